"""What a model did not expect of what it has read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_inf.memory.short_term import push
from fairseq_inf.memory.state import Ranges, State

# B rows, W vectors of a window without its sinks, T tokens of the segment, e width

AROUND = 8  # tokens on either side that are a passage


@dataclass
class Surprise(State):
    losses: Tensor  # B x AROUND + W: -log p of each token when it was read; 0: not known
    last: Tensor  # B x e: what the head makes the prediction of the next token from

    def ranges(self) -> Ranges:
        yield "losses", 0, torch.inf

    def passages(self, first: int) -> Tensor:
        """The mean over each of the first vectors of the window and its neighbours, as far as they
        are known.  -> B x first"""
        if not first:
            return self.losses[:, :0]
        both = torch.stack([self.losses, (self.losses > 0).float()])
        sums, counts = F.avg_pool1d(F.pad(both, (0, AROUND)), 2 * AROUND + 1, stride=1)
        return (sums / counts.clamp(min=1e-9))[:, :first]

    def after(
        self, losses: Tensor, features: Tensor, lengths: Tensor | None, length: int
    ) -> Surprise:
        """The same after a segment.  losses: B x T, features: B x T x e.  length: S"""
        losses = losses[..., None].to(self.losses)
        old = self.losses[:, self.losses.size(1) - AROUND - length :, None]
        if lengths is None:
            last = features[:, -1]
        else:
            rows = torch.arange(len(features), device=features.device)
            last = features[rows, (lengths - 1).clamp(min=0)]
            last = torch.where((lengths > 0)[:, None], last, self.last)
        return Surprise(push(old, losses, lengths).squeeze(2), last)

    def widen(self, segment: int, length: int) -> Surprise:
        """With room for a segment of that many.  length: S"""
        room = AROUND + length + segment - self.losses.size(1)
        return Surprise(F.pad(self.losses, (room, 0)), self.last)
