"""Sentences about plans of the papers' strategies, from the plan and from what the paper's formulas say of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.planner.activity import NeuronProfile
from penstock.planner.homes import kv_layers, weights_bytes
from penstock.planner.programs import policy as lp
from penstock.planner.programs.pipo_memory import PIPELINES, Configuration, MachineLimits, Sizes, equation_1, peak_bytes
from penstock.spec.part_keys import gathered_key
from penstock.spec.places import DISK, GPU, HOST, Tier
from penstock.spec.plan import Plan
from penstock.units import format_bytes, format_rate

_PLACES: dict[Tier, str] = {GPU.executor: "in device memory", HOST: "in RAM", DISK.tier: "on the disk"}


def by_equation_1(s: Sizes, batch: int, tokens: int, limits: MachineLimits) -> str:
    """What PIPO's Eq. 1 chooses, with the bytes and the rates that it goes by. `tokens`: of a prompt and its answer."""
    published = equation_1(s, batch, tokens, limits)
    need, kv = peak_bytes(s, batch, tokens, "overlapped"), s.kv_total_bytes(batch, tokens)
    return (
        f"PIPO Eq. 1: W {format_bytes(s.weights_bytes)} and M {format_bytes(need)} against "
        f"{format_bytes(limits.device_bytes)} of the device, W and C {format_bytes(kv)} against "
        f"{format_bytes(limits.host_bytes)} of RAM, link {format_rate(limits.link_bytes_per_s)}, disk "
        f"{format_rate(limits.disk_bytes_per_s)}: weights {_PLACES[published.home]}, {PIPELINES[published.pipeline]}"
    )


def in_pipeline(plan: Plan, choice: Configuration) -> tuple[str, ...]:
    """Sentences about where a plan of PIPO's has its weights, about its ring, and about KV."""
    where = f"all weights {_PLACES[choice.home]}"
    if choice.home != GPU.executor:
        where += ": each token lifts all of them"
        if choice.on_device:
            where = f"{choice.on_device:.0%} of the weights in device memory, the rest {_PLACES[choice.home]}"
    lines = [where]
    if ring := plan.ring_bytes.get(GPU.executor):
        how = "two blocks: one comes while the other computes" if choice.pipeline == "overlapped" else "one block"
        lines.append(f"a ring of {format_bytes(ring)}, for {how}")
    home = plan.kv[0].home
    lines.append(f"KV in {plan.kv[0].format.name} {_PLACES[home]}" + (", an attention ahead" if home == HOST else ""))
    return tuple(lines)


_LANE = {
    lp.READ: "bound by reading the disk",
    lp.WRITE: "bound by writing to the disk",
    lp.TO_DEVICE: "bound by the link to the device",
    lp.TO_HOST: "bound by the link to RAM",
    lp.COMPUTE: "bound by computing",
}


def in_blocks(
    plan: Plan, asked: int, placed: Collection[str], kv_bytes: int, solution: lp.Solution | None
) -> tuple[str, ...]:  # fmt: skip
    """Sentences about a plan of FlexGen's: how many blocks there are, which shares of their bytes are where, and what
    the program says. `asked`: sequences; `placed`: the keys of the parts that the policy places; `kv_bytes`: of a
    block; `solution`: None where the program has none."""
    parts, layers = plan.parts, len(plan.target.spec.layers)
    nbytes = {unit: plan.unit_bytes(unit) for unit in plan.units if unit.part in placed}
    tiers = (plan.main, HOST, DISK.tier) if plan.main != HOST else (HOST, DISK.tier)
    shares = {
        ("weights", tier): sum(n for unit, n in nbytes.items() if unit.home == tier) / sum(nbytes.values())
        for tier in tiers
    } | {
        ("KV", tier): sum(kv.layers[1] - kv.layers[0] for kv in plan.kv if kv.home == tier) / layers for tier in tiers
    }  # fmt: skip
    where = " · ".join(f"{what} {share:.0%} {_PLACES[tier]}" for (what, tier), share in shares.items() if share > 0)
    block = plan.sequences
    rounds, placed_bytes = -(-asked // block), sum(parts[key].nbytes for key in placed)
    told = (
        f"{asked} sequences in {rounds} block{'s' if rounds > 1 else ''} of {plan.batches_per_pass} batches of"
        f" {plan.batch_seqs}: what streams crosses once a block and token",
        f"{where} of {format_bytes(placed_bytes)} and {format_bytes(kv_bytes)}",
    )
    if solution is None:
        return *told, "the least memory that such blocks take: the linear program finds no room for more"
    return (
        *told,
        f"the linear program says {solution.seconds:.3g} s a block: a layer takes {solution.prefill.seconds:.3g} s of"
        f" prompts ({_LANE[solution.prefill.lane]}) and {solution.decode.seconds:.3g} s a token"
        f" ({_LANE[solution.decode.lane]})",
    )


def in_slices(
    plan: Plan, r_gg: Sequence[float], r_cg: Sequence[float], layer_s: float, alone_s: float, n_g: tuple[int, int],
    prompts: bool, lifts: str,
) -> tuple[str, ...]:  # fmt: skip
    """Sentences about a plan of ScheInfer's.

    r_gg, r_cg      of each layer
    layer_s, alone_s  seconds of the first layer, and what they would be without the link
    n_g             (how many tokens of a chunk the device had best compute with the CPU's weights, of how many)
    prompts         whether the device computes them all so, or none
    lifts           why units that are lifted have their size
    """
    layers, homes = len(r_gg), weights_bytes(plan)
    gg, cg = sum(r_gg) / layers, sum(r_cg) / layers
    away = (unit for unit in plan.units if unit.home != GPU.executor and unit.part != gathered_key(plan.target.spec))
    lifted = any(unit.decode == GPU.executor for unit in away)
    return (
        f"{format_bytes(homes[GPU.executor])} of {format_bytes(sum(homes.values()))} of weights stay in device memory,"
        f" by what a byte saves there: attention and KV of {kv_layers(plan, GPU.executor)} of {layers} layers,"
        f" {gg:.0%} of the FFNs (r_GG)",
        f"of the FFNs the link lifts {cg:.0%} (r_CG) and the CPU computes {1 - gg - cg:.0%} (r_CC): the first layer"
        f" takes {layer_s * 1e3:.2f} ms, without the link {alone_s * 1e3:.2f}",
        f"of a chunk of {n_g[1]} tokens the device had best take {n_g[0]} with the CPU's weights (n_g);"
        f" {_rows_taken(plan, prompts)}",
        *([lifts] if lifted else []),
    )


def _rows_taken(plan: Plan, prompts: bool) -> str:
    """What the device takes of a chunk with the CPU's weights."""
    if not plan.device_rows:
        return f"it takes {'all' if prompts else 'none'}"
    table = plan.device_rows[len(plan.device_rows) // 2]
    shares = ", ".join(f"{rows - cpu} of {rows}" for rows, cpu in zip(table.rows, table.cpu, strict=True))
    takes = shares if any(table.cpu) else "all"
    return f"it takes {takes}, and none of prompts shorter than {plan.least_device_rows} tokens"


def hot_and_cold(plan: Plan, profile: NeuronProfile, why: str, prompts: bool) -> tuple[str, ...]:
    """Sentences about a plan of PowerInfer's. `why`: who chose the neurons of device memory; `prompts`: the device
    computes the CPU's neurons too where a prompt is read."""
    sizes = plan.parts
    ffns = [unit for unit in plan.units if sizes[unit.part].kind == "ffn"]
    whole = sum(map(plan.unit_bytes, ffns))
    hot = sum(plan.unit_bytes(unit) for unit in ffns if unit.home == GPU.executor)
    predictors = {GPU.executor: 0, HOST: 0}
    for predictor in plan.predictors:
        predictors[predictor.home] += predictor.part(plan.target.spec).nbytes
    attention, layers = kv_layers(plan, GPU.executor), len(profile.layers)
    where = f"predictors take {format_bytes(predictors[GPU.executor])} of device memory"
    if predictors[HOST]:
        where += f" and {format_bytes(predictors[HOST])} of RAM"
    return (
        f"a token is expected to need {profile.mean:.0%} of the FFNs' neurons: {profile.source}",
        f"the hottest {format_bytes(hot)} of {format_bytes(whole)} of FFNs stay in device memory and make "
        f"{_device_share(plan, profile):.0%} of the active neurons; the CPU computes what is active of the others",
        why,
        where,
        f"attention and KV of {attention} of {layers} layers on the device, of the others on the CPU",
        "a prompt is read densely, the CPU's neurons by the device" if prompts else "a prompt is read densely",
    )


def _device_share(plan: Plan, profile: NeuronProfile) -> float:
    """Of the neurons that a token needs, the share that the device computes."""
    there, whole, sizes = 0.0, 0.0, plan.parts
    for unit in plan.units:
        part = sizes[unit.part]
        for i in range(unit.lo, unit.hi) if part.kind == "ffn" else ():
            active = profile.layers[part.layer][i] * part.rows_of(i, i + 1)
            there, whole = there + active * (unit.decode == GPU.executor), whole + active
    return there / whole
