"""The short-term memory: the last S vectors of a layer, and those that have just left it.

One Window holds both, in W >= K + S columns.  The vectors of a row stand at its right end, `filled`
of them: the last S are the short-term memory, the older ones wait to be written to the long-term
memory by the next segment.  The first K columns are the sinks (Xiao et al., 2024): the first K
vectors of a stream stay visible when they leave, and no long-term memory gets them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .state import Ranges, State

# B rows, W columns of a window, T tokens of the segment, e width, m marks


@dataclass
class Window(State):
    vectors: Tensor  # B x W x e
    marks: Tensor  # B x W x m: what the long-term memory notes of each; m may be 0
    # in evaluation, where weights stay: keys and values of each, B x W x 2 G d; else B x W x 0
    projected: Tensor

    def ranges(self) -> Ranges:
        yield "marks", 0, torch.inf


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
    sinks: int = 0  # K

    @property
    def size(self) -> int:
        """Vectors that attention may see: [sinks; short-term memory]."""
        return self.sinks + self.length

    def split(
        self, window: Window, joining: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Window, Window]:
        """-> what has left: W-K-S columns, and [sinks; short-term memory]: K+S columns"""
        left = window.map(lambda x: x[:, self.sinks : x.size(1) - self.length])
        return left, window.map(lambda x: self._visible(x, joining))

    def _visible(self, x: Tensor, joining: tuple[Tensor, Tensor] | None) -> Tensor:
        short_term = x[:, x.size(1) - self.length :]
        if not self.sinks:
            return short_term
        sinks = x[:, : self.sinks]
        if joining is not None:
            column, joins = joining
            left = x[:, self.sinks : x.size(1) - self.length]
            first = left.gather(1, column[..., None].expand(-1, -1, x.size(2)))
            sinks = torch.where(joins[..., None], first, sinks)
        return torch.cat([sinks, short_term], dim=1)

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

    def push(
        self,
        visible: Window,
        new: Tensor,
        projected: Tensor,
        marks: Tensor | None,
        lengths: Tensor | None,
    ) -> Window:
        """The window after a segment.  visible: [sinks; short-term memory].  new: B x T x e, and
        what is `projected` of it.  marks: what is added to those of the last columns of `visible`,
        and the new ones' own, B x shown+T x m; None if there are none."""
        old = visible.marks
        if marks is None:
            marks = old.new_zeros(len(new), new.size(1), old.size(2))
        else:
            shown = marks.size(1) - new.size(1)
            old = torch.cat([old[:, : old.size(1) - shown],
                             old[:, old.size(1) - shown :] + marks[:, :shown]], dim=1)  # fmt: skip
            old[:, : self.sinks] = 0  # they stay, and are looked at for ever
            marks = marks[:, shown:]
        return Window(
            self._push(visible.vectors, new, lengths),
            self._push(old, marks, lengths),
            self._push(visible.projected, projected, lengths),
        )

    def _push(self, visible: Tensor, new: Tensor, lengths: Tensor | None) -> Tensor:
        sinks, short_term = visible.split([self.sinks, self.length], dim=1)
        pushed = push(short_term, new, lengths)
        return torch.cat([sinks, pushed], dim=1) if self.sinks else pushed

    def widen(self, window: Window, segment: int) -> Window:
        """The same with room for a segment of that many."""

        def wide(x: Tensor) -> Tensor:
            room = self.size + segment - x.size(1)
            sinks, rest = x.split([self.sinks, x.size(1) - self.sinks], dim=1)
            return torch.cat([sinks, F.pad(rest, (0, 0, room, 0))], dim=1)

        return window.map(wide)

    def line_up(self, recent: Tensor, lengths: Tensor, longest: int) -> Tensor:
        """[sinks; short-term memory; segment] with the segment at the same column in every row: its
        vectors, `lengths` of up to `longest`, are the last of `recent`.  -> B x K+S+longest x e"""
        width = self.size + longest
        place = torch.arange(width, device=recent.device)
        index = (longest - lengths[:, None] + place).clamp(max=width - 1)
        index = torch.where(place < self.sinks, place, index)
        return recent.gather(1, index[..., None].expand(-1, -1, recent.size(2)))
