"""One layer of the decoder: self-attention with a memory as a part, then the feed-forward net."""

from functools import partial

import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.modules import LayerNorm
from torch import nn

from fairseq_inf.memory import CompressiveMemory, push, split_recent


class DecoderLayer(nn.Module):
    """(x, recent, memory state) -> (x, recent, memory state), for one segment.

    Attention over [short-term memory; segment], and one of three long-term memories: none
    (Transformer-XL); a compressive one, whose slots are further keys of the same attention; a
    continuous one, whose answer to the same queries is added, Z = Z_T + Z_LTM.
    """

    def __init__(
        self,
        dim,
        ffn_dim,
        memory,
        attention,
        dropout=0.0,
        activation_dropout=0.0,
        activation="relu",
        normalize_before=True,
    ):
        super().__init__()
        # in this order: optimizers number the parameters
        self.attention, self.memory = attention, memory
        self.attention_norm = LayerNorm(dim)
        self.inner = nn.Linear(dim, ffn_dim)
        self.outer = nn.Linear(ffn_dim, dim)
        self.ffn_norm = LayerNorm(dim)
        self.activation = utils.get_activation_fn(activation)
        if activation == "gelu_accurate":  # the same function in one pass
            self.activation = partial(F.gelu, approximate="tanh")
        self.dropout = nn.Dropout(dropout)
        self.activation_dropout = nn.Dropout(activation_dropout)
        self.normalize_before = normalize_before
        for linear in (self.inner, self.outer):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x, recent, memory_state, segment, output=True):
        """x: B x T x e.  recent: B x W x e.  segment: SegmentPlan, the same for every layer.
        output: False if only the states are wanted, and then x is None.
        -> x, recent, memory state, what is to be logged or learned of the memory, by name"""
        source = self.source(x)
        left, short_term = split_recent(recent, segment.stm_length)
        visible = short_term[:, segment.stm_length - segment.stm_visible :]
        context = keys = torch.cat([visible, source], dim=1)
        compressive = memory_state is not None and isinstance(self.memory, CompressiveMemory)
        if compressive:
            slots, memory_state, old, new = self.memory(left, memory_state, segment.write)
            keys = torch.cat([slots, context], dim=1)
        found = query = None
        if output:
            found, query = self.attention(source, keys, segment.distances, segment.hidden)
        elif memory_state is not None and self.memory.needs_queries:
            query = self.attention.queries(source)

        extra = {}
        if compressive:
            if output and self.memory.compression == "conv" and torch.is_grad_enabled():
                extra["reconstruction"] = self._reconstruction(query, old, new, segment)
        elif memory_state is not None:
            remembered, density, memory_state = self.memory(
                query, left, memory_state, segment.write, segment.mask, segment.key, output
            )
            if output:
                extra["density"] = density
                extra["share"] = _share(remembered.detach(), found.detach(), segment.mask)
                found = found + remembered

        x = self.finish(x, found) if output else None
        if segment.stm_visible == segment.stm_length and segment.lengths is None:
            recent = context.detach()
        else:
            recent = push(short_term, source.detach(), segment.lengths)
        return x, recent, memory_state, extra

    def source(self, x):
        """The vectors that queries, keys and values are made from."""
        return self.attention_norm(x) if self.normalize_before else x

    def finish(self, x, found):
        """What follows the attention."""
        x = self._residual(x, found, self.attention_norm)
        y = self.ffn_norm(x) if self.normalize_before else x
        y = self.outer(self.activation_dropout(self.activation(self.inner(y))))
        return self._residual(x, y, self.ffn_norm)

    def _reconstruction(self, query, old, new, segment):
        """How far from what the queries find in the old vectors is what they find in the slots
        made of them: mean square over the width, summed over the real tokens.  Only the
        compression gets a gradient."""
        # it takes part in every step, or data-parallel training waits for its gradient
        unused = 0 * sum(p.flatten()[0] for p in self.memory.parameters())
        plan = segment.write
        if plan.most == 0:
            return query.new_zeros(()) + unused
        groups = plan.groups.clamp(min=1)[:, None]  # a row without any is left out below
        place = torch.arange(old.size(1), device=old.device)
        with torch.no_grad():
            target = self.attention.by_content(query, old, place < groups * self.memory.rate)
        found = self.attention.by_content(query, new, place[: plan.most] < groups)
        error = (found - target).float().square().mean(dim=-1)  # B x T
        counted = (plan.groups > 0)[:, None]
        if segment.mask is not None:
            counted = counted & segment.mask
        return (error * counted).sum() + unused

    def _residual(self, x, update, norm):
        x = x + self.dropout(update)
        return x if self.normalize_before else norm(x)


def _share(memory, attention, mask):
    """|Z_LTM| / (|Z_LTM| + |Z_T|), with the norms over all real tokens of the segment."""
    if mask is not None:
        memory, attention = memory * mask[..., None], attention * mask[..., None]
    exact = torch.promote_types(memory.dtype, torch.float)
    memory = torch.linalg.vector_norm(memory, dtype=exact)
    attention = torch.linalg.vector_norm(attention, dtype=exact)
    return memory / (memory + attention).clamp(min=1e-20)
