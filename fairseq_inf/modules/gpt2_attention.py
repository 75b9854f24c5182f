"""GPT-2's self-attention (Radford et al., 2019), and what it finds in a compressive memory."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .attention import Attention

# B rows, T queries, C slots, P = C + T keys, H heads, d head width, e = H d


def slot_bias(num_heads, slots, like):
    """ALiBi (Press et al., 2022) over the slots: -m_h k for the k-th newest one, the same for all
    tokens of the segment, with m_h = 2^(-8h/H) for h = 1..H.  -> H x 1 x C"""
    slopes = [2 ** (-8 * (h + 1) / num_heads) for h in range(num_heads)]
    ages = torch.arange(slots, 0, -1, device=like.device, dtype=torch.float)
    return -(torch.tensor(slopes, device=like.device)[:, None, None] * ages).to(like.dtype)


class GPT2Attention(Attention):
    """softmax_j(q_i . k_j / sqrt(d)) over the keys j <= i of the segment, with biases everywhere.

    With slots, joint attention over [slots; segment] finds Z_joint where the segment alone gives
    Z.  The difference has an output projection of its own, W^O Z + W^C (Z_joint - Z): W^C = 0, as
    it starts, is GPT-2, and W^C = W^O is attention to slots and segment as one.
    """

    def __init__(self, dim, num_heads, dropout=0.0, slots=False):
        """slots: whether there is a compressive memory."""
        super().__init__(dim, num_heads, dropout)
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.output = nn.Linear(dim, dim)
        self.memory_output = None
        if slots:
            self.memory_output = nn.Linear(dim, dim, bias=False)
            nn.init.zeros_(self.memory_output.weight)

    def forward(self, x, context, distances, hidden):
        """x: B x T x e, the queries' vectors.  context: B x P x e, those of the keys, x last.
        distances: none.  hidden: broadcastable to B x H x T x P, added to the scores where there
        are slots; the segment alone is just causal.
        -> B x T x e, and the queries themselves, B x H x T x d"""
        query = self.queries(x)
        key, value = self.project(context)
        slots = context.size(1) - x.size(1)
        dropout = self.dropout if self.training else 0.0

        def own(dropout):
            return F.scaled_dot_product_attention(
                query, key[:, :, slots:], value[:, :, slots:], dropout_p=dropout, is_causal=True
            )

        found = own(dropout)
        out = self.output(_side_by_side(found))
        if self.memory_output is not None:
            # takes part in every step, or data-parallel training waits for its gradient
            found = own(0.0) if dropout else found  # dropout is no difference that slots make
            joint = found
            if slots:
                joint = F.scaled_dot_product_attention(query, key, value, attn_mask=hidden)
            out = out + self.memory_output(_side_by_side(joint - found))
        return out, query

    def step(self, x, keys, values, column, past, hidden, table, places):
        """One query a row, x: B x 1 x e, which is a key of its own as well; the rest as in
        RelativeAttention.step.  -> B x 1 x e, and the query, B x H x 1 x d"""
        b, h, d = x.size(0), self.num_heads, self.head_dim
        query = self.query(x).view(b, h, 1, d)
        self.keep(x, keys, values, column)
        scores = (query @ keys.transpose(2, 3)).squeeze(2) / math.sqrt(d)  # B x H x P
        if hidden is not None:
            scores = scores + hidden

        def find(first):
            weights = torch.softmax(scores[..., first:], dim=-1)
            return _side_by_side(weights[:, :, None] @ values[:, :, first:])

        found = find(past)
        out = self.output(found)
        if past:
            out = out + self.memory_output(find(0) - found)
        return out, query


def _side_by_side(heads):
    """B x H x T x d -> B x T x e"""
    return heads.transpose(1, 2).flatten(2)
