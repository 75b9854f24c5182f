"""GPT-2's self-attention (Radford et al., 2019), and how it sees slots."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .dot_product_attention import DotProductAttention

# C slots, H heads


def slot_bias(num_heads: int, slots: int, like: Tensor) -> Tensor:
    """ALiBi (Press et al., 2022) over the slots: -m_h k for the k-th newest one, the same for all
    tokens of the segment, with m_h = 2^(-8h/H) for h = 1..H.  -> H x 1 x C"""
    slopes = [2 ** (-8 * (h + 1) / num_heads) for h in range(num_heads)]
    ages = torch.arange(slots, 0, -1, device=like.device, dtype=torch.float)
    return -(torch.tensor(slopes, device=like.device)[:, None, None] * ages).to(like.dtype)


class GPT2Attention(DotProductAttention):
    """Biases everywhere."""

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__(dim, num_heads, dropout)
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.output = nn.Linear(dim, dim)
