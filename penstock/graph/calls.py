"""Makes calls: looks up slots and costs of operands by name, for all blocks alike. A part of the lowering."""

from __future__ import annotations

from penstock.graph import ops
from penstock.graph.arenas import Layout, neurons_of
from penstock.graph.batch import Batch
from penstock.graph.emit import Emitter
from penstock.graph.tasks import Call, Slot
from penstock.spec.format import Kinds
from penstock.spec.part_keys import block_keys
from penstock.spec.parts import active_columns
from penstock.spec.places import HOST, Executor, Lane, kernels_of

Cost = tuple[int, int]  # bytes, flops


class Calls:
    """Hands calls to the emitter. `units`: part → indices of its units in the plan, in order."""

    def __init__(self, layout: Layout, emit: Emitter) -> None:
        self.plan, self.layout, self.emit = layout.plan, layout, emit
        self.units: dict[str, list[int]] = {}
        for i, unit in enumerate(self.plan.units):
            self.units.setdefault(unit.part, []).append(i)
        spec = self.plan.target.spec
        self._blocks = {
            (layer, kind): [u for key in block_keys(spec, layer, kind) for u in self.units[key]]
            for layer in range(len(spec.layers))
            for kind in ("attn", "ffn")
        }
        self._shares: dict[tuple[int, str, str, Executor | None], dict[Executor, list[int]]] = {}
        self._matrix_costs: dict[tuple[int, tuple[str, ...]], Cost] = {}

    def of_block(self, layer: int, kind: str) -> list[int]:
        """The units of a layer's block, in the order in which they are computed. `kind`: attn or ffn."""
        return self._blocks[layer, kind]

    def shares(self, layer: int, kind: str, purpose: str, asking: Executor | None = None) -> dict[Executor, list[int]]:
        """The units of a layer's block by their executor, the host last. `asking`: the executor that adds experts up
        when the router has said which. Their units are left out then. Kept, since a layer may have thousands of
        units."""
        shares = self._shares.get((layer, kind, purpose, asking))
        if shares is None:
            by_executor: dict[Executor, list[int]] = {}
            for u in self.of_block(layer, kind):
                unit = self.plan.units[u]
                if asking and self.layout.parts[unit.part].kind == "experts":
                    by_executor.setdefault(asking, [])
                else:
                    by_executor.setdefault(unit.executor(purpose), []).append(u)
            order = sorted(by_executor, key=lambda executor: executor == HOST)
            shares = {executor: by_executor[executor] for executor in order}
            self._shares[layer, kind, purpose, asking] = shares
        return shares

    def add(
        self,
        executor: Executor,
        operands: ops.Operands,
        unit: int,
        batch: Batch,
        fmt: Kinds,
        cost: Cost,
    ) -> Call:
        """Hands a call of the executor to the emitter, and returns it."""
        call = Call(operands, unit, batch, fmt, *cost)
        self.emit.call(kernels_of(executor), call)
        return call

    def copy(
        self, batch: Batch, name: str, nbytes: int, source: Executor, target: Executor, lands: str | None = None,
        of: int | None = None,
    ) -> Slot:  # fmt: skip
        """Copies activations across the link, on the device's lane. Returns the slot that they land in. `lands`: the
        buffer's name on the target, where it differs from `name`. `of`: the id of the batch whose buffers they are, if
        it is not this one's."""
        owner = batch.id if of is None else of
        from_slot = self.layout.act(source, owner, name, nbytes)
        to_slot = self.layout.act(target, owner, lands or name, nbytes)
        self._copied(batch, name, from_slot, to_slot, source, target)
        return to_slot

    def copy_rows(
        self, batch: Batch, name: str, source: Executor, target: Executor, lands: str | None = None, lo: int = 0
    ) -> None:  # fmt: skip
        """`copy` of rows of a buffer float32 [T, D], from row `lo` on, as many as `batch` has."""
        slots = self.rows(source, batch, name, lo), self.rows(target, batch, lands or name, lo)
        self._copied(batch, name, *slots, source, target)

    def _copied(
        self, batch: Batch, name: str, from_slot: Slot, to_slot: Slot, source: Executor, target: Executor
    ) -> None:  # fmt: skip
        device = target if source == HOST else source
        self.add(device, ops.Copy(from_slot, to_slot, name), -1, batch, "*", (from_slot.nbytes, 0))

    def norm(
        self, batch: Batch, norms: str, which: str, layer: int | None, rows: range | tuple[int, ...]
    ) -> None:  # fmt: skip
        """Adds a norm of these rows of x on the main executor, in which they come to h, float32 [rows, D]. `norms`: the
        part with the norm's weights. Where the model has no such norm, the op copies x to h: so every block reads h."""
        if not len(rows):
            return
        main, spec = self.plan.main, self.plan.target.spec
        x = self.rows(main, batch, "x")
        wide = max(spec.d_model, spec.d_embed) if norms == "edges" else spec.d_model
        h = self.layout.act(main, batch.id, "h", 4 * len(rows) * wide)
        norm = ops.Norm(self.whole(norms), x, h, self.scratch(main), which=which, layer=layer)
        self.add(main, norm, -1, batch, "*", ops.rows_cost(spec, len(rows), 2))

    def order(self, executor: Executor, batch: Batch, layer: int, which: str, rows: Slot) -> None:
        """Brings the columns of `rows`, float32 [T, C], into an order of a layer's matrices, where these have one."""
        if self.plan.target.spec.layers[layer].ordered:
            norms, values = self.layout.norms(layer, executor), rows.nbytes // 4
            order = ops.Order(norms, rows, self.scratch(executor), which=which, layer=layer)
            self.add(executor, order, -1, batch, "*", (2 * rows.nbytes, values))

    def move_kv(self, lane: Lane, move: ops.KvMove, batch: Batch, nbytes: int) -> None:
        """Moves K and V of a batch from one tier to another, in a task of its own."""
        fmt = self.layout.kv.home(move.layer, batch).format.kind
        self.emit.alone((lane,), Call(move, -1, batch, fmt, nbytes, 0))

    def matrix_cost(self, u: int, blocks: tuple[str, ...], rows: int) -> Cost:
        """The cost of multiplying `rows` rows with a unit's blocks. The cost of one row is worked out once per unit."""
        cost_of_row = self._matrix_costs.get((u, blocks))
        if cost_of_row is None:
            unit = self.plan.units[u]
            cost_of_row = ops.matrix_cost(self.layout.parts[unit.part], unit.lo, unit.hi, blocks, 1)
            self._matrix_costs[u, blocks] = cost_of_row
        return cost_of_row[0], cost_of_row[1] * rows

    def rows(self, executor: Executor, batch: Batch, name: str, lo: int = 0) -> Slot:
        """The slot of a buffer float32 [T, D] of a batch. `lo`: the first of its rows, of those that the buffer has
        room for."""
        row_bytes = 4 * self.plan.target.spec.d_model
        slot = self.layout.act(executor, batch.id, name, (lo + batch.total_rows) * row_bytes)
        return Slot(slot.arena, slot.lo + lo * row_bytes, slot.hi) if lo else slot

    def active(self, layer: int, executor: Executor, batch: Batch) -> Slot:
        """The slot of a batch's `active`, uint8 [T, N]: which neurons of the layer's FFN each row needs. N is in whole
        granules."""
        nbytes = batch.total_rows * active_columns(neurons_of(self.plan.target.spec.layers[layer]))
        return self.layout.act(executor, batch.id, self.layout.active_name(layer), nbytes)

    def scratch(self, executor: Executor) -> Slot:
        return self.layout.scratch[executor]

    def whole(self, key: str) -> Slot:
        """The slot of a part that is one unit, at its home."""
        return self.layout.weights[self.units[key][0]]
