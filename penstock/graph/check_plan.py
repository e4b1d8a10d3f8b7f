"""Checks a plan from a file that somebody else made, before anything is computed from it.

A plan that passes can be lowered for every pass of the engine, and its task lists satisfy `graph.verify`. The arena
sizes that it states are true, so one comparison tells whether it fits in memory.

Raises BadRequest, one line, for the first thing that is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from itertools import pairwise, product

from penstock.errors import BadRequest
from penstock.graph.arenas import Layout
from penstock.graph.asked import MOST_ROWS
from penstock.graph.cache import POLICIES
from penstock.graph.guests import may_have_guests
from penstock.graph.records import may_be_asked
from penstock.spec.format import PAGE_TOKENS, Format
from penstock.spec.model import ModelSpec
from penstock.spec.part_keys import gathered_key
from penstock.spec.parts import FFNS, PAGE_BYTES, PINNED, Part, parts
from penstock.spec.places import HOST, Executor, device, disk, is_device, is_disk
from penstock.spec.plan import IO_ENGINES, ORDERS, SPARSITIES, ActHome, KvHome, Plan, PlanModel, Unit
from penstock.spec.predictors import FORMAT, MOST_AHEAD, MOST_RANK, RANK_STEP, part_of, predicted_layers
from penstock.spec.profile import MOST_LEVEL
from penstock.units import GIB

DEVICES = (device(0).executor,)  # the devices that this version drives
EXECUTORS = (HOST, *DEVICES)  # also the tiers of memory
DISKS = (disk(0).tier, disk(1).tier)  # the disks that weights may lie on

# Field → (least, most). No sensible plan lies beyond these, and within them every check and size is computed at once.
_BOUNDS = {
    "batches_per_pass": (1, 1024),
    "batch_seqs": (1, 1 << 20),
    "chunk_rows": (1, 1 << 16),
    "logits_rows": (1, 1 << 20),
    "context": (1, 2**31 - 1),
    "page_tokens": (1, 1 << 16),
    "kv_pages": (0, 2**31 - 1),
    "io_block_bytes": (PAGE_BYTES, 1 << 30),
    "io_depth": (1, 256),
    "process_bytes": (1, 1 << 40),
    "context_bytes": (0, 1 << 40),
    "stage_bytes": (0, 1024 * GIB),
    "hole_bytes": (0, 1 << 30),
}
_MOST_RING_BYTES = 1024 * GIB
# (home of KV, executor of attention).
_KV_HOMES = (*product((HOST, DISKS[0]), EXECUTORS), *((gpu, gpu) for gpu in DEVICES))


def check_plan(plan: Plan, spec: ModelSpec, weights: Format) -> None:
    """`spec`, `weights`: of the model that the plan should be for.

    Raises BadRequest."""
    _check_model(plan.models, spec, weights)
    _check_numbers(plan)
    if plan.sparsity not in SPARSITIES:
        raise _wrong(f"sparsity is {plan.sparsity!r}; there are {', '.join(SPARSITIES)}")
    if plan.sparsity in ("exact", "predict") and not spec.fires:
        raise _wrong("it leaves out neurons that do not fire, and all neurons of this model do")
    if plan.sparsity == "off" and any(unit.active != 1 for unit in plan.units):
        raise _wrong("it leaves out neurons of some units, yet its sparsity is off")
    if plan.predictors and plan.sparsity != "predict":
        raise _wrong(f"it has predictors, which nobody asks with sparsity {plan.sparsity}")
    if not 0 < plan.value_share <= 1:
        raise _wrong(f"value_share is {plan.value_share}; it should be above 0 and at most 1")
    if plan.value_share < 1 and any(home.home != home.attend for home in plan.kv):
        raise _wrong("it reads the values of a query's best positions alone, and KV does not live where attention runs")
    _check_levels(plan, spec)
    if any(not 0 <= unit.active <= 1 for unit in plan.units):
        raise _wrong("the active share of a unit's neurons should be from 0 to 1")
    if weights.for_cpu and any(is_device(unit.decode) or is_device(unit.prefill) for unit in plan.units):
        raise _wrong(f"a device has no kernels for weights in {weights.name}")
    by_key = {part.key: part for part in parts(spec, weights)}
    _check_units(plan.units, by_key)
    main = _check_acts(plan)
    _check_caches(plan, by_key)
    _check_kv(plan, main)
    _check_main(plan.units, by_key, main)
    _check_asked(plan, by_key)
    _check_predictors(plan, spec)
    _check_device_rows(plan, main)
    _check_rings(plan, by_key)
    if plan.guests and not may_have_guests(plan):
        raise _wrong(
            "units stay in KV pages that nobody has: that needs all KV in RAM, order overlapped, weights that stream to"
            " the CPU, and no device, caches, predictors or units that are asked for"
        )
    layout = Layout(plan)
    _check_pages(layout)
    wanted = layout.arenas()
    if plan.arenas != wanted:
        both = set(plan.arenas) & set(wanted)
        differs = [arena.name for arena in (*plan.arenas, *wanted) if arena not in both]
        culprit = f"arena {differs[0]!r}" if differs else "the list of arenas"
        raise _wrong(f"{culprit} is not what the rest of the plan leads to")


def _check_asked(plan: Plan, by_key: dict[str, Part]) -> None:
    """Units that are asked for lie on a disk, the CPU computes them, and their records may be read one by one."""
    asked = [unit for unit in plan.units if unit.asked]
    for unit in plan.units:
        lo, hi = plan.unit_rows(unit) if unit.asked else (0, 0)
        if not 0 <= unit.recent_slots <= hi - lo:
            raise _wrong(f"a unit of {unit.part} has {unit.recent_slots} slots for records, where {hi - lo} make sense")
    for unit in asked:
        here = is_disk(unit.home) and unit.decode == unit.prefill == HOST
        if plan.sparsity in ("exact", "predict") and not (here and may_be_asked(by_key[unit.part], plan.sparsity)):
            how = "with whole records" if plan.sparsity == "predict" else "that lie neuron by neuron"
            raise _wrong(f"a unit of {unit.part} is asked for, which only FFNs on a disk are {how}")
    asks = plan.sparsity in ("exact", "predict") and not plan.caches
    if asked and not (asks and plan.main == HOST and plan.order == "overlapped"):
        raise _wrong(
            "units are asked for: that needs sparsity exact or predict and order overlapped, no caches and no device"
        )
    if asked and plan.batch_seqs > MOST_ROWS:
        raise _wrong(f"units are asked for by batches of {plan.batch_seqs}; at most {MOST_ROWS} sequences can ask")


def _check_predictors(plan: Plan, spec: ModelSpec) -> None:
    """Where predictors run, each layer with a dense FFN has one, in RAM or in the memory of the device that has the
    activations."""
    if plan.sparsity != "predict":
        return
    if [each.layer for each in plan.predictors] != predicted_layers(spec):
        raise _wrong("it leaves out what predictors say, and not every layer has a predictor")
    ahead = {each.ahead for each in plan.predictors}
    if len(ahead) > 1 or not ahead <= set(range(MOST_AHEAD + 1)):
        raise _wrong(f"its predictors should all hear their own layer, or all the one before: ahead 0 or {MOST_AHEAD}")
    if any(ahead) and len(plan.predictors) < len(spec.layers):
        raise _wrong("its predictors hear the layer before theirs, and some layer has none")
    for each in plan.predictors:
        known = each.weights == FORMAT and each.rank % RANK_STEP == 0 and 1 <= each.rank <= MOST_RANK
        if each.home not in (HOST, plan.main) or not known:
            raise _wrong(
                f"the predictor of layer {each.layer} has rank {each.rank} in {each.weights.name} on {each.home!r};"
                f" it should be a multiple of {RANK_STEP} in {FORMAT.name} on {HOST} or on {plan.main}"
            )
        if each.home != HOST and part_of(spec, each.layer, each.rank).nbytes > plan.stage_bytes:
            raise _wrong(f"the predictor of layer {each.layer} does not fit into the stage that it comes by")


def _check_levels(plan: Plan, spec: ModelSpec) -> None:
    """Where small activations count as zeros, each layer has a level, and the CPU computes all FFNs."""
    wanted = len(spec.layers) if plan.sparsity == "threshold" else 0
    if len(plan.levels) != wanted or not all(0 <= level <= MOST_LEVEL for level in plan.levels):
        raise _wrong(
            f"it has {len(plan.levels)} levels below which activations count as zeros, where {wanted} make sense"
        )
    if wanted and not spec.has_levels:
        raise _wrong("it takes small activations for zeros, where FFNs have zeros of their own or experts")
    if wanted and any(is_device(unit.decode) or is_device(unit.prefill) for unit in plan.units):
        raise _wrong("it takes small activations for zeros, and a device's kernels cannot")


def _check_model(models: tuple[PlanModel, ...], spec: ModelSpec, weights: Format) -> None:
    if len(models) != 1:
        raise _wrong(f"it is for {len(models)} models; this version runs one")
    if models[0].weights != weights:
        raise _wrong(f"it is for {models[0].weights.name} weights, the model has {weights.name}")
    # A plan may have been made where the tokenizer was not.
    other = replace(models[0].spec, tokenizer_bytes=spec.tokenizer_bytes)
    differs = next((f.name for f in fields(spec) if getattr(other, f.name) != getattr(spec, f.name)), None)
    if differs is not None:
        raise _wrong(f"it is for another model: {differs} differs")


def _check_numbers(plan: Plan) -> None:
    for name, (least, most) in _BOUNDS.items():
        if not least <= getattr(plan, name) <= most:
            raise _wrong(f"{name} is {getattr(plan, name)}; it should be from {least} to {most}")
    if plan.context > plan.target.spec.max_positions:
        raise _wrong(f"context {plan.context} is more than the model's {plan.target.spec.max_positions} positions")
    if plan.logits_rows < plan.batch_seqs:
        raise _wrong(f"logits_rows {plan.logits_rows} is less than batch_seqs {plan.batch_seqs}")
    if plan.page_tokens % PAGE_TOKENS:
        raise _wrong(f"page_tokens {plan.page_tokens} is no multiple of {PAGE_TOKENS}")
    if plan.io_block_bytes % PAGE_BYTES:
        raise _wrong(f"io_block_bytes {plan.io_block_bytes} is no multiple of {PAGE_BYTES}")
    for name, choices in (("order", ORDERS), ("io_engine", IO_ENGINES)):
        if getattr(plan, name) not in choices:
            raise _wrong(f"{name} is {getattr(plan, name)!r}; there are {', '.join(choices)}")
    for tier, nbytes in plan.ring_bytes.items():
        if tier not in EXECUTORS or not 0 <= nbytes <= _MOST_RING_BYTES:
            raise _wrong(f"a ring of {nbytes} bytes on {tier!r}; there are {', '.join(EXECUTORS)}")


def _check_units(units: Iterable[Unit], by_key: dict[str, Part]) -> None:
    """Every granule of every part is in one unit. The units of a part stand side by side, with ascending granules."""
    covered: dict[str, int] = {}
    last = ""
    for unit in units:
        part = by_key.get(unit.part)
        if part is None:
            raise _wrong(f"the model has no part {unit.part!r}")
        start = covered.get(unit.part, 0)
        if unit.part != last and start:
            raise _wrong(f"the units of {unit.part} do not stand side by side")
        if unit.lo != start or not unit.lo < unit.hi <= part.granules:
            raise _wrong(
                f"a unit of {unit.part} has granules {unit.lo}..{unit.hi}, where {start}.. of {part.granules} come next"
            )
        if unit.home not in (*EXECUTORS, *DISKS) or not {unit.decode, unit.prefill} <= set(EXECUTORS):
            raise _wrong(
                f"a unit of {unit.part} is at home in {unit.home!r} and computed by {unit.decode!r} and "
                f"{unit.prefill!r}; this version has {', '.join((*DISKS, *EXECUTORS))}"
            )
        if is_device(unit.home) and (unit.decode, unit.prefill) != (unit.home, unit.home):
            raise _wrong(
                f"a unit of {unit.part} is at home in {unit.home} and computed by {unit.decode} and {unit.prefill}; "
                "what lies there is computed there"
            )
        if (unit.lo % part.expert_granules or unit.hi % part.expert_granules) and part.experts > 1:
            raise _wrong(
                f"a unit of {unit.part} has granules {unit.lo}..{unit.hi}: no whole experts of {part.expert_granules}"
            )
        covered[unit.part], last = unit.hi, unit.part
    for key, part in by_key.items():
        if covered.get(key, 0) != part.granules:
            raise _wrong(f"granules {covered.get(key, 0)}..{part.granules} of {key} have no home")


def _check_caches(plan: Plan, by_key: dict[str, Part]) -> None:
    places = [(cache.layer, is_device(cache.executor)) for cache in plan.caches]
    if sorted(set(places)) != places:
        layers = [layer for layer, _ in places]
        raise _wrong(
            f"its caches are of the layers {layers}; each has at most one in RAM and then one on a device, in their"
            " order"
        )
    for cache in plan.caches:
        part = by_key.get(f"{cache.layer}.experts")
        if part is None:
            raise _wrong(f"a cache is of layer {cache.layer}, which has no experts")
        there = dict.fromkeys((HOST, plan.main))
        if not 1 <= cache.slots <= part.experts or cache.policy not in POLICIES or cache.executor not in there:
            raise _wrong(
                f"the cache of layer {cache.layer} has {cache.slots} slots of {part.experts} experts, {cache.policy!r}"
                f" on {cache.executor!r}; there are {', '.join(POLICIES)} on {', '.join(there)}"
            )
        if not 1 <= cache.lifted_rows <= _BOUNDS["chunk_rows"][1]:
            raise _wrong(f"the cache of layer {cache.layer} has lifted_rows {cache.lifted_rows}")
        routed = plan.target.spec.layers[cache.layer].routed
        most = routed.active if routed is not None and (cache.executor, plan.main) == (HOST, HOST) else 0
        if not 0 <= cache.guesses <= most:
            raise _wrong(f"the cache of layer {cache.layer} has {cache.guesses} guesses for a row; at most {most} here")
        if any(unit.part == f"{cache.layer}.router" and unit.decode != HOST for unit in plan.units):
            raise _wrong(f"the router of layer {cache.layer} is not on {HOST}, which is to hear which experts it wants")
        units = [unit for unit in plan.units if unit.part == part.key]
        over_ram = is_device(cache.executor) and (cache.layer, False) not in places
        if any((unit.home != HOST if over_ram else not is_disk(unit.home)) or unit.decode != HOST for unit in units):
            home = "in RAM, and the CPU's" if over_ram else "on a disk"
            raise _wrong(f"the experts of layer {cache.layer} have a cache, but are not all at home {home}")


def _check_acts(plan: Plan) -> Executor:
    """Returns the one executor that holds all activations."""
    _check_cover("activations", plan.acts, plan)
    homes = {home.home for home in plan.acts}
    if len(homes) != 1 or not homes <= set(EXECUTORS):
        raise _wrong(f"activations are at home in {sorted(homes)}; this version keeps them together")
    return homes.pop()


def _check_kv(plan: Plan, main: Executor) -> None:
    """Attention runs where its projections are computed. Or it is delegated: to the CPU, all projections of the layer
    with the device that holds the activations."""
    _check_cover("KV", plan.kv, plan)
    projecting: dict[int, set[Executor]] = {}
    for unit in plan.units:
        number, _, kind = unit.part.partition(".")
        if kind == "attn":
            projecting.setdefault(int(number), set()).update((unit.decode, unit.prefill))
    for home in plan.kv:
        try:
            home.format.check_kv()
        except BadRequest as error:
            raise _wrong(str(error)) from None
        if (home.home, home.attend) not in _KV_HOMES:
            raise _wrong(f"KV at home in {home.home!r} with attention on {home.attend!r}")
        for layer in range(*home.layers):
            delegated = home.attend == HOST and is_device(main) and projecting[layer] == {main}
            if projecting[layer] != {home.attend} and not delegated:
                raise _wrong(f"attention of layer {layer} on {home.attend} but its projections elsewhere")


def _check_device_rows(plan: Plan, main: Executor) -> None:
    """The CPU takes rows of prompts only from a device that computes all of the layer's FFN for the other rows, with
    units in RAM that the CPU computes in decode."""
    layers = [table.layer for table in plan.device_rows]
    if layers != sorted(set(layers)):
        raise _wrong(f"rows of prompts are shared in the layers {layers}; each layer comes once, in their order")
    if layers and (not is_device(main) or plan.asks or plan.predictors):
        raise _wrong(
            f"rows of prompts are shared in the layers {layers}; that needs a device, no caches, no predictors and no"
            " units that are asked for"
        )
    for table in plan.device_rows:
        rows, most = table.rows, _BOUNDS["chunk_rows"][1]
        rising = all(a < b for a, b in pairwise((0, *rows, most + 1)))
        fewer = len(rows) == len(table.cpu) and all(0 <= n < t for n, t in zip(table.cpu, rows, strict=True))
        if not rows or not rising or not fewer:
            raise _wrong(f"layer {table.layer} shares rows {rows}, of which the CPU would take {table.cpu}")
        units = [unit for unit in plan.units if unit.part == f"{table.layer}.ffn"]
        shared = [unit for unit in units if unit.decode == HOST]
        if not shared or any(u.prefill != main for u in units) or any(u.home != HOST for u in shared):
            raise _wrong(
                f"layer {table.layer} shares rows of prompts; {main} should compute all of its FFN then, and the CPU"
                " some of it in decode, from RAM"
            )


def _check_pages(layout: Layout) -> None:
    """Pages that sequences share are enough for one of them, and where KV is on a disk they fill whole blocks of it."""
    pages, least, group = layout.plan.kv_pages, layout.kv.pages_per_seq, layout.kv.page_group
    if pages and pages < least:
        raise _wrong(f"its pools have {pages} pages; a context of {layout.plan.context} tokens takes {least}")
    if pages % group:
        raise _wrong(f"its pools have {pages} pages; on a disk {group} fill whole blocks of {PAGE_BYTES}")


def _check_cover(name: str, homes: Iterable[KvHome] | Iterable[ActHome], plan: Plan) -> None:
    """The homes cover the layers one after the other. Each has all sequences, since a batch may mix any of them.
    `name`: KV or activations."""
    layers, seqs = len(plan.target.spec.layers), plan.sequences
    start = 0
    for home in homes:
        if home.layers[0] != start or not start < home.layers[1] <= layers:
            raise _wrong(f"{name} of layers {home.layers[0]}..{home.layers[1]}, where {start}.. of {layers} come next")
        if home.seqs != (0, seqs):
            raise _wrong(f"{name} of sequences {home.seqs[0]}..{home.seqs[1]}; a pass has {seqs}")
        start = home.layers[1]
    if start != layers:
        raise _wrong(f"{name} of layers {start}..{layers} has no home")


def _check_main(units: Iterable[Unit], by_key: dict[str, Part], main: Executor) -> None:
    """Norms and the model's ends lie with the activations, on the main executor. It computes the head too. A router
    lies with its executor, which may be any."""
    for unit in units:
        kind = by_key[unit.part].kind
        if kind == "router":
            if {unit.decode, unit.prefill} != {unit.home}:
                raise _wrong(
                    f"{unit.part} is at home in {unit.home} and computed by {unit.decode} and {unit.prefill}; "
                    "a router stays with its executor"
                )
            continue
        if kind in PINNED and unit.home != main:
            raise _wrong(f"{unit.part} is at home in {unit.home}; {main} reads it at every step")
        if kind not in ("attn", *FFNS) and (unit.decode, unit.prefill) != (main, main):
            raise _wrong(f"{unit.part} is computed by {unit.decode} and {unit.prefill}, not by {main}")


def _check_rings(plan: Plan, by_key: dict[str, Part]) -> None:
    gathered = gathered_key(plan.target.spec)
    device_parts = {unit.part for unit in plan.units if is_device(unit.home)}
    device_parts |= {f"{layer}.norms" for home in plan.kv if is_device(home.attend) for layer in range(*home.layers)}
    for part in device_parts:
        if by_key[part].granule_bytes > plan.stage_bytes:
            raise _wrong(f"{part} is loaded through a stage of {plan.stage_bytes} bytes, less than a granule")
    together: dict[str, list[int]] = {}  # attention that is delegated → bytes of its units that stream
    delegated = {f"{layer}.attn" for home in plan.kv if home.attend == HOST for layer in range(*home.layers)}
    for unit in plan.units:
        if unit.part == gathered:
            continue
        nbytes = (unit.hi - unit.lo) * by_key[unit.part].granule_bytes
        for executor in {unit.decode, unit.prefill} - {unit.home}:
            room = plan.ring_bytes.get(executor, 0)
            if nbytes > room:
                raise _wrong(f"{unit.part} streams units of {nbytes} bytes through a ring of {room} on {executor}")
            if is_device(executor) and is_disk(unit.home) and nbytes > plan.stage_bytes:
                raise _wrong(f"{unit.part} streams units of {nbytes} bytes through a stage of {plan.stage_bytes}")
            if is_device(executor) and unit.part in delegated:
                together.setdefault(unit.part, []).append(nbytes)
    for part, sizes in together.items():  # they are in the ring at once, of which less than a unit may be lost
        need = sum(sizes) + (max(sizes) if len(sizes) > 1 else 0)
        if need > plan.ring_bytes[plan.main]:
            raise _wrong(
                f"{part}, whose attention is delegated, streams {need} bytes at once through a ring of"
                f" {plan.ring_bytes[plan.main]} on {plan.main}"
            )


def _wrong(fault: str) -> BadRequest:
    return BadRequest(f"this plan cannot run: {fault}")
