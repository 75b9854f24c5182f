"""The short-term memory: the last S vectors of a layer, and those that have just left it.

One tensor `recent` (B x W x e, W >= K + S) holds both.  The vectors of a row stand at its right
end, `filled` of them: the last S are the short-term memory, the older ones wait to be written to
the long-term memory by the next segment.  The first K columns are the sinks (Xiao et al., 2024):
the first K vectors of a stream stay visible when they leave, and no long-term memory gets them.
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


@dataclass
class Leaving:
    """How many vectors of each row have left, and how many of them the long-term memory gets."""

    among: Tensor  # B
    picks: Tensor  # B
    most: int  # picks, known to the CPU


def rate(looked: Tensor) -> Tensor:
    """How much was looked at each vector by those that could.  B x W x 2 -> B x W"""
    looks, chances = looked.unbind(-1)
    return looks / chances.clamp(min=1e-9)


def pick(left: Tensor, looked: Tensor, leaving: Leaving) -> Tensor:
    """Those of the last `among` vectors of each row that were looked at most, in their order, at
    the right end.  left: B x W x e, looked: B x W.  -> B x `most` x e"""
    width = left.size(1)
    place = torch.arange(width, device=left.device)
    marks = looked.masked_fill(place < width - leaving.among[:, None], -torch.inf)
    rank = marks.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    chosen = torch.where(rank < leaving.picks[:, None], place, -1).sort(dim=1).values
    index = chosen[:, width - leaving.most :].clamp(min=0)
    return left.gather(1, index[..., None].expand(-1, -1, left.size(2)))


@dataclass(frozen=True)
class ShortTermMemory:
    length: int  # S
    sinks: int = 0  # K

    @property
    def size(self) -> int:
        """Vectors that attention may see: [sinks; short-term memory]."""
        return self.sinks + self.length

    def split(
        self, recent: Tensor, joining: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """-> vectors that have left: B x W-K-S x e, [sinks; short-term memory]: B x K+S x e"""
        waiting = recent.size(1) - self.size
        sinks, left, short_term = recent.split([self.sinks, waiting, self.length], dim=1)
        if joining is not None:
            column, joins = joining
            first = left.gather(1, column[..., None].expand(-1, -1, left.size(2)))
            sinks = torch.where(joins[..., None], first, sinks)
        return left, torch.cat([sinks, short_term], dim=1) if self.sinks else short_term

    def held(self, position: Sequence[int]) -> list[int]:
        """How many sinks each row has.  position: tokens of the stream before the segment."""
        return [min(max(count - self.length, 0), self.sinks) for count in position]

    def left(self, filled: Sequence[int], position: Sequence[int]) -> list[int]:
        """How many vectors of each row go on to the long-term memory: all that have left but the
        first of the stream."""
        gone = [
            max(all_of - max(count, self.length) - self.sinks, 0)
            for count, all_of in zip(filled, position, strict=True)
        ]
        return [
            max(all_of - self.length - self.sinks, 0) - before
            for all_of, before in zip(position, gone, strict=True)
        ]

    def joins(self, filled: Sequence[int], position: Sequence[int]) -> bool:
        """Whether some row has new sinks."""
        gone = [all_of - count for count, all_of in zip(filled, position, strict=True)]
        rows = zip(gone, self.held(position), strict=True)
        return any(before < held for before, held in rows)

    def joining(self, filled: Tensor, position: Tensor, waiting: int) -> tuple[Tensor, Tensor]:
        """Which of the `waiting` columns become sinks.  -> of each sink its column, and whether
        it is new: B x K"""
        last = position - self.length  # the stream's index of the first that has not left
        index = torch.arange(self.sinks, device=position.device)
        joins = (index < last[:, None]) & (index >= (position - filled)[:, None])
        return (index - last[:, None] + waiting).clamp(min=0, max=waiting - 1), joins

    def visible(self, filled: Sequence[int], position: Sequence[int]) -> list[int]:
        """How many vectors of each row attention sees."""
        held = self.held(position)
        return [min(a, self.length) + b for a, b in zip(filled, held, strict=True)]

    def shown(self, visible: Sequence[int]) -> int:
        """How many of the last columns of [sinks; short-term memory] some row sees."""
        most = max(visible)
        return self.size if most > self.length else most

    def absent(self, filled: Tensor, position: Tensor, shown: int) -> Tensor:
        """True where the last `shown` places have no vector yet.  -> B x shown"""
        place = torch.arange(self.length, device=filled.device)
        absent = place < self.length - filled[:, None]
        if shown > self.length:
            place = torch.arange(self.sinks, device=filled.device)
            absent = torch.cat([place >= (position - self.length)[:, None], absent], dim=1)
        return absent[:, absent.size(1) - shown :]

    def after(self, filled: Tensor, read: Tensor) -> Tensor:
        """`filled` after a segment: what had left has been written."""
        return filled.clamp(max=self.length) + read

    def push(self, kept: Tensor, new: Tensor, lengths: Tensor | None) -> Tensor:
        """`recent` after a segment.  kept: [sinks; short-term memory]"""
        sinks, short_term = kept.split([self.sinks, self.length], dim=1)
        return torch.cat([sinks, push(short_term, new, lengths)], dim=1)

    def push_looked(self, kept: Tensor, new: Tensor, shown: int, lengths: Tensor | None) -> Tensor:
        """How much each vector of `recent` was looked at, after a segment.  kept: B x K+S x 2, of
        [sinks; short-term memory] before it.  new: B x `shown`+T x 2, to add.  -> B x W x 2"""
        border = kept.size(1) - shown
        kept = torch.cat([kept[:, :border], kept[:, border:] + new[:, :shown]], dim=1)
        kept[:, : self.sinks] = 0  # they have no need of it, and are looked at for ever
        return self.push(kept, new[:, shown:], lengths)

    def widen(self, recent: Tensor, segment: int) -> Tensor:
        """The same with room for a segment of that many."""
        room = self.size + segment - recent.size(1)
        sinks, rest = recent.split([self.sinks, recent.size(1) - self.sinks], dim=1)
        return torch.cat([sinks, F.pad(rest, (0, 0, room, 0))], dim=1)

    def line_up(self, recent: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """[sinks; short-term memory; segment] with the segment at the same column in every row: its
        vectors, `lengths` of up to `longest`, are the last of `recent`.  -> B x K+S+longest x e"""
        width = self.size + longest
        place = torch.arange(width, device=recent.device)
        index = (longest - lengths[:, None] + place).clamp(max=width - 1)
        index = torch.where(place < self.sinks, place, index)
        return recent.gather(1, index[..., None].expand(-1, -1, recent.size(2)))
