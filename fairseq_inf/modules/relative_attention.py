"""Self-attention with the relative positions of Transformer-XL (Dai et al., 2019)."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from .attention import Attention

# B rows, T queries, P keys, H heads, d head width, e = H d


def sinusoids(positions, dim):
    """[sin(p w_1) .. sin(p w_k), cos(p w_1) .. cos(p w_k)], w_i = 10000^(-2i/dim).  -> P x dim"""
    rates = 10000 ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float) / dim)
    angles = positions.float()[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class RelativeAttention(Attention):
    """score(i, j) = (q_i + u) . k_j + (q_i + v) . W^R s(i - j), over the keys j <= i."""

    def __init__(self, dim, num_heads, dropout=0.0):
        super().__init__(dim, num_heads, dropout)
        self.query = nn.Linear(dim, dim, bias=False)
        self.key_value = nn.Linear(dim, 2 * dim, bias=False)
        self.position = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(num_heads, self.head_dim))  # u
        self.position_bias = nn.Parameter(torch.zeros(num_heads, self.head_dim))  # v
        for linear in (self.query, self.key_value, self.position, self.output):
            nn.init.xavier_uniform_(linear.weight)

    def forward(self, x, context, distances, hidden):
        """x: B x T x e, the queries' vectors.  context: B x P x e, those of the keys, x last.
        distances: P+1 x e, `sinusoids` of P-1, P-2 .. 0, -1.  hidden: broadcastable to
        B x H x T x P, -inf where a query must not look and 0 elsewhere.
        -> B x T x e, and the queries themselves, B x H x T x d"""
        b, t, e = x.shape
        p, h, d = context.size(1), self.num_heads, self.head_dim
        query = self.queries(x).transpose(1, 2)
        key, value = self.project(context)
        relative = self.table(distances)

        # Column c of these scores is for distance P-1-c, and row i wants key j at column
        # T-1-i+j.  With P+1 columns in a row that is one straight cut of the flattened scores.
        shifted = (query + self.position_bias) / math.sqrt(d)
        scores = shifted.flatten(0, 1).transpose(0, 1) @ relative  # H x BT x P+1
        scores = scores.view(h, b, t * (p + 1))[..., t - 1 : t - 1 + t * p]
        bias = scores.unflatten(2, (t, p)).transpose(0, 1)  # B x H x T x P
        bias = bias + hidden if bias.requires_grad else bias.add_(hidden)
        out = F.scaled_dot_product_attention(
            (query + self.content_bias).transpose(1, 2),
            key,
            value,
            attn_mask=bias,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.output(out.transpose(1, 2).reshape(b, t, e)), query.transpose(1, 2)

    def table(self, distances):
        """W^R s(.) of each distance.  P x e -> H x d x P"""
        relative = self.position(distances)
        return relative.view(-1, self.num_heads, self.head_dim).permute(1, 2, 0)

    def step(self, x, keys, values, column, past, hidden, table, places):
        """One query a row, x: B x 1 x e, which is a key of its own as well.

        keys, values: B x H x P x d, written in place at `column` (an int, or B of them, and
        then `places` is B x P: where each row finds its distances).  past: how many of the keys
        are older than the segment.  hidden: None, or added to the scores, broadcastable to
        B x H x P.  table: H x d x P.  -> B x 1 x e, and the query, B x H x 1 x d
        """
        b, h, d, p = x.size(0), self.num_heads, self.head_dim, keys.size(2)
        query = self.query(x).view(b, h, 1, d)
        self.keep(x, keys, values, column)
        # B = 1 and T = 1 are what counts here: few operations, each of them small
        position = (query + self.position_bias[:, None]).view(b, h, d).transpose(0, 1)
        scores = torch.matmul(position, table).transpose(0, 1)  # B x H x P
        if places is not None:
            scores = scores.gather(2, places[:, None].expand(-1, h, -1))
        if hidden is not None:
            scores = scores + hidden
        content = (query + self.content_bias[:, None]).view(b * h, 1, d)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        scores = scores.reshape(b * h, 1, p)
        scores = torch.baddbmm(scores, content, keys.transpose(1, 2)).mul_(1 / math.sqrt(d))
        out = torch.bmm(torch.softmax(scores, dim=-1), values)
        return self.output(out.view(b, 1, h * d)), query

    def by_content(self, query, vectors, visible):
        return super().by_content(query + self.content_bias[:, None], vectors, visible)
