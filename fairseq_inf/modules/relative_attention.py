"""Self-attention with the relative positions of Transformer-XL (Dai et al., 2019)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Attention, Place

# B rows, T queries, P keys, H heads, d head width, e = H d


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    """[sin(p w_1) .. sin(p w_k), cos(p w_1) .. cos(p w_k)], w_i = 10000^(-2i/dim).  -> P x dim"""
    rates = 10000 ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float) / dim)
    angles = positions.float()[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class RelativeAttention(Attention):
    """score(i, j) = (q_i + u) . k_j + (q_i + v) . W^R s(i - j), over the keys j <= i."""

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__(dim, num_heads, dropout)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.position = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, self.head_dim))  # u
        self.position_bias = nn.Parameter(torch.zeros(num_heads, self.head_dim))  # v
        for linear in (self.query, self.key_value, self.position, self.output):
            nn.init.xavier_uniform_(linear.weight)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, positions: tuple[Tensor, Tensor]
    ) -> Tensor:
        """positions: `sinusoids` of the distances P-1, P-2 .. 0, -1: P+1 x e, and what is added
        to the scores, broadcastable to B x H x T x P, -inf where a query must not look."""
        return F.scaled_dot_product_attention(
            query + self.content_bias[:, None],
            key,
            value,
            attn_mask=self._by_distance(query, *positions),
            dropout_p=self.dropout if self.training else 0.0,
        )

    def weights(
        self, query: Tensor, key: Tensor, positions: tuple[Tensor, Tensor], every: int = 1
    ) -> Tensor:
        bias = self._by_distance(query, *positions)[:, :, ::every]
        query = query[:, :, ::every] + self.content_bias[:, None]
        scores = query @ key.transpose(2, 3) / math.sqrt(self.head_dim)
        return torch.softmax(scores + bias, dim=-1)

    def _by_distance(self, query: Tensor, distances: Tensor, hidden: Tensor) -> Tensor:
        """What is added to the scores by content.  -> B x H x T x P"""
        query = query.transpose(1, 2)  # as it was projected: B x T x H x d
        b, t, h, d = query.shape
        p = distances.size(0) - 1

        # Column c of these scores is for distance P-1-c, and row i wants key j at column
        # T-1-i+j.  With P+1 columns in a row that is one straight cut of the flattened scores.
        shifted = (query + self.position_bias) / math.sqrt(d)
        scores = shifted.flatten(0, 1).transpose(0, 1) @ self.table(distances)  # H x BT x P+1
        scores = scores.view(h, b, t * (p + 1))[..., t - 1 : t - 1 + t * p]
        bias = scores.unflatten(2, (t, p)).transpose(0, 1)  # B x H x T x P
        return bias + hidden if bias.requires_grad else bias.add_(hidden)

    def table(self, positions: Tensor) -> Tensor:
        """W^R s(.) of each distance.  P x e -> H x d x P"""
        relative = self.position(positions)
        return relative.view(-1, self.num_heads, self.head_dim).permute(1, 2, 0)

    def token_weights(self, query: Tensor, keys: Tensor, place: Place, table: Tensor) -> Tensor:
        """table: H x d x P, of the distances P-1 .. 0 of the whole cache."""
        b, h, _, d = query.shape
        last = place.past + place.most + 1
        table = table[..., table.size(-1) - last :]  # the farthest key of the longest row first
        # B = 1 and T = 1 are what counts here: few operations, each of them small
        position = (query + self.position_bias[:, None]).view(b, h, d).transpose(0, 1)
        scores = torch.matmul(position, table).transpose(0, 1)  # B x H x P
        if place.places is not None:
            scores = scores.gather(2, place.places[:, None].expand(-1, h, -1))
        if place.hidden is not None:
            scores = scores + place.hidden[..., :last]
        content = (query + self.content_bias[:, None]).view(b * h, 1, d)
        keys = keys[:, :, :last].flatten(0, 1).transpose(1, 2)
        scores = torch.baddbmm(scores.reshape(b * h, 1, -1), content, keys).mul_(1 / math.sqrt(d))
        return torch.softmax(scores, dim=-1).view(b, h, 1, -1)

    def by_content(self, query: Tensor, vectors: Tensor, visible: Tensor) -> Tensor:
        return super().by_content(query + self.content_bias[:, None], vectors, visible)
