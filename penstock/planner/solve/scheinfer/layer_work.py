"""Estimates how long a pass takes beside a device, layer by layer: exact enough to choose which splits to simulate.

The estimate is learned from the lowering. Two plans are lowered, of one layer and of two, whose FFN lies in three
slices: at home on the device (GG), lifted from RAM (CG) and computed by the CPU (CC). `Cost` says how long their calls
take. The second plan's seconds less the first's are those of a layer. The first plan's seconds less those of a layer
are the ends of a pass. Each lane's seconds for the FFN are a line over the lane's share of it (`slicing.SliceTime`),
and `slicing.finish_s` makes the layer's period of them.

Two things are left to `simulate`: in how many units a share streams, and how far the ends of a pass overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.graph import ops
from penstock.graph.lower import Lowering
from penstock.graph.passes import one_batch
from penstock.graph.tasks import Pass
from penstock.planner.programs.slicing import FfnBlock, Lanes, SliceTime, Times, best_r_cg, finish_s
from penstock.planner.shares import all_of
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.skeleton import RING_BYTES, device_skeleton
from penstock.spec.model import Layer
from penstock.spec.parts import GRANULE_ROWS, WIDE_ROWS, Part
from penstock.spec.places import CPU, DISK, GPU, HOST, Lane, Tier

_SLICES = 3  # GG, CG and CC, which the FFN of a lowered plan has in equal shares


@dataclass(frozen=True, slots=True)
class Shares:
    """Where a layer's weights and KV are.

    ffn, attention  the shares of the FFN and of attention that are at home on the device
    disk            the share of the rest that is at home on a disk
    attends         the device computes attention
    kv_away         the device computes attention, and its KV lives in RAM
    delegates       of that attention the CPU computes the scores
    """

    ffn: float = 0.0
    attention: float = 1.0
    disk: float = 0.0
    attends: bool = True
    kv_away: bool = False
    delegates: bool = False


class LayerLines(NamedTuple):
    """The seconds that are learned of one layer. `block`: its FFN, and what its lanes do beside that. Two fields of
    `block.lanes` are not complete: `link_also_s` has KV alone, no weights of attention, and `ring_s` is inf. `ends_s`:
    the seconds that the device computes in a pass outside all layers."""

    block: FfnBlock
    ends_s: float


class LayerWork:
    """The estimated seconds of a problem's layers. `ring_bytes`: the device's ring, so far can lifts run ahead."""

    def __init__(self, problem: Problem, ring_bytes: int = RING_BYTES) -> None:
        self.problem, self.ring_bytes = problem, ring_bytes
        self._first = {layer: i for i, layer in reversed(list(enumerate(problem.spec.layers)))}

    def decode(self) -> Pass:
        """The decode pass that predictions are of, half-way through the output."""
        return one_batch("decode", self.problem.ask.batch, 1, self.problem.half_way)

    def chunks(self, chunk_rows: int) -> Iterator[tuple[Pass, int]]:
        """(pass, how often it comes) of reading the prompts in chunks of `chunk_rows` rows. As in `passes.prompts`, the
        prompts of a batch share passes."""
        ask = self.problem.ask
        whole, last = divmod(ask.batch * ask.prompt_tokens, chunk_rows)
        for rows, count in ((chunk_rows, whole), (last, int(last > 0))):
            if count:
                seqs = max(1, rows // ask.prompt_tokens)
                yield one_batch("prefill", seqs, rows // seqs, max(0, (ask.prompt_tokens - rows) // 2)), count

    def ffn(self, layer: Layer, step: Pass, shares: Shares) -> FfnBlock:
        """The FFN of a layer in a pass. Its lifts run ahead while the device computes the rest of the layer."""
        block, cost, kind = self._learned(layer, step, shares).block, self.problem.cost, self.problem.weights.kind
        away = (1 - shares.attention) * self._part(layer, "attn").nbytes if shares.attends else 0.0
        lift_s = cost.call_s(GPU.to_device, "lift", kind, nbytes=away) if away else 0.0
        ring_s = cost.least_s(GPU.to_device, "lift", kind, 1, self.ring_bytes)
        return replace(block, lanes=replace(block.lanes, ring_s=ring_s, link_also_s=block.lanes.link_also_s + lift_s))

    def best_r_cg(self, layer: Layer, shares: Shares) -> float:
        """The best r_CG of a layer for decode (ScheInfer Eq. 13)."""
        return best_r_cg(self.ffn(layer, self.decode(), shares), shares.ffn)[0]

    def prompt_s(self, layer: Layer, step: Pass, shares: Shares, r_cg: float) -> Callable[[int], float]:
        """n_g → the layer's period in seconds in a chunk of a prompt, where the device computes n_g of the chunk's
        tokens with the CPU's weights (ScheInfer Eq. 15).

        In the paper the link carries all n_W weights, whatever r_GG is. Here weights at home on the device do not
        cross."""
        block, part, rows = self.ffn(layer, step, shares), self._part(layer, "ffn"), step.total_rows
        cost, kind, r_cc = self.problem.cost, self.problem.weights.kind, max(0.0, 1 - r_cg - shares.ffn)
        dense = block.gpu.at(r_cg) + block.gpu.at(shares.ffn)

        def product_s(lane: Lane, rows: int) -> float:
            if not rows or not r_cc:
                return 0.0
            nbytes, flops = ops.matrix_cost(part, 0, part.granules, ops.FFN_BLOCKS, rows)
            return cost.call_s(lane, "ffn", kind, rows, r_cc * nbytes, r_cc * flops)

        def finish(n_g: int) -> float:
            lifted = block.link.at(r_cg) + block.link.at(r_cc if n_g else 0.0)
            gpu_s = product_s(GPU.kernels, n_g) + (cost.task_s(GPU.kernels) if n_g and r_cc else 0.0)
            return finish_s(block.lanes, Times(product_s(CPU, rows - n_g), lifted, dense + gpu_s))

        return finish

    def disk_s(self, layer: Layer, shares: Shares) -> float:
        """Seconds that a layer reads from the disk in a pass."""
        away = (1 - shares.ffn) * self._part(layer, "ffn").nbytes
        away += (1 - shares.attention) * self._part(layer, "attn").nbytes
        return self.problem.cost.least_s(DISK.reads, "load", self.problem.weights.kind, 1, shares.disk * away)

    def ends_s(self, step: Pass, head_stays: bool) -> float:
        """Seconds of a pass outside all layers: the head, and the pause before the next pass. `head_stays`: the head is
        at home on the device. Otherwise it crosses the link, while the device computes."""
        problem, cost = self.problem, self.problem.cost
        seconds = self._learned(problem.spec.layers[0], step, Shares()).ends_s
        if not head_stays:
            seconds = max(seconds, cost.call_s(GPU.to_device, "lift", problem.weights.kind, nbytes=problem.head.nbytes))
        return seconds + cost.between_passes_s

    def _part(self, layer: Layer, kind: str) -> Part:
        return self.problem.parts[f"{self._first[layer]}.{kind}"]

    def _learned(self, layer: Layer, step: Pass, shares: Shares) -> LayerLines:
        homes = Shares(attends=shares.attends, kv_away=shares.kv_away, delegates=shares.delegates)
        return self.problem.learned((layer, step, homes), lambda: _learn(self.problem, layer, step, homes))


class _LayerSums(NamedTuple):
    """Sums over a lowered pass.

    other_s         lane → seconds of all calls that are no FFN's
    tasks_s         lane → seconds that tasks take beside their calls
    slices          (lane, home) → of one FFN's slice (granules, fixed seconds of its call, seconds of its bytes)
    """

    other_s: dict[Lane, float]
    tasks_s: dict[Lane, float]
    slices: dict[tuple[Lane, Tier], tuple[int, float, float]]


def _learn(problem: Problem, layer: Layer, step: Pass, homes: Shares) -> LayerLines:
    """Learns a layer's seconds by lowering one such layer, and two. Of `homes` only who attends, and where KV is, count
    here."""
    ffn, cost = layer.ffns[0], problem.cost
    rows = replace(problem, spec=replace(problem.spec, layers=(layer,))).of_kind("ffn")[0].granule_rows
    granules = -(-ffn.neurons // rows)
    least = _SLICES * (rows if rows == GRANULE_ROWS else WIDE_ROWS[-1])  # more neurons may have wider granules
    wide = replace(layer, ffn=replace(ffn, neurons=max(ffn.neurons, least)))
    one, two = (_sums(problem, (wide,) * count, step, homes) for count in (1, 2))

    def line(lane: Lane, home: Tier) -> SliceTime:
        count, fixed_s, moving_s = one.slices[lane, home]
        return SliceTime(fixed_s + cost.task_s(lane) * (lane != CPU), moving_s / count * granules)

    other_s = {lane: two.other_s[lane] - one.other_s[lane] for lane in two.other_s}
    tasks_s = {lane: two.tasks_s[lane] - one.tasks_s[lane] for lane in two.tasks_s}
    launched_s = 2 * cost.task_s(GPU.kernels)  # counted in the lines of the two slices that the device computes
    ahead_s = other_s[GPU.kernels] + max(0.0, tasks_s[GPU.kernels] - launched_s) + tasks_s[CPU]
    attends_s = other_s.get(CPU, 0.0)
    lanes = Lanes(
        cpu_factor=cost.factor(CPU, frozenset({GPU.to_device})),
        link_factor=cost.factor(GPU.to_device, frozenset({CPU})),
        ahead_s=ahead_s + homes.delegates * attends_s,  # the device waits for the scores
        link_also_s=other_s.get(GPU.to_device, 0.0),
        cpu_also_s=(not homes.attends) * attends_s,
    )
    block = FfnBlock(lanes, line(CPU, HOST), line(GPU.to_device, HOST), line(GPU.kernels, GPU.executor))
    ends_s = one.other_s[GPU.kernels] + one.tasks_s[GPU.kernels] - other_s[GPU.kernels] - tasks_s[GPU.kernels]
    return LayerLines(block, ends_s)


def _sums(problem: Problem, layers: tuple[Layer, ...], step: Pass, homes: Shares) -> _LayerSums:
    """The sums of a pass through these layers. The FFN of each lies in slices GG, CG and CC of one unit each."""
    few = replace(problem, spec=replace(problem.spec, layers=layers))
    attention, kv_home = len(layers) if homes.attends else 0, HOST if homes.kv_away else GPU.executor
    skeleton = device_skeleton(few, step.total_rows, attention, 0.5, kv_home, prompts=False)
    there = {part.key: part.granules // _SLICES for part in few.of_kind("ffn")}
    there |= all_of([few.head, *few.of_kind("attn")[:attention]])
    skeleton = replace(skeleton, unit_bytes=few.parts["0.ffn"].nbytes, delegates=homes.delegates)
    plan, cost = skeleton.plan(there), problem.cost
    other_s, tasks_s = defaultdict[Lane, float](float), defaultdict[Lane, float](float)
    slices: dict[tuple[Lane, Tier], tuple[int, float, float]] = {}
    for task in Lowering(plan).step(step):
        lane = task.lanes[0]
        tasks_s[lane] += cost.task_s(lane)
        for call in task.calls:
            fixed_s, moving_s = cost.call_parts_s(lane, call)
            unit = plan.units[call.unit] if call.unit >= 0 else None
            if unit is not None and unit.part.endswith(".ffn"):
                slices[lane, unit.home] = (unit.hi - unit.lo, fixed_s, moving_s)
            else:
                other_s[lane] += fixed_s + moving_s
    return _LayerSums(other_s, tasks_s, slices)


class Estimate:
    """Estimated seconds of splits that differ only in the share that the link lifts and in who reads prompts.

    The device computes attention of the first `attention_layers` layers, the CPU that of the others. `shares`: of these
    first layers. `head`: the head is at home on the device. `reads`: whether a pass reads from a disk."""

    def __init__(self, work: LayerWork, chunk_rows: int, shares: Shares, attention_layers: int, head: bool) -> None:
        self._work, self._head, self._r_gg, self.reads = work, head, shares.ffn, shares.disk > 0
        self._chunks = list(work.chunks(chunk_rows))
        self._alike: dict[tuple[Layer, Shares], list[int]] = {}  # → the numbers of these layers
        cpu_attends = replace(shares, attention=0.0, attends=False, kv_away=False, delegates=False)
        for i, layer in enumerate(work.problem.spec.layers):
            self._alike.setdefault((layer, shares if i < attention_layers else cpu_attends), []).append(i)

    def lifted(self) -> tuple[float, ...]:
        """For each layer, of the FFN outside device memory, the share that the link had best lift in decode:
        r_CG / (1 - r_GG)."""
        outside, best = 1 - self._r_gg, dict[int, float]()
        for (layer, shares), numbers in self._alike.items() if outside > 0 else ():
            best |= dict.fromkeys(numbers, min(1.0, self._work.best_r_cg(layer, shares) / outside))
        return tuple(best.get(i, 0.0) for i in range(self._work.problem.layers))

    def seconds(self, lifted: tuple[float, ...], prompts: bool) -> float:
        """Seconds of all answers, which either objective minimises. `lifted`: for each layer a share, as `lifted()`
        gives it. `prompts`: the device computes the CPU's granules too where a prompt is read."""
        read = (1.0,) * len(lifted) if prompts else lifted
        prompts_s = sum(count * self.pass_s(step, read) for step, count in self._chunks)
        return prompts_s + self.pass_s(self._work.decode(), lifted) * self._work.problem.ask.output_tokens

    def pass_s(self, step: Pass, lifted: tuple[float, ...]) -> float:
        """Seconds of a pass."""
        total = 0.0
        for (layer, shares), numbers in self._alike.items():
            period_s = self._work.ffn(layer, step, shares).period_s(lifted[numbers[0]] * (1 - self._r_gg), self._r_gg)
            total += len(numbers) * max(self._work.disk_s(layer, shares), period_s)
        return total + self._work.ends_s(step, self._head)
