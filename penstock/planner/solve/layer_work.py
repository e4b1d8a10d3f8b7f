"""What a pass takes layer by layer beside a device: good enough to tell which splits to simulate.

Learned from the lowering: two plans of one layer and of two, with a part of the FFN in each of its slices GG, CG and
CC, are lowered, and `Cost` says what their calls take. Their difference is a layer, what is left are the ends of a
pass. So each lane's work is a line in its share of the FFN (`slicing.Line`), and a layer's period is what
`slicing.finish_s` says where loads run ahead. Left out, for `simulate` to judge: in how many units a share streams, and
what the ends of a pass hide of each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.graph import ops
from penstock.graph.batch import Batch
from penstock.graph.lower import Lowering
from penstock.graph.tasks import Pass
from penstock.planner.solve.beside import RING_BYTES, Split, device_skeleton
from penstock.planner.solve.problem import Problem
from penstock.planner.solve.slicing import FfnBlock, Lanes, Line, Times, best_r_cg, finish_s
from penstock.spec.model import Layer
from penstock.spec.parts import GRANULE_ROWS, Part
from penstock.spec.places import CPU, DISK, GPU, HOST, Lane, Tier

_SLICES = 3  # of the FFN that is lowered


class Step(NamedTuple):
    """One pass: `seqs` sequences of `rows` rows each, the first at position `start`."""

    purpose: str
    seqs: int
    rows: int
    start: int

    @property
    def total_rows(self) -> int:
        return self.seqs * self.rows

    @property
    def lowered(self) -> Pass:
        n = self.seqs
        last = tuple(range(self.rows - 1, self.total_rows, self.rows))
        return Pass(self.purpose, (Batch(0, tuple(range(n)), (self.start,) * n, (self.rows,) * n, last),), None)


@dataclass(frozen=True, slots=True)
class Shares:
    """Where a layer's weights are: of the FFN (`ffn`) and of attention (`attention`) so much at home on the device; of
    what is not there, `disk` is read from a disk. `attends`: attention is the device's. `kv_away`: its KV lives in RAM.
    """

    ffn: float = 0.0
    attention: float = 1.0
    disk: float = 0.0
    attends: bool = True
    kv_away: bool = False


class LayerLines(NamedTuple):
    """A layer's FFN as lines of each lane. Outside it the device and the waits for the other lanes take `ahead_s`, the
    CPU `cpu_also_s`, the link `kv_s`. `ends_s`: of a pass, what the device does in no layer."""

    cpu: Line
    link: Line
    gpu: Line
    ahead_s: float
    cpu_also_s: float
    kv_s: float
    ends_s: float


class LayerWork:
    """Of a problem's layers. `ring_bytes`: of the device's ring, what lifting may run ahead."""

    def __init__(self, problem: Problem, ring_bytes: int = RING_BYTES) -> None:
        self.problem, self.ring_bytes = problem, ring_bytes
        self._first = {layer: i for i, layer in reversed(list(enumerate(problem.spec.layers)))}

    def decode(self) -> Step:
        """The pass that the prediction is of: half-way through the output."""
        ask = self.problem.ask
        return Step("decode", ask.batch, 1, ask.prompt_tokens + ask.output_tokens // 2)

    def chunks(self, chunk_rows: int) -> Iterator[tuple[Step, int]]:
        """Passes of the prompts, and how often each comes. Prompts of a batch share passes (`passes.prompts`)."""
        ask = self.problem.ask
        whole, last = divmod(ask.batch * ask.prompt_tokens, chunk_rows)
        for rows, count in ((chunk_rows, whole), (last, int(last > 0))):
            if count:
                seqs = max(1, rows // ask.prompt_tokens)
                yield Step("prefill", seqs, rows // seqs, max(0, (ask.prompt_tokens - rows) // 2)), count

    def ffn(self, layer: Layer, step: Step, shares: Shares) -> FfnBlock:
        """The FFN of a layer like this one, where loads run ahead while the device does the rest of the layer."""
        learned, cost, kind = self._learned(layer, step, shares), self.problem.cost, self.problem.weights.kind
        away = (1 - shares.attention) * self._part(layer, "attn").nbytes if shares.attends else 0.0
        lanes = Lanes(
            cpu_factor=cost.factor(CPU, frozenset({GPU.to_device})),
            link_factor=cost.factor(GPU.to_device, frozenset({CPU})),
            ahead_s=learned.ahead_s,
            ring_s=cost.least_s(GPU.to_device, "lift", kind, 1, self.ring_bytes),
            link_also_s=learned.kv_s + (cost.call_s(GPU.to_device, "lift", kind, nbytes=away) if away else 0.0),
            cpu_also_s=learned.cpu_also_s,
        )
        return FfnBlock(lanes, learned.cpu, learned.link, learned.gpu)

    def prompt_s(self, layer: Layer, step: Step, shares: Shares, r_cg: float) -> Callable[[int], float]:
        """The same FFN in a chunk of a prompt, as a function of the tokens that the device takes with the CPU's weights
        too (Eq. 15). The paper's link carries n_W whatever r_GG; what is at home on the device need not cross."""
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
        """What a layer reads from the disk."""
        away = (1 - shares.ffn) * self._part(layer, "ffn").nbytes
        away += (1 - shares.attention) * self._part(layer, "attn").nbytes
        return self.problem.cost.least_s(DISK.reads, "load", self.problem.weights.kind, 1, shares.disk * away)

    def ends_s(self, step: Step, head_stays: bool) -> float:
        """The head, and what lies between two passes."""
        problem, seconds = self.problem, self._learned(self.problem.spec.layers[0], step, Shares()).ends_s
        if not head_stays:
            seconds = max(
                seconds, problem.cost.call_s(GPU.to_device, "lift", problem.weights.kind, nbytes=problem.head.nbytes)
            )
        return seconds + problem.cost.between_passes_s

    def head_s(self, stays: bool) -> float:
        """The same for all tokens of an answer."""
        return self.problem.ask.output_tokens * self.ends_s(self.decode(), stays)

    def _part(self, layer: Layer, kind: str) -> Part:
        return self.problem.parts[f"{self._first[layer]}.{kind}"]

    def _learned(self, layer: Layer, step: Step, shares: Shares) -> LayerLines:
        known: dict[object, LayerLines] = self.problem.learned
        key = (layer, step, shares.attends, shares.kv_away)
        if key not in known:
            known[key] = _learn(self.problem, layer, step, shares.attends, shares.kv_away)
        return known[key]


class _LayerSums(NamedTuple):
    """Of a lowered pass, seconds: of each lane all that is no FFN (`other_s`) and what tasks take beside their calls
    (`tasks_s`); of an FFN in each slice the granules, the calls' fixed seconds, and those that go with bytes."""

    other_s: dict[Lane, float]
    tasks_s: dict[Lane, float]
    slices: dict[tuple[Lane, Tier], tuple[int, float, float]]  # by lane and home


def _learn(problem: Problem, layer: Layer, step: Step, attends: bool, kv_away: bool) -> LayerLines:
    """By lowering one layer, and two."""
    ffn = layer.ffns[0]
    granules = -(-ffn.neurons // GRANULE_ROWS)
    wide = replace(layer, ffn=replace(ffn, neurons=max(ffn.neurons, _SLICES * GRANULE_ROWS)))
    one, two = (_sums(problem, (wide,) * count, step, attends, kv_away) for count in (1, 2))

    def line(lane: Lane, home: Tier) -> Line:
        count, fixed_s, moving_s = one.slices[lane, home]
        return Line(fixed_s + problem.cost.task_s(lane) * (lane != CPU), moving_s / count * granules)

    other_s = {lane: two.other_s[lane] - one.other_s[lane] for lane in two.other_s}
    tasks_s = {lane: two.tasks_s[lane] - one.tasks_s[lane] for lane in two.tasks_s}
    launched_s = 2 * problem.cost.task_s(GPU.kernels)  # of the two slices that are the device's, in their lines
    return LayerLines(
        cpu=line(CPU, HOST),
        link=line(GPU.to_device, HOST),
        gpu=line(GPU.kernels, GPU.executor),
        ahead_s=other_s[GPU.kernels] + max(0.0, tasks_s[GPU.kernels] - launched_s) + tasks_s[CPU],
        cpu_also_s=other_s.get(CPU, 0.0) if not attends else 0.0,
        kv_s=other_s.get(GPU.to_device, 0.0),
        ends_s=one.other_s[GPU.kernels] + one.tasks_s[GPU.kernels] - other_s[GPU.kernels] - tasks_s[GPU.kernels],
    )


def _sums(problem: Problem, layers: tuple[Layer, ...], step: Step, attends: bool, kv_away: bool) -> _LayerSums:
    """Of a pass through these layers, the FFN of each in three slices GG, CG and CC of one unit."""
    few = replace(problem, spec=replace(problem.spec, layers=layers))
    split = Split("", 0.5, len(layers) if attends else 0, HOST if kv_away else GPU.executor, prompts=False)
    skeleton = replace(device_skeleton(few, split, step.total_rows), unit_bytes=few.parts["0.ffn"].nbytes)
    there = {part.key: part.granules // _SLICES for part in few.of_kind("ffn")}
    there |= {part.key: part.granules for part in (few.head, *few.of_kind("attn")[: split.attention_layers])}
    plan, cost = skeleton.plan(there), problem.cost
    other_s, tasks_s = defaultdict[Lane, float](float), defaultdict[Lane, float](float)
    slices: dict[tuple[Lane, Tier], tuple[int, float, float]] = {}
    for task in Lowering(plan).step(step.lowered):
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
    """The seconds that splits would take, which differ in what crosses the link and in who reads prompts.

    `shares`: of the first `attention_layers` layers, whose attention is the device's; the others' is the CPU's.
    `reads`: whether something is read from a disk."""

    def __init__(self, work: LayerWork, chunk_rows: int, shares: Shares, attention_layers: int, head: bool) -> None:
        problem = work.problem
        self._output_tokens, self._ffn_there = problem.ask.output_tokens, shares.ffn
        self._layers, self.reads = problem.layers, shares.disk > 0
        kinds: dict[tuple[Layer, bool], list[int]] = {}
        for i, layer in enumerate(problem.spec.layers):
            kinds.setdefault((layer, i < attention_layers), []).append(i)

        def periods(step: Step) -> list[_Period]:
            found = []
            for (layer, attends), those in kinds.items():
                each = shares if attends else replace(shares, attention=0.0, attends=False, kv_away=False)
                found.append(_Period(tuple(those), work.ffn(layer, step, each), work.disk_s(layer, each)))
            return found

        decode = work.decode()
        self._decode, self._decode_ends_s = periods(decode), work.ends_s(decode, head)
        self._prompts = [(count, periods(step), work.ends_s(step, head)) for step, count in work.chunks(chunk_rows)]

    def lifted(self) -> tuple[float, ...]:
        """Layer by layer, of the FFN outside the device's memory the share that the link had best lift in decode:
        r_CG / (1 - r_GG)."""
        outside = 1 - self._ffn_there
        if outside <= 0:
            return (0.0,) * self._layers
        found = {
            at: min(1.0, best_r_cg(period.block, self._ffn_there)[0] / outside)
            for period in self._decode
            for at in period.layers
        }
        return tuple(found[at] for at in range(self._layers))

    def decode_s(self, lifted: tuple[float, ...]) -> float:
        """A token of every sequence. `lifted`: as above."""
        return self._pass_s(self._decode, lifted) + self._decode_ends_s

    def prompts_s(self, lifted: tuple[float, ...], prompts: bool) -> float:
        """All prompts. `prompts`: the device computes the CPU's granules there."""
        shares = (1.0,) * self._layers if prompts else lifted
        return sum(count * (self._pass_s(periods, shares) + ends_s) for count, periods, ends_s in self._prompts)

    def seconds(self, lifted: tuple[float, ...], prompts: bool) -> float:
        """All answers: what either objective brings down."""
        return self.prompts_s(lifted, prompts) + self.decode_s(lifted) * self._output_tokens

    def _pass_s(self, periods: list[_Period], lifted: tuple[float, ...]) -> float:
        r_gg, total = self._ffn_there, 0.0
        for layers, block, disk_s in periods:
            r_cg = lifted[layers[0]] * (1 - r_gg)
            total += len(layers) * max(disk_s, finish_s(block.lanes, block.times(r_cg, r_gg)))
        return total


class _Period(NamedTuple):
    """Layers that are alike; the FFN of one, and what it reads from the disk."""

    layers: tuple[int, ...]
    block: FfnBlock
    disk_s: float
