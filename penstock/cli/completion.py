"""`penstock completion`: the shell completes commands and flags.

The script is text made from the commands: the shell reads it once, and no process of ours runs at a press of the tab
key.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from penstock.cli.output import note
from penstock.errors import BadRequest

_BEGINS = {"bash": "# penstock completion for bash\n", "zsh": "#compdef penstock\n", "fish": "# penstock completion\n"}


def completion(
    shell: Annotated[
        str | None, Argument(metavar="SHELL", help="bash, zsh or fish; default the one that $SHELL names.")
    ] = None,
    show: Annotated[bool, Option("--show", help="Print the script instead.")] = False,
) -> None:
    """Lets the shell complete commands, flags and files.

    Writes a script to where the shell looks for it, for this user. Again after an update brings what is new.
    """
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in _BEGINS:
        raise BadRequest(f"{name!r} is no shell that completions are made for: name one of {', '.join(_BEGINS)}")
    import typer

    from penstock.cli.main import app

    group: Any = typer.main.get_command(app())
    text = script(name, group.commands)
    if show:
        print(text, end="")
        return
    from penstock.store.files import Kind, write_bytes

    file = _file(name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, text.encode(), Kind("a completion of penstock's", _BEGINS[name].encode()))
    except OSError as error:
        raise BadRequest(f"{file} cannot be written: {error.strerror}") from None
    note(f"{file} is written; {_NEXT[name].format(folder=file.parent)}")


_NEXT = {
    "bash": "a new shell completes penstock, where the package bash-completion is installed (else: source that file)",
    "zsh": "a new shell completes penstock, where ~/.zshrc has `fpath+=({folder}); autoload -Uz compinit; compinit`",
    "fish": "a new shell completes penstock",
}


def script(shell: str, commands: Mapping[str, Any]) -> str:
    """The text that a shell reads. `commands`: by their names."""
    known = {name: (_first_sentence(each), _flags(each)) for name, each in commands.items()}
    return _BEGINS[shell] + _MADE[shell](known)


_Commands = dict[str, tuple[str, list[Any]]]  # name → what it does, its flags


def _bash(commands: _Commands) -> str:
    cases = "\n".join(f"    {name}) words='{' '.join(_names(flags))}' ;;" for name, (_, flags) in commands.items())
    return f"""_penstock() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} words=''
  if [ "$COMP_CWORD" -eq 1 ]; then
    words='{" ".join(commands)} --help --version'
  elif [[ $word == -* ]]; then
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _penstock penstock
"""


def _zsh(commands: _Commands) -> str:
    cases = "\n".join(f"    {name}) compadd -- {' '.join(_names(flags))} ;;" for name, (_, flags) in commands.items())
    return f"""if (( CURRENT == 2 )); then
  compadd -- {" ".join(commands)} --help --version
elif [[ $words[CURRENT] == -* ]]; then
  case $words[2] in
{cases}
  esac
else
  _files
fi
"""


def _fish(commands: _Commands) -> str:
    lines = []
    for name, (does, flags) in commands.items():
        lines.append(f"complete -c penstock -n __fish_use_subcommand -f -a {name} -d {_quoted(does)}")
        for flag in flags:
            value = "" if flag.is_flag else " -r"
            long = max(flag.opts, key=len).removeprefix("--")
            seen = f"'__fish_seen_subcommand_from {name}'"
            lines.append(f"complete -c penstock -n {seen} -l {long}{value} -d {_quoted(flag.help or '')}")
    return "\n".join(lines) + "\n"


_MADE: dict[str, Callable[[_Commands], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}


def _flags(command: Any) -> list[Any]:
    return [p for p in command.params if p.param_type_name == "option" and not p.hidden]


def _names(flags: list[Any]) -> list[str]:
    return [name for flag in flags for name in flag.opts]


def _first_sentence(command: Any) -> str:
    return " ".join((command.callback.__doc__ or "").split()).partition(". ")[0].rstrip(".")


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _file(shell: str) -> Path:
    """Where a user's shell looks for completions. Raises BadRequest where the user has no home folder."""

    def base(variable: str, *otherwise: str) -> Path:
        named = os.environ.get(variable, "")
        if os.path.isabs(named):
            return Path(named)
        try:
            return Path.home().joinpath(*otherwise)
        except RuntimeError:
            raise BadRequest("this user has no home folder: --show prints the script") from None

    if shell == "fish":
        return base("XDG_CONFIG_HOME", ".config") / "fish" / "completions" / "penstock.fish"
    data = base("XDG_DATA_HOME", ".local", "share")
    if shell == "bash":
        return data / "bash-completion" / "completions" / "penstock"
    return data / "zsh" / "site-functions" / "_penstock"
