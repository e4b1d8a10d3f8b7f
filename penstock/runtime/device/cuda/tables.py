"""What a device's kernels read of a batch beside its activations: positions, sequences, rows whose logits are wanted,
and rotations. In device memory at fixed addresses, so that a recorded graph finds what the pass at hand has there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.graph.batch import Batch
from penstock.kernels import rope
from penstock.kernels.gpu.attention import turns
from penstock.spec.plan import Plan


class DeviceTables:
    """One for each batch id of a plan. `fill` gives it the batch of a pass; what it hands out are views.

    int32 positions [rows], sequences [rows], chosen rows [logits_rows]; float32 [2, rows, dims / 2] for each rope."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        rows = max(plan.chunk_rows, plan.batch_seqs)
        self._rows, self._device = rows, device
        self._all = torch.zeros(2 * rows + plan.logits_rows, dtype=torch.int32, device=device)
        self._staged = torch.zeros(self._all.shape, dtype=torch.int32, pin_memory=device.type != "cpu")
        self._frequencies: dict[int, tuple[Tensor, float]] = {}
        self._turns: dict[int, tuple[Tensor, Tensor]] = {}
        self._kind: list[int | None] = []
        kinds: dict[object, int] = {}
        for layer in plan.target.spec.layers:
            found = layer.attention.rope
            if found is None:
                self._kind.append(None)
                continue
            if found not in kinds:
                number = kinds[found] = len(kinds)
                inverse, factor = rope.frequencies(found, plan.context)
                self._frequencies[number] = (torch.from_numpy(inverse).to(device), factor)
                shape = (rows, len(inverse))
                self._turns[number] = (torch.empty(shape, device=device), torch.empty(shape, device=device))
            self._kind.append(kinds[found])
        self._batch: Batch | None = None
        self._turned: set[int] = set()

    def fill(self, batch: Batch) -> None:
        """On the current stream. The staged copy is read by the link until the pass ends; the next one comes after."""
        if batch == self._batch:
            return
        at, first = 0, batch.first_seq
        positions: list[int] = []
        sequences: list[int] = []
        for seq, start, rows in zip(batch.seqs, batch.start, batch.rows, strict=True):
            positions += range(start, start + rows)
            sequences += [seq - first] * rows
        for values in (positions, sequences, batch.logits):
            self._staged[at : at + len(values)] = torch.tensor(values, dtype=torch.int32)
            at += self._rows
        self._all.copy_(self._staged, non_blocking=True)
        self._batch = batch
        self._turned.clear()

    def forget_turns(self) -> None:
        """The next `turn` computes them: within a recording, so that a replay does too."""
        self._turned.clear()

    @property
    def positions(self) -> Tensor:
        return self._all[: self._total]

    @property
    def sequence(self) -> Tensor:
        return self._all[self._rows : self._rows + self._total]

    @property
    def chosen(self) -> Tensor:
        """Rows whose logits are wanted."""
        assert self._batch is not None
        return self._all[2 * self._rows : 2 * self._rows + len(self._batch.logits)]

    def turn(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """cos and sin of the batch's positions, computed once a pass for layers that share a rope."""
        kind = self._kind[layer]
        if kind is None:
            return None
        cos, sin = (each[: self._total] for each in self._turns[kind])
        if kind not in self._turned:
            turns(self.positions, *self._frequencies[kind], cos, sin)
            self._turned.add(kind)
        return cos, sin

    @property
    def _total(self) -> int:
        assert self._batch is not None
        return self._batch.total_rows


def tables_of(plan: Plan, device: torch.device) -> Sequence[DeviceTables]:
    """By batch id."""
    return [DeviceTables(plan, device) for _ in range(plan.batches_per_pass)]
