"""What a policy costs, as lines over its shares: seconds of every lane in prefill and decode, bytes of every tier.

FlexGen's slides do not give these terms. They are derived here from what penstock does with a plan: each op, move and
task that `graph/lower` will emit is counted, and `Cost.seconds` (so `MachineSpec.rate` of its lane, op, format and rows)
says what one takes. With W bytes of placed weights, in units of u bytes; a block of b batches; shares w, c, h of weights,
KV and activations on (device, host, disk):

    disk → host     w_disk · (W, and a read a unit) + c_disk · KV before the rows
    host → disk     c_disk · pages with the rows
    host → device   (w_host + w_disk) · (W, and a copy a unit) + c_host · KV before the rows, where the device attends
    device → host   c_host · pages with the rows, where the device attends; else new K and V
    compute         every op of every batch; a task and b calls more for each unit that streams; what is copied of
                    activations; attention on whoever attends

once a pass: a prompt's block takes several passes of b batches, a token one. Without a device, what is called the device
here is the CPU with its RAM, and nothing crosses a link.

Bytes are those of `graph/arenas.Layout`: what does not depend on the shares is read off a plan with everything at home
(scratch, activations, norms, vocabulary) and one with nothing there (windows of KV); rings hold so many layers' share of
what streams through them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from penstock.graph import ops, passes
from penstock.graph.arenas import ARENA_ALIGN, Layout
from penstock.graph.tasks import Batch, Call, Pass, Slot, Task
from penstock.planner.cost import Cost
from penstock.planner.solve.limits import device_limit_bytes, host_limit_bytes
from penstock.planner.solve.policy_plan import Shape
from penstock.planner.solve.policy_program import READ, TO_DEVICE, TO_HOST, WINDOW, WRITE, Line, Program, Shares
from penstock.planner.solve.skeleton import kv_format
from penstock.spec.format import Format
from penstock.spec.model import ModelSpec
from penstock.spec.parts import head_key, parts
from penstock.spec.plan import DEVICE, Plan

Tiers = tuple[bool, bool, bool]
NEAR: Shares = (1.0, 0.0, 0.0)
_ARENAS = 8  # a tier's arenas, each rounded up to whole huge pages


def weight_bytes(spec: ModelSpec, weights: Format) -> int:
    """Of all matrices of the layers: in FlexGen's shape and 16 bits, l · (8·h1² + 4·h1·h2)."""
    layers = (part for part in parts(spec, weights) if part.kind in ("attn", "ffn"))
    return sum(block.nbytes * part.granules for part in layers for block in part.blocks if block.tiled)


def kv_bytes(spec: ModelSpec, fmt: Format, seqs: int, tokens: int) -> int:
    """K and V of so many sequences: in FlexGen's shape and 16 bits, 4 · b · l · h1 · (s + n)."""
    a_token = sum(2 * a.kv_heads * fmt.kv_bytes(a.head_dim) for a in (layer.attention for layer in spec.layers))
    return seqs * tokens * a_token


class Mode(NamedTuple):
    """The tiers that weights and KV may be in."""

    weights: Tiers
    kv: Tiers


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


_ONLY_RAM, _ONLY_DISK = (False, True, False), (False, False, True)


@dataclass
class _Stage:
    """Lines of a stage's lanes, of all its passes together."""

    lines: dict[str, Line]

    def add(self, lane: str, constant: float = 0.0, weights: Shares = (0, 0, 0), kv: Shares = (0, 0, 0)) -> None:
        self.lines[lane] = self.lines.get(lane, Line()) + Line(constant, weights, kv)


class Terms:
    """The program of a shape in one mode."""

    def __init__(self, shape: Shape, mode: Mode) -> None:
        self.shape, self.mode = shape, mode
        self.streams = any(mode.weights[1:])
        self.moves_kv = mode.kv[shape.moved_tier]
        # Passes of one shape are lowered and prepared once where nothing streams.
        self.prepared = not self.streams and not self.moves_kv
        self.layers = len(shape.spec.layers)
        # With everything at home, but KV where the CPU attends, if it does at all: then that is an executor too.
        self.home = shape.plan(NEAR, NEAR if shape.attends == "device" else (0.0, 1.0, 0.0))
        self.kv = kv_format(shape.ask, shape.spec)
        self._cost = Cost(shape.machine)
        self._parts = {part.key: part for part in parts(shape.spec, shape.weights)}
        # Both from the first layer on: what one layer of each kind costs, times how many there are.
        self._kinds = Counter(shape.spec.layers)
        first = {layer: i for i, layer in reversed(list(enumerate(shape.spec.layers)))}
        self._like = [(first[layer], count) for layer, count in self._kinds.items()]

    def program(self) -> Program:
        shape, ask = self.shape, self.shape.ask
        prompt = max(1, min(ask.prompt_tokens, self.home.context - 1))
        position = min(prompt + ask.output_tokens // 2, self.home.context - 1)
        seqs = range(shape.block)
        prompts = self._stage(passes.prompts(self.home, (prompt,) * shape.block, passes.DECODE))
        tokens = self._stage([passes.decode(self.home, seqs, (position,) * shape.block, passes.DECODE)])
        memory, capacity = self._memory()
        return Program(
            layers=self.layers,
            steps=max(0, ask.output_tokens - 1),
            block=shape.block,
            prefill={lane: line.times(1 / self.layers) for lane, line in prompts.lines.items()},
            decode={lane: line.times(1 / self.layers) for lane, line in tokens.lines.items()},
            memory=memory,
            capacity=capacity,
            allowed={
                "weights": self.mode.weights,
                "kv": self.mode.kv,
                "acts": (True, False, False),  # the lowering keeps them with the executor of norms and merges
            },
            sharing=shape.machine.sharing,
        )

    # -- seconds --------------------------------------------------------------------------------------

    def _stage(self, wanted: Iterable[Pass]) -> _Stage:
        """Of all passes; those of one shape are worked out once."""
        stage = _Stage({lane: Line() for lane in (READ, WRITE, TO_DEVICE, TO_HOST, WINDOW, DEVICE, "host")})
        counts = Counter(replaced(p) for p in wanted)
        for p, count in counts.items():
            one = _Stage({})
            self._pass(one, p)
            for lane, line in one.lines.items():
                stage.lines[lane] = stage.lines[lane] + line.times(count)
        return stage

    def _pass(self, stage: _Stage, p: Pass) -> None:
        main = self.shape.main
        stage.add(main, self._cost.between_passes_s + self._task(main))
        self._weights(stage, p)
        for batch in p.batches:
            self._ends(stage, batch)
            for layer, count in self._like:
                one = _Stage({})
                self._rows(one, batch)
                self._ffn(one, layer, batch)
                self._attention(one, layer, batch)
                for lane, line in one.lines.items():
                    stage.add(lane)
                    stage.lines[lane] = stage.lines[lane] + line.times(count)

        self._apart(stage, len(p.batches))

    def _apart(self, stage: _Stage, batches: int) -> None:
        """Where KV comes from elsewhere, a pass does not begin with the one before: weights may be loaded ahead, the
        cache not. So the executor waits for the first batch's, in one layer; and the lane that brings it has nothing to
        do in the last layer and in what comes after."""
        main = stage.lines[self.shape.main].constant
        ends_s = main / self.layers
        for lane, tier in ((TO_DEVICE, 1), (READ, 2)):
            loads_s = stage.lines.get(lane, Line()).kv[tier]
            if loads_s > 0:
                first_s = loads_s / self.layers / batches
                stage.add(self.shape.main, kv=(0.0, first_s, 0.0) if tier == 1 else (0.0, 0.0, first_s))
                stage.add(lane, kv=(0.0, ends_s, 0.0) if tier == 1 else (0.0, 0.0, ends_s))

    def _weights(self, stage: _Stage, p: Pass) -> None:
        """What streams, once a pass: reads, copies over the link, and tasks and calls of the executor for each unit."""
        shape, main = self.shape, self.shape.main
        fmt, total = shape.weights.kind, shape.placed_bytes
        units = total / shape.unit_bytes
        begun = self.layers if self.streams else 0  # of each layer and tier one unit more, which is not full
        read_s, lift_s = self._fixed("disk0", "load", fmt), 0.0
        read = total * self._per_byte("disk0", "load", fmt) + units * read_s
        stage.add(READ, begun * read_s, weights=(0.0, 0.0, read))
        if main == DEVICE:
            lift_s = self._fixed("h2d0", "lift", fmt)
            lift = total * self._per_byte("h2d0", "lift", fmt) + units * lift_s
            stage.add(TO_DEVICE, begun * lift_s, weights=(0.0, lift, lift))
        attention = sum(part.nbytes for part in shape.placed if part.kind == "attn") / total
        calls = 0.0
        for batch in p.batches:
            rows = batch.total_rows
            in_attention = sum(self._call(main, op, fmt, 0, 0, rows) for op in ("qkv", "attend", "out"))
            calls += attention * in_attention + (1 - attention) * self._call(main, "ffn", fmt, 0, 0, rows)
        each = self._task(main) + calls
        begun *= sum(self.mode.weights[1:])
        after = self._task(main) * self.layers if self.streams else 0.0  # what follows a layer's last unit
        stage.add(main, begun * each + after, weights=(0.0, units * each, units * each))

    def _ends(self, stage: _Stage, batch: Batch) -> None:
        """Embedding, last norm, head; tokens and logits over the link."""
        main, spec, t = self.shape.main, self.shape.spec, batch.total_rows
        vocabulary = self._parts[head_key(spec)]
        row_bytes = 4 * t * spec.d_embed
        stage.add(main, self._call(main, "gather", vocabulary.format.kind, row_bytes, 0, t))
        stage.add(main, self._call(main, "embed", "*", *ops.rows_cost(spec, t, 2), t))
        if main == DEVICE:
            stage.add(main, self._copy("host", 4 * t, batch))
            if head_key(spec) != "embed":
                stage.add(main, self._copy("host", row_bytes, batch))
        n = len(batch.logits)
        if n:
            stage.add(main, self._call(main, "norm", "*", *ops.rows_cost(spec, n, 2), t))
            cost = ops.matrix_cost(vocabulary, 0, vocabulary.granules, ops.VOCAB_BLOCKS, n)
            stage.add(main, self._call(main, "head", vocabulary.format.kind, *cost, n))
            if main == DEVICE:
                stage.add(main, self._copy(DEVICE, 4 * n * spec.vocab, batch) + self._copy(DEVICE, 8 * n, batch))

    def _rows(self, stage: _Stage, batch: Batch) -> None:
        """Norms and merges of a layer: two each, of one partial."""
        main, spec, t = self.shape.main, self.shape.spec, batch.total_rows
        norm = self._call(main, "norm", "*", *ops.rows_cost(spec, t, 2), t)
        merge = self._call(main, "merge", "*", *ops.rows_cost(spec, t, 3), t)
        stage.add(main, 2 * (norm + merge))

    def _ffn(self, stage: _Stage, layer: int, batch: Batch) -> None:
        main, part = self.shape.main, self._parts[f"{layer}.ffn"]
        cost = ops.matrix_cost(part, 0, part.granules, ops.FFN_BLOCKS, batch.total_rows)
        stage.add(main, self._call(main, "ffn", part.format.kind, *cost, batch.total_rows))

    def _attention(self, stage: _Stage, layer: int, batch: Batch) -> None:
        """Of a layer: at home where its KV is with the executor; else as `shape.attends` says."""
        shape, main, t = self.shape, self.shape.main, batch.total_rows
        a, part = shape.spec.layers[layer].attention, self._parts[f"{layer}.attn"]
        begins = not any(batch.start)
        each = self.kv.kv_bytes(a.head_dim)
        kv_cost = ops.attend_cost(a, part.granules, batch, each)
        longest = max(batch.rows)

        def projections(at: str) -> float:
            qkv = ops.matrix_cost(part, 0, part.granules, ops.QKV_BLOCKS, t)
            out = ops.matrix_cost(part, 0, part.granules, ops.OUT_BLOCKS, t)
            return self._call(at, "qkv", part.format.kind, *qkv, t) + self._call(at, "out", part.format.kind, *out, t)

        def attend(at: str) -> float:
            return self._call(at, "attend", self.kv.kind, *kv_cost, longest)

        loaded, saved = (self._moved(layer, batch, save) for save in (False, True))
        load_s = self._move("disk0", "kv_load", loaded) if loaded else 0.0
        save_s = self._move("disk_write0", "kv_save", saved)
        x_bytes = 4 * t * shape.spec.d_model
        q_bytes, new_bytes = 4 * t * a.heads * a.head_dim, 2 * t * a.kv_heads * each
        # One layer's seconds, by the tier of its KV: of lanes, and of the chain that a window's turn is.
        if shape.attends == "cpu":
            stage.add("host", projections("host") + attend("host") + self._task("host"))
            copies = self._copy("host", 4 * t * shape.spec.d_model, batch) + self._copy(DEVICE, 4 * t * shape.spec.d_model, batch)
            stage.add(main, copies + self._task(main))
            self._through_window(stage, 2, (READ, load_s), attend("host") + projections("host"), (WRITE, save_s))
            return
        stage.add(main, projections(main))
        at_home = attend(main)
        if main == "host":
            wait = self._task(main) if loaded else 0.0
            stage.add(main, kv=(at_home, 0.0, at_home + wait))
            self._through_window(stage, 2, (READ, load_s), at_home, (WRITE, save_s))
        elif shape.attends == "device":
            stage.add(main, kv=(at_home, at_home + self._task(main), 0.0))
            load_s = self._move("h2d0", "kv_load", loaded) if loaded else 0.0
            save_s = self._move("d2h0", "kv_save", saved)
            self._through_window(stage, 1, (TO_DEVICE, load_s), at_home, (TO_HOST, save_s))
        else:
            copies = 0.0 if begins else self._copy(DEVICE, q_bytes, batch) + self._copy("host", q_bytes, batch)
            mine = copies + (at_home if begins else 0.0) + self._task(main)
            theirs = 0.0 if begins else attend("host") + self._task("host")
            stage.add(main, kv=(at_home, mine, mine))
            stage.add("host", kv=(0.0, theirs, theirs))
            new = self._move("d2h0", "kv_save", new_bytes)
            stage.add(TO_HOST, kv=(0.0, new, new))
            self._through_window(stage, 2, (READ, load_s), theirs + new, (WRITE, save_s))

    def _through_window(
        self, stage: _Stage, tier: int, load: tuple[str, float], attend_s: float, save: tuple[str, float]
    ) -> None:
        """KV of a batch in a layer that comes from another tier and goes back there."""

        def of(seconds: float) -> Shares:
            return (0.0, seconds, 0.0) if tier == 1 else (0.0, 0.0, seconds)

        (reads, load_s), (writes, save_s) = load, save
        stage.add(reads, kv=of(load_s))
        stage.add(writes, kv=of(save_s))
        # Two windows take turns, batch by batch: each is loaded, read and saved before it is loaded again.
        nb = self.shape.batches
        turn = ((load_s + attend_s + save_s) / nb + (1 - 1 / nb) * max(load_s, attend_s, save_s)) / 2
        stage.add(WINDOW, kv=of(turn))

    def _moved(self, layer: int, batch: Batch, save: bool) -> int:
        """Bytes of K and V that come before the rows (or go back with them), in whole pages."""
        a, page = self.shape.spec.layers[layer].attention, self.home.page_tokens
        page_bytes = a.kv_heads * page * self.kv.kv_bytes(a.head_dim)
        pages = 0
        for start, rows in zip(batch.start, batch.rows, strict=True):
            first, last = (start // page, -(-(start + rows) // page)) if save else (0, -(-start // page))
            pages += last - first
        return 2 * pages * page_bytes

    def _call(self, lane: str, op: str, fmt: str, nbytes: float, flops: float, rows: int) -> float:
        """One call in a task that others are in too."""
        batch = Batch(0, (0,), (0,), (rows,), tuple(range(rows)) if op == "head" else ())
        call = Call(op, -1, batch, (), (), fmt, int(nbytes), int(flops))
        return self._seconds(lane, call) - self._task(lane)

    def _copy(self, source: str, nbytes: int, batch: Batch) -> float:
        """Of activations, on the device's lane."""
        target = Slot("host.act" if source == DEVICE else "gpu0.act", 0, nbytes)
        call = Call("copy", -1, batch, (target, target), (), "*", nbytes, 0)
        return self._seconds(DEVICE, call) - self._task(DEVICE)

    def _move(self, lane: str, op: str, nbytes: int) -> float:
        """A task of one move."""
        return self._seconds(lane, Call(op, -1, None, (), (), self.kv.kind, nbytes, 0))

    def _per_byte(self, lane: str, op: str, fmt: str) -> float:
        return (self._seconds(lane, Call(op, -1, None, (), (), fmt, 1 << 40, 0)) - self._fixed(lane, op, fmt)) / 2**40

    def _fixed(self, lane: str, op: str, fmt: str) -> float:
        return self._seconds(lane, Call(op, -1, None, (), (), fmt, 0, 0))

    def _task(self, lane: str) -> float:
        return self._seconds(lane)

    def _seconds(self, lane: str, *calls: Call) -> float:
        like = 0 if self.prepared else -1
        return self._cost.seconds(Task(0, (lane,), calls, (), (), 0, 0, (), like))

    # -- bytes ----------------------------------------------------------------------------------------

    def _memory(self) -> tuple[dict[str, Line], dict[str, float]]:
        """Peak bytes of the tiers, and what they have."""
        shape, layers = self.shape, self.layers
        device, total = shape.main == DEVICE, float(shape.placed_bytes)
        at_home = self.home.tier_bytes()
        kv_total = float(sum(2 * slot.nbytes for slot in _kv_slots(self.home)))
        ring = shape.ring_layers * total / layers
        slack = float(shape.unit_slack_bytes + ARENA_ALIGN) if self.streams else 0.0
        fixed = {tier: nbytes + float(_ARENAS * ARENA_ALIGN) for tier, nbytes in at_home.items()}
        near_kv = 1.0 if shape.attends == "device" else 0.0
        granule = float(max(part.granule_bytes for part in shape.placed))
        window = self._window_bytes() if self.moves_kv else 0.0
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

    def _window_bytes(self) -> int:
        """Of KV that comes from elsewhere; of a plan that has all of it there."""
        shape = self.shape
        away: Shares = (0.0, 1.0, 0.0) if shape.main == DEVICE and shape.attends == "device" else (0.0, 0.0, 1.0)
        return sum(slot.nbytes for slot in Layout(shape.plan(NEAR, away)).windows)


def replaced(p: Pass) -> Pass:
    """A pass that costs the same: sequences do not matter, nor what follows."""
    batches = (batch._replace(id=0, seqs=tuple(range(len(batch.seqs)))) for batch in p.batches)
    return p._replace(batches=tuple(batches), then=None)


def _kv_slots(plan: Plan) -> list[Slot]:
    """The keys of every layer."""
    layout, seqs = Layout(plan), tuple(range(plan.batch_seqs * plan.batches_per_pass))
    every = Batch(0, seqs, (0,) * len(seqs), (1,) * len(seqs), ())
    return [layout.kv_stored(layer, every)[0] for layer in range(len(plan.target.spec.layers))]

