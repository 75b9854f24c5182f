"""Self-attention by the dot products of queries and keys alone."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import Attention, Place

# B rows, T queries, P keys, H heads, G of them with keys of their own, d head width


class DotProductAttention(Attention):
    """softmax_j(q_i . k_j / sqrt(d)) over the keys j <= i."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, positions: Any) -> Tensor:
        """positions: added to the scores, broadcastable to B x H x T x P; a segment alone is just
        causal."""
        b, h, t, d = query.shape
        share = h // key.size(1)
        alone = key.size(2) == t and share == 1
        if share > 1:  # the queries of all heads that share a key, one after the other
            query = query.reshape(b, -1, share * t, d)
            positions = positions.repeat(*[1] * (positions.dim() - 2), share, 1)
        found = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if alone else positions,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=alone,
        )
        return found.view(b, h, t, d)

    def weights(self, query: Tensor, key: Tensor, positions: Any, every: int = 1) -> Tensor:
        query = query[:, :, ::every]
        b, h, t, d = query.shape
        scores = query.reshape(b, key.size(1), -1, d) @ key.transpose(2, 3) / math.sqrt(d)
        return torch.softmax(scores.view(b, h, t, -1) + positions[..., ::every, :], dim=-1)

    def token_weights(self, query: Tensor, keys: Tensor, place: Place, table: Any) -> Tensor:
        b, h, _, d = query.shape
        keys = keys[:, :, : place.width]
        query = (query / math.sqrt(d)).view(b, keys.size(1), -1, d)
        scores = (query @ keys.transpose(2, 3)).view(b, h, 1, -1)
        if place.hidden is not None:
            scores = scores + place.hidden[..., None, :]
        return torch.softmax(scores, dim=-1)
