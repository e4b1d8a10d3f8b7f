"""Seconds of a policy's lanes, pass by pass, as lines over its shares (the derivation stands in `policy_cost`).

Each op, move and task that `graph/lower` will emit is counted here and costed by `Cost.seconds`.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from penstock.graph import ops
from penstock.graph.tasks import Batch, Call, Pass, Slot, Task
from penstock.planner.cost import Cost
from penstock.planner.solve.policy_plan import PAGE_TOKENS, Shape
from penstock.planner.solve.policy_program import (
    HELD,
    LOADED,
    READ,
    SAVED,
    TO_DEVICE,
    TO_HOST,
    WINDOW,
    WRITE,
    Line,
    Shares,
)
from penstock.planner.solve.skeleton import kv_format
from penstock.spec.parts import head_key, parts
from penstock.spec.plan import DEVICE

Tiers = tuple[bool, bool, bool]
_NOTHING: Shares = (0.0, 0.0, 0.0)


class Mode(NamedTuple):
    """The tiers that weights and KV may be in: device, host, disk."""

    weights: Tiers
    kv: Tiers

    @property
    def streams(self) -> bool:
        """Whether weights may come from elsewhere."""
        return any(self.weights[1:])

    def prepared(self, shape: Shape) -> bool:
        """Whether nothing streams: then passes of one shape are lowered and prepared once."""
        return not self.streams and not self.kv[shape.moved_tier]


class Lines:
    """Lines by lane; of compute by executor."""

    def __init__(self) -> None:
        self.of: dict[str, Line] = {}

    def add(self, lane: str, constant: float = 0.0, weights: Shares = _NOTHING, kv: Shares = _NOTHING) -> None:
        self.of[lane] = self.of.get(lane, Line()) + Line(constant, weights, kv)

    def add_all(self, other: Lines, times: float = 1.0) -> None:
        for lane, line in other.of.items():
            self.of[lane] = self.of.get(lane, Line()) + line.times(times)


class Lanes:
    """Lines of the passes of one shape."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.layers = shape, len(shape.spec.layers)
        self.kv = kv_format(shape.ask, shape.spec)
        self._cost = Cost(shape.machine)
        self._parts = {part.key: part for part in parts(shape.spec, shape.weights)}
        first = {layer: i for i, layer in reversed(list(enumerate(shape.spec.layers)))}
        self._like = [(first[layer], count) for layer, count in Counter(shape.spec.layers).items()]
        self._known: dict[tuple[Pass, bool], Lines] = {}
        self._prepared = False

    def of_passes(self, counts: Counter[Pass], mode: Mode, begun: tuple[float, float]) -> dict[str, Line]:
        """Of a stage's passes together, a line for each lane, all of them there. `begun`: `Shape.begun_units`."""
        found, self._prepared = Lines(), mode.prepared(self.shape)
        for lane in (READ, WRITE, TO_DEVICE, TO_HOST, WINDOW, DEVICE, "host"):
            found.add(lane)
        for p, count in counts.items():
            one = Lines()
            one.add_all(self._computed(p))
            if mode.streams:
                self._weights(one, p, begun)
            self._apart(one, len(p.batches))
            found.add_all(one, count)
        return found.of

    def _computed(self, p: Pass) -> Lines:
        """All but what streams of weights: worked out once for the modes that share it."""
        key = (p, self._prepared)
        if key not in self._known:
            found = self._known[key] = Lines()
            found.add(self.shape.main, self._cost.between_passes_s + self._task(self.shape.main))
            for batch, count in Counter(batch._replace(id=0) for batch in p.batches).items():
                one = Lines()
                self._ends(one, batch)
                for layer, layers in self._like:
                    like = Lines()
                    self._rows(like, batch)
                    self._ffn(like, layer, batch)
                    self._attention(like, layer, batch)
                    one.add_all(like, layers)
                found.add_all(one, count)
        return self._known[key]

    def ends_s(self, counts: Counter[Pass]) -> float:
        """Of what the executor of norms computes in a stage's passes, all that is in no layer."""
        total_s = 0.0
        for p, count in counts.items():
            found = Lines()
            for batch in p.batches:
                self._ends(found, batch)
            total_s += count * found.of[self.shape.main].constant
        return total_s

    def _apart(self, stage: Lines, batches: int) -> None:
        """Where KV comes from elsewhere, a pass does not begin with the one before: weights may be loaded ahead, the
        cache not. So the executor waits for the first batch's, in one layer; and the lane that brings it has nothing to
        do in the last layer and in what comes after."""
        ends_s = stage.of[self.shape.main].constant / self.layers
        for lane, tier in ((TO_DEVICE, 1), (READ, 2)):
            loads_s = stage.of[lane].kv[tier] if lane in stage.of else 0.0
            if loads_s > 0:
                first_s = loads_s / self.layers / batches
                stage.add(self.shape.main, kv=(0.0, first_s, 0.0) if tier == 1 else (0.0, 0.0, first_s))
                stage.add(lane, kv=(0.0, ends_s, 0.0) if tier == 1 else (0.0, 0.0, ends_s))

    def _weights(self, stage: Lines, p: Pass, begun: tuple[float, float]) -> None:
        """What streams, once a pass: reads, copies over the link, and tasks and calls of the executor for each unit.
        What follows a layer's last unit is a task of its own."""
        shape, main = self.shape, self.shape.main
        fmt, total = shape.weights.kind, shape.placed_bytes
        units = total / shape.unit_bytes
        read_s = self._fixed("disk0", "load", fmt)
        read = total * self._per_byte("disk0", "load", fmt) + units * read_s
        from_ram, from_disk = (self.layers * units_more for units_more in begun)
        stage.add(READ, from_disk * read_s, weights=(0.0, 0.0, read))
        if main == DEVICE:
            lift_s = self._fixed("h2d0", "lift", fmt)
            lift = total * self._per_byte("h2d0", "lift", fmt) + units * lift_s
            stage.add(TO_DEVICE, (from_ram + from_disk) * lift_s, weights=(0.0, lift, lift))
        attention = sum(part.nbytes for part in shape.placed if part.kind == "attn") / total
        calls = 0.0
        for batch in p.batches:
            rows = batch.total_rows
            in_attention = sum(self._call(main, op, fmt, 0, 0, rows) for op in ("qkv", "attend", "out"))
            calls += attention * in_attention + (1 - attention) * self._call(main, "ffn", fmt, 0, 0, rows)
        each = self._task(main) + calls
        more = (from_ram + from_disk) * each + self.layers * self._task(main)
        stage.add(main, more, weights=(0.0, units * each, units * each))

    def _ends(self, stage: Lines, batch: Batch) -> None:
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

    def _rows(self, stage: Lines, batch: Batch) -> None:
        """Norms and merges of a layer: two each, of one partial."""
        main, spec, t = self.shape.main, self.shape.spec, batch.total_rows
        norm = self._call(main, "norm", "*", *ops.rows_cost(spec, t, 2), t)
        merge = self._call(main, "merge", "*", *ops.rows_cost(spec, t, 3), t)
        stage.add(main, 2 * (norm + merge))

    def _ffn(self, stage: Lines, layer: int, batch: Batch) -> None:
        main, part = self.shape.main, self._parts[f"{layer}.ffn"]
        cost = ops.matrix_cost(part, 0, part.granules, ops.FFN_BLOCKS, batch.total_rows)
        stage.add(main, self._call(main, "ffn", part.format.kind, *cost, batch.total_rows))

    def _attention(self, stage: Lines, layer: int, batch: Batch) -> None:
        """Of a layer: at home where its KV is with the executor; else as `shape.attends` says."""
        shape, main, t = self.shape, self.shape.main, batch.total_rows
        a, part = shape.spec.layers[layer].attention, self._parts[f"{layer}.attn"]
        begins, ranges = not any(batch.start), 2 * len(batch.seqs)
        each = self.kv.kv_bytes(a.head_dim)
        kv_cost = ops.attend_cost(a, part.granules, batch, each)
        longest = max(batch.rows)

        def projections(at: str) -> float:
            qkv = ops.matrix_cost(part, 0, part.granules, ops.QKV_BLOCKS, t)
            out = ops.matrix_cost(part, 0, part.granules, ops.OUT_BLOCKS, t)
            return self._call(at, "qkv", part.format.kind, *qkv, t) + self._call(at, "out", part.format.kind, *out, t)

        def attend(at: str) -> float:
            return self._call(at, "attend", self.kv.kind, *kv_cost, longest)

        def holds_s(at: str) -> float:
            """Its window: the task that attends waits for the load, and the save for all of it."""
            merge = self._call(main, "merge", "*", *ops.rows_cost(shape.spec, t, 3), t)
            return projections(at) + attend(at) + (merge if at == main else 0.0)

        loaded, saved = (self._moved(layer, batch, save) for save in (False, True))
        load_s = self._move("disk0", "kv_load", loaded, ranges) if loaded else 0.0
        save_s = self._move("disk_write0", "kv_save", saved, ranges)
        x_bytes = 4 * t * shape.spec.d_model
        q_bytes, new_bytes = 4 * t * a.heads * a.head_dim, 2 * t * a.kv_heads * each
        if shape.attends == "cpu":
            stage.add("host", projections("host") + attend("host") + self._task("host"))
            copies = self._copy("host", x_bytes, batch) + self._copy(DEVICE, x_bytes, batch)
            stage.add(main, copies + self._task(main))
            self._through_window(stage, 2, (READ, load_s), holds_s("host"), (WRITE, save_s))
            return
        stage.add(main, projections(main))
        at_home = attend(main)
        if main == "host":
            wait = self._task(main) if loaded else 0.0
            stage.add(main, kv=(at_home, 0.0, at_home + wait))
            self._through_window(stage, 2, (READ, load_s), holds_s(main), (WRITE, save_s))
        elif shape.attends == "device":
            stage.add(main, kv=(at_home, at_home + self._task(main), 0.0))
            load_s = self._move("h2d0", "kv_load", loaded, ranges) if loaded else 0.0
            save_s = self._move("d2h0", "kv_save", saved, ranges)
            self._through_window(stage, 1, (TO_DEVICE, load_s), holds_s(main), (TO_HOST, save_s))
        else:
            copies = 0.0 if begins else self._copy(DEVICE, q_bytes, batch) + self._copy("host", q_bytes, batch)
            mine = copies + (at_home if begins else 0.0) + self._task(main)
            theirs = 0.0 if begins else attend("host") + self._task("host")
            new = self._move("d2h0", "kv_save", new_bytes, 2)
            late = 0.0 if begins else max(0.0, new - self._copy(DEVICE, q_bytes, batch)) / shape.batches
            stage.add(main, kv=(at_home, mine, mine))
            stage.add("host", kv=(0.0, theirs + late, theirs + late))
            stage.add(TO_HOST, kv=(0.0, new, new))
            self._through_window(stage, 2, (READ, load_s), theirs + new, (WRITE, save_s))

    def _through_window(
        self, stage: Lines, tier: int, load: tuple[str, float], attend_s: float, save: tuple[str, float]
    ) -> None:
        """KV of a batch in a layer that comes from another tier and goes back there."""

        def of(seconds: float) -> Shares:
            return (0.0, seconds, 0.0) if tier == 1 else (0.0, 0.0, seconds)

        (reads, load_s), (writes, save_s) = load, save
        stage.add(reads, kv=of(load_s))
        stage.add(writes, kv=of(save_s))
        for name, seconds in ((LOADED, load_s), (HELD, attend_s), (SAVED, save_s)):
            stage.add(name, kv=of(seconds))
        # Two windows take turns, batch by batch: each is loaded, read and saved before it is loaded again.
        nb = self.shape.batches
        turn = ((load_s + attend_s + save_s) / nb + (1 - 1 / nb) * max(load_s, attend_s, save_s)) / 2
        stage.add(WINDOW, kv=of(turn))

    def _moved(self, layer: int, batch: Batch, save: bool) -> int:
        """Bytes of K and V that come before the rows (or go back with them), in whole pages."""
        a, page = self.shape.spec.layers[layer].attention, PAGE_TOKENS
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

    def _move(self, lane: str, op: str, nbytes: int, ranges: int) -> float:
        """A task of one batch's KV."""
        return self._seconds(lane, Call(op, -1, None, (), (-1, ranges), self.kv.kind, nbytes, 0))

    def _per_byte(self, lane: str, op: str, fmt: str) -> float:
        return (self._seconds(lane, Call(op, -1, None, (), (), fmt, 1 << 40, 0)) - self._fixed(lane, op, fmt)) / 2**40

    def _fixed(self, lane: str, op: str, fmt: str) -> float:
        return self._seconds(lane, Call(op, -1, None, (), (), fmt, 0, 0))

    def _task(self, lane: str) -> float:
        return self._seconds(lane)

    def _seconds(self, lane: str, *calls: Call) -> float:
        like = 0 if self._prepared else -1
        return self._cost.seconds(Task(0, (lane,), calls, (), (), 0, 0, (), like))
