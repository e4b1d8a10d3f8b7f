"""ScheInfer's plans: every FFN in three slices GG, CG and CC, by the closed forms of `programs/slicing`.

Device memory goes to the items that save the most seconds a byte: a layer's attention with its KV, granules of its FFN,
the head (Eq. 14). Of the rest of each FFN, the link lifts r_CG and the CPU computes r_CC, as is best for decode
(Eq. 13). Where a prompt is read, the device computes n_g of its tokens with the CPU's weights (Eq. 15). Memory is
assigned as if n_g were all rows or none, whichever is better. There are two candidates: that plan, in which short
prompts are the CPU's, and the same with the best n_g of each layer and each length of a chunk.

Two things differ from the paper. The paper assigns memory for decode alone; here a prompt counts as much as the ask has
of it. The paper knows no disk, so here is no plan if RAM does not hold the rest. `ours/device` has plans that read a
disk, and fills device memory in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from penstock.planner.candidate import Candidate
from penstock.planner.homes import all_there
from penstock.planner.paper_reasons import in_slices
from penstock.planner.programs.slicing import Option, assign, best_r_cg
from penstock.planner.shares import Resident, share_out
from penstock.planner.sizes import page_tokens, shared_tokens, usual_chunks
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.scheinfer.layer_work import LayerWork, Shares
from penstock.planner.solve.scheinfer.rows import best_rows, with_rows
from penstock.planner.solve.skeleton import Skeleton, device_skeleton, lift_reason, within_device
from penstock.spec.model import Layer
from penstock.spec.parts import Part
from penstock.spec.places import GPU
from penstock.spec.plan import Plan

NAME = "slicing (ScheInfer)"
_STEPS = 16  # r_GG is a multiple of 1/16 at first (n_G of Eq. 14); memory that is left then is filled by granules


@dataclass(frozen=True)
class SliceRules:
    """What a search may do. `attends`: who may compute attention, True for the device, False for the CPU. `prompts`:
    whether the seconds of prompts count where memory is assigned."""

    attends: tuple[bool, ...] = (False, True)
    prompts: bool = True


FREE, PAPER = SliceRules(), SliceRules((True,), prompts=False)


@dataclass(frozen=True)
class Slices:
    """How layers are sliced.

    attends         for each layer, whether the device computes attention
    r_gg, r_cg      for each layer, the shares of the FFN that are at home on the device, and that the link lifts
    on_device       the granules of each part that are at home on the device
    prompts         whether the device computes all of a prompt's rows with the CPU's weights
    """

    attends: tuple[bool, ...]
    r_gg: tuple[float, ...]
    r_cg: tuple[float, ...]
    on_device: Resident
    prompts: bool


class Kept(NamedTuple):
    """What a layer may keep on the device, and how long the layer then takes.

    attends         whether attention and its KV stay
    granules        so many granules of the FFN stay
    nbytes          device memory that all this takes
    decode_s        seconds of the layer, for all tokens of an answer
    prompts_s       seconds of the layer for the prompts: if the device computes no row with the CPU's weights, and if
                    it computes all rows so
    """

    attends: bool
    granules: int
    nbytes: int
    decode_s: float
    prompts_s: tuple[float, float]


def candidates(problem: Problem) -> Iterator[Candidate]:
    """At most one candidate: the plan of `solve_slices`, if it leaves any weights outside device memory."""
    solved = solve_slices(problem)
    if solved is not None and not all_there(solved[0]):
        plan, slices = solved
        work = LayerWork(problem, plan.ring_bytes.get(GPU.executor, 0))
        yield Candidate(NAME, plan, _reasons(plan, slices, work))
        skeleton = device_skeleton(problem, plan.chunk_rows, attention_layers=0, lifted=0.0)
        shared = with_rows(problem, plan_of(skeleton, replace(slices, prompts=True)), share=True)
        if shared is not None and problem.fits(shared):
            yield Candidate(f"{NAME}, rows of prompts shared", shared, _reasons(shared, slices, work))


def solve_slices(problem: Problem, wanted: SliceRules = FREE) -> tuple[Plan, Slices] | None:
    """The plan and its slices. None if there is no device, or if either memory is too small."""
    room = problem.device_bytes + problem.host_bytes
    if not problem.has_device or problem.total_bytes > room or problem.may_stay is not None:
        return None
    for chunk_rows in usual_chunks(problem.ask):
        skeleton = device_skeleton(problem, chunk_rows, attention_layers=0, lifted=0.0)
        budget = problem.spare_bytes(skeleton.plan({}, {}), GPU.executor)
        fitting = within_device(problem, budget, partial(_assigned, skeleton, wanted), partial(plan_of, skeleton))
        if fitting is not None:
            return fitting
    return None


def plan_of(skeleton: Skeleton, slices: Slices) -> Plan:
    """The complete plan of some slices. Weights that are not at home on the device are in RAM."""
    outside = [1 - r_gg for r_gg in slices.r_gg]
    lifted = tuple(r / left if left > 0 else 0.0 for r, left in zip(slices.r_cg, outside, strict=True))
    sliced = replace(skeleton, attention_layers=sum(slices.attends), lifted=lifted, prompts=slices.prompts)
    return sliced.plan(slices.on_device)


def _assigned(skeleton: Skeleton, wanted: SliceRules, budget: int) -> Slices:
    """The slices that a greedy assignment of `budget` bytes of device memory gives. Of the rest of each FFN, the link
    lifts the best r_CG."""
    problem, sizes, head = skeleton.problem, skeleton.problem.parts, skeleton.problem.head
    work = LayerWork(problem, skeleton.ring_bytes)
    tables: dict[Layer, list[Kept]] = {}
    for i, layer in enumerate(problem.spec.layers):
        if layer not in tables:
            tables[layer] = _options(work, layer, (sizes[f"{i}.attn"], sizes[f"{i}.ffn"]), skeleton, wanted)
    tokens = problem.ask.output_tokens
    heads = [Option(n, tokens * work.ends_s(work.decode(), head_stays=n > 0)) for n in (0, head.nbytes)]

    def greedy(prompts: bool) -> tuple[float, bool, int, list[Kept]]:
        """(seconds, prompts, whether the head stays, what each layer keeps). `prompts`: the device computes all of a
        prompt's rows with the CPU's weights, else none."""
        seen = {
            layer: [Option(kept.nbytes, kept.decode_s + wanted.prompts * kept.prompts_s[prompts]) for kept in table]
            for layer, table in tables.items()
        }
        head_stays, *chosen = assign([heads, *(seen[layer] for layer in problem.spec.layers)], budget)
        picked = [tables[layer][i] for layer, i in zip(problem.spec.layers, chosen, strict=True)]
        return sum(kept.decode_s + kept.prompts_s[prompts] for kept in picked), prompts, head_stays, picked

    _, prompts, head_stays, picked = min(greedy(prompts) for prompts in (True, False))
    # A plan has attention on the device for the first layers only. So layers that are alike change places: the ones
    # that keep attention come first.
    for layer in tables:
        places = [i for i, each in enumerate(problem.spec.layers) if each == layer]
        for i, kept in zip(places, sorted((picked[i] for i in places), reverse=True), strict=True):
            picked[i] = kept
    attends = tuple(i < sum(kept.attends for kept in picked) for i in range(len(picked)))
    ffns = problem.of_kind("ffn")
    left = {part.key: part.granules - kept.granules for part, kept in zip(ffns, picked, strict=True)}
    more = share_out(ffns, budget - sum(kept.nbytes for kept in picked) - heads[head_stays].nbytes, left)
    on_device = {part.key: kept.granules + more[part.key] for part, kept in zip(ffns, picked, strict=True)}
    alike = [
        (layer, attends[i], on_device[part.key] / part.granules)
        for i, (layer, part) in enumerate(zip(problem.spec.layers, ffns, strict=True))
    ]
    best = {key: work.best_r_cg(key[0], Shares(key[2], attends=key[1])) for key in set(alike)}
    on_device |= {f"{i}.attn": sizes[f"{i}.attn"].granules for i, here in enumerate(attends) if here}
    on_device |= {head.key: head.granules} if head_stays else {}
    return Slices(attends, tuple(r_gg for _, _, r_gg in alike), tuple(best[key] for key in alike), on_device, prompts)


def _options(
    work: LayerWork, layer: Layer, both: tuple[Part, Part], skeleton: Skeleton, wanted: SliceRules
) -> list[Kept]:
    """What a layer may keep, the option that keeps least first. `both`: its attention and its FFN."""
    (attn, ffn), problem, a = both, skeleton.problem, layer.attention
    tokens = shared_tokens(problem.ask, page_tokens(problem.context))
    kv_bytes = 2 * tokens * a.kv_heads * problem.kv.kv_bytes(a.head_dim)
    steps, options = list(work.chunks(skeleton.chunk_rows)), []
    for attends in wanted.attends:
        decode = work.ffn(layer, work.decode(), Shares(attends=attends))
        chunks = [(count, work.ffn(layer, step, Shares(attends=attends))) for step, count in steps]
        for granules in dict.fromkeys(ffn.granules * i // _STEPS for i in range(_STEPS + 1)):
            nbytes = granules * ffn.granule_bytes + (attn.nbytes + kv_bytes if attends else 0)
            r_gg = granules / ffn.granules
            r_cg, decode_s = best_r_cg(decode, r_gg)
            none, every = (sum(count * block.period_s(r, r_gg) for count, block in chunks) for r in (r_cg, 1 - r_gg))
            options.append(Kept(attends, granules, nbytes, problem.ask.output_tokens * decode_s, (none, every)))
    return options


def _reasons(plan: Plan, slices: Slices, work: LayerWork) -> tuple[str, ...]:
    """Sentences about the slices, with the seconds of the first layer, and the best n_g of a prompt's first chunk in
    the layer in the middle."""
    layers = work.problem.spec.layers
    block = work.ffn(layers[0], work.decode(), Shares(slices.r_gg[0], attends=slices.attends[0]))
    alone_s, layer_s = (block.period_s(r, slices.r_gg[0]) for r in (0.0, slices.r_cg[0]))
    i, (step, _) = len(layers) // 2, next(work.chunks(plan.chunk_rows))
    n_g = best_rows(work, (layers[i], slices.attends[i], slices.r_gg[i], slices.r_cg[i]), step), step.total_rows
    lifts = lift_reason(work.problem, work.ring_bytes)
    return in_slices(plan, slices.r_gg, slices.r_cg, layer_s, alone_s, n_g, slices.prompts, lifts)
