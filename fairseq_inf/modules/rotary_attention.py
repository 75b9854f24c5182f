"""Llama's self-attention: rotary positions (Su et al., 2021) and grouped queries (Ainslie et al.,
2023)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .attention import Place
from .dot_product_attention import DotProductAttention

# B rows, T queries, P keys, H heads, G of them with keys of their own, d head width, e = H d


def rotations(positions: Tensor, dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """cos and sin of the angles p w_m, w_m = theta^(-2m/dim) for m = 0 .. dim/2 - 1.
    P -> 2 x P x dim/2"""
    exact = torch.promote_types(dtype, torch.float)
    steps = torch.arange(0, dim, 2, device=positions.device, dtype=exact)
    angles = positions.to(exact)[:, None] * (1 / theta ** (steps / dim))
    return torch.stack([angles.cos(), angles.sin()]).to(dtype)


def rotate(x: Tensor, by: Tensor) -> Tensor:
    """Turn each pair (x_m, x_{m + d/2}) by its angle.  x: ... x d, by: `rotations`, which has
    ... x d/2 after the first dimension, broadcastable"""
    one, two = x.chunk(2, dim=-1)
    cos, sin = by.to(x.dtype)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)


def _placed(query: Tensor, key: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """The last of `by` are those of the queries."""
    return rotate(query, by[:, by.size(1) - query.size(2) :]), rotate(key, by)


class RotaryAttention(DotProductAttention):
    """Queries and keys are turned by their positions, so that scores depend on distances.  Each
    head of keys and values serves H / `num_key_heads` heads of queries.  No biases."""

    def __init__(
        self, dim: int, num_heads: int, num_key_heads: int | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__(dim, num_heads, dropout)
        self.num_key_heads = num_heads if num_key_heads is None else num_key_heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * self.num_key_heads * self.head_dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, positions: tuple[Tensor, Tensor]
    ) -> Tensor:
        """positions: `rotations` of the keys, of which the last T are those of the queries, and
        what is added to the scores, broadcastable to B x H x T x P."""
        by, hidden = positions
        return super().attend(*_placed(query, key, by), value, hidden)

    def weights(
        self, query: Tensor, key: Tensor, positions: tuple[Tensor, Tensor], every: int = 1
    ) -> Tensor:
        by, hidden = positions
        return super().weights(*_placed(query, key, by), hidden, every)

    def placed(self, keys: Tensor, positions: Tensor) -> Tensor:
        """positions: `rotations` of the columns of a cache, which may be more than the keys."""
        return rotate(keys, positions[:, : keys.size(2)])

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin for x cos + (x with its halves exchanged) sin, 2 of P x d"""
        cos, sin = positions
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)

    def placed_token(self, key: Tensor, place: Place, table: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = (x[place.column] for x in table)
        if not isinstance(place.column, int):
            cos, sin = cos[:, None, None], sin[:, None, None]
        return torch.addcmul(key * cos, key.roll(self.head_dim // 2, -1), sin)

    def token_weights(self, query: Tensor, keys: Tensor, place: Place, table: Any) -> Tensor:
        return super().token_weights(self.placed_token(query, place, table), keys, place, None)
