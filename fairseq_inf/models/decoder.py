"""The decoder: (tokens, state) -> (output, new state), one segment of each stream at a time.

Everything here is the same for all hosts and all memories.  A host is a subclass in `hosts/`: it
says how layers are built, how tokens are embedded, what the head is and where its attention's
positions come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.models import FairseqDecoder
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_inf.memory import (
    Correction,
    Goals,
    Leaving,
    LongTermMemory,
    ShortTermMemory,
    State,
    mix,
)
from fairseq_inf.memory.contract import check_empty, check_same
from fairseq_inf.memory.state import Ranges
from fairseq_inf.modules import DecoderLayer, LayerPlan, Roles, Segment, Watched

from .flags import flag

# B rows (streams), T tokens of the segment, S short-term length, e width


@dataclass
class DecoderState(State):
    # a layer: B x W x e, its sinks, what has just left its short-term memory, and that
    recent: tuple[Tensor, ...]
    memories: tuple[State, ...]  # a layer with a long-term memory: its state
    filled: Tensor  # B: how many vectors of `recent` are real
    position: Tensor  # B: tokens of the stream read so far
    key: Tensor  # B: hash of those tokens, the seed of sticky sampling
    role: tuple[Tensor, ...] = ()  # B: what the last of them is part of, if that is embedded
    # a layer, if memories get what was looked at most: B x W x 2, how much each vector of `recent`
    # was, and how often it could be
    looked: tuple[Tensor, ...] = ()

    def ranges(self) -> Ranges:
        yield "filled", self.position.clamp(max=1), self.recent[0].size(1)
        yield "position", self.filled, torch.iinfo(torch.long).max
        if self.role:
            yield "role.0", 0, torch.iinfo(torch.long).max
        for layer in range(len(self.looked)):
            yield f"looked.{layer}", 0, torch.inf
        # whole numbers in a memory count what it has been given
        for name, x in self.tensors().items():
            if name.startswith("memories.") and not x.is_floating_point():
                yield name, 0, self.position[(..., *[None] * (x.dim() - 1))]


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # what is kept must serve a training later
def _causal(queries: int, past: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 for the keys that query i may see, up to past + i, and -inf for the others."""
    hidden = torch.full((queries, past + queries), -torch.inf, dtype=dtype, device=device)
    return hidden.triu(past + 1)


def build_roles(cfg: Any, dictionary: Any) -> Roles | None:
    if not cfg.role_words:
        return None
    words = cfg.role_words.split(",")
    for word in words:
        if word not in dictionary:
            raise ValueError(f"{flag('role_words')}: {word} is not in the dictionary of the data")
    return Roles([dictionary.index(word) for word in words], len(dictionary), cfg.decoder_embed_dim)


class MemoryDecoder(FairseqDecoder):
    """What a host says: everything up to `check_tokens`."""

    Config: type  # dataclass of the flags that this host alone has
    memory_fields: tuple[str, ...] = ()  # those that the numbers in a memory depend on
    # suffix -> settings: the sizes of this host that have an architecture of their own
    architectures: dict[str, dict[str, Any]] = {}
    pretrained = False  # memories start silent

    layers: Any  # of DecoderLayer
    embed_tokens: Any
    norm: nn.Module
    adaptive_softmax: Any
    output_projection: Any

    @classmethod
    def refuse(cls, cfg: Any) -> None:
        """Raise an error if the configuration has something that this host cannot be."""

    def build_layer(self, cfg: Any, memory: LongTermMemory | None) -> DecoderLayer:
        raise NotImplementedError

    def embed(self, tokens: Tensor, place: Tensor) -> Tensor:
        """place: of each token in its segment, broadcastable to B x T."""
        raise NotImplementedError

    def head(self, x: Tensor) -> Tensor:
        """-> logits, or the features that an adaptive softmax takes"""
        raise NotImplementedError

    def positions(self, slots: int, shown: int, queries: int, hidden: Tensor) -> Any:
        """For `attend`: positions of the keys [slots; the last `shown` vectors of sinks and
        short-term memory; `queries` tokens].  hidden: added to the scores, broadcastable to
        B x H x T x P."""
        raise NotImplementedError

    def cache_positions(self, slots: int, length: int) -> Any:
        """For `placed` and `table`: those of [slots; sinks; short-term memory; `length` tokens]."""
        return None

    def slot_bias(self, slots: int, like: Tensor) -> Tensor | None:
        """Scores that depend on the place of a slot alone.  -> H x 1 x C"""
        return None

    def check_length(self, length: int) -> None:
        """Raise an error if a segment cannot have that many tokens."""

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise an error if the host has not all of these tokens."""

    # the same for all

    def __init__(
        self,
        cfg: Any,
        dictionary: Any,
        embed_tokens: nn.Module,
        build_memory: Callable[[int], LongTermMemory | None],
    ) -> None:
        """build_memory: layer number -> its long-term memory, or None."""
        super().__init__(dictionary)
        self.embed_tokens = embed_tokens
        self.adaptive_softmax = self.output_projection = None
        self.dim = cfg.decoder_embed_dim
        self.short_term = ShortTermMemory(cfg.stm_length, cfg.sink_tokens)
        self.ltm_pick = cfg.ltm_pick
        self.ltm_enabled, self.ltm_start = cfg.ltm_enabled is not False, str(cfg.ltm_start)
        self.watched = False  # set by an inspection: what is found goes into `extra["layers"]`
        self.checkpoint_activations = cfg.checkpoint_activations
        self.dropout = nn.Dropout(cfg.dropout)
        self.roles = build_roles(cfg, dictionary)

        def own_draws(number: int) -> LongTermMemory | None:
            """With a seed the host has the same first weights, whatever its memory."""
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(torch.initial_seed() + 1 + number)
                memory = build_memory(number)
                if cfg.ltm_rank and memory is not None:
                    self._need_slots(memory, f"--ltm-rank {cfg.ltm_rank}")
                    memory.correction = Correction(self.dim, cfg.ltm_rank)
                return memory

        self.layers = nn.ModuleList(
            self.build_layer(cfg, own_draws(number)) for number in range(cfg.decoder_layers)
        )

    @property
    def stm_length(self) -> int:
        return self.short_term.length

    def start_silent(self) -> None:
        """What the memories add is zero at first, unless the host is to read their slots."""
        for number, layer in enumerate(self.layers):
            if layer.memory is None:
                continue
            if self.ltm_start != "host":
                layer.memory.start_silent(number, len(self.layers))
            else:
                self._need_slots(layer.memory, "--ltm-start host")

    @staticmethod
    def _need_slots(memory: LongTermMemory, asked: str) -> None:
        if not memory.has_slots:
            raise ValueError(
                f"{asked} needs a memory with slots, which the host's own attention reads: "
                "infinite_former_lm with --ltm-density host, or compressive_transformer_lm"
            )

    def initial_state(self, rows: int) -> DecoderState:
        like = self.layers[0].inner.weight

        def count() -> Tensor:
            return torch.zeros(rows, dtype=torch.long, device=like.device)

        memories = tuple(
            layer.memory.initial_state(rows, like.device, like.dtype)
            for layer in self.layers
            if layer.memory is not None
        )
        for memory in memories:
            check_empty(memory, rows)
        return DecoderState(
            recent=tuple(like.new_zeros(rows, self.short_term.size, self.dim) for _ in self.layers),
            memories=memories,
            filled=count(),
            position=count(),
            key=count(),
            role=() if self.roles is None else (count(),),
            looked=tuple(
                torch.zeros(rows, self.short_term.size, 2, device=like.device)
                for _ in (self.layers if self.ltm_pick > 1 else ())
            ),
        )

    def memory_states(self, state: DecoderState) -> list[State | None]:
        """The state of each layer's memory, None where there is none."""
        states = iter(state.memories)
        return [None if layer.memory is None else next(states) for layer in self.layers]

    @staticmethod
    def plan_key(memory: LongTermMemory | None) -> Any:
        """Layers of the same key have the same plans."""
        return None if memory is None else (type(memory), memory.plan_key())

    def forward(
        self,
        tokens: Tensor,
        state: DecoderState,
        lengths: Tensor | None = None,
        project: bool = True,
        goals: Goals | None = None,
        head: bool = True,
    ) -> tuple[Tensor | None, DecoderState, dict[str, Any]]:
        """tokens: B x T, padded on the right to the lengths (B) if there are any.  goals: what is
        to be learned beside the likelihood.  head: False for what the head takes, B x T x e.
        -> logits (features with an adaptive softmax, None unless `project`): B x T x V, state,
        extra: of each layer what its memory has seen, learned and logged, and the losses and logs
        of all by name"""
        self.check_length(tokens.size(1))
        self.check_tokens(tokens)
        segment, plans = self._plan(tokens, state, lengths, goals)
        x = self.embed(tokens, torch.arange(tokens.size(1), device=tokens.device))
        roles = None
        if self.roles is not None:
            roles = self.roles.of(tokens, *state.role)
            x = x + self.roles(roles)
        recents, looks, memories = [], [], []
        extra: dict[str, Any] = {"layers": [], "losses": {}, "logs": {}}
        each_looked = state.looked or (None,) * len(self.layers)
        for number, (layer, recent, looked, kept, plan) in enumerate(
            zip(
                self.layers, state.recent, each_looked, self.memory_states(state), plans,
                strict=True,
            )
        ):  # fmt: skip
            output = project or number + 1 < len(self.layers)
            args = (x, recent, looked, kept if self.ltm_enabled else None, segment, plan, output)
            if self.checkpoint_activations and self.training:
                x, recent, looked, used, own = checkpoint(layer, *args, use_reentrant=False)
            else:
                x, recent, looked, used, own = layer(*args)
            recents.append(recent)
            if looked is not None:
                looks.append(looked)
            if kept is not None:
                if used is not None:
                    check_same(kept, used)
                memories.append(kept if used is None else used)
            extra["layers"].append(own)
            for name, loss in own.losses.items():
                extra["losses"][name] = extra["losses"].get(name, 0) + loss
            for name, (total, of) in own.logs.items():
                before = extra["logs"].get(name, (0, 0))
                extra["logs"][name] = (before[0] + total, before[1] + of)
        out = x if project else None
        if project and head:
            out = self.head(x)

        read = segment.lengths
        if read is None:
            read = torch.full_like(state.filled, tokens.size(1))
        scattered = mix(tokens + mix(torch.arange(tokens.size(1), device=tokens.device)))
        if segment.mask is not None:
            scattered = scattered * segment.mask
        key = torch.where(read > 0, mix(state.key + scattered.sum(dim=-1)), state.key)
        role = state.role
        if roles is not None:
            last = roles.gather(1, (read - 1).clamp(min=0)[:, None]).squeeze(1)
            role = (torch.where(read > 0, last, state.role[0]),)
        state = DecoderState(
            recent=tuple(recents),
            memories=tuple(memories),
            filled=self.short_term.after(state.filled, read),
            position=state.position + read,
            key=key,
            role=role,
            looked=tuple(looks),
        )
        return out, state, extra

    def _plan(
        self, tokens: Tensor, state: DecoderState, lengths: Tensor | None, goals: Goals | None
    ) -> tuple[Segment, list[LayerPlan]]:
        """All that the CPU must know of a segment, before anything is computed."""
        t, mask = tokens.size(1), None
        if lengths is not None:
            if min(lengths.tolist()) < t:
                mask = torch.arange(t, device=tokens.device) < lengths[:, None]
            else:
                lengths = None
        short_term, joining = self.short_term, None
        filled, position = state.filled.tolist(), state.position.tolist()
        left, visible = short_term.left(filled, position), short_term.visible(filled, position)
        if short_term.joins(filled, position):
            waiting = state.recent[0].size(1) - short_term.size
            joining = short_term.joining(state.filled, state.position, waiting)
        leaving = None
        if self.ltm_pick > 1:
            picks = [-(-count // self.ltm_pick) for count in left]
            among, chosen = (torch.tensor(x, device=tokens.device) for x in (left, picks))
            leaving, left = Leaving(among, chosen, max(picks)), picks
        watched = Watched(left, self._leaving(state)) if self.watched else None
        shown = short_term.shown(visible)
        segment = Segment(
            short_term, joining, shown, lengths, mask, state.key, goals, leaving, watched
        )
        found: dict[Any, LayerPlan] = {}
        plans: list[LayerPlan] = []
        positions: dict[tuple[int, ...], Any] = {}
        for layer, own in zip(self.layers, self.memory_states(state), strict=True):
            memory = None if own is None or not self.ltm_enabled else layer.memory
            key = self.plan_key(memory)
            if key not in found:
                write = None if memory is None else memory.plan(left, own)
                held = () if write is None or not write.slots else tuple(write.held)
                if held not in positions:
                    positions[held] = self._positions(tokens, state, visible, held)
                found[key] = LayerPlan(write, positions[held])
            plans.append(found[key])
        return segment, plans

    def _leaving(self, state: DecoderState) -> Tensor:
        """Which vectors of their streams stand before the short-term memory.  -> B x W"""
        width = state.recent[0].size(1) - self.short_term.size
        place = torch.arange(-width, 0, device=state.position.device)
        return (state.position - self.short_term.length)[:, None] + place

    def _positions(
        self, tokens: Tensor, state: DecoderState, visible: list[int], held: tuple[int, ...]
    ) -> Any:
        """held: how many slots each row has, if there are any."""
        t, slots = tokens.size(1), max(held, default=0)
        shown = self.short_term.shown(visible)
        past = slots + shown
        hidden = _causal(t, past, self.layers[0].inner.weight.dtype, tokens.device)
        if min(visible) < shown or (slots and min(held) < slots):
            absent = [self.short_term.absent(state.filled, state.position, shown)]
            if slots:
                place = torch.arange(slots, device=tokens.device)
                held_by_row = torch.tensor(held, device=tokens.device)
                absent.insert(0, place < slots - held_by_row[:, None])
            every = F.pad(torch.cat(absent, dim=1), (0, t))  # B x P
            hidden = hidden.masked_fill(every[:, None, None], -torch.inf)
        return self.positions(slots, shown, t, self.with_slot_bias(hidden, slots))

    def with_slot_bias(self, hidden: Tensor, slots: int) -> Tensor:
        """hidden: ... x T x P, the slots first."""
        bias = self.slot_bias(slots, hidden) if slots else None
        return hidden if bias is None else hidden + F.pad(bias, (0, hidden.size(-1) - slots))

    def max_positions(self) -> int:
        return int(1e9)
