"""Some of the vectors that a memory has been given, followed to their places, and the words that
hold the most space there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_inf.memory import Move


class Sample:
    """Some of the vectors that a memory has been given, and where they are: every vector of the
    stream at first, then every second, fourth .., so that there are never more than `most`."""

    def __init__(self, most: int = 256) -> None:
        self.most, self.every = most, 1
        self.waiting: list[tuple[int, Tensor]] = []  # have come, and have no place yet
        self.kept: list[tuple[int, Tensor]] = []  # number of the vector, and the vector: e
        self.t = torch.zeros(0, dtype=torch.float64)

    def follow(self, move: Move, numbers: Tensor, vectors: Tensor) -> None:
        """One write.  numbers: n, vectors: n x e, of those that come, as they are stored."""
        self.waiting += zip(numbers.tolist(), vectors, strict=True)
        if move.forgets:
            self.kept, self.t = [], self.t[:0]
        moved = move(self.t).tolist()
        for t in move.new.tolist():
            number, vector = self.waiting.pop(0)
            if number % self.every == 0:
                self.kept.append((number, vector))
                moved.append(t)
        while len(self.kept) > self.most:
            self.every *= 2
            stay = [i for i, (number, _) in enumerate(self.kept) if number % self.every == 0]
            self.kept, moved = [self.kept[i] for i in stay], [moved[i] for i in stay]
        alive = [i for i, t in enumerate(moved) if t >= 0]
        self.kept = [self.kept[i] for i in alive]
        self.t = torch.tensor([moved[i] for i in alive], dtype=torch.float64)

    def numbers(self) -> Tensor:
        """-> K"""
        return torch.tensor([number for number, _ in self.kept], dtype=torch.long)

    def vectors(self) -> Tensor:
        """-> K x e"""
        return torch.stack([vector for _, vector in self.kept])


def phrases(spaces: Sequence[float], width: int = 4, most: int = 12) -> list[tuple[int, int]]:
    """The runs of `width` neighbours with the largest spaces, none over another.
    -> (first, behind the last), the largest one first"""
    total = torch.as_tensor(spaces, dtype=torch.float64)
    width = min(width, len(total))
    if not width:
        return []
    sums = total.unfold(0, width, 1).sum(dim=1)
    found: list[tuple[int, int]] = []
    taken = torch.zeros(len(sums), dtype=torch.bool)
    for start in sums.argsort(descending=True, stable=True).tolist():
        if taken[start]:
            continue
        found.append((start, start + width))
        taken[max(0, start - width + 1) : start + width] = True
        if len(found) == most or bool(taken.all()):
            break
    return found
