"""The child process that opens a model's tokenizer and template, and answers one request at a time within its limits.

`penstock.serve.confined` starts it. Each request says how much processor time and memory it may take. Requests and
answers are lines over one socket, which is the child's standard input. From one request to the next the child remembers
only the files that "open" read, so another child can replace one that broke.

request: JSON [action, arguments, cpu_s, memory_bytes, answer_bytes]
answer:  seconds of processor time, a space, JSON {"value": …} or {"failed": kind, "message": …, "trace": …}
kind:    MemoryError; TooLong; Library (the message is the tokenizers library's); or the name of one of our errors

Before its answer, "open" sends such a line with {"reads": path} for each file that it is about to read.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError

_LINK = 0  # standard input: a socket, for both directions
_LOOK_UP_MS = 5_000  # a child that waits asks so often whether its parent is still there
_STACK_BYTES = 8 << 20  # the usual limit; without one, endless recursion would take all memory
CHUNK_BYTES = 1 << 16  # a read of 1 MiB costs 30 µs for its buffer, where most answers have 50 bytes


def answer_requests(open_: Callable[[list[Any], Callable[[Path], None]], Any], actions: Collection[str]) -> None:
    """Answers until the parent closes the socket or ends. argv: the parent's process id. `open_`: makes the object
    whose methods `actions` are asked for, and which has `facts`, of the arguments of "open"."""
    _settle()
    opened: Any = None
    while line := _receive():
        action, arguments, cpu_s, memory_bytes, answer_bytes = json.loads(line)
        unlimited = _lower(resource.RLIMIT_DATA, memory_bytes)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            if action == "open":
                opened = open_(arguments, lambda file: _send(_json({"reads": str(file)})))
                value = opened.facts
            else:
                assert opened is not None and action in actions, "the first request is to open"
                value = getattr(opened, action)(*arguments)
            answer = _json({"value": value})
            if len(answer) > answer_bytes:
                answer = _json({"failed": "TooLong", "message": ""})
        except BaseException as error:
            answer = _json(_failure(error))
        left_s, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_DATA, unlimited)
        _send(answer, cpu_s - left_s)


def _failure(error: BaseException) -> dict[str, str]:
    said = str(error)[:1000]
    if isinstance(error, MemoryError):
        return {"failed": "MemoryError", "message": said}
    if isinstance(error, PenstockError):
        return {"failed": type(error).__name__, "message": said}
    # The tokenizers library raises plain Exceptions. Its panics raise PanicException, which is no Exception.
    if type(error) is Exception or type(error).__name__ == "PanicException":
        return {"failed": "Library", "message": said}
    trace = traceback.format_exc()[-4000:]
    return {"failed": "InternalError", "message": f"{type(error).__name__}: {said}", "trace": trace}


def _settle() -> None:
    """Sets signals and limits, also where the parent's settings, which a process inherits, would weaken the limits."""
    # Ctrl-C hardly reaches us, for we have a session of our own. It is for the parent, which may still need us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The processor timer ends us wherever we are, in the library or in Python, if nobody ignores or blocks it.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.set_blocking(_LINK, False)
    os.set_blocking(sys.stderr.fileno(), False)  # the parent reads it only when we have ended
    _lower(resource.RLIMIT_STACK, _STACK_BYTES)
    _lower(resource.RLIMIT_CORE, 0)
    # A panic in Rust is an answer like others. To print where it came from takes 20 MiB for symbols. Beyond the limit
    # of memory Rust then waits for a lock that it holds itself, for ever.
    os.putenv("RUST_BACKTRACE", "0")
    # One text at a time has no use for the library's threads, and each would take 2 MiB of the limit for its stack.
    os.putenv("TOKENIZERS_PARALLELISM", "false")
    with contextlib.suppress(OSError):  # where the system's memory runs out, it ends us and not the parent
        Path("/proc/self/oom_score_adj").write_text("1000")


def _lower(limit: int, value: int) -> tuple[int, int]:
    """Sets a soft limit. The hard limit stays, so that the next request can have more. Returns both as they were."""
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    return soft, hard


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def _receive() -> bytes:
    """The parent's next line; no bytes where the parent has closed the socket or ended."""
    received = bytearray()
    while not received.endswith(b"\n"):
        _wait(select.POLLIN)
        chunk = os.read(_LINK, CHUNK_BYTES)
        if not chunk:
            return b""
        received += chunk
    return bytes(received)


def _send(answer: bytes, cpu_s: float = 0.0) -> None:
    """Sends a line to the parent."""
    rest = memoryview(b"%.6f %b\n" % (cpu_s, answer))
    while rest:
        _wait(select.POLLOUT)
        rest = rest[os.write(_LINK, rest) :]


def _wait(event: int) -> None:
    """Waits until the socket is ready. Ends this process where the parent has ended. The socket alone does not always
    tell that, for a fork of the parent may still hold the other end."""
    poller = select.poll()
    poller.register(_LINK, event)
    while not poller.poll(_LOOK_UP_MS):
        if os.getppid() != int(sys.argv[1]):
            sys.exit()


def main() -> None:
    """Answers for a tokenizer and its template."""
    # Before any limit is set. `guide_child`, and its parent through it, import this module and need no tokenizers.
    from penstock.serve.vocabulary import Vocabulary

    def open_(arguments: list[Any], reads: Callable[[Path], None]) -> Vocabulary:
        return Vocabulary.open(Path(arguments[0]), reads)

    with contextlib.suppress(ConnectionError):  # the parent ended while we answered
        answer_requests(
            open_,
            ("encode", "decode", "texts", "token_bytes", "advance", "advance_all", "chat", "check_templates"),
        )


if __name__ == "__main__":
    main()
