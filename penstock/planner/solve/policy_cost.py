"""What a policy costs, as lines over its shares: seconds of every lane in prefill and decode, bytes of every tier.

FlexGen's slides do not give these terms. They are derived here from what penstock does with a plan: each op, move and
task that `graph/lower` will emit is counted (`policy_lanes`), and `Cost.seconds`, so `MachineSpec.rate` of its lane,
op, format and rows, says what one takes. With W bytes of placed weights in units of u bytes, a block of b batches, and
shares w, c, h of weights, KV and activations on (device, host, disk), once a pass:

    disk → host     w_disk · (W, and W / u reads) + c_disk · KV before the rows
    host → disk     c_disk · pages with the rows
    host → device   (w_host + w_disk) · (W, and W / u copies) + c_host · KV before the rows, where the device attends
    device → host   c_host · pages with the rows, where the device attends; else new K and V
    compute         every op of every batch; for each unit that streams a task, and a call for each batch; what is
                    copied of activations; attention, by whoever attends

A block's prompts take several passes of b batches, a token one. Without a device, what is called the device here is
the CPU with its RAM, and nothing crosses a link. Three terms are of our runtime, not FlexGen's: units that are not
full; the start of a pass, since KV is not loaded before the pass that needs it; and the turns of two windows (a sixth
line). Two are not linear, and the program is solved again with them as in the solution before: lanes that share RAM
slow each other by `MachineSpec.sharing`; and where layers differ in where their KV is, a lane that brings weights waits
beside the slow ones, since only a ring full comes ahead; windows wait where layers that need them follow each other.

Bytes are those of `graph/arenas.Layout`: what does not depend on the shares is read off a plan with everything at home
(scratch, activations, norms, vocabulary) and one with its KV away (windows); rings hold so many layers' share of what
streams through them. Activations stay with the executor of norms and merges, as the lowering has it: h is fixed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock.graph import passes
from penstock.graph.arenas import ARENA_ALIGN
from penstock.graph.tasks import Pass
from penstock.planner.solve.limits import device_limit_bytes, host_limit_bytes
from penstock.planner.solve.policy_lanes import Lanes, Mode
from penstock.planner.solve.policy_plan import Shape
from penstock.planner.solve.policy_program import Line, Program, Shares
from penstock.spec.format import Format
from penstock.spec.model import ModelSpec
from penstock.spec.parts import parts
from penstock.spec.plan import DEVICE

_ARENAS = 8  # a tier's arenas, each rounded up to whole huge pages
_ONLY_RAM, _ONLY_DISK = (False, True, False), (False, False, True)


def weight_bytes(spec: ModelSpec, weights: Format) -> int:
    """Of all matrices of the layers: in FlexGen's shape and 16 bits, l · (8·h1² + 4·h1·h2)."""
    layers = (part for part in parts(spec, weights) if part.kind in ("attn", "ffn"))
    return sum(block.nbytes * part.granules for part in layers for block in part.blocks if block.tiled)


def kv_bytes(spec: ModelSpec, fmt: Format, seqs: int, tokens: int) -> int:
    """K and V of so many sequences: in FlexGen's shape and 16 bits, 4 · b · l · h1 · (s + n)."""
    a_token = sum(2 * a.kv_heads * fmt.kv_bytes(a.head_dim) for a in (layer.attention for layer in spec.layers))
    return seqs * tokens * a_token


def modes(shape: Shape) -> Iterator[Mode]:
    """How to place: what is not there costs nothing (no ring without streams, no window without KV that moves). A lane
    that brings weights brings KV of all layers or of none: a layer's KV is one large load, and waits behind weights
    that wait for room, so lanes would not be evenly busy; bytes of weights can make up for the rest."""
    near, ram, disk, ram_disk = (True, False, False), (True, True, False), (True, False, True), (True, True, True)
    if shape.main == "host":
        found = [Mode(near, near), Mode(near, disk), Mode(disk, near), Mode(disk, _ONLY_DISK)]
    elif shape.attends == "device":
        found = [Mode(near, near), Mode(near, ram)]
        found += [Mode(weights, kv) for weights in (ram, ram_disk) for kv in (near, _ONLY_RAM)]
    else:
        # Where the CPU attends, KV in RAM comes nowhere.
        some, any_tier = ((False, True, False), (False, True, True)) if shape.attends == "cpu" else (ram, ram_disk)
        found = [Mode(near, any_tier), Mode(ram, any_tier), Mode(ram_disk, some), Mode(ram_disk, _ONLY_DISK)]
    for mode in found:
        memory, on_disk = shape.ask.kv_home != "disk", shape.ask.kv_home != "memory"
        kv = (mode.kv[0] and memory, mode.kv[1] and memory, mode.kv[2] and on_disk)
        if any(kv):
            yield mode._replace(kv=kv)


class Terms:
    """The programs of a shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.layers = shape, len(shape.spec.layers)
        self._lanes = Lanes(shape)
        ask, home = shape.ask, shape.home
        prompt = max(1, min(ask.prompt_tokens, home.context - 1))
        position = min(prompt + ask.output_tokens // 2, home.context - 1)
        seqs = range(shape.block)
        prompts = passes.prompts(home, seqs, (prompt,) * shape.block, passes.DECODE)
        self._prompts = Counter(map(_alike, prompts))
        self._tokens = Counter([_alike(passes.decode(home, seqs, (position,) * shape.block, passes.DECODE))])

    def program(self, mode: Mode, near: Shares | None = None) -> Program:
        """`near`: shares of weights where the numbers of units that are not full are taken; they are no lines."""
        shape, layers = self.shape, self.layers
        begun = shape.begun_units(near) if near else (0.5 * mode.weights[1], 0.5 * mode.weights[2])
        memory, capacity = self._memory(mode)
        prefill, decode = (
            {lane: line.times(1 / layers) for lane, line in self._lanes.of_passes(counts, mode, begun).items()}
            for counts in (self._prompts, self._tokens)
        )
        return Program(
            layers=layers,
            steps=max(0, shape.ask.output_tokens - 1),
            block=shape.block,
            prefill=prefill,
            decode=decode,
            memory=memory,
            capacity=capacity,
            # The lowering keeps activations with the executor of norms and merges.
            allowed={"weights": mode.weights, "kv": mode.kv, "acts": (True, False, False)},
            sharing=shape.machine.sharing,
            ring_layers=shape.ring_layers,
            moved_tier=shape.moved_tier,
            batches=shape.batches,
            ends_s=(self._lanes.ends_s(self._prompts) / layers, self._lanes.ends_s(self._tokens) / layers),
        )

    def _memory(self, mode: Mode) -> tuple[dict[str, Line], dict[str, float]]:
        """Peak bytes of the tiers, and what they have."""
        shape, layers = self.shape, self.layers
        device, total = shape.main == DEVICE, float(shape.placed_bytes)
        at_home = shape.home.tier_bytes()
        kv_total = float(shape.kv_bytes)
        ring = shape.ring_layers * total / layers
        slack = float(shape.unit_slack_bytes + ARENA_ALIGN) if mode.streams else 0.0
        fixed = {tier: nbytes + float(_ARENAS * ARENA_ALIGN) for tier, nbytes in at_home.items()}
        near_kv = 1.0 if shape.attends == "device" else 0.0
        granule = float(max(part.granule_bytes for part in shape.placed))
        window = float(shape.window_bytes) if mode.kv[shape.moved_tier] else 0.0
        ask, machine = shape.ask, shape.machine
        capacity = {"host": float(host_limit_bytes(ask, machine)), "disk": float(machine.tier("disk0").bytes)}
        memory = {"disk": Line(0.0, (0.0, 0.0, total), (0.0, 0.0, kv_total))}
        if not device:
            constant = fixed["host"] - total - kv_total + slack + window
            memory["host"] = Line(constant, (total, 0.0, ring), (kv_total, 0.0, 0.0))
            return memory, capacity
        on_device = fixed[DEVICE] - total - near_kv * kv_total + slack
        in_ram = fixed["host"] - (1 - near_kv) * kv_total + slack + granule
        attends_there = shape.attends == "device"
        on_device, in_ram = on_device + window * attends_there, in_ram + window * (not attends_there)
        memory["device"] = Line(on_device, (total, ring, ring), (kv_total, 0.0, 0.0))
        memory["host"] = Line(in_ram, (0.0, total, ring), (0.0, kv_total, 0.0))
        capacity["device"] = float(device_limit_bytes(ask, machine))
        return memory, capacity


def _alike(p: Pass) -> Pass:
    """A pass that costs the same: sequences do not matter, nor what follows."""
    batches = (batch._replace(id=0, seqs=tuple(range(len(batch.seqs)))) for batch in p.batches)
    return p._replace(batches=tuple(batches), then=None)
