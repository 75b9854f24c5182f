"""What a token is part of: a document, or the turn of a speaker."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# B rows, T tokens, K words that begin a part, e width


class Roles(nn.Module):
    """r(s_t), to be added to the embedding of token t: s_t is the last of the K words that stands
    at t or before it.  Zero where there is none, and of every word in a new model."""

    numbers: Tensor

    def __init__(self, words: Sequence[int], vocabulary: int, dim: int) -> None:
        """words: the tokens that begin a part.  vocabulary: how many tokens there are."""
        super().__init__()
        numbers = torch.zeros(vocabulary, dtype=torch.long)
        numbers[list(words)] = torch.arange(1, len(words) + 1)
        self.register_buffer("numbers", numbers, persistent=False)
        self.weight = nn.Parameter(torch.zeros(len(words), dim))

    def of(self, tokens: Tensor, before: Tensor) -> Tensor:
        """tokens: B x T.  before: B, the role of the token before them.  -> roles, 0 .. K: B x T"""
        numbers = torch.cat([before[:, None], self.numbers[tokens]], dim=1)
        place = torch.arange(numbers.size(1), device=tokens.device)
        begun = (place * (numbers > 0)).cummax(dim=1).values
        return numbers.gather(1, begun)[:, 1:].clamp(max=len(self.weight))

    def forward(self, roles: Tensor) -> Tensor:
        """B x T -> B x T x e"""
        return F.embedding(roles, F.pad(self.weight, (0, 0, 1, 0)))
