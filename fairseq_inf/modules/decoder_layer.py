"""One layer of the decoder: self-attention with a memory as a part, then the feed-forward net."""

import torch
from fairseq import utils
from fairseq.modules import LayerNorm
from torch import nn

from fairseq_inf.memory import push, split_recent

from .relative_attention import RelativeAttention


class DecoderLayer(nn.Module):
    """(x, recent, memory state) -> (x, recent, memory state), for one segment.

    Z = Z_T + Z_LTM: what the attention finds in [short-term memory; segment] plus what the
    long-term memory (None for none) gives to the same queries.
    """

    def __init__(
        self,
        dim,
        ffn_dim,
        num_heads,
        memory=None,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        activation="relu",
        normalize_before=True,
    ):
        super().__init__()
        self.attention = RelativeAttention(dim, num_heads, attention_dropout)
        self.memory = memory
        self.attention_norm = LayerNorm(dim)
        self.inner = nn.Linear(dim, ffn_dim)
        self.outer = nn.Linear(ffn_dim, dim)
        self.ffn_norm = LayerNorm(dim)
        self.activation = utils.get_activation_fn(activation)
        self.dropout = nn.Dropout(dropout)
        self.activation_dropout = nn.Dropout(activation_dropout)
        self.normalize_before = normalize_before
        for linear in (self.inner, self.outer):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x, recent, memory_state, segment):
        """x: B x T x e.  recent: B x W x e.  segment: SegmentPlan, the same for every layer.
        -> x, recent, memory state, density of the read (or None), share of the memory (or None)"""
        source = self.attention_norm(x) if self.normalize_before else x
        left, short_term = split_recent(recent, segment.stm_length)
        visible = short_term[:, segment.stm_length - segment.stm_visible :]
        context = torch.cat([visible, source], dim=1)
        found, query = self.attention(source, context, segment.distances, segment.hidden)

        density = share = None
        if memory_state is not None:
            remembered, density, memory_state = self.memory(
                query, left, memory_state, segment.write, segment.mask, segment.key
            )
            share = _share(remembered.detach(), found.detach(), segment.mask)
            found = found + remembered

        x = self._residual(x, found, self.attention_norm)
        y = self.ffn_norm(x) if self.normalize_before else x
        y = self.outer(self.activation_dropout(self.activation(self.inner(y))))
        x = self._residual(x, y, self.ffn_norm)

        if segment.stm_visible == segment.stm_length and segment.lengths is None:
            recent = context.detach()
        else:
            recent = push(short_term, source.detach(), segment.lengths)
        return x, recent, memory_state, density, share

    def _residual(self, x, update, norm):
        x = x + self.dropout(update)
        return x if self.normalize_before else norm(x)


def _share(memory, attention, mask):
    """|Z_LTM| / (|Z_LTM| + |Z_T|), with the norms over all real tokens of the segment."""
    if mask is not None:
        memory, attention = memory * mask[..., None], attention * mask[..., None]
    memory = torch.linalg.vector_norm(memory, dtype=torch.float)
    attention = torch.linalg.vector_norm(attention, dtype=torch.float)
    return memory / (memory + attention).clamp(min=1e-20)
