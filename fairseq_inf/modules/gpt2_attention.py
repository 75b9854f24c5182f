"""GPT-2's self-attention (Radford et al., 2019), and how it sees slots."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention, Place

# B rows, T queries, C slots, P = C + T keys, H heads, d head width, e = H d


def slot_bias(num_heads: int, slots: int, like: Tensor) -> Tensor:
    """ALiBi (Press et al., 2022) over the slots: -m_h k for the k-th newest one, the same for all
    tokens of the segment, with m_h = 2^(-8h/H) for h = 1..H.  -> H x 1 x C"""
    slopes = [2 ** (-8 * (h + 1) / num_heads) for h in range(num_heads)]
    ages = torch.arange(slots, 0, -1, device=like.device, dtype=torch.float)
    return -(torch.tensor(slopes, device=like.device)[:, None, None] * ages).to(like.dtype)


class GPT2Attention(Attention):
    """softmax_j(q_i . k_j / sqrt(d)) over the keys j <= i, with biases everywhere."""

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__(dim, num_heads, dropout)
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.output = nn.Linear(dim, dim)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        first: int = 0,
        drop: bool = True,
    ) -> Tensor:
        """positions: added to the scores, broadcastable to B x H x T x P; a segment alone is just
        causal."""
        alone = key.size(2) - first == query.size(2)
        return F.scaled_dot_product_attention(
            query,
            key[:, :, first:],
            value[:, :, first:],
            attn_mask=None if alone else positions[..., first:],
            dropout_p=self.dropout if self.training and drop else 0.0,
            is_causal=alone,
        )

    def attend_token(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        place: Place,
        table: None = None,
        first: int = 0,
    ) -> Tensor:
        last = place.past + place.most + 1
        scores = (query @ keys[:, :, first:last].transpose(2, 3)).squeeze(2)  # B x H x P
        scores = scores / math.sqrt(self.head_dim)
        if place.hidden is not None:
            scores = scores + place.hidden[..., first:]
        weights = torch.softmax(scores, dim=-1)
        return weights[:, :, None] @ values[:, :, first:last]
