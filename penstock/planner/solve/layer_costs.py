"""What a pass takes layer by layer beside a device, in closed form: good enough to tell which splits to simulate.

The coefficients are the machine's rates; each lane's work in a layer is a line in its share of the FFN
(`slicing.Line`), and a layer's period is what `slicing.finish_s` says where loads run ahead. Left out: that units are
whole granules, and what the ends of a pass hide of each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.graph import ops
from penstock.graph.tasks import Batch
from penstock.planner.cost import Cost
from penstock.planner.solve.skeleton import kv_format
from penstock.planner.solve.slicing import Block, Lanes, Line, Prompt, Regime, best_r_cg, finish_s
from penstock.spec.ask import Ask
from penstock.spec.format import Format
from penstock.spec.machine import MachineSpec, Rate
from penstock.spec.model import Layer, ModelSpec
from penstock.spec.parts import Part, head_key, parts
from penstock.spec.plan import DEVICE
from penstock.units import MIB

LINK = "h2d0"
RING_BYTES = 128 * MIB  # of a device, where its memory has room for it
_PROJECTIONS = ((ops.QKV_BLOCKS, "qkv"), (ops.OUT_BLOCKS, "out"))


@dataclass(frozen=True, slots=True)
class Step:
    """One pass: `seqs` sequences of `rows` rows each, the first at position `start`."""

    seqs: int
    rows: int
    start: int

    @property
    def total_rows(self) -> int:
        return self.seqs * self.rows

    @property
    def batch(self) -> Batch:
        n = self.seqs
        return Batch(0, tuple(range(n)), (self.start,) * n, (self.rows,) * n, ())


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


@dataclass(frozen=True)
class LayerCosts:
    """Of a model in one format on one machine. `ring_bytes`: of the device's ring, what lifting may run ahead."""

    ask: Ask
    spec: ModelSpec
    weights: Format
    machine: MachineSpec
    ring_bytes: int = RING_BYTES

    def decode(self) -> Step:
        """The pass that the prediction is of: half-way through the output."""
        return Step(self.ask.batch, 1, self.ask.prompt_tokens + self.ask.output_tokens // 2)

    def chunks(self, chunk_rows: int) -> Iterator[tuple[Step, int]]:
        """Passes of the prompts, and how often each comes. Prompts of a batch share passes (`passes.prompts`)."""
        whole, last = divmod(self.ask.batch * self.ask.prompt_tokens, chunk_rows)
        for rows, count in ((chunk_rows, whole), (last, int(last > 0))):
            if count:
                seqs = max(1, rows // self.ask.prompt_tokens)
                yield Step(seqs, rows // seqs, max(0, (self.ask.prompt_tokens - rows) // 2)), count

    def ffn(self, layer: Layer, step: Step, shares: Shares) -> Block:
        """The FFN of a layer like this one, where loads run ahead while the device does the rest of the layer."""
        part, rows = self._part(layer, "ffn"), step.total_rows
        nbytes, flops = ops.matrix_cost(part, 0, part.granules, ops.FFN_BLOCKS, rows)
        launch_s = self.machine.overhead_s(DEVICE, "task")
        gpu = _line(self._rate(DEVICE, "ffn", rows), nbytes, flops)
        cost = Cost(self.machine)
        lanes = Lanes(
            cpu_factor=cost.factor("host", frozenset({LINK})),
            link_factor=cost.factor(LINK, frozenset({"host"})),
            ahead_s=self._ahead_s(layer, step, shares),
            ring_s=self.ring_bytes * self._rate(LINK, "lift", 1).s_per_byte,
            link_also_s=self._link_also_s(layer, step, shares),
            cpu_also_s=0.0 if shares.attends else self._attention_s("host", layer, step),
        )
        return Block(
            lanes,
            _line(self._rate("host", "ffn", rows), nbytes, flops),
            _line(self._rate(LINK, "lift", 1), part.nbytes, 0),
            replace(gpu, alpha_s=gpu.alpha_s + launch_s),
        )

    def prompt(self, layer: Layer, step: Step, shares: Shares, r_cg: float) -> Prompt:
        """The same FFN in a chunk of a prompt, as a function of the tokens that the device takes (Eq. 15)."""
        block, part = self.ffn(layer, step, shares), self._part(layer, "ffn")
        nbytes, flops = ops.matrix_cost(part, 0, part.granules, ops.FFN_BLOCKS, 1)

        def regimes(lane: str, launch_s: float) -> tuple[Regime, ...]:
            tops = {rate.rows for rate in self.machine.rates if rate.lane == lane and 0 < rate.rows < step.total_rows}
            found = []
            for rows in (*sorted(tops), 0):
                rate = self._rate(lane, "ffn", rows or step.total_rows)
                memory_s, row_s = nbytes * rate.s_per_byte, flops * rate.s_per_flop
                found.append(Regime(rows, rate.alpha_s + launch_s, memory_s, row_s))
            return tuple(found)

        cpu, gpu = regimes("host", 0.0), regimes(DEVICE, self.machine.overhead_s(DEVICE, "task"))
        return Prompt(block.lanes, step.total_rows, r_cg, shares.ffn, cpu, block.link, gpu)

    def disk_s(self, layer: Layer, shares: Shares) -> float:
        """What a layer reads from the disk."""
        if not shares.disk:
            return 0.0
        away = (1 - shares.ffn) * self._part(layer, "ffn").nbytes
        away += (1 - shares.attention) * self._part(layer, "attn").nbytes
        return shares.disk * away * self._rate("disk0", "load", 1).s_per_byte

    def ends_s(self, step: Step, head_stays: bool) -> float:
        """The head, and what lies between two passes."""
        head = next(part for part in parts(self.spec, self.weights) if part.key == head_key(self.spec))
        nbytes, flops = ops.matrix_cost(head, 0, head.granules, ops.VOCAB_BLOCKS, step.seqs)
        seconds = _line(self._rate(DEVICE, "head", step.seqs), nbytes, flops).at(1)
        if not head_stays:
            seconds = max(seconds, _line(self._rate(LINK, "lift", 1), nbytes, 0).at(1))
        return seconds + self.machine.overhead_s("host", "pass")

    def head_s(self, stays: bool) -> float:
        """The same for all tokens of an answer."""
        return self.ask.output_tokens * self.ends_s(self.decode(), stays)

    # -- lanes ----------------------------------------------------------------------------------------

    def _ahead_s(self, layer: Layer, step: Step, shares: Shares) -> float:
        """All of a layer but its FFN and the CPU's attention: norms, sums, activations across the link, tasks picked
        up, and attention where it is the device's."""
        machine, rows = self.machine, step.total_rows
        nbytes, _ = ops.rows_cost(self.spec, rows, 2)
        seconds = 4 * _line(machine.rate(DEVICE, "norm", "*", rows), nbytes, 0).at(1)
        crossings = 1 if shares.attends else 2
        activations = 4 * rows * self.spec.d_model
        for lane in ("d2h0", LINK):
            seconds += crossings * _line(machine.rate(lane, "copy", "*", rows), activations, 0).at(1)
        seconds += (1 + crossings) * machine.overhead_s(DEVICE, "task") + crossings * machine.overhead_s("host", "task")
        return seconds + (self._attention_s(DEVICE, layer, step) if shares.attends else 0.0)

    def _attention_s(self, lane: str, layer: Layer, step: Step) -> float:
        part, rows = self._part(layer, "attn"), step.total_rows
        seconds = 0.0
        for blocks, op in _PROJECTIONS:
            nbytes, flops = ops.matrix_cost(part, 0, part.granules, blocks, rows)
            seconds += _line(self._rate(lane, op, rows), nbytes, flops).at(1)
        fmt = kv_format(self.ask, self.spec)
        each = fmt.kv_bytes(layer.attention.head_dim)
        nbytes, flops = ops.attend_cost(layer.attention, layer.attention.kv_heads, step.batch, each)
        return seconds + _line(self.machine.rate(lane, "attend", fmt.kind, step.rows), nbytes, flops).at(1)

    def _link_also_s(self, layer: Layer, step: Step, shares: Shares) -> float:
        """What crosses the link besides the FFN: attention's weights that are not there, and KV that lives in RAM."""
        if not shares.attends:
            return 0.0
        link = self._rate(LINK, "lift", 1)
        seconds = _line(link, self._part(layer, "attn").nbytes, 0).at(1 - shares.attention)
        if shares.kv_away:
            a, fmt = layer.attention, kv_format(self.ask, self.spec)
            nbytes, _ = ops.attend_cost(a, a.kv_heads, step.batch, fmt.kv_bytes(a.head_dim))
            rate = self.machine.rate(LINK, "kv_load", fmt.kind)
            seconds += _line(rate, nbytes, 0).at(1) + (2 * step.seqs - 1) * rate.alpha_s  # K and V of each sequence
        return seconds

    def _part(self, layer: Layer, kind: str) -> Part:
        return _parts_of(self.spec, self.weights)[f"{self.spec.layers.index(layer)}.{kind}"]

    def _rate(self, lane: str, op: str, rows: int) -> Rate:
        return self.machine.rate(lane, op, self.weights.kind, rows)


class Estimate:
    """The seconds that splits would take, which differ in what crosses the link and in who reads prompts.

    `shares`: of the first `attention_layers` layers, whose attention is the device's; the others' is the CPU's.
    `reads`: whether something is read from a disk."""

    def __init__(self, costs: LayerCosts, chunk_rows: int, shares: Shares, attention_layers: int, head: bool) -> None:
        self._output_tokens, self._ffn_there = costs.ask.output_tokens, shares.ffn
        decode = costs.decode()
        kinds: dict[tuple[Layer, bool], list[int]] = {}
        for i, layer in enumerate(costs.spec.layers):
            kinds.setdefault((layer, i < attention_layers), []).append(i)
        self._layers, self.reads = len(costs.spec.layers), shares.disk > 0

        def periods(step: Step) -> list[_Period]:
            found = []
            for (layer, attends), those in kinds.items():
                each = shares if attends else replace(shares, attention=0.0, attends=False)
                found.append(_Period(tuple(those), costs.ffn(layer, step, each), costs.disk_s(layer, each)))
            return found

        self._decode, self._decode_ends_s = periods(decode), costs.ends_s(decode, head)
        self._prompts = [(count, periods(step), costs.ends_s(step, head)) for step, count in costs.chunks(chunk_rows)]

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
    block: Block
    disk_s: float


def _parts_of(spec: ModelSpec, weights: Format) -> dict[str, Part]:
    return {part.key: part for part in parts(spec, weights)}


def _line(rate: Rate, nbytes: float, flops: float) -> Line:
    """As `Cost.seconds` has it: the slower of reading and computing, both in proportion to the share."""
    return Line(rate.alpha_s, max(nbytes * rate.s_per_byte, flops * rate.s_per_flop))
