"""How many neurons of a ReLU model fire: by a profile of it, or as PowerInfer measured of models like it.

If a plan leaves out neurons that do not fire, a unit's `active` is the share that is expected to fire, in the mean over
the model's layers. So layers stay alike, and short plans can stand for long ones (`planner.shorten`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from penstock.errors import BadRequest
from penstock.graph.asked import MOST_ROWS
from penstock.graph.records import may_be_asked
from penstock.planner import activity
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.model import ModelSpec
from penstock.spec.places import HOST, is_disk
from penstock.spec.plan import Plan, Predictor
from penstock.spec.predictors import FORMAT, RANK_STEP, TRAIN, Predictors
from penstock.spec.profile import FIRED_TOGETHER, Profile
from penstock.units import format_bytes, round_up


@dataclass(frozen=True, slots=True)
class Foretold:
    """What is known of a model's predictors. `predictors`: one for each layer, in RAM. `shares[i]`: the share of all
    neurons that they call active for at least one of FIRED_TOGETHER[i] tokens. `recall`: of the neurons that fire, the
    share that they call active; None where nobody has measured it."""

    predictors: tuple[Predictor, ...]
    shares: tuple[float, ...]
    recall: float | None
    source: str


@dataclass(frozen=True, slots=True)
class Firing:
    """`shares[i]`: the share of all neurons that at least one of FIRED_TOGETHER[i] tokens fires. `source`: who says
    so. `foretold`: of a model that has predictors. `levels`: of each layer, where it has no ReLU, below which
    activations are taken for zeros; `shares` are those of the neurons that are not below."""

    shares: tuple[float, ...]
    source: str
    foretold: Foretold | None = None
    levels: tuple[float, ...] = ()

    def share(self, tokens: int) -> float:
        """Of so many tokens, interpolated."""
        return _interpolated(self.shares, tokens)


def _interpolated(shares: tuple[float, ...], tokens: int) -> float:
    """The share for so many tokens, of `shares` for FIRED_TOGETHER."""
    if tokens >= FIRED_TOGETHER[-1]:
        return shares[-1]
    above = next(i for i, n in enumerate(FIRED_TOGETHER) if n >= tokens)
    if FIRED_TOGETHER[above] == tokens:
        return shares[above]
    lo, hi = FIRED_TOGETHER[above - 1], FIRED_TOGETHER[above]
    return shares[above - 1] + (shares[above] - shares[above - 1]) * (tokens - lo) / (hi - lo)


def leveled(profile: Profile | None, spec: ModelSpec) -> Firing | None:
    """The firing that a profile tells of a model without ReLU; None if it has no levels."""
    if profile is None or not profile.levels:
        return None
    neurons = [layer.ffns[0].neurons for layer in spec.layers]
    each = zip(*(layer.kept for layer in profile.levels), strict=True)
    shares = tuple(sum(k * n for k, n in zip(in_layers, neurons, strict=True)) / sum(neurons) for in_layers in each)
    return Firing(shares, profile.source, levels=tuple(layer.level for layer in profile.levels))


def foretold(found: Predictors, spec: ModelSpec) -> Foretold:
    """What a packed model's predictors are known to do."""
    mean = found.mean(spec)
    predictors = tuple(Predictor(each.layer, each.rank, HOST, FORMAT, found.ahead) for each in found.layers)
    return Foretold(predictors, mean.active, mean.recall, found.source)


@lru_cache(maxsize=64)
def expected_predictors(spec: ModelSpec) -> Foretold | None:
    """The predictors assumed for a model for which none were trained. They have the sizes that PowerInfer publishes
    (Table 6), and call exactly the neurons active that fire. None if it publishes nothing of such models."""
    known = activity.published(spec)
    if known is None:
        return None
    ranks = [activity.predictor_rank(spec.d_model, sum(layer) / len(layer)) for layer in known.layers]
    predictors = tuple(Predictor(i, round_up(r, RANK_STEP), HOST, FORMAT) for i, r in enumerate(ranks))
    return Foretold(predictors, expected(spec).shares, None, known.source)


def measured(profile: Profile | None) -> Firing | None:
    """The firing that a profile tells; None if it counted no neurons."""
    if profile is None or not profile.neurons:
        return None
    total = sum(layer.neurons for layer in profile.neurons)
    each = zip(*(layer.fired for layer in profile.neurons), strict=True)
    weights = [layer.neurons for layer in profile.neurons]
    shares = tuple(sum(f * n for f, n in zip(in_layers, weights, strict=True)) / total for in_layers in each)
    return Firing(shares, profile.source)


@lru_cache(maxsize=64)
def expected(spec: ModelSpec) -> Firing:
    """The firing assumed of a model without a profile. Tokens are taken to be independent of each other, and neurons to
    fire at PowerInfer's figures (Table 3 and Figure 4). Where PowerInfer has none for it, all neurons fire."""
    known = activity.published(spec)
    if known is None:
        return Firing((1.0,) * len(FIRED_TOGETHER), "without a profile, all are taken to fire")
    rates = [f for layer in known.layers for f in layer]
    shares = tuple(sum(1 - (1 - f) ** n for f in rates) / len(rates) for n in FIRED_TOGETHER)
    return Firing(shares, known.source)


def sparsity_of(asked: str, spec: ModelSpec) -> str:
    """The sparsity of a plan (`spec.plan.SPARSITIES`) for what was asked (`spec.ask.SPARSITIES`)."""
    if asked in ("predict", "threshold"):
        return asked
    return "exact" if asked != "off" and spec.fires else "off"


def foretold_of(spec: ModelSpec, firing: Firing | None) -> Foretold | None:
    """What is known or taken of a model's predictors."""
    return firing.foretold if firing is not None and firing.foretold is not None else expected_predictors(spec)


def share_of(spec: ModelSpec, weights: Format, firing: Firing | None, rows: int, sparsity: str) -> float:
    """The share of neurons of which a call of so many rows computes all. In tiles only whole granules can be left out,
    and in a checkpoint's order hardly any granule has no neuron that fires."""
    if not weights.neurons or sparsity == "off":
        return 1.0
    if sparsity == "predict":
        known = foretold_of(spec, firing)
        return 1.0 if known is None else _interpolated(known.shares, rows)
    return (firing or expected(spec)).share(rows)


def check_sparsity(ask: Ask, spec: ModelSpec, firing: Firing | None) -> None:
    """Raises BadRequest if the ask wants a sparsity that this model does not have, or that does not run there."""
    if ask.sparsity == "exact" and not spec.fires:
        raise BadRequest("--sparsity exact: all neurons of this model fire, since its activation is no ReLU")
    if ask.sparsity == "predict":
        if not spec.fires:
            raise BadRequest("--sparsity predict: this model's activation is no ReLU, so no neuron can be left out")
        if foretold_of(spec, firing) is None:
            raise BadRequest(
                "--sparsity predict: this model has no predictors (`penstock train-predictors` trains them)"
            )
    if ask.sparsity == "threshold":
        if not spec.has_levels:
            why = "this model has a ReLU, whose zeros are left out exactly" if spec.fires else "this model has experts"
            raise BadRequest(f"--sparsity threshold: {why}")
        if firing is None or not firing.levels:
            raise BadRequest(
                "--sparsity threshold: no levels are known (`penstock profile MODEL FILE --below SHARE` finds them)"
            )
        if ask.use_device:
            raise BadRequest("--sparsity threshold runs without a device, whose kernels leave nothing out yet")


def untrained(sparsity: str, spec: ModelSpec, firing: Firing | None) -> str:
    """What has to be done before a plan with this sparsity (as asked) runs, where its predictors are those of models
    like it; empty where predictors are there, or none are wanted."""
    known = firing is not None and firing.foretold is not None
    return "" if sparsity != "predict" or known or not spec.fires else f"it has no predictors yet: {TRAIN}"


def require_unpacked(sparsity: str, spec: ModelSpec, where: str) -> None:
    """Raises BadRequest for a sparsity that a checkpoint without a packed copy cannot have. Predictors and levels are
    kept beside a copy, so packing it would end in a refusal. `where`: names the checkpoint."""
    check_sparsity(Ask(sparsity=sparsity), spec, None)
    if sparsity == "predict":
        raise BadRequest(f"{where} has no predictors, which --sparsity predict needs: {TRAIN}")


def reason(plan: Plan, firing: Firing | None, may_ask: bool = True) -> tuple[str, ...]:
    """A sentence about neurons that do not fire, where that plays a part. `may_ask`: whether a plan for this ask may
    ask a disk for neurons at all (not under `Ask.resident_bytes`)."""
    target = plan.target
    if plan.sparsity == "threshold" and firing is not None:
        read = (
            "of the others alone all is read" if target.weights.neurons else "they are left out where 64 lie together"
        )
        return (
            f"activations below a level of their layer count as zeros: {1 - firing.share(1):.1%} of them,"
            f" {firing.source}; {read}",
            "this is lossy (threshold): `penstock eval` prices it",
        )
    if not target.spec.fires:
        return ()
    if plan.sparsity == "off":
        return ("all neurons are computed, also those that do not fire (--sparsity off)",)
    if plan.sparsity == "predict":
        return _predicted_reason(plan, firing)
    if not target.weights.neurons:
        return ("what a ReLU's zeros multiply is left out where 64 neurons that lie together do not fire (exact)",)
    known = firing or expected(target.spec)
    streams = _streams(plan)
    where = "of FFNs in memory, " if streams else ""
    share = f"{known.share(plan.batch_seqs):.1%} are taken to fire, {known.source}"
    told: tuple[str, ...] = (f"{where}neurons that do not fire are not read (exact): {share}",)
    if may_ask and streams and firing is None and plan.batch_seqs <= MOST_ROWS and _may_ask(plan):
        told += (
            "what streams is read whole: a plan asks for neurons that fire alone where that is faster and a profile"
            " tells which ones fire (`penstock profile MODEL FILE`)",
        )
    return told


def _streams(plan: Plan) -> bool:
    """Whether a part of the FFNs comes from a disk as a whole."""
    ffns = {part.key for part in plan.parts.values() if part.kind == "ffn"}
    return any(unit.part in ffns and is_disk(unit.home) and not unit.asked for unit in plan.units)


def _may_ask(plan: Plan) -> bool:
    """Whether a disk may be asked for the neurons that count alone."""
    return all(may_be_asked(part, plan.sparsity) for part in plan.parts.values() if part.kind == "ffn")


def _predicted_reason(plan: Plan, firing: Firing | None) -> tuple[str, ...]:
    target = plan.target
    known = foretold_of(target.spec, firing)
    assert known is not None, "a plan with predictors is of a model that has some"
    nbytes = sum(each.part(target.spec).nbytes for each in plan.predictors)
    recall = "" if known.recall is None else f", among them {known.recall:.1%} of those that fire"
    share = _interpolated(known.shares, plan.batch_seqs)
    what = "of these alone anything is read" if target.weights.records else "all activations are read all the same"
    if not target.weights.neurons:
        what = "others are left out where 64 lie together"
    if _streams(plan):
        what = f"in memory {what}, and what streams is read whole"
    return (
        f"predictors of {format_bytes(nbytes)} call {share:.1%} of the neurons active{recall}, {known.source}: {what}",
        "this is lossy (predict): neurons that fire and are not foretold are missing (`penstock eval` prices that)",
        *_hearing_reason(plan),
        *(() if known.recall is not None else (f"these predictors are not there yet, so this does not run: {TRAIN}",)),
    )


def _hearing_reason(plan: Plan) -> tuple[str, ...]:
    """A sentence about predictors that would serve this plan better: on a disk those that hear the layer before theirs
    decode 1.2 times as fast; of the others fewer alarms are false (docs/LOG.md, "Predictors one layer ahead")."""
    asks, ahead = any(unit.asked for unit in plan.units), any(each.ahead for each in plan.predictors)
    if asks and not ahead:
        return (
            "the disk waits for each layer's predictor: it would not for predictors one layer ahead"
            " (`penstock train-predictors MODEL --text FILE --ahead`)",
        )
    if ahead and not asks and not _streams(plan):
        return (
            "nothing is asked of a disk here: predictors of their own layer (--no-ahead) call fewer neurons active",
        )
    return ()
