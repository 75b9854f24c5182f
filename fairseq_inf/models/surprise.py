"""What a model did not expect of what it has read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_inf.memory.short_term import push
from fairseq_inf.memory.state import Ranges, State

# B rows, W vectors of a window without its sinks, T tokens of the segment, e width

PASSAGE, NEAR = 13, 9  # tokens of a passage; passages around a token, of which one counts
AROUND = PASSAGE // 2 + NEAR // 2  # tokens on either side that the surprise of one depends on
FREQUENT, OTHERS = 2048, 2048  # words that a normalizer is made of


@dataclass
class Surprise(State):
    losses: Tensor  # B x AROUND + W: -log p of each token when it was read; 0: not known
    last: Tensor  # B x e: what the head makes the prediction of the next token from

    def ranges(self) -> Ranges:
        yield "losses", 0, torch.inf

    def passages(self, first: int) -> Tensor:
        """Of the first vectors of the window: the mean of (log p)^2 over a passage, as far as it is
        known, of those around a token the largest.  -> B x first"""
        if not first:
            return self.losses[:, :0]
        known = F.pad(torch.stack([self.losses.square(), (self.losses > 0).float()]), (0, AROUND))
        sums, counts = F.avg_pool1d(known, PASSAGE, stride=1)
        means = sums / counts.clamp(min=1e-9)
        means[:, means.size(1) - NEAR // 2 :] = 0  # passages around what has not come
        return F.max_pool1d(means, NEAR, stride=1)[:, :first]

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


def losses(x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor) -> Tensor:
    """-log p of the targets, n, by what an output projection takes, n x e, about.  Its normalizer
    is made of the first words, since a dictionary begins with the frequent ones, and of some of the
    others at equal steps, which stand for all of them: a twelfth of the work for 50,000 words."""
    words, first = weight.size(0), min(FREQUENT, weight.size(0))
    some = torch.arange(first, words, max(1, (words - first) // OTHERS), device=x.device)
    chosen = torch.cat([torch.arange(first, device=x.device), some])
    scores = F.linear(x, weight[chosen], None if bias is None else bias[chosen]).float()
    if len(some):
        scores[:, first:] += math.log((words - first) / len(some))
    own = (x * weight[target]).sum(dim=-1).float()
    own = own if bias is None else own + bias[target]
    return (scores.logsumexp(dim=-1) - own).clamp(min=1e-6)  # 0 is what is not known
