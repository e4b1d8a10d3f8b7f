"""Reads a text and counts the experts that its tokens go to, or the neurons that they fire, for `penstock profile`."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.errors import BadRequest
from penstock.graph import passes
from penstock.graph.ops import Route
from penstock.graph.tasks import Call
from penstock.runtime.host import Progress
from penstock.serve.engine import Engine
from penstock.serve.windows import width_of
from penstock.spec.model import FfnSpec, ModelSpec
from penstock.spec.profile import FIRED_TOGETHER, Counting, FiringCounts, Profile


def profile(
    engine: Engine, text: str, name: str, most_tokens: int | None = None, on_progress: Progress | None = None
) -> Profile:
    """Reads at most `most_tokens` of the text. Raises BadRequest as `profile_ids` does."""
    require_counted(engine.packed.spec, str(engine.packed.folder))
    ids = engine.tokenizer.encode(text)[:most_tokens]
    return profile_ids(engine, ids, name, hashlib.sha256(text.encode()).hexdigest(), on_progress)


def profile_ids(
    engine: Engine, ids: list[int], name: str, text_sha256: str, on_progress: Progress | None = None
) -> Profile:
    """Reads tokens in windows of 512 (or the model's maximum). `name`, `text_sha256`: of the profile. Raises BadRequest
    for a model without experts and ReLUs, or where there are no tokens."""
    require_counted(engine.packed.spec, str(engine.packed.folder))
    if not ids:
        raise BadRequest("the text has no tokens")
    if engine.packed.spec.fires:
        neurons = _neurons(engine, ids, on_progress)
        return Profile(name, text_sha256, len(ids), (), neurons)
    spec = engine.packed.spec
    counting = {i: Counting(i, layer.routed.experts) for i, layer in enumerate(spec.layers) if layer.routed is not None}

    def note(call: Call, answer: list[list[int]]) -> None:
        assert isinstance(call.operands, Route)
        layer = call.operands.layer
        for row in answer:
            counting[layer].token(tuple(row))
        for row in engine.session.hearing.guess(call) or ():
            counting[layer + 1].guess(tuple(row))

    with engine.session.hearing.routers(note):
        for _ in read(engine, ids, on_progress):
            pass
    return Profile(name, text_sha256, len(ids), tuple(counted.found() for counted in counting.values()))


def require_counted(spec: ModelSpec, where: str) -> None:
    """Raises BadRequest for a model that has nothing to count. `where`: names it."""
    if not (spec.is_routed or spec.fires):
        raise BadRequest(
            f"{where} has no experts to count, and no ReLU: all its neurons fire (--below SHARE finds levels)"
        )


def read(engine: Engine, ids: Sequence[int], on_progress: Progress | None) -> Iterator[None]:
    """Reads all tokens, and yields after each window."""
    plan = engine.plan
    width = min(width_of(engine.packed.spec), plan.context)
    for lo in range(0, len(ids), width):
        window = ids[lo : lo + width]
        for p in passes.prefill(plan, 0, len(window), None):
            start, rows = p.batches[0].start[0], p.batches[0].rows[0]
            engine.session.step(p, [np.array(window[start : start + rows], np.int32)])
        if on_progress:
            on_progress("reading tokens", min(lo + width, len(ids)), len(ids))
        yield


class Fired:
    """Counts which of a layer's neurons fire, or are called active."""

    def __init__(self, neurons: int) -> None:
        self.counts = np.zeros(neurons, np.uint32)
        self._shares = np.zeros(len(FIRED_TOGETHER))  # sums over windows
        self._windows = np.zeros(len(FIRED_TOGETHER), np.int64)

    def rows(self, fired: NDArray[np.uint8]) -> None:
        """Counts successive tokens, uint8 [T, neurons]."""
        self.counts += fired.sum(axis=0, dtype=np.uint32)
        for i, together in enumerate(FIRED_TOGETHER):
            windows = len(fired) // together
            if windows:
                unions = fired[: windows * together].reshape(windows, together, -1).max(axis=1)
                self._shares[i] += unions.mean(axis=1, dtype=np.float64).sum()
                self._windows[i] += windows

    def shares(self) -> tuple[float, ...]:
        """The share that at least one of FIRED_TOGETHER successive tokens fires, in the mean. Of more tokens together
        than there were at once, as many fire as of the most that there were."""
        shares: list[float] = []
        for total, windows in zip(self._shares, self._windows, strict=True):
            # A window's mean may be less than a shorter one's by rounding, or because it leaves the last tokens out.
            shares.append(max([*shares[-1:], total / windows if windows else 0.0]))
        return tuple(min(1.0, share) for share in shares)

    def found(self, layer: int) -> FiringCounts:
        counts = b64encode(self.counts.astype("<u4").tobytes()).decode()
        return FiringCounts(layer, len(self.counts), counts, self.shares())


def _neurons(engine: Engine, ids: Sequence[int], on_progress: Progress | None) -> tuple[FiringCounts, ...]:
    layers = [Fired(layer.ffn.neurons) for layer in engine.packed.spec.layers if isinstance(layer.ffn, FfnSpec)]
    with engine.session.hearing.neurons(lambda layer, _, fired: layers[layer].rows(fired)):
        for _ in read(engine, ids, on_progress):
            pass
    return tuple(layer.found(i) for i, layer in enumerate(layers))
