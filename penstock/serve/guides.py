"""Holds answers to a JSON schema or a grammar: a child process says which tokens may come next, while the model
computes.

A token is told to the child as soon as it is chosen. The mask of the next one is computed while the pass runs that
gives its logits. So a mask costs no time where the pass takes longer. A mask of most schemas takes less than a
millisecond.

One child serves all answers, and remembers them. A schema that makes it take too much time or memory ends it. The
answer that asked is tried again in a new child, where nothing else takes memory, and ends with an error if it breaks
that one too. Other answers are told to the new child anew, with the tokens that they have. All answers of a pass wait
for the slowest mask. So an answer whose masks take long, one by one within the limits, ends with an error too.
"""

from __future__ import annotations

import base64
import importlib.util
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest, BrokenModel
from penstock.runtime import host
from penstock.serve.confined import ChildLimits, Confined
from penstock.serve.guide_child import NUMBERED
from penstock.serve.schemas import Rule
from penstock.serve.tokenizer import Tokenizer
from penstock.units import MIB, format_bytes

# Of processor time. A schema of 2,000 properties compiles in 0.3 s, and is refused for its size then.
_COMPILE_S, _STEP_S, _OPEN_S = 1.0, 0.5, 10.0
# The masks of one answer may take so long together, beside what each of them may: most take below a millisecond.
_ALL_STEPS_S, _EACH_STEP_S = _COMPILE_S + _STEP_S, 0.02
_ANSWER_BYTES = 1 << 20
# With 128k entries the child peaks at 46 MiB; a schema's automaton may take 20 MiB. A numbered mask is a byte for each
# token here and a bit there.
_CHILD_BYTES, _BYTES_PER_TOKEN = 56 * MIB, 256 + NUMBERED + NUMBERED // 8

_ENDED = "the model that this answer is from was closed"
T = TypeVar("T")


def has_guides() -> bool:
    """Whether llguidance is installed."""
    return importlib.util.find_spec("llguidance") is not None


def guide_bytes(vocab: int) -> int:
    """Memory of the child for a vocabulary of so many entries, and for the schemas that it holds."""
    return _CHILD_BYTES + _BYTES_PER_TOKEN * vocab


class Allowed:
    """What may come next. `choice`: ids, int64 [n], rising, where they are few, else bool [V]. `end`: the text may end
    here. `only_end`: nothing else may come."""

    def __init__(self, mask: str | list[int], vocab: int, eos_ids: frozenset[int], known: int) -> None:
        """`mask`: as the child gives it, of ids below `known`, which stands for the end."""
        ends, most = [i for i in eos_ids if 0 <= i < vocab], min(vocab, known)
        self._vocab = vocab
        self.choice: NDArray[np.bool_] | NDArray[np.int64]
        if isinstance(mask, list):
            self.end = known in mask
            ids = {i for i in mask if i < most}
            self.only_end = not ids
            self.choice = np.array(sorted(ids | set(ends if self.end else ())), np.int64)
            return
        bits = np.frombuffer(base64.b64decode(mask), np.uint8)
        flags = np.unpackbits(bits, count=known + 1, bitorder="little").view(np.bool_)
        tokens = np.zeros(vocab, np.bool_)
        tokens[:most] = flags[:most]
        self.end, self.only_end = bool(flags[known]), not tokens.any()
        if self.end:
            tokens[ends] = True
        self.choice = tokens

    @property
    def tokens(self) -> NDArray[np.bool_]:
        """bool [V]: the ids that may come."""
        if self.choice.dtype == np.bool_:
            return self.choice.view(np.bool_)
        tokens = np.zeros(self._vocab, np.bool_)
        tokens[self.choice] = True
        return tokens


class Guides:
    """The child of one model, started when the first schema comes. `vocab`: entries of the model's logits.
    `memory_bytes`: how much memory the child may take now. Any thread may ask.

    Raises BadRequest where llguidance is not installed."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, memory_bytes: Callable[[], int]) -> None:
        if not has_guides():
            raise BadRequest("answers that follow a JSON schema need llguidance: pip install 'penstock[serve]'")
        self._tokenizer, self._vocab, self._memory_bytes = tokenizer, vocab, memory_bytes
        self._confined = Confined(
            tokenizer.folder, lambda: self._limits("reading the vocabulary", _OPEN_S),
            module="penstock.serve.guide_child", arguments=self._tokens, naming=tokenizer.naming,
        )  # fmt: skip
        # One thread, so that requests come in the order in which they were made.
        self._worker = ThreadPoolExecutor(1, "penstock-guides")
        self._known = 0  # ids that the child knows
        self._numbered: dict[int, Allowed] = {}  # the masks that the child may name by their numbers
        self._limit_bytes = 0  # of its memory
        self._child = 0  # how many children have been opened
        self._number = 0
        self._counting = threading.Lock()
        self._left: deque[int] = deque()  # answers that nobody holds any more

    def check(self, rule: Rule) -> None:
        """Has the child compile a rule, and waits for that. Raises BadRequest where the rule cannot be followed, or
        takes more than it may."""
        _result(self._submit(self._ask, "check", list(rule), _COMPILE_S))

    def begin(self, rule: Rule) -> Guide:
        """Guides an answer from its first token on. Returns at once. Raises BadRequest after `close`."""
        with self._counting:
            self._number += 1
            guide = Guide(self, self._number, rule)
        # Garbage collection may come in the middle of any line, with any lock held: it may append, and no more.
        weakref.finalize(guide, self._left.append, guide.number).atexit = False
        return guide

    def close(self) -> None:
        """Ends the child."""
        self._worker.shutdown(cancel_futures=True)
        self._confined.close()

    @property
    def peak_bytes(self) -> int:
        """The most memory that the child had so far."""
        return self._confined.peak_bytes

    def later(self, known: _Known, tokens: list[int]) -> Future[Allowed]:
        """The promise of what may come after these tokens of an answer. Raises BadRequest after `close`."""
        return self._submit(self._next, known, tokens)

    def _submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """The promise of what the worker's thread will return. Raises BadRequest after `close`."""
        try:
            return self._worker.submit(work, *arguments)
        except RuntimeError:
            raise BadRequest(_ENDED) from None

    # -- the worker's thread ---------------------------------------------------------------------------

    def _next(self, known: _Known, tokens: list[int]) -> Allowed:
        self._ensure()
        try:
            mask = self._mask(known, tokens)
        except _Broken:  # perhaps because of what other answers hold, so it is tried once more alone
            self._ensure()
            try:
                mask = self._mask(known, tokens)
            except _Broken as broken:
                raise BadRequest(f"the JSON schema or grammar cannot be followed: {broken}") from None
        if isinstance(mask, int):
            return self._numbered[mask]
        number, told = mask if isinstance(mask[-1], str) else (None, mask)
        allowed = Allowed(told, self._vocab, self._tokenizer.eos_ids, self._known)
        if number is not None:
            self._numbered[number] = allowed
        return allowed

    def _mask(self, known: _Known, tokens: list[int]) -> Any:
        """`guide_child.Mask`, as JSON has it."""
        if known.child == self._child and tokens:
            mask, taken_s = self._try("step", [known.number, tokens[-1]], _STEP_S)
        else:
            mask, taken_s = self._try("begin", [known.number, *known.rule, tokens], _COMPILE_S + _STEP_S)
            known.child = self._child
        known.taken_s += taken_s
        masks = len(tokens) + 1
        if known.taken_s > _ALL_STEPS_S + masks * _EACH_STEP_S:
            raise BadRequest(
                f"the JSON schema or grammar cannot be followed: {masks} tokens took it {known.taken_s:.1f} s of "
                f"processor time, and others wait meanwhile"
            )
        return mask

    def _ask(self, action: str, arguments: list[Any], cpu_s: float) -> Any:
        self._ensure()
        try:
            return self._try(action, arguments, cpu_s)[0]
        except _Broken as broken:
            raise BadRequest(f"the JSON schema or grammar cannot be followed: {broken}") from None

    def _try(self, action: str, arguments: list[Any], cpu_s: float) -> tuple[Any, float]:
        """The child's answer, and the seconds of processor time that it took. Raises _Broken where it took too much,
        BadRequest with the child's reason."""
        doing = "compiling it" if action in ("check", "begin") else "the next token"
        task = self._limits(doing, cpu_s)
        try:
            return self._confined.ask(action, arguments, task)
        except BrokenModel as error:
            raise _Broken(error.message.removeprefix(f"{task.file}: ")) from None
        except BadRequest as error:
            raise BadRequest(f"the JSON schema or grammar cannot be followed: {error.message}") from None

    def _ensure(self) -> None:
        """Opens a child where there is none. Raises BadRequest where there is no room for one, and where the model's
        tokens have no bytes."""
        if self._confined.lives:
            self._drop_left()
            return
        need = guide_bytes(0)
        self._limit_bytes = have = self._memory_bytes()
        if have < need:
            raise BadRequest(
                f"answers to a JSON schema take {format_bytes(need)} of memory, and {format_bytes(have)} are left"
            )
        self._numbered.clear()
        self._known = self._confined.open()["tokens"]
        self._child += 1

    def _tokens(self) -> list[Any]:
        tokens = self._tokenizer.token_bytes()
        if tokens is None:
            raise BadRequest("with this model's tokenizer no answer can be held to a JSON schema")
        return [tokens]

    def _limits(self, doing: str, cpu_s: float) -> ChildLimits:
        return ChildLimits(doing, self._tokenizer.folder, cpu_s, self._limit_bytes, _ANSWER_BYTES)

    def _drop_left(self) -> None:
        """Makes the child forget the answers that nobody holds any more."""
        while self._left:
            number = self._left.popleft()
            if self._confined.lives:
                self._confined.ask("drop", [number], self._limits("ending", _STEP_S))


class _Broken(Exception):
    """The child ended, or had no memory left."""


class _Known:
    """What the worker knows of an answer. `child`: the number of the child that knows it; 0 for none. `taken_s`: of
    processor time, by its masks so far."""

    def __init__(self, number: int, rule: Rule) -> None:
        self.number, self.rule, self.child, self.taken_s = number, rule, 0, 0.0


class Guide:
    """Guides one answer. Its owner tells it each token (`push`). The child forgets it when it is collected."""

    def __init__(self, guides: Guides, number: int, rule: Rule) -> None:
        self.number, self._guides = number, guides
        self._known, self._tokens = _Known(number, rule), list[int]()
        self._next = guides.later(self._known, [])

    def allowed(self) -> Allowed:
        """What may come next. Raises BadRequest where the rule cannot be followed any further, and after
        `Guides.close`."""
        return _result(self._next)

    def push(self, token: int) -> None:
        """Notes one more token of the answer. It was allowed, and does not end the answer."""
        self._tokens.append(token)
        self._next = self._guides.later(self._known, list(self._tokens))


def _result(promise: Future[T]) -> T:
    """What was promised. Raises BadRequest where `Guides.close` has broken the promise."""
    try:
        return promise.result()
    except CancelledError:
        raise BadRequest(_ENDED) from None


def memory_left(within_bytes: int | None, planned_bytes: int, tokenizer: Tokenizer, vocab: int) -> int:
    """Memory that the child may take now. `within_bytes`: the most that this process and its children may take; None
    for no limit. `planned_bytes`: what the plan has for the child."""
    if within_bytes is None:
        return 2 * guide_bytes(vocab)
    return max(planned_bytes, within_bytes - host.rss_bytes() - tokenizer.peak_bytes)
