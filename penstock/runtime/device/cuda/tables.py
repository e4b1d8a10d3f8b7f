"""Tables that a GPU's kernels read of a batch beside its activations: positions, sequences, rotations, and rows that
want logits. They lie in device memory at fixed addresses, so that a recorded graph reads those of the current pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.graph.arenas import Layout
from penstock.graph.batch import Batch
from penstock.kernels import rope
from penstock.kernels.gpu.attention import turns
from penstock.spec.plan import Plan


class DeviceTables:
    """The tables of one batch id of a plan. `fill` fills them for the batch of a pass; the properties are views.

    int32: positions [rows], sequences [rows] and chosen rows [logits_rows], in one tensor, and pages [sequences, most
    pages of one] in another. float32: cos and sin,
    [rows, dims / 2] each, for each rope of the model. `rows` is the most that a batch has.
    `delegated`: whether attention of any layer is, without which there are no fresh rows."""

    def __init__(self, plan: Plan, most_pages: int, device: torch.device, delegated: bool) -> None:
        rows = max(plan.chunk_rows, plan.batch_seqs)
        self._rows, self._device = rows, device
        self._all = torch.zeros(2 * rows + plan.logits_rows, dtype=torch.int32, device=device)
        self._staged = torch.zeros(self._all.shape, dtype=torch.int32, pin_memory=device.type != "cpu")
        self.pages = torch.zeros((plan.batch_seqs, most_pages), dtype=torch.int32, device=device)
        self._staged_pages = torch.zeros(self.pages.shape, dtype=torch.int32, pin_memory=device.type != "cpu")
        self._of_pages: Sequence[Sequence[int]] = ()  # that `pages` holds
        # Fresh pages: of beginnings, or of other rows the one page 0 (`graph.fresh`).
        fresh_seqs, fresh_rows = (plan.batch_seqs, rows) if delegated else (0, 0)
        self.fresh_pages = torch.zeros((fresh_seqs, most_pages), dtype=torch.int32, device=device)
        self._of_fresh: Sequence[Sequence[int]] = ()
        self._numbers = torch.arange(fresh_rows, dtype=torch.int32, device=device)
        self._zeros = torch.zeros(fresh_rows, dtype=torch.int32, device=device)
        self._frequencies: dict[int, tuple[Tensor, float]] = {}
        self._turns: dict[int, tuple[Tensor, Tensor]] = {}
        self._kind: list[int | None] = []
        kinds: dict[object, int] = {}
        for layer in plan.target.spec.layers:
            layer_rope = layer.attention.rope
            if layer_rope is None:
                self._kind.append(None)
                continue
            if layer_rope not in kinds:
                number = kinds[layer_rope] = len(kinds)
                inverse, factor = rope.frequencies(layer_rope, plan.context)
                self._frequencies[number] = (torch.from_numpy(inverse).to(device), factor)
                shape = (rows, len(inverse))
                self._turns[number] = (torch.empty(shape, device=device), torch.empty(shape, device=device))
            self._kind.append(kinds[layer_rope])
        self._batch: Batch | None = None
        self._filled = False  # in this pass
        self._turned: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that the tables take."""
        ints = [self._all, self.pages, self.fresh_pages, self._numbers, self._zeros]
        floats = [each for turned in self._turns.values() for each in turned]
        return sum(table.nbytes for table in (*ints, *floats, *(inverse for inverse, _ in self._frequencies.values())))

    def begin(self) -> None:
        """A pass starts, and the one before has ended: the tables may be filled once."""
        self._filled = False

    def fill(self, batch: Batch, pages: Sequence[Sequence[int]], fresh: Sequence[Sequence[int]] = ()) -> None:
        """Fills the tables, on the current stream. `pages[i]`: the pages of the batch's sequence i. `fresh`: likewise
        its fresh pages, if they are several. The link may read the staged copies until the pass ends; the next pass
        fills them only after that."""
        if batch == self._batch:
            return
        assert not self._filled, f"two batches {batch.id} in one pass: the link may still read the tables of the first"
        self._filled = True
        offset = 0
        positions: list[int] = []
        sequences: list[int] = []
        for i, (start, rows) in enumerate(zip(batch.start, batch.rows, strict=True)):
            positions += range(start, start + rows)
            sequences += [i] * rows
        for values in (positions, sequences, batch.logits):
            self._staged[offset : offset + len(values)] = torch.tensor(values, dtype=torch.int32)
            offset += self._rows
        self._all.copy_(self._staged, non_blocking=True)
        if pages != self._of_pages:
            for row, ids in enumerate(pages):
                self._staged_pages[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
            self.pages.copy_(self._staged_pages, non_blocking=True)
            self._of_pages = pages
        if fresh != self._of_fresh:
            self.fresh_pages.zero_()
            for row, ids in enumerate(fresh):
                first = torch.arange(len(ids), dtype=torch.int32, device=self._device)
                self.fresh_pages[row, : len(ids)] = first + ids[0]  # consecutive, so nothing has to cross the link
            self._of_fresh = fresh
        self._batch = batch
        self._turned.clear()

    def forget_turns(self) -> None:
        """The next `turn` computes cos and sin again. Called before a recording, so that a replay computes them too."""
        self._turned.clear()

    @property
    def positions(self) -> Tensor:
        """The position of each row, int32 [T]."""
        return self._all[: self._total]

    @property
    def sequence(self) -> Tensor:
        """The sequence of each row, by its place in the batch, int32 [T]."""
        return self._all[self._rows : self._rows + self._total]

    @property
    def fresh_rows(self) -> tuple[Tensor, Tensor]:
        """As positions and sequence: those of rows that lie one after the other, as of one sequence, int32 [T] each."""
        return self._numbers[: self._total], self._zeros[: self._total]

    @property
    def chosen(self) -> Tensor:
        """The rows whose logits are wanted, int32 [n]."""
        assert self._batch is not None
        return self._all[2 * self._rows : 2 * self._rows + len(self._batch.logits)]

    def turn(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """cos and sin of the batch's positions, float32 [T, dims / 2] each, computed once a pass for all layers that
        share a rope. None where the layer does not rotate."""
        kind = self._kind[layer]
        if kind is None:
            return None
        cos, sin = (table[: self._total] for table in self._turns[kind])
        if kind not in self._turned:
            turns(self.positions, *self._frequencies[kind], cos, sin)
            self._turned.add(kind)
        return cos, sin

    @property
    def _total(self) -> int:
        assert self._batch is not None
        return self._batch.total_rows


def tables_of(plan: Plan, device: torch.device) -> Sequence[DeviceTables]:
    """The tables of all batches of a plan; a batch's id is its index."""
    layout = Layout(plan)
    most_pages, delegated = layout.kv.pages_per_seq, bool(layout.delegated)
    return [DeviceTables(plan, most_pages, device, delegated) for _ in range(plan.batches_per_pass)]
