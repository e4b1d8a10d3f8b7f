"""Flags that commands share, as groups: a command takes `machine: Machine` and has all of its flags.

A group is a frozen dataclass whose fields are typer options; `grouped` unfolds them into the signature that
typer reads, and folds the values again for the command.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import stat
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from penstock.cli.output import note
from penstock.errors import BadRequest, BrokenModel
from penstock.spec.ask import Ask, check_device
from penstock.units import parse_bytes

if TYPE_CHECKING:
    from penstock.serve.sampling import SamplingParams
    from penstock.spec.plan import Plan

DEFAULT_MAX_TOKENS = 128

Model = Annotated[str, Argument(metavar="MODEL", help="A packed model, a Hugging Face folder or a Hub id.")]
# For commands that read no weights.
Shape = Annotated[
    str,
    Argument(metavar="MODEL", help="A packed model, a Hugging Face folder, a config.json or a bundled shape's name."),
]
Json = Annotated[bool, Option("--json", help="Print one JSON object as the last line of stdout.")]
Weights = Annotated[
    str | None,
    Option("--weights", metavar="FORMAT", help="float32, bfloat16, float16, int8 or int4; default the checkpoint's."),
]
CacheName = Annotated[
    str | None,
    Option(
        "--cache",
        metavar="DIR",
        help="Packed models and machine files; default $XDG_CACHE_HOME/penstock, or ~/.cache/penstock.",
    ),
]
CacheLimit = Annotated[
    str | None,
    Option(
        "--cache-limit",
        metavar="SIZE",
        help="Packed models in the cache take at most so much: the longest unused are removed.",
    ),
]


@dataclass(frozen=True)
class Machine:
    """What penstock may use."""

    device: Annotated[str, Option("--device", metavar="NAME", help="auto, cuda, none or emulated.")] = "auto"
    device_memory: Annotated[
        str | None, Option("--device-memory", metavar="SIZE", help="Limit of device memory, such as 6GiB.")
    ] = None
    host_memory: Annotated[
        str | None, Option("--host-memory", metavar="SIZE", help="Limit of the whole process, such as 12GiB.")
    ] = None
    resident: Annotated[
        str | None,
        Option("--resident", metavar="SIZE", help="At most so many bytes of weights stay in memory; the rest streams."),
    ] = None
    threads: Annotated[
        int | None,
        Option("--threads", metavar="N", min=1, max=4096, help="CPU threads; default and at most: all CPUs allowed."),
    ] = None
    exact: Annotated[
        bool, Option("--exact", help="Multiply int4 weights with float32 activations, not with int8 ones.")
    ] = False
    no_verify: Annotated[
        bool, Option("--no-verify", help="Do not compare what is read of a packed model with its checksums.")
    ] = False
    cache: CacheName = None

    def prepare(self) -> None:
        """Checks the device, quiets numpy, and says what of --threads cannot be. Call it before anything imports
        numpy."""
        check_device(self.device)
        quiet_blas()
        if self.threads is not None and self.threads != self.usable_threads:
            note(f"--threads {self.threads}: this process may use {self.usable_threads} CPUs and has as many threads")

    @property
    def usable_threads(self) -> int:
        """--threads, by default and at most all CPUs that this process may use."""
        from penstock.runtime import host

        cpus = host.usable_cpus()
        return min(self.threads or cpus, cpus)

    @property
    def cache_folder(self) -> Path:
        return cache_folder(self.cache)


@dataclass(frozen=True)
class Work:
    """What the plan is for."""

    kv: Annotated[
        str | None,
        Option(
            "--kv",
            metavar="FORMAT",
            help="KV cache in float32, bfloat16, float16, int8 or int4; default 16 bits, or 32 for a float32 model.",
        ),
    ] = None
    kv_home: Annotated[
        str | None,
        Option("--kv-home", metavar="TIER", help="memory or disk; default memory, and the disk for what does not fit."),
    ] = None
    batch: Annotated[int, Option("--batch", metavar="N", min=1, help="Sequences at once.")] = 1
    prompt_tokens: Annotated[
        int | None,
        Option("--prompt-tokens", metavar="N", min=1, help="Expected prompt length; default 64 or the prompt's."),
    ] = None
    output_tokens: Annotated[
        int | None,
        Option("--output-tokens", metavar="N", min=1, help="Expected answer length; default 64 or --max-tokens."),
    ] = None
    context: Annotated[
        int | None,
        Option("--context", metavar="N", min=1, help="KV room in tokens; default the model's maximum, at most 4096."),
    ] = None
    objective: Annotated[str, Option("--objective", metavar="NAME", help="latency or throughput.")] = "latency"

    def ask(self, machine: Machine, prompt_tokens: int = 64, output_tokens: int = 64) -> Ask:
        """The request. `prompt_tokens`, `output_tokens`: for where no flag says them."""
        return Ask(
            prompt_tokens=self.prompt_tokens or prompt_tokens,
            output_tokens=self.output_tokens or output_tokens,
            batch=self.batch,
            context=self.context,
            objective=self.objective,
            host_memory_bytes=_size(machine.host_memory, "--host-memory"),
            device_memory_bytes=_size(machine.device_memory, "--device-memory"),
            resident_bytes=_size(machine.resident, "--resident"),
            kv=self.kv,
            kv_home=self.kv_home,
            use_device=machine.device in ("cuda", "emulated"),
        )


TraceName = Annotated[
    str | None,
    Option("--trace", metavar="FILE", help="Also write what each lane did when, for ui.perfetto.dev."),
]
PlanFile = Annotated[
    str | None, Option("--plan", metavar="FILE", help="Run this plan, made by `penstock plan --json`, not a new one.")
]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; what is not named comes from the model's generation_config.json, else greedy."""

    max_tokens: Annotated[
        int | None,
        Option("--max-tokens", metavar="N", help=f"Longest answer; default {DEFAULT_MAX_TOKENS}, or --output-tokens."),
    ] = None
    temperature: Annotated[
        float | None, Option("--temperature", metavar="X", help="0 is greedy; default the model's own, else 0.")
    ] = None
    top_k: Annotated[int | None, Option("--top-k", metavar="N", help="Draw from the best N tokens only; 0 is off.")] = (
        None
    )
    top_p: Annotated[
        float | None, Option("--top-p", metavar="X", help="Draw from the best tokens that reach this probability.")
    ] = None
    min_p: Annotated[
        float | None, Option("--min-p", metavar="X", help="Drop tokens less likely than this share of the best.")
    ] = None
    repetition_penalty: Annotated[
        float | None, Option("--repetition-penalty", metavar="X", help="Above 1 makes tokens seen before less likely.")
    ] = None
    stop: Annotated[
        list[str] | None, Option("--stop", metavar="TEXT", help="End the answer before this text; may be repeated.")
    ] = None
    seed: Annotated[int | None, Option("--seed", metavar="N", help="Makes a draw repeatable.")] = None
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on past the end of text, to --max-tokens.")] = False

    def params(self, generation_config: dict[str, Any], work: Work | None = None) -> SamplingParams:
        from penstock.serve.sampling import with_model_defaults

        named = dataclasses.asdict(self)
        if self.max_tokens is None:
            named["max_tokens"] = (work and work.output_tokens) or DEFAULT_MAX_TOKENS
        return with_model_defaults(generation_config, **named)


def given_plan(file: str | None, machine: Machine, work: Work) -> Plan | None:
    """The plan of --plan, None where none is given. Raises BadRequest where another flag would say the same thing."""
    if file is None:
        return None
    flags = {"--kv": work.kv, "--kv-home": work.kv_home, "--context": work.context, "--resident": machine.resident}
    if any(flags.values()):
        raise BadRequest(f"--plan says what {', '.join(flags)} would: give one or the other")
    return _read_plan(file)


def _read_plan(file: str) -> Plan:
    """A plan as `penstock plan --json` printed it, or its plan alone."""
    import json

    from penstock.spec import plan as plans

    text = read_text(file)
    try:
        data = json.loads(text.removeprefix("\ufeff"))  # some editors put a byte-order mark before what they save
        if isinstance(data, dict) and isinstance(data.get("plan"), dict):
            text = json.dumps(data["plan"])
    except (ValueError, RecursionError):
        pass  # `plans.loads` says what is wrong
    return plans.loads(text, file)


def as_path(text: str) -> Path:
    """A path as the user typed it. The home of a user that nobody knows is left as it stands, to be not there."""
    return Path(os.path.expanduser(text))


def cache_folder(name: str | None) -> Path:
    """The folder of --cache, or of what the environment says: XDG counts where it is an absolute path."""
    from penstock.serve.planning import default_cache

    if name == "":
        raise BadRequest("--cache names no folder")
    if name is not None:
        return as_path(name)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base) / "penstock" if os.path.isabs(base) else default_cache()


def file_to_write(name: str, flag: str) -> Path:
    """The file that the user named for an output, where links lead; it may be there already.

    Raises BadRequest for what no file can replace: a folder, a pipe, a device, and the file that this process reads its
    input from or prints to.
    """
    path = as_path(name)
    try:
        file = path.resolve()
        there = path.stat() if path.exists() else None
        if file.name and (there is None or (stat.S_ISREG(there.st_mode) and not _is_stream(there) and file.exists())):
            return file
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError
        raise BadRequest(f"{flag} {name} cannot be written: {getattr(error, 'strerror', None) or error}") from None
    raise BadRequest(f"{flag} {name!r} is not a file that can be written")


def _is_stream(status: os.stat_result) -> bool:
    """Whether a file is our standard input, output or error. `… --trace FILE > FILE` would lose one."""
    for fd in range(3):
        with contextlib.suppress(OSError):  # closed
            if os.path.samestat(os.fstat(fd), status):
                return True
    return False


def read_text(file: str) -> str:
    """A text file that the user named. Raises BadRequest."""
    from penstock.store.files import load_text

    try:
        return load_text(as_path(file))
    except OSError as error:
        raise BadRequest(f"{file} cannot be read: {error.strerror}") from None
    except BrokenModel as error:
        raise BadRequest(error.message) from None


def quiet_blas() -> None:
    """numpy's BLAS starts its threads when it is loaded, and each costs work space; our kernels have their own."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the fields of its dataclass parameters as flags of their own, in their places."""
    hints = typing.get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[parameter.name]))
            continue
        group = groups[parameter.name]
        field_hints = typing.get_type_hints(group, include_extras=True)
        parameters += [
            inspect.Parameter(f.name, parameter.KEYWORD_ONLY, default=f.default, annotation=field_hints[f.name])
            for f in dataclasses.fields(group)
        ]

    @functools.wraps(command)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{f.name: values.pop(f.name) for f in dataclasses.fields(group)})
        command(**values)

    del call.__dict__["__wrapped__"]  # or inspect would look through to the folded signature
    call.__dict__["__signature__"] = inspect.Signature(parameters)
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    call.__dict__["groups"] = tuple(groups.values())
    return call


def _size(text: str | None, flag: str) -> int | None:
    return None if text is None else parse_bytes(text, flag)
