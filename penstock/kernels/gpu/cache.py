"""The KV cache on a device: pages as views, and storing and loading rows by torch (spec/format.py has the layout).

The Triton kernels store and load within qkv and attend. `store` and `load` are for where Triton is missing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.gpu.memory import storage_dtype
from penstock.spec.format import Format

_MOST_HALF = 65504.0


@dataclass(frozen=True)
class TensorKv:
    """K or V of some sequences in one layer. `blocks` uint8 [pages, K, page_tokens · kv_bytes]: a page has a block for
    each KV head. `pages` int32 [sequences, most pages]: the pages of each sequence in the order of its positions."""

    blocks: Tensor
    page_tokens: int
    head_dim: int
    format: Format
    pages: Tensor

    @property
    def context(self) -> int:
        """The most tokens of a sequence."""
        return int(self.pages.shape[1]) * self.page_tokens

    @property
    def groups(self) -> int:
        """Groups of a row; 1 for float formats."""
        return max(1, self.format.groups(self.head_dim))

    @property
    def codes_bytes(self) -> int:
        return self.format.kv_codes_bytes(self.head_dim)

    def numbers(self) -> Tensor:
        """Codes uint8, or float numbers, of all rows: [pages, K, P, …], a view."""
        raw = self.blocks[:, :, : self.page_tokens * self.codes_bytes]
        typed = raw if self.format.is_quantised else raw.view(storage_dtype(self.format))
        return typed.unflatten(2, (self.page_tokens, -1))

    def factors(self) -> Tensor:
        """Scales and minimums float16 [pages, K, 2, G, P], a view."""
        raw = self.blocks[:, :, self.page_tokens * self.codes_bytes :]
        return raw.view(torch.float16).unflatten(2, (2, self.groups, self.page_tokens))

    def store(self, head: int, rows: Tensor, positions: Tensor, sequence: Tensor) -> None:
        """Writes rows float32 [T, E] of one KV head to positions int32 [T] of the sequences `sequence` int32 [T]."""
        page, slot = self._place(positions, sequence)
        if not self.format.is_quantised:
            kept = rows.clamp(-_MOST_HALF, _MOST_HALF) if self.format.kind == "float16" else rows
            self.numbers()[page, head, slot] = kept.to(storage_dtype(self.format))
            return
        codes = torch.zeros(
            (len(rows), self.codes_bytes * 8 // self.format.bits), dtype=torch.uint8, device=rows.device
        )
        factors = self.factors()
        for g in range(self.groups):
            columns = slice(g * self.format.group, min((g + 1) * self.format.group, self.head_dim))
            codes[:, columns], scale, minimum = _quantise(rows[:, columns], 2**self.format.bits - 1)
            factors[page, head, 0, g, slot] = scale
            factors[page, head, 1, g, slot] = minimum
        if self.format.kind == "int4":
            halves = codes.view(len(rows), -1, 2, 16)
            codes = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
        self.numbers()[page, head, slot] = codes

    def load(self, head: int, page: Tensor) -> Tensor:
        """The pages `page` int64 [T] of one KV head, one for each row: float32 [T, P, E]."""
        numbers = self.numbers()[page, head]
        if not self.format.is_quantised:
            return numbers.float()
        if self.format.kind == "int4":
            by_lane = numbers.unflatten(2, (-1, 1, 16))
            numbers = torch.cat([by_lane & 15, by_lane >> 4], 3).flatten(2)
        scale, minimum = self.factors()[page, head].float().transpose(2, 3).repeat_interleave(
            self.format.group, 3
        )[..., : self.head_dim].unbind(1)  # fmt: skip
        return numbers[..., : self.head_dim].float().mul_(scale).add_(minimum)

    def rows(self, head: int, page: Tensor, slot: Tensor) -> Tensor:
        """The rows of one KV head at slots of pages, both int64 of any one shape [...]: float32 [..., E]."""
        numbers = self.numbers()[page, head, slot]
        if not self.format.is_quantised:
            return numbers.float()
        if self.format.kind == "int4":
            by_lane = numbers.unflatten(-1, (-1, 1, 16))
            numbers = torch.cat([by_lane & 15, by_lane >> 4], -2).flatten(-3)
        scale, minimum = (
            self.factors()[:, :, i].transpose(2, 3)[page, head, slot].float().repeat_interleave(self.format.group, -1)
            for i in range(2)
        )
        e = self.head_dim
        return numbers[..., :e].float().mul_(scale[..., :e]).add_(minimum[..., :e])

    def _place(self, positions: Tensor, sequence: Tensor) -> tuple[Tensor, Tensor]:
        """(page, slot) int64 [T] of every row."""
        position = positions.long()
        page = self.pages[sequence.long(), position // self.page_tokens].long()
        return page, position % self.page_tokens


def _quantise(values: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """values float32 [T, columns of a group] → codes uint8 [T, columns], scales and minimums float16 [T]. The rule is
    the reference's."""
    spoilt = values.isnan().any(1)
    kept = torch.where(spoilt[:, None], 0.0, values).clamp(-_MOST_HALF, _MOST_HALF)
    minimum = _half_beyond(kept.amin(1), down=True)
    offset = minimum.float()
    scale = _half_beyond((kept.amax(1) - offset) / levels, down=False)
    wide = scale.float()
    inverse = torch.where(wide > 0, 1.0 / torch.where(wide > 0, wide, 1.0), 0.0)
    codes = ((kept - offset[:, None]) * inverse[:, None] + 0.5).to(torch.uint8)
    return codes, scale, torch.where(spoilt, torch.nan, minimum)


def _half_beyond(values: Tensor, down: bool) -> Tensor:
    """float32 [T] → float16 [T]: the nearest one that is not above (`down`) or not below the value. "Not below" is
    right only for values of 0 and more."""
    near = values.half()
    bits, back = near.view(torch.int16), near.float()
    if not down:
        return torch.where(back < values, bits + 1, bits).view(torch.float16)
    zero = (bits & 0x7FFF) == 0  # below a zero of either sign comes the smallest negative number, 0x8001
    below = torch.where(zero, -32767, torch.where(bits < 0, bits + 1, bits - 1)).to(torch.int16)
    return torch.where(back > values, below, bits).view(torch.float16)
