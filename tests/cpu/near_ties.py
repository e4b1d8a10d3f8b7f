"""Where a router's scores nearly tie, transformers is made to choose as our engine did.

Two engines round a router's products differently. Where the last expert that is chosen and the first that is not
differ by less than that, either choice is right, and everything after it differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from penstock.graph.ops import Route
from penstock.graph.tasks import Call
from penstock.serve.engine import Engine

NEAR = 1e-5  # scores that differ by less

Said = Mapping[int, Sequence[Sequence[int]]]  # by layer, of each row the experts


@contextmanager
def heard(engine: Engine) -> Iterator[dict[int, list[list[int]]]]:
    """In this block all answers of the engine's routers are noted, row after row."""
    said: dict[int, list[list[int]]] = {}

    def note(call: Call, answer: list[list[int]]) -> None:
        assert isinstance(call.operands, Route)
        said.setdefault(call.operands.layer, []).extend(answer)

    with engine.session.hearing.routers(note):
        yield said


@contextmanager
def choosing(model: torch.nn.Module, said: Said) -> Iterator[list[tuple[int, int]]]:
    """In this block the model's routers choose what was `said`, in the rows in which scores that differ by less than
    NEAR decide. Yields the (layer, row) in which they would have chosen otherwise; it grows."""
    forced: list[tuple[int, int]] = []
    layers: Any = model.model.layers
    routers = {i: getattr(layers[i].mlp, "gate", None) or layers[i].mlp.router for i in said}
    hooks = [routers[i].register_forward_hook(_hook(i, rows, forced)) for i, rows in said.items()]
    try:
        yield forced
    finally:
        for hook in hooks:
            hook.remove()


def _hook(layer: int, rows: Sequence[Sequence[int]], forced: list[tuple[int, int]]) -> Any:
    seen = 0  # rows of earlier calls

    def hook(gate: Any, _: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        nonlocal seen
        logits, weights, experts = output  # [T, E], [T, A], [T, A]
        for row in range(len(logits)):
            ours = sorted(rows[seen + row])
            if ours == sorted(experts[row].tolist()):
                continue
            scores, bias = _scores(gate, logits[row])
            nudged = scores + bias - NEAR / 2
            nudged[ours] += NEAR
            if _choice(gate, nudged) == ours:
                forced.append((layer, seen + row))
                experts[row] = torch.tensor(ours)
                weights[row] = _weights(gate, scores[ours])
        seen += len(logits)
        return logits, weights, experts

    return hook


def _scores(gate: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Of all experts, and what is added to choose by: [E] each."""
    if hasattr(gate, "e_score_correction_bias"):
        return logits.sigmoid(), gate.e_score_correction_bias
    return logits.softmax(dim=-1), 0.0


def _choice(gate: Any, scores: torch.Tensor) -> list[int]:
    """The experts with the highest scores, of the groups whose best two are highest; upwards."""
    if (groups := getattr(gate, "num_group", 1)) > 1:
        grouped = scores.view(groups, -1)
        best = grouped.topk(2, dim=-1)[0].sum(dim=-1).topk(gate.topk_group)[1]
        kept = torch.full_like(grouped, float("-inf"))
        kept[best] = grouped[best]
        scores = kept.view(-1)
    return sorted(scores.topk(gate.top_k)[1].tolist())


def _weights(gate: Any, scores: torch.Tensor) -> torch.Tensor:
    """What the outputs of the chosen experts are multiplied by. Mixtral always normalises, and does not say so."""
    if getattr(gate, "norm_topk_prob", True):
        scores = scores / scores.sum()
    return scores * getattr(gate, "routed_scaling_factor", 1.0)
