"""The decoder: (tokens, state) -> (output, new state), one segment of each stream at a time."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from fairseq.models import FairseqDecoder
from fairseq.modules import AdaptiveSoftmax, LayerNorm
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairseq_inf.memory import CompressionPlan, State, mix
from fairseq_inf.modules import DecoderLayer, RelativeAttention, sinusoids

# B rows (streams), T tokens of the segment, S short-term length, e width


@dataclass
class DecoderState(State):
    recent: tuple  # a layer: B x W x e, its short-term memory and what has just left it
    memories: tuple  # a layer with a long-term memory: its state
    filled: torch.Tensor  # B: how many vectors of `recent` are real
    position: torch.Tensor  # B: tokens of the stream read so far
    key: torch.Tensor  # B: hash of those tokens, the seed of sticky sampling

    def ranges(self):
        yield "filled", self.position.clamp(max=1), self.recent[0].size(1)
        yield "position", self.filled, torch.iinfo(torch.long).max
        # whole numbers in a memory count what it has been given
        for name, x in self.tensors().items():
            if name.startswith("memories.") and not x.is_floating_point():
                yield name, 0, self.position[(..., *[None] * (x.dim() - 1))]


@dataclass
class SegmentPlan:
    """What every layer needs to know of a segment, worked out once."""

    stm_length: int
    stm_visible: int  # the longest short-term memory of any row
    distances: torch.Tensor | None  # P+1 x e, of relative positions
    hidden: torch.Tensor  # -inf where a query must not look, broadcastable to B x H x T x P
    # the P keys are: slots of a compressive memory, short-term memory, segment
    lengths: torch.Tensor | None  # B: real tokens, None if there is no padding
    mask: torch.Tensor | None  # B x T: true for real tokens, None if there is no padding
    write: object  # plan of the long-term memories, which take what left the short-term memory
    key: torch.Tensor  # B


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # what is kept must serve a training later
def _causal(queries, past, dtype, device):
    """0 for the keys that query i may see, up to past + i, and -inf for the others."""
    hidden = torch.full((queries, past + queries), -torch.inf, dtype=dtype, device=device)
    return hidden.triu(past + 1)


class MemoryDecoder(FairseqDecoder):
    def __init__(self, cfg, dictionary, embed_tokens, build_memory, softmax_cutoff=None):
        """build_memory: layer number -> its long-term memory, or None."""
        super().__init__(dictionary)
        self.embed_tokens = embed_tokens
        self.dim, self.stm_length = cfg.decoder_embed_dim, cfg.stm_length
        self.ltm_enabled = cfg.ltm_enabled is not False
        self.checkpoint_activations = cfg.checkpoint_activations
        self.dropout = nn.Dropout(cfg.dropout)
        self.layers = nn.ModuleList(
            self.build_layer(cfg, build_memory(number)) for number in range(cfg.decoder_layers)
        )
        self.norm = nn.Identity() if cfg.decoder_post_norm else LayerNorm(self.dim)
        self.adaptive_softmax = self.output_projection = None
        if softmax_cutoff:
            self.adaptive_softmax = AdaptiveSoftmax(
                len(dictionary),
                self.dim,
                softmax_cutoff,
                dropout=cfg.adaptive_softmax_dropout,
                factor=cfg.adaptive_softmax_factor,
                adaptive_inputs=embed_tokens if cfg.tie_adaptive_weights else None,
                tie_proj=cfg.tie_adaptive_proj,
            )
        else:
            self.output_projection = nn.Linear(self.dim, len(dictionary), bias=False)
            if cfg.untie_embeddings or cfg.adaptive_input:
                nn.init.normal_(self.output_projection.weight, std=self.dim**-0.5)
            else:
                self.output_projection.weight = embed_tokens.weight

    def build_layer(self, cfg, memory):
        return DecoderLayer(
            self.dim,
            cfg.decoder_ffn_embed_dim,
            memory,
            self.build_attention(cfg, memory),
            dropout=cfg.dropout,
            activation_dropout=cfg.activation_dropout,
            activation=cfg.activation_fn,
            normalize_before=not cfg.decoder_post_norm,
        )

    def build_attention(self, cfg, memory):
        return RelativeAttention(self.dim, cfg.decoder_attention_heads, cfg.attention_dropout)

    def initial_state(self, rows):
        like = self.layers[0].inner.weight

        def count():
            return torch.zeros(rows, dtype=torch.long, device=like.device)

        return DecoderState(
            recent=tuple(like.new_zeros(rows, self.stm_length, self.dim) for _ in self.layers),
            memories=tuple(
                layer.memory.initial_state(rows, like.device, like.dtype)
                for layer in self.layers
                if layer.memory is not None
            ),
            filled=count(),
            position=count(),
            key=count(),
        )

    def forward(self, tokens, state, lengths=None, project=True):
        """tokens: B x T, padded on the right to the lengths (B) if there are any.
        -> logits (features with an adaptive softmax, None unless `project`): B x T x V, state,
        extra"""
        plan = self._plan(tokens, state, lengths)
        x = self.embed(tokens, torch.arange(tokens.size(1), device=tokens.device))
        recents, memories, extras = [], [], []
        old = iter(state.memories)
        for number, (layer, recent) in enumerate(zip(self.layers, state.recent, strict=True)):
            output = project or number + 1 < len(self.layers)
            kept = None if layer.memory is None else next(old)
            used = kept if self.ltm_enabled else None
            if self.checkpoint_activations and self.training:
                out = checkpoint(layer, x, recent, used, plan, output, use_reentrant=False)
            else:
                out = layer(x, recent, used, plan, output)
            x, recent, used, extra = out
            recents.append(recent)
            if kept is not None:
                memories.append(kept if used is None else used)
            extras.append(extra)
        x = self.head(x) if project else None

        read = plan.lengths
        if read is None:
            read = torch.full_like(state.filled, tokens.size(1))
        scattered = mix(tokens + mix(torch.arange(tokens.size(1), device=tokens.device)))
        if plan.mask is not None:
            scattered = scattered * plan.mask
        key = torch.where(read > 0, mix(state.key + scattered.sum(dim=-1)), state.key)
        state = DecoderState(
            recent=tuple(recents),
            memories=tuple(memories),
            filled=state.filled.clamp(max=self.stm_length) + read,
            position=state.position + read,
            key=key,
        )
        extra = {"densities": [x["density"] for x in extras if "density" in x]}
        if extra["densities"]:
            used = (plan.write.tokens > 0)[:, None]
            extra["ltm_mask"] = used.expand_as(tokens) if plan.mask is None else used & plan.mask
            extra["ltm_share"] = torch.stack([x["share"] for x in extras if "share" in x]).mean()
        losses = [x["reconstruction"] for x in extras if "reconstruction" in x]
        if losses:
            extra["reconstruction"] = sum(losses)
        return x, state, extra

    def check_length(self, length):
        """Raise an error if a segment cannot have that many tokens."""

    def embed(self, tokens, place):
        """place: of each token in its segment, broadcastable to B x T."""
        return self.dropout(self.embed_tokens(tokens) * math.sqrt(self.dim))

    def head(self, x):
        """-> logits, or the features that an adaptive softmax takes"""
        x = self.dropout(self.norm(x))
        return x if self.output_projection is None else self.output_projection(x)

    def distances(self, farthest, nearest):
        """Encoded distances farthest, farthest - 1 .. nearest."""
        like = self.layers[0].inner.weight
        positions = torch.arange(farthest, nearest - 1, -1, device=like.device)
        return self.dropout(sinusoids(positions, self.dim).to(like.dtype))

    def bias_slots(self, hidden, slots):
        """Scores that depend on the place of a slot alone.  hidden: B x 1 x T x P (or without its
        first dimensions), the slots first.  -> broadcastable to B x H x T x P"""
        return hidden

    def _plan(self, tokens, state, lengths):
        t = tokens.size(1)
        filled = state.filled.tolist()
        write, held, slots = None, None, 0
        if state.memories and self.ltm_enabled:
            memory = next(layer.memory for layer in self.layers if layer.memory is not None)
            left = [max(count - self.stm_length, 0) for count in filled]
            write = memory.plan(left, state.memories[0])
            if isinstance(write, CompressionPlan):
                held, slots = write.held, write.longest
        visible = [min(count, self.stm_length) for count in filled]
        longest = max(visible)
        past = slots + longest
        like = self.layers[0].inner.weight
        hidden = _causal(t, past, like.dtype, tokens.device)
        ragged = min(visible) < longest or (slots and held.min() < slots)
        if ragged:
            place = torch.arange(past + t, device=tokens.device)
            absent = place < past - state.filled.clamp(max=self.stm_length)[:, None]  # B x P
            if slots:
                absent = torch.where(place < slots, place < slots - held[:, None], absent)
            hidden = hidden.masked_fill(absent[:, None, None], -torch.inf)
        mask = None
        if lengths is not None:
            if min(lengths.tolist()) < t:
                mask = torch.arange(t, device=tokens.device) < lengths[:, None]
            else:
                lengths = None
        return SegmentPlan(
            self.stm_length,
            longest,
            self.distances(past + t - 1, -1),
            self.bias_slots(hidden, slots),
            lengths,
            mask,
            write,
            state.key,
        )

    def max_positions(self):
        return int(1e9)
