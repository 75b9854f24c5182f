"""Where is a word now?  The places of past vectors, followed through every write."""

from __future__ import annotations

import torch
from torch import Tensor

from .contract import Move


class Places:
    """The vectors that one row of a memory holds, in the order of their coming, on [0, 1].

    A vector's cell, its space, reaches half the way to either neighbour; the first one's begins
    where the memory's contents do, the last one's ends at 1.  So all spaces and the empty part of
    the line, [0, begin), sum to 1.
    """

    def __init__(self) -> None:
        self.first = 0  # the first vector that has a place, counted as they have come
        self.t = torch.zeros(0, dtype=torch.float64)  # K, not falling
        self.begin = 1.0

    @property
    def after(self) -> int:
        """The first vector that has not come to a place yet."""
        return self.first + len(self.t)

    def follow(self, move: Move) -> None:
        """One write."""
        if move.forgets:
            self.first, self.t, self.begin = self.after, self.t[:0], move.begin
        else:
            self.t = move(self.t)
            if len(self.t):
                begin = move(torch.tensor([self.begin], dtype=torch.float64))
                self.begin = max(0.0, float(begin))
        self.t = torch.cat([self.t, move.new])
        lost = int((self.t < 0).sum())
        self.first, self.t = self.first + lost, self.t[lost:]

    def edges(self) -> Tensor:
        """The borders of the cells.  -> K + 1"""
        middles = (self.t[1:] + self.t[:-1]) / 2
        ends = torch.tensor([self.begin, 1.0], dtype=torch.float64)
        return torch.cat([ends[:1], middles, ends[1:]])

    def spaces(self) -> Tensor:
        """-> K"""
        return self.edges().diff()
