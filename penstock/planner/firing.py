"""How many neurons of a ReLU model fire: by a profile of it, or as PowerInfer measured of models like it.

Where a plan leaves out what does not fire, a unit's `active` is the share that is expected to fire, in the mean over
the model's layers. So layers stay alike, and short plans can stand for long ones (`planner.shorten`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from penstock.planner import activity
from penstock.spec.format import Format
from penstock.spec.model import ModelSpec
from penstock.spec.plan import Plan
from penstock.spec.profile import FIRED_TOGETHER, Profile


@dataclass(frozen=True, slots=True)
class Firing:
    """`shares[i]`: the share of all neurons that at least one of FIRED_TOGETHER[i] tokens fires. `source`: who says
    so."""

    shares: tuple[float, ...]
    source: str

    def share(self, tokens: int) -> float:
        """Of so many tokens, interpolated."""
        if tokens >= FIRED_TOGETHER[-1]:
            return self.shares[-1]
        above = next(i for i, n in enumerate(FIRED_TOGETHER) if n >= tokens)
        if FIRED_TOGETHER[above] == tokens:
            return self.shares[above]
        lo, hi = FIRED_TOGETHER[above - 1], FIRED_TOGETHER[above]
        return self.shares[above - 1] + (self.shares[above] - self.shares[above - 1]) * (tokens - lo) / (hi - lo)


def measured(profile: Profile | None) -> Firing | None:
    """What a profile says; None where it counted no neurons."""
    if profile is None or not profile.neurons:
        return None
    total = sum(layer.neurons for layer in profile.neurons)
    each = zip(*(layer.fired for layer in profile.neurons), strict=True)
    weights = [layer.neurons for layer in profile.neurons]
    shares = tuple(sum(f * n for f, n in zip(at, weights, strict=True)) / total for at in each)
    return Firing(shares, profile.source)


@lru_cache(maxsize=64)
def expected(spec: ModelSpec) -> Firing:
    """What is taken of a model without a profile: tokens that are independent of each other, and PowerInfer's figures
    (Table 3 and Figure 4); or that all neurons fire, where there are none."""
    known = activity.published(spec)
    if known is None:
        return Firing((1.0,) * len(FIRED_TOGETHER), "without a profile, all are taken to fire")
    rates = [f for layer in known.layers for f in layer]
    shares = tuple(sum(1 - (1 - f) ** n for f in rates) / len(rates) for n in FIRED_TOGETHER)
    return Firing(shares, known.source)


def sparsity_of(asked: str, spec: ModelSpec) -> str:
    """The sparsity of a plan (`spec.plan.SPARSITIES`) for what was asked (`spec.ask.SPARSITIES`)."""
    return "exact" if asked != "off" and spec.fires else "off"


def share_of(spec: ModelSpec, weights: Format, firing: Firing | None, rows: int) -> float:
    """The share of neurons of which a call of so many rows computes all. In tiles only whole granules can be left out,
    and in a checkpoint's order hardly any granule has no neuron that fires."""
    return (firing or expected(spec)).share(rows) if weights.neurons else 1.0


def reason(plan: Plan, firing: Firing | None) -> tuple[str, ...]:
    """A sentence about neurons that do not fire, where that plays a part."""
    target = plan.target
    if not target.spec.fires:
        return ()
    if plan.sparsity == "off":
        return ("all neurons are computed, also those that do not fire (--sparsity off)",)
    if not target.weights.neurons:
        return ("what a ReLU's zeros multiply is left out where 64 neurons that lie together do not fire (exact)",)
    known = firing or expected(target.spec)
    return (
        f"neurons that do not fire are not read (exact): {known.share(plan.batch_seqs):.1%} are taken to fire,"
        f" {known.source}",
    )
