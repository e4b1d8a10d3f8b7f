"""Reads a text and counts the experts that its tokens go to, for `penstock profile`."""

from __future__ import annotations

import hashlib

import numpy as np

from penstock.errors import BadRequest
from penstock.graph import passes
from penstock.graph.ops import Route
from penstock.graph.tasks import Call
from penstock.runtime.host import Progress
from penstock.serve.engine import Engine
from penstock.spec.profile import Counting, Profile

WINDOW_TOKENS = 512


def profile(
    engine: Engine, text: str, name: str, most_tokens: int | None = None, on_progress: Progress | None = None
) -> Profile:
    """Reads at most `most_tokens` of the text. Raises BadRequest as `profile_ids` does."""
    if not engine.packed.spec.is_routed:
        raise BadRequest(f"{engine.packed.folder} has no experts to count")
    ids = engine.tokenizer.encode(text)[:most_tokens]
    return profile_ids(engine, ids, name, hashlib.sha256(text.encode()).hexdigest(), on_progress)


def profile_ids(
    engine: Engine, ids: list[int], name: str, text_sha256: str, on_progress: Progress | None = None
) -> Profile:
    """Reads tokens in windows of 512 (or the model's maximum). `name`, `text_sha256`: of the profile. Raises BadRequest
    for a model without experts, or where there are no tokens."""
    spec, plan = engine.packed.spec, engine.plan
    if not spec.is_routed:
        raise BadRequest(f"{engine.packed.folder} has no experts to count")
    counting = {i: Counting(i, layer.routed.experts) for i, layer in enumerate(spec.layers) if layer.routed is not None}

    def note(call: Call, answer: list[list[int]]) -> None:
        assert isinstance(call.operands, Route)
        layer = call.operands.layer
        for row in answer:
            counting[layer].token(tuple(row))
        for row in engine.session.guess(call) or ():
            counting[layer + 1].guess(tuple(row))

    if not ids:
        raise BadRequest("the text has no tokens")
    width = min(WINDOW_TOKENS, spec.max_positions, plan.context)
    with engine.session.hearing_routers(note):
        for lo in range(0, len(ids), width):
            window = ids[lo : lo + width]
            for p in passes.prefill(plan, 0, len(window), None):
                start, rows = p.batches[0].start[0], p.batches[0].rows[0]
                engine.session.step(p, [np.array(window[start : start + rows], np.int32)])
            if on_progress:
                on_progress("reading tokens", min(lo + width, len(ids)), len(ids))
    return Profile(name, text_sha256, len(ids), tuple(counted.found() for counted in counting.values()))
