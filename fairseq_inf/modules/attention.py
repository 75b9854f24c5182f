"""What all kinds of self-attention share.

The keys of a segment are [slots of a memory; sinks; short-term memory; segment].  An attention has
the linear maps `query`, `key_value` and `output`, and two ways over the same keys: `attend` and
`weights`, for the queries of a segment, and `token_weights`, for one query a row.  What it needs to
know of positions comes from its host, which alone makes it and which nothing in between looks into.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_inf.memory import as_heads, side_by_side

# B rows, T queries, P keys, H heads, G of them with keys of their own, d head width, e = H d


class SlotLine(NamedTuple):
    """The slots that queries see, as positions go by them."""

    shown: int = 0
    all: int = 0  # that the memory has room for
    spacing: float = 0.0  # positions from one to the next

    @property
    def reach(self) -> float:
        """Positions that all of them take."""
        return self.all * self.spacing


@dataclass
class Place:
    """Where the next token of each row stands among the keys of a cache."""

    slots: int  # keys that are slots of a memory
    past: int  # keys before the segment
    most: int  # tokens of the longest row before this one
    width: int  # keys to read, those up to the longest row's token, or all that there is room for
    column: int | Tensor  # of the new key: the same in every row, or B of them
    counts: Tensor  # B: tokens of the segment before this one
    hidden: Tensor | None  # None, or added to the scores, broadcastable to B x H x `width`
    # of ragged rows, B x past + most + 1: the column that has the key's distance
    places: Tensor | None


class Attention(nn.Module):
    query: nn.Linear
    key_value: nn.Linear
    output: nn.Linear

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.dropout = num_heads, dim // num_heads, dropout

    def queries(self, x: Tensor) -> Tensor:
        """B x T x e -> B x H x T x d, without positions"""
        return as_heads(self.query(x), self.num_heads)

    def project(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Keys without positions, and values.  B x P x e -> 2 of B x G x P x d"""
        return self.heads(self.key_value(vectors))

    def heads(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """What `key_value` gives, as keys and values: B x P x 2 G d -> 2 of B x G x P x d"""
        key, value = projected.unflatten(-1, (2, -1, self.head_dim)).permute(2, 0, 3, 1, 4)
        return key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, positions: Any) -> Tensor:
        """What the queries of a segment find in the keys, each in those up to its own; in training
        with dropout.  query: B x H x T x d, key, value: B x G x P x d, each for H / G heads of
        queries.  -> B x H x T x d"""
        raise NotImplementedError

    def weights(self, query: Tensor, key: Tensor, positions: Any, every: int = 1) -> Tensor:
        """The softmax of `attend`, of one query in `every`.  -> B x H x T' x P"""
        raise NotImplementedError

    def token_weights(self, query: Tensor, keys: Tensor, place: Place, table: Any) -> Tensor:
        """The same for one query a row, B x H x 1 x d, and the keys of a cache, B x G x P x d.
        -> B x H x 1 x P', the first P' keys"""
        raise NotImplementedError

    @staticmethod
    def mix(weights: Tensor, values: Tensor) -> Tensor:
        """weights: B x H x T x P', values: B x G x P x d.  -> B x H x T x d"""
        b, h, t, p = weights.shape
        g = values.size(1)
        values = values[:, :, :p].flatten(0, 1)
        return torch.bmm(weights.reshape(b * g, -1, p), values).view(b, h, t, -1)

    def apart(self, weights: Tensor, values: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        """A, what is found without the first keys, which are slots, and A' - A, what these change,
        from one softmax over all: with w of the slots' weights and W their sum, what is left is
        brought to a sum of 1, and A' - A = w V - W A.  Dropout is no difference that slots make.
        -> 2 of B x H x T x d"""
        w, context = weights[..., :slots], weights[..., slots:]
        context = context / context.sum(dim=-1, keepdim=True).clamp(min=1e-30)
        old, values = values[:, :, :slots], values[:, :, slots:]
        plain = self.mix(context, values)
        change = self.mix(w, old) - w.sum(dim=-1, keepdim=True) * plain
        if self.training and self.dropout:
            plain = self.mix(F.dropout(context, self.dropout), values)
        return plain, change

    def placed(self, keys: Tensor, positions: Any) -> Tensor:
        """The keys of a cache as `token_weights` takes them.  B x G x P x d"""
        return keys

    def placed_token(self, key: Tensor, place: Place, table: Any) -> Tensor:
        """The same of one key a row.  B x G x 1 x d"""
        return key

    def table(self, positions: Any) -> Any:
        """What the steps of a generation need of the positions of a cache, worked out once."""
        return positions

    def keep(self, x: Tensor, keys: Tensor, values: Tensor, place: Place, table: Any) -> None:
        """Write the key and the value of x: B x 1 x e into those of a cache, in place."""
        key, value = self.project(x)
        key, value = self.placed_token(key, place, table).squeeze(2), value.squeeze(2)
        if isinstance(place.column, int):
            keys[:, :, place.column], values[:, :, place.column] = key, value
        else:
            row = torch.arange(len(x), device=x.device)
            keys[row, :, place.column], values[row, :, place.column] = key, value

    def by_content(self, query: Tensor, vectors: Tensor, visible: Tensor) -> Tensor:
        """What queries (B x H x T x d) attend to in vectors (B x P x e) where `visible` (B x P) is
        true, regardless of positions.  A constant for the gradient but for the vectors.
        -> B x T x e, heads side by side"""
        b, h, t, _ = query.shape
        bias = self.key_value.bias
        projected = F.linear(
            vectors, self.key_value.weight.detach(), None if bias is None else bias.detach()
        )
        key, value = (x.repeat_interleave(h // x.size(1), dim=1) for x in self.heads(projected))
        out = F.scaled_dot_product_attention(
            query.detach(), key, value, attn_mask=visible[:, None, None].expand(b, h, t, -1)
        )
        return side_by_side(out)
