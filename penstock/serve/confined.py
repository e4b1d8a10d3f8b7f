"""Opens files that nobody has vetted, a model's tokenizer and its chat template, in a child process with limits.

Both are programs in all but name. A template loops and multiplies strings. A tokenizer's normaliser may write a
thousand characters for each that it reads, and its patterns may backtrack for ever, on every text that is encoded and
on every token that is decoded. So neither is opened in the process that holds the model. A child opens both and answers
over a socket. Each request has a limit of processor time and one of memory. Beyond a limit the system ends the child,
whether it is in Rust, C or Python. The user gets a line that names the file and the limit. The next request gets a new
child.

Weighed, and not taken:
- To try a file in a child, and then open it in this process: that opens every file twice, and says nothing of the next
  text.
- To render a template here and count its operators and filters: `*`, `**`, `%`, `~`, `join`, `center`, `format`, loops
  and macros each need a bound of their own, and one that is forgotten is a hole.
- To fork instead of starting a new interpreter: that takes 3 ms instead of 25 ms. But it is unsafe beside threads,
  which a process that uses `LLM` may have by the dozen, and a limit of memory would start from whatever the process
  holds.
- PR_SET_PDEATHSIG against orphans: it follows the thread that started the child, not the process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import BadRequest, BrokenModel, InternalError, PenstockError, StorageFailed
from penstock.runtime import host
from penstock.runtime.child import command
from penstock.serve.confined_child import CHUNK_BYTES
from penstock.units import format_bytes

# A child has stopped if twice in a row it gives no byte for so long, takes no processor time in between, and does not
# wait for a processor. The time alone does not tell: on a machine with much else to do, 4 s of processor time may well
# take a minute. A wait that took longer by so much is not counted: this process was stopped meanwhile, and its child
# may have been too.
_PATIENCE_S, _LATE_S = 15.0, 1.0
TOKENIZER_CHILD = "penstock.serve.confined_child"
_END_S = 10.0  # until a child that closed the socket has ended
_LEAST_S = 1e-3  # of processor time: a timer of 0 would never ring
T = TypeVar("T")
Naming = Callable[[], AbstractContextManager[None]]  # makes a context in which errors get other names for files
_ERRORS = {error.__name__: error for error in (BadRequest, BrokenModel, StorageFailed)}


@dataclass(frozen=True, slots=True)
class ChildLimits:
    """The limits of a request to the child, and what it is about, for the error that the user reads.

    `doing`: "rendering a chat". `file`: that the request needs. `answer_bytes`: the most bytes of the answer, which
    this process will hold. `spent_s`: seconds of `cpu_s` that earlier requests took. `hint`: why there is no more
    memory, where we know.
    """

    doing: str
    file: Path
    cpu_s: float
    memory_bytes: int
    answer_bytes: int
    spent_s: float = 0.0
    hint: str = ""


class Confined:
    """The child for one model's folder. It is started by the first request, and again after a request that broke it.

    Any thread may ask; threads wait for each other. After a fork of this process, the copy starts a child of its own.
    """

    def __init__(
        self,
        folder: Path,
        opening: Callable[[], ChildLimits],
        spare: Child | None = None,
        module: str = TOKENIZER_CHILD,
        arguments: Callable[[], list[Any]] | None = None,
        naming: Naming = nullcontext,
    ) -> None:
        """`opening`: returns the limits of opening the folder, and is called each time that it is opened. `spare`: a
        child that was started and asked nothing yet; the first request takes it. `module`: that the child runs.
        `arguments`: what it opens; None for the folder. `naming`: the context of each request."""
        self._folder = os.path.abspath(folder)  # the working folder may be another when it is opened again
        self._opening = opening
        self._module, self._arguments, self._naming = module, arguments, naming
        # Garbage collection may close this in the middle of a request, in the thread that makes the request.
        self._owner, self._lock = os.getpid(), threading.RLock()
        self._spare = spare
        self._child: Child | None = None
        self._peak_bytes = 0

    def open(self) -> dict[str, Any]:
        """Opens the folder's files and returns their facts (`Vocabulary.facts`). Raises BrokenModel beyond a limit, and
        the child's errors."""
        with self._naming(), self._mine():
            return self._start()

    def ask(self, action: str, arguments: list[Any], limits: ChildLimits) -> tuple[Any, float]:
        """The answer, and the seconds of processor time that it took. Raises BrokenModel beyond a limit, and the
        child's errors. `action`: the name of a method of `Vocabulary`."""
        with self._naming(), self._mine():
            # A child may also have been ended from outside, while it had nothing to do.
            if self._child is None or self._child.process.poll() is not None:
                self._start()
            assert self._child is not None
            return self._exchange(self._child, action, arguments, limits)

    @property
    def lives(self) -> bool:
        """Whether there is a child that knows what the requests before told it."""
        with self._mine():
            return self._child is not None and self._child.process.poll() is None

    def close(self) -> None:
        """Ends the child. Another request would start one."""
        with self._mine():
            self._drop()

    @property
    def peak_bytes(self) -> int:
        """The most bytes of memory that a child had to itself so far."""
        if self._child is not None:
            self._peak_bytes = max(self._peak_bytes, host.peak_private_bytes(self._child.process.pid))
        return self._peak_bytes

    def _start(self) -> dict[str, Any]:
        self._drop()
        spare, self._spare = self._spare, None
        self._child = spare if spare is not None and spare.process.poll() is None else Child(self._module)
        try:
            facts: dict[str, Any]
            arguments = [self._folder] if self._arguments is None else self._arguments()
            facts, _ = self._exchange(self._child, "open", arguments, self._opening())
        except BaseException:
            self._drop()
            raise
        return facts

    def _exchange(self, child: Child, action: str, arguments: list[Any], limits: ChildLimits) -> tuple[Any, float]:
        try:
            left_s = max(_LEAST_S, limits.cpu_s - limits.spent_s)
            answer, cpu_s = child.exchange([action, arguments, left_s, limits.memory_bytes, limits.answer_bytes])
        except BaseException as error:  # Ctrl-C too: the next request would take this one's answer for its own
            self._drop()
            if isinstance(error, _Broke):
                raise _explain(error, limits, child.reads or limits.file) from None
            raise
        if "value" in answer:
            return answer["value"], cpu_s
        if answer["failed"] == "MemoryError":
            self._drop()  # and the memory that it holds by now
        raise _refused(answer, limits, child.reads or limits.file)

    def _mine(self) -> AbstractContextManager[Any]:
        # After a fork the child belongs to the other process, and a thread of that one may hold the lock.
        if self._owner != os.getpid():
            self._owner, self._lock = os.getpid(), threading.RLock()
            self._spare = self._child = None
        return self._lock

    def _drop(self) -> None:
        if self._child is not None:
            _ = self.peak_bytes
            self._child.end()
            self._child = None


class _Broke(Exception):
    """The child gave no answer. `status`: its exit code if it ended by itself; minus the signal that ended it; None if
    it still runs and must be ended."""

    def __init__(self, status: int | None, stderr: str = "") -> None:
        super().__init__(status)
        self.status, self.stderr = status, stderr


class Child:
    """The child process, and our end of the socket.

    Python and its libraries take 60 ms to come up in it. A command that will open a tokenizer starts a child before
    anything else, so that it comes up on another processor meanwhile. Raises BadRequest where Python does not start.
    """

    def __init__(self, module: str = TOKENIZER_CHILD) -> None:
        self.reads: Path | None = None  # the file that "open" is reading
        self._received, self._searched = bytearray(), 0  # so many of these bytes have no end of a line
        self._link, theirs = socket.socketpair()
        self._link.settimeout(_PATIENCE_S)
        with theirs:
            try:
                self.process = subprocess.Popen(
                    command(module, str(os.getpid())),
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C at the terminal is not for the child
                )
            except OSError as error:
                self._link.close()
                why = f"the tokenizer needs a process of its own, and {sys.executable} does not start"
                raise BadRequest(f"{why}: {error.strerror}") from None
        self.end = weakref.finalize(self, _end, self._link, self.process, os.getpid())

    def exchange(self, request: list[Any]) -> tuple[dict[str, Any], float]:
        """The answer to a request, and the seconds of processor time that it took. Raises _Broke."""
        self.reads = None
        try:
            rest = memoryview(json.dumps(request).encode() + b"\n")
            while rest:
                rest = rest[self._patiently(self._link.send, rest) :]
            while True:
                cpu_s, _, answer = self._line().partition(b" ")
                message: dict[str, Any] = json.loads(answer)
                if "reads" not in message:
                    return message, float(cpu_s)
                self.reads = Path(message["reads"])
        except ConnectionError:
            raise self._broke() from None

    def _line(self) -> bytes:
        """The child's next line. Raises _Broke."""
        while (end := self._received.find(b"\n", self._searched)) < 0:
            self._searched = len(self._received)
            chunk = self._patiently(self._link.recv, CHUNK_BYTES)
            if not chunk:
                raise self._broke()
            self._received += chunk
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        self._searched = 0
        return line

    def _patiently(self, move: Callable[[Any], T], argument: Any) -> T:
        """`move(argument)`, tried again after each timeout as long as the child takes processor time, or waits for it.
        Raises _Broke."""
        before_s = None
        while True:
            begun_s = time.monotonic()
            try:
                return move(argument)
            except TimeoutError:
                late = time.monotonic() - begun_s > _PATIENCE_S + _LATE_S
                now_s = host.cpu_s(self.process.pid)
                if now_s == before_s and not late and not host.wants_cpu(self.process.pid):
                    raise _Broke(None) from None
                before_s = now_s

    def _broke(self) -> _Broke:
        """Why the other end of the socket is closed."""
        assert self.process.stderr is not None
        try:
            status = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return _Broke(None)
        return _Broke(status, self.process.stderr.read().decode(errors="replace"))


def _end(link: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    """Ends the child. Called by `Child.end`, when the Child is collected, and when this process ends."""
    assert process.stderr is not None
    link.close()
    process.stderr.close()
    if owner == os.getpid():
        process.kill()
        process.wait()
    else:
        process.returncode = 0  # this handle is a fork's copy: the process that forked waits for the child


def _refused(answer: dict[str, Any], limits: ChildLimits, file: Path) -> PenstockError:
    """The error that the child's answer reports."""
    kind, said = answer["failed"], answer["message"]
    if kind == "MemoryError":
        return _too_large(limits, file)
    if kind == "TooLong":
        return BrokenModel(f"{file}: {limits.doing} gives more than {format_bytes(limits.answer_bytes)}")
    if kind == "Library":
        return BrokenModel(f"{file}: {limits.doing} fails: {said[:300]}")
    if kind in _ERRORS:
        return _ERRORS[kind](said)
    failure = InternalError(said)
    failure.add_note(answer["trace"])
    return failure


def _explain(broke: _Broke, limits: ChildLimits, file: Path) -> PenstockError:
    """The error for a child that gave no answer."""
    if broke.status is None:
        return BrokenModel(f"{file}: {limits.doing} came to a standstill")
    if broke.status > 0:
        said = (broke.stderr.strip() or "it gave no reason").splitlines()[-1]
        return InternalError(f"the process that opens tokenizers ended with code {broke.status}: {said[:300]}")
    if -broke.status == signal.SIGPROF:
        return BrokenModel(f"{file}: {limits.doing} takes more than {limits.cpu_s:.2g} s of processor time")
    if "memory allocation" in broke.stderr:  # Rust says so and aborts
        return _too_large(limits, file)
    # A status of 0 gives no reason: where this process ignores SIGCHLD, the system says no more.
    how = signal.Signals(-broke.status).name if broke.status else "an unknown way"
    within = f"{limits.cpu_s:.2g} s of processor time and {format_bytes(limits.memory_bytes)} of memory"
    return BrokenModel(f"{file}: {limits.doing} ended in {how}, within {within}")


def _too_large(limits: ChildLimits, file: Path) -> PenstockError:
    return BrokenModel(
        f"{file}: {limits.doing} takes more than {format_bytes(limits.memory_bytes)} of memory{limits.hint}"
    )
