"""A chat at the terminal: turns, commands, and which turns are dropped when the context is full.

The keys and values of a conversation stay, so a turn computes only what is new (`Engine.holds`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.interrupts import taken
from penstock.cli.options import as_path, file_to_write
from penstock.cli.output import fitted, note, speed_parts
from penstock.cli.streaming import NO_TEMPLATE, print_stream, promise, tell_speed
from penstock.errors import BadRequest, BrokenModel, PenstockError

if TYPE_CHECKING:
    from penstock.serve.api.chats import ChatPrompt
    from penstock.serve.engine import Engine
    from penstock.serve.generation import Generation
    from penstock.serve.sampling import SamplingParams

Messages = list[dict[str, Any]]

_NEXT_TURN = "\nUser:"  # a base model writes this where the user would speak again
_QUOTES = '"""'
_HISTORY_LINES = 1000
_BEGINS = '{"penstock chat": 1'
_MOST_MESSAGES = 10_000


def opening(system: str | None) -> Messages:
    """The messages before the first turn."""
    return [] if system is None else [{"role": "system", "content": system}]


class Chat:
    """A conversation with a model. `messages`: the turns so far. `system`: the system prompt. `thoughts`: whether the
    model's thoughts are shown."""

    def __init__(
        self, engine: Engine, params: SamplingParams, system: str | None = None, thoughts: bool = True
    ) -> None:
        from penstock.serve.conversation import Conversation

        self._engine, self._params, self.messages = engine, params, opening(system)
        self._thoughts, self._conversation = thoughts, Conversation(engine.tokenizer)
        self._ended = False
        self._last: Generation | None = None
        self._commands: dict[str, tuple[str, Callable[[str], None]]] = {
            "/help": ("lists these commands", self._help),
            "/bye": ("ends the chat, as Ctrl-D does", self._bye),
            "/new": ("starts over; what the model was told before stays", self._new),
            "/system": ("TEXT: starts over, and tells the model this before the first turn", self._system),
            "/retry": ("another answer to the last turn", self._retry),
            "/set": ("NAME VALUE, as in /set temperature 0.7; alone it tells what is set", self._set),
            "/last": ("all figures of the last answer", self._figures),
            "/save": ("FILE: writes the conversation down", self._save),
            "/load": ("FILE: goes on with a conversation that was saved", self._load),
            "/plan": ("where everything lies, and how fast it was predicted to be; /plan why: all of it", self._plan),
        }
        self._promised = engine.prediction
        if not engine.tokenizer.has_chat_template:
            note(f"{NO_TEMPLATE}: it reads plain lines of User and Assistant")
            self._params = replace(params, stop=(*params.stops, _NEXT_TURN))

    def run(self, lines: Iterator[str]) -> None:
        """Answers the user's turns until they end. Ctrl-C ends an answer, and between two answers the chat. If a turn
        fails by an error that the user can mend, the turn is taken back. Raises any other PenstockError."""
        self._promised = promise(self._engine)
        for turn in turns(lines):
            if not turn.strip():
                continue
            try:
                self._hear(turn)
            except PenstockError as error:
                if error.exit_code != 2:
                    raise
                note(error.message if turn.lstrip().startswith("/") else f"{error.message} (/new starts over)")
            if self._ended:
                return

    def _hear(self, turn: str) -> None:
        """Takes a line: a turn, or a command. Raises BadRequest for an unknown command."""
        word, _, rest = turn.strip().partition(" ")
        if not word.startswith("/") or "/" in word[1:]:  # a path is no command
            self._say(turn)
        elif word in self._commands:
            self._commands[word][1](rest.strip())
        else:
            raise BadRequest(f"there is no {word}: /help lists what there is")

    def _say(self, turn: str) -> None:
        """Answers a turn. If Ctrl-C ends the answer, the part that was said stays in the conversation."""
        self.messages.append({"role": "user", "content": turn})
        heard: list[str] = []
        engine, asked = self._engine, None
        try:
            asked = self._within_context()
            self._tell_rewritten(asked)
            params = asked.ruled(self._params)
            generation = print_stream(
                engine, asked.ids, params, reading=asked.reading(params), thoughts=self._thoughts, heard=heard
            )
        except KeyboardInterrupt as interrupt:
            taken(interrupt)
            print(flush=True)
            note("the answer was ended; Ctrl-C once more, or /bye, ends the chat")
            self.messages.append({"role": "assistant", "content": "".join(heard)})
            if asked is not None and heard and engine.last is not None:
                self._conversation.answered(asked, engine.last.text, engine.last.token_ids)
            return
        except PenstockError:
            self.messages.pop()
            raise
        self.messages.append({"role": "assistant", "content": "".join(heard)})
        self._conversation.answered(asked, generation.text, generation.token_ids)
        self._last = generation
        tell_speed(self._engine, generation, self._promised)

    def _tell_rewritten(self, asked: ChatPrompt) -> None:
        """Tells the user if the template writes earlier turns otherwise than they were, since they are read again
        then."""
        again = len(asked.ids) - self._engine.holds(asked.ids)
        if self._conversation.rewritten and again > 1:
            note(f"the chat template writes earlier turns anew: {again} of {len(asked.ids)} tokens are read")

    def _within_context(self) -> ChatPrompt:
        """The prompt of the conversation. If it leaves no room for an answer, the oldest turns are dropped until half
        of the context is free, so that this does not happen again with each turn."""
        context, prompt = self._engine.plan.context, self._conversation.prompt
        asked, left = prompt(self.messages), 0
        wanted = context - min(self._params.max_tokens, context // 2)
        if len(asked.ids) <= wanted:
            return asked
        first = 1 if self.messages[0]["role"] == "system" else 0
        while len(asked.ids) > context // 2 and len(self.messages) > first + 1:
            gone = 2 if len(self.messages) > first + 2 else 1
            del self.messages[first : first + gone]
            left += 1
            self._conversation.forget()
            asked = prompt(self.messages)
        if left:
            turns_left = "the oldest turn was" if left == 1 else f"the {left} oldest turns were"
            note(f"the context of {context} tokens is full: {turns_left} left out")
        return asked

    def _help(self, _: str) -> None:
        for name, (does, _command) in self._commands.items():
            note(f"{name}  {does}")
        note(f"a turn of several lines stands between {_QUOTES} and {_QUOTES}")

    def _bye(self, _: str) -> None:
        self._ended = True

    def _new(self, _: str) -> None:
        del self.messages[len([m for m in self.messages[:1] if m["role"] == "system"]) :]
        self._conversation.forget()

    def _system(self, text: str) -> None:
        self.messages[:] = opening(text or None)
        self._conversation.forget()

    def _retry(self, _: str) -> None:
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant":
            raise BadRequest("there is no answer yet")
        self.messages.pop()
        self._conversation.forget()
        self._say(self.messages.pop()["content"])

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        numbers = {each.name: each.type for each in fields(self._params) if str(each.type).startswith(("int", "float"))}
        for other in ("n", "logprobs", "prompt_logprobs"):  # a turn has one answer, and shows its text alone
            del numbers[other]
        if name and name not in numbers:
            raise BadRequest(f"/set {name}: there are {', '.join(numbers)}")
        if not value:
            for each in [name] if name else numbers:
                set_to = getattr(self._params, each)
                note(f"{each} {'is not set' if set_to is None else set_to}")
            return
        try:
            named: dict[str, Any] = {name: (int if str(numbers[name]).startswith("int") else float)(value)}
        except ValueError:
            raise BadRequest(f"/set {name} {value}: it should be a number") from None
        self._params = replace(self._params, **named)
        note(f"{name} {named[name]}")

    def _save(self, name: str) -> None:
        import json

        from penstock.store.files import Kind, write_bytes

        file = file_to_write(_named(name, "/save"), "/save")
        text = _BEGINS + ', "messages": ' + json.dumps(self.messages) + "}\n"
        try:
            write_bytes(file, text.encode(), Kind("a conversation", _BEGINS.encode()))
        except OSError as error:
            raise BadRequest(f"/save {name}: {error.strerror}") from None
        note(f"{len(self.messages)} messages are in {file}")

    def _load(self, name: str) -> None:
        self.messages[:] = _messages_of(as_path(_named(name, "/load")))
        self._conversation.forget()
        note(f"{len(self.messages)} messages: the next turn goes on with them")

    def _figures(self, _: str) -> None:
        if self._last is None:
            raise BadRequest("there is no answer yet")
        last = self._last
        read = f"{last.prompt_tokens} tokens of prompt, of which {last.cached_tokens} were there"
        for part in [*speed_parts(last, self._promised), read, f"{last.output_tokens} tokens of answer"]:
            note(part)

    def _plan(self, text: str) -> None:
        from penstock.planner import explain

        engine = self._engine
        print(fitted(explain.table(engine.solved, engine.ask, engine.machine, why=text == "why")), flush=True)


def _named(name: str, command: str) -> str:
    if not name:
        raise BadRequest(f"{command} wants a file: {command} chat.json")
    return name


def _messages_of(file: Path) -> Messages:
    """The messages of a conversation that was saved. Raises BadRequest."""
    from penstock.store.files import read_json

    try:
        messages = read_json(file).get("messages")
    except (BrokenModel, PenstockError) as error:
        raise BadRequest(error.message) from None
    roles = ("system", "user", "assistant")
    if not isinstance(messages, list) or len(messages) > _MOST_MESSAGES or not all(
        isinstance(m, dict) and m.keys() == {"role", "content"} and m["role"] in roles and isinstance(m["content"], str)
        for m in messages
    ):  # fmt: skip
        raise BadRequest(f"{file} is no conversation that was saved")
    return messages


def turns(lines: Iterator[str]) -> Iterator[str]:
    """Lines as turns. The lines between three quotes are one turn."""
    for line in lines:
        if not line.lstrip().startswith(_QUOTES):
            yield line
            continue
        turn, rest = list[str](), line.lstrip()[len(_QUOTES) :]
        while not rest.rstrip().endswith(_QUOTES):
            turn.append(rest)
            following = next(lines, None)
            if following is None:
                return
            rest = following
        yield "\n".join([*turn, rest.rstrip()[: -len(_QUOTES)]]).strip("\n")


@contextmanager
def typed_lines(folder: Path) -> Iterator[Iterator[str]]:
    """The lines that the user types until Ctrl-D, with line editing where the platform has it, and with a history of
    lines, which `folder` keeps."""
    if not sys.stdout.isatty():  # the answers go to a file, and the "> " should not
        yield _lines(_ask_on_stderr)
        return
    try:
        import readline
    except ImportError:
        yield _lines(input)
        return
    file = folder / "chat_history"
    with suppress(OSError):
        readline.read_history_file(file)
    try:
        yield _lines(input, readline.get_line_buffer)
    finally:
        readline.set_history_length(_HISTORY_LINES)
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            before = os.umask(0o077)  # the history is for its owner alone
            try:
                readline.write_history_file(file)
            finally:
                os.umask(before)


def _lines(ask: Callable[[str], str], typed: Callable[[], str] = str) -> Iterator[str]:
    """What is asked for until its end. `typed`: the line so far, where Ctrl-C ended it. A line that has something in it
    is left out then. Raises KeyboardInterrupt for an empty one."""
    while True:
        try:
            line = ask("> ")
        except KeyboardInterrupt as interrupt:
            if not typed():
                raise
            taken(interrupt)
            print(flush=True)
            continue
        except EOFError:
            print(file=sys.stderr)
            return
        yield line


def _ask_on_stderr(prompt: str) -> str:
    print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
