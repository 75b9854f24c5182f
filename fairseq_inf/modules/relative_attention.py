"""Self-attention with the relative positions of Transformer-XL (Dai et al., 2019)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .attention import Attention, Place

# B rows, T queries, P keys, H heads, d head width, e = H d

BLOCK = 64  # queries that look together, at the keys up to the last of them and at no others


def sinusoids(positions: Tensor, dim: int) -> Tensor:
    """[sin(p w_1) .. sin(p w_k), cos(p w_1) .. cos(p w_k)], w_i = 10000^(-2i/dim).  -> P x dim"""
    rates = 10000 ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float) / dim)
    angles = positions.float()[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def _cut(scores: Tensor, queries: int) -> Tensor:
    """From scores by distance to scores by key, in place.  Column c is for distance P-1-c, and row
    i wants key j at column T-1-i+j.  With P+1 columns in a row that is one straight cut of the
    flattened scores.  ... x T (P+1) -> ... x T x P"""
    t = queries
    p = scores.size(-1) // t - 1
    return scores[..., t - 1 : t - 1 + t * p].unflatten(-1, (t, p))


class _Attend(torch.autograd.Function):
    """The attention of a training on a CPU, with gradients by hand, block by block: twice as fast
    as by torch's own operations, which work out the half of the scores that nobody sees, and have
    no fast way to a gradient of what is added to them."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, content_bias: Tensor, position_bias: Tensor, key: Tensor,
        value: Tensor, table: Tensor, hidden: Tensor,
    ) -> Tensor:  # fmt: skip
        """query: B x H x T x d, key, value: B x H x P x d, table: H x d x P+1.  -> as the query"""
        b, h, t, d = query.shape
        p = key.size(2)

        def placed(bias: Tensor) -> Tensor:
            whole = query.new_empty(h, b, t, d)
            return torch.add(query.transpose(0, 1), bias[:, None, None], out=whole).mul_(d**-0.5)

        by_content, by_place = placed(content_bias), placed(position_bias)
        key, value = (x.transpose(0, 1).reshape(h * b, p, d) for x in (key, value))
        hidden = hidden.expand(b, h, t, p).transpose(0, 1)
        out = query.new_empty(b, t, h, d)
        weights = []
        for first in range(0, t, BLOCK):
            last = min(first + BLOCK, t)
            n, seen = last - first, p - t + last
            scores = by_place[:, :, first:last].reshape(h, b * n, d) @ table[..., p - seen :]
            scores = _cut(scores.view(h * b, -1), n)
            content = by_content[:, :, first:last].reshape(h * b, n, d)
            scores.baddbmm_(content, key[:, :seen].transpose(1, 2))
            scores.unflatten(0, (h, b)).add_(hidden[:, :, first:last, :seen])
            weights.append(torch.softmax(scores, dim=-1))
            found = torch.bmm(weights[-1], value[:, :seen])
            out[:, first:last] = found.view(h, b, n, d).permute(1, 2, 0, 3)
        ctx.save_for_backward(by_content, by_place, key, value, table, *weights)
        return out.transpose(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        by_content, by_place, key, value, table, *weights = ctx.saved_tensors
        h, b, t, d = by_content.shape
        p = key.size(1)
        grad = grad.transpose(0, 1).reshape(h * b, t, d)
        of_content, of_place = torch.empty_like(by_content), torch.empty_like(by_place)
        of_key, of_value, of_table = (torch.zeros_like(x) for x in (key, value, table))
        for first, weight in zip(range(0, t, BLOCK), weights, strict=True):
            n, seen = weight.shape[1:]
            last = first + n
            part = grad[:, first:last].contiguous()
            of_value[:, :seen].baddbmm_(weight.transpose(1, 2), part)
            of_weight = torch.bmm(part, value[:, :seen].transpose(1, 2))
            scores = torch._softmax_backward_data(of_weight, weight, -1, weight.dtype)
            content = by_content[:, :, first:last].reshape(h * b, n, d)
            of_key[:, :seen].baddbmm_(scores.transpose(1, 2), content)
            of_content[:, :, first:last] = torch.bmm(scores, key[:, :seen]).view(h, b, n, d)

            whole = scores.new_empty(h * b, n * (seen + 1))
            whole[:, : n - 1] = whole[:, n - 1 + n * seen :] = 0
            _cut(whole, n).copy_(scores)
            whole = whole.view(h, b * n, seen + 1)
            distances = torch.bmm(whole, table[..., p - seen :].transpose(1, 2))
            of_place[:, :, first:last] = distances.view(h, b, n, d)
            place = by_place[:, :, first:last].reshape(h, b * n, d)
            of_table[..., p - seen :].baddbmm_(place.transpose(1, 2), whole)
        scale = d**-0.5
        biases = [x.sum(dim=(1, 2)).mul_(scale) for x in (of_content, of_place)]
        of_query = of_content.new_empty(b, t, h, d)
        torch.add(of_content, of_place, out=of_query.permute(2, 0, 1, 3)).mul_(scale)
        of_key, of_value = (x.view(h, b, p, d).transpose(0, 1) for x in (of_key, of_value))
        return of_query.transpose(1, 2), *biases, of_key, of_value, of_table, None


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
        distances, hidden = positions
        table = self.table(distances)
        cpu, t, p = query.device.type == "cpu", query.size(2), key.size(2)
        dropout = self.dropout if self.training else 0.0
        exact = query.dtype in (torch.float, torch.double) and key.dtype == query.dtype
        if cpu and torch.is_grad_enabled() and exact and not dropout:
            biases = self.content_bias, self.position_bias
            return _Attend.apply(query, *biases, key, value, table, hidden)
        found = []
        block = BLOCK if cpu else t  # a GPU wants them all at once
        for first in range(0, t, block):
            last = min(first + block, t)
            seen = p - t + last
            part = query[:, :, first:last]
            above = hidden[..., first:last, :seen]
            found.append(
                F.scaled_dot_product_attention(
                    part + self.content_bias[:, None],
                    key[:, :, :seen],
                    value[:, :, :seen],
                    attn_mask=self._by_distance(part, table[..., p - seen :], above),
                    dropout_p=dropout,
                )
            )
        return found[0] if len(found) == 1 else torch.cat(found, dim=2)

    def weights(
        self, query: Tensor, key: Tensor, positions: tuple[Tensor, Tensor], every: int = 1
    ) -> Tensor:
        distances, hidden = positions
        bias = self._by_distance(query, self.table(distances), hidden)[:, :, ::every]
        query = query[:, :, ::every] + self.content_bias[:, None]
        scores = query @ key.transpose(2, 3) / math.sqrt(self.head_dim)
        return torch.softmax(scores + bias, dim=-1)

    def _by_distance(self, query: Tensor, table: Tensor, hidden: Tensor) -> Tensor:
        """What is added to the scores by content.  -> B x H x T x P"""
        query = query.transpose(1, 2)  # as it was projected: B x T x H x d
        b, t, h, d = query.shape
        shifted = (query + self.position_bias) / math.sqrt(d)
        scores = shifted.flatten(0, 1).transpose(0, 1) @ table  # H x BT x P+1
        bias = _cut(scores.view(h, b, -1), t).transpose(0, 1)
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
