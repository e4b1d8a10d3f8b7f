"""Runs `penstock` with its commands, and turns errors into one line and an exit code.

0: done. 2: an error that the user can mend. 1: a fault of ours (PENSTOCK_DEBUG=1 shows its traceback). 130: Ctrl-C.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Annotated, Any

import typer

import penstock
from penstock.cli.conversions import let_through
from penstock.cli.flags import grouped
from penstock.cli.interrupts import Interrupts
from penstock.cli.output import note, one_line, print_json, say
from penstock.errors import BadRequest, InternalError, PenstockError, StorageFailed

# Command → its function, in a module of `penstock.cli`. A command imports its own module only: all of them take 20 ms.
COMMANDS = {
    "demo": "demo.demo",
    "run": "run.run",
    "serve": "serve.serve",
    "batch": "batch.batch",
    "plan": "plan.plan",
    "pull": "pull.pull",
    "import": "import_.import_",
    "pack": "pack.pack",
    "synth": "synth.synth",
    "eval": "eval.eval_",
    "profile": "profile.profile",
    "train-predictors": "train_predictors.train_predictors",
    "bench": "bench.bench",
    "probe": "probe.probe",
    "list": "cache.list_",
    "rm": "cache.rm",
    "prune": "cache.prune",
    "completion": "completion.completion",
}

# Since 0.26 typer has its own copy of click; before it used click itself. So its errors are found by inheritance, not
# by name.
_UsageError = typer.BadParameter.__mro__[1]
_ClickException = _UsageError.__mro__[1]

# Errors of files and disks that the user can mend.
_USERS_ERRNO = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ELOOP),
    *(errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG, errno.EIO),
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {penstock.__version__}")
        raise typer.Exit


def app(names: tuple[str, ...] = tuple(COMMANDS)) -> typer.Typer:
    """The program with these commands."""
    # Without rich: to import it takes as long as all the rest of `penstock --help`.
    program = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    program.callback()(_penstock)
    for name in names:
        module, _, function = COMMANDS[name].partition(".")
        program.command(name)(grouped(getattr(import_module(f"penstock.cli.{module}"), function)))
    return program


def _penstock(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Runs language models that are bigger than your memory, and tells the speed before it loads a byte."""


def main(argv: Sequence[str] | None = None, interrupts: Interrupts | None = None) -> int:
    """Runs one command and returns its exit code. `interrupts`: within which this is called, None for a context of its
    own."""
    with Interrupts() if interrupts is None else nullcontext(interrupts) as entered:
        try:
            code = _run(list(sys.argv[1:] if argv is None else argv), entered)
            if entered.asked:  # however this came to an end, it was to be stopped
                raise KeyboardInterrupt
            return code
        except KeyboardInterrupt:
            entered.take()  # what is finalized from here on is not to be interrupted again
            note("stopped")
            return 130


def _run(args: list[str], interrupts: Interrupts) -> int:
    """Runs one command and returns its exit code. Raises KeyboardInterrupt."""
    wants_json = "--json" in args[: args.index("--")] if "--" in args else "--json" in args
    _mend_streams()
    # Warnings are one line each, as our own notes. The place that they come from does not help the user.
    warnings.showwarning = lambda message, *_, **__: note(str(message))
    code = 0
    try:
        try:
            code = _invoke(args or ["--help"])
        except BrokenPipeError:
            raise
        except Exception as error:
            if interrupts.asked:  # it is what the interrupt left behind
                raise KeyboardInterrupt from error
            failure, lines = _explain(error)
            code = failure.exit_code
            say("\n".join(lines))
            if wants_json:
                print_json({"error": failure.to_json()})
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of our output has seen enough, as `head` has. Without this Python would complain when it flushes at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except OSError as error:  # the last flush: `penstock … > /dev/full`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        note(f"cannot write the output: {error.strerror}")
        return StorageFailed.exit_code


def _mend_streams() -> None:
    """Mends streams, so that nothing fails where one is closed (`>&-`) or its encoding lacks a character."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (it lives as long as we do)
        elif mode == "w" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _invoke(args: list[str]) -> int:
    program = app((args[0],)) if args[0] in COMMANDS else app()
    group: Any = typer.main.get_command(program)
    let_through(group, {})
    for each in program.registered_commands:
        assert each.name is not None and each.callback is not None, "app names them"
        let_through(group.commands[each.name], each.callback.__annotations__)
    try:
        with group.make_context("penstock", args) as context:
            group.invoke(context)
    except typer.Exit as done:
        return int(done.exit_code)
    return 0


def _explain(error: Exception) -> tuple[PenstockError, list[str]]:
    """The error as one of ours, and its lines for stderr: one line, and a hint or a traceback where that helps."""
    if isinstance(error, PenstockError) and error.exit_code == 2:
        return error, [f"penstock: {one_line(error.message)}"]
    if isinstance(error, _ClickException):
        failure: PenstockError = BadRequest(" ".join(_usage(error).split()))
        path = getattr(getattr(error, "ctx", None), "command_path", "penstock")
        return failure, [f"penstock: {one_line(failure.message)}", f"Try `{path} --help`."]
    if isinstance(error, OSError) and error.errno in _USERS_ERRNO:
        where = f"{error.filename}: " if error.filename is not None else ""
        failure = StorageFailed(f"{where}{error.strerror}")
        return failure, [f"penstock: {one_line(failure.message)}"]
    lines = []
    if os.environ.get("PENSTOCK_DEBUG") == "1":
        import traceback

        lines = traceback.format_exception(error)
    said = " ".join(str(error).split()) or "no message"
    failure = error if isinstance(error, PenstockError) else InternalError(f"{type(error).__name__}: {said}")
    lines.append(f"penstock: a fault of ours: {one_line(failure.message)} (PENSTOCK_DEBUG=1 shows where)")
    return failure, [line.rstrip("\n") for line in lines]


def _usage(error: Any) -> str:
    return str(error.format_message())


if __name__ == "__main__":
    sys.exit(main())
