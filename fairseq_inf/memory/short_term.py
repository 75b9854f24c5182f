"""The short-term memory: the last S vectors of a layer, and those that have just left it.

One tensor `recent` (B x W x e, W >= S) holds both.  The vectors of a row stand at its right end,
`filled` of them: the last S are the short-term memory, the older ones wait to be written to the
long-term memory by the next segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def push(short_term: Tensor, new: Tensor, lengths: Tensor | None = None) -> Tensor:
    """Append a segment.  lengths: B, the real vectors at the left of each row; None if all are.

    -> B x S+T x e, the vectors of each row at its right end
    """
    recent = torch.cat([short_term, new], dim=1)
    if lengths is None:
        return recent
    width = recent.size(1)
    shift = (new.size(1) - lengths)[:, None]  # how far each row moves to the right
    source = torch.arange(width, device=new.device) - shift  # B x W
    moved = recent.gather(1, source.clamp(min=0)[..., None].expand(-1, -1, recent.size(2)))
    return moved.masked_fill((source < 0)[..., None], 0)


@dataclass(frozen=True)
class ShortTermMemory:
    length: int  # S

    def split(self, recent: Tensor) -> tuple[Tensor, Tensor]:
        """-> vectors that have left: B x W-S x e, short-term memory: B x S x e"""
        border = recent.size(1) - self.length
        return recent[:, :border], recent[:, border:]

    def left(self, filled: Sequence[int]) -> list[int]:
        """How many vectors of each row have left."""
        return [max(count - self.length, 0) for count in filled]

    def visible(self, filled: Sequence[int]) -> list[int]:
        """How many vectors of each row attention sees."""
        return [min(count, self.length) for count in filled]

    def absent(self, filled: Tensor, shown: int) -> Tensor:
        """True where the last `shown` places have no vector yet.  -> B x shown"""
        place = torch.arange(shown, device=filled.device)
        return place < shown - filled.clamp(max=self.length)[:, None]

    def after(self, filled: Tensor, read: Tensor) -> Tensor:
        """`filled` after a segment: what had left has been written."""
        return filled.clamp(max=self.length) + read

    def widen(self, recent: Tensor, segment: int) -> Tensor:
        """The same with room for a segment of that many, at the left."""
        return F.pad(recent, (0, 0, self.length + segment - recent.size(1), 0))

    def line_up(self, recent: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """[short-term memory; segment] with the segment at the same column in every row: its
        vectors, `lengths` of up to `longest`, are the last of `recent`.  -> B x S+longest x e"""
        width = self.length + longest
        place = torch.arange(width, device=recent.device)
        index = (longest - lengths[:, None] + place).clamp(max=width - 1)
        return recent.gather(1, index[..., None].expand(-1, -1, recent.size(2)))
