"""One layer of the decoder: self-attention with a memory as a part, then the feed-forward net."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_inf.memory import (
    Encounter,
    Goals,
    Leaving,
    LongTermMemory,
    Move,
    ShortTermMemory,
    State,
    Weights,
    pick,
    rate,
    side_by_side,
    take_part,
)

from .attention import Attention, Place

# B rows, T tokens of the segment, K sinks, S short-term length, P keys, H heads, d head width,
# e = H d


@dataclass
class Watched:
    """Of vectors that go to a long-term memory: a row takes the last `counts` of W."""

    counts: Sequence[int]
    numbers: Tensor  # B x W: which vectors of its stream they are
    vectors: Tensor | None = None  # B x W x e
    moves: list[Move] | None = None  # what the write does to the places of all; None if it has none

    def row(self, row: int = 0) -> tuple[Tensor, Tensor]:
        """-> numbers: n, vectors: n x e"""
        assert self.vectors is not None
        first = self.numbers.size(1) - self.counts[row]
        return self.numbers[row, first:], self.vectors[row, first:]


@dataclass
class Segment:
    """What every layer needs to know of a segment, worked out once."""

    short_term: ShortTermMemory
    joining: tuple[Tensor, Tensor] | None  # what has left and becomes a sink
    shown: int  # sinks and short-term memory, of the row that sees most
    lengths: Tensor | None  # B: real tokens, None if there is no padding
    mask: Tensor | None  # B x T: true for real tokens, None if there is no padding
    key: Tensor  # B: hash of the stream so far
    goals: Goals | None  # what is to be learned and logged
    leaving: Leaving | None  # None: the long-term memory gets all that leaves
    watched: Watched | None  # what an inspection wants to know


@dataclass
class LayerPlan:
    """The same for all layers whose memories have the same plan."""

    write: Any  # the memory's Plan; None without a memory
    positions: Any  # of the keys [slots; sinks; short-term memory; segment], for the attention

    @property
    def slots(self) -> int:
        return 0 if self.write is None else self.write.slots


@dataclass
class LayerExtra:
    """What is to be learned and logged of a layer's memory."""

    losses: dict[str, Tensor] = field(default_factory=dict)
    logs: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    seen: Any = None
    watched: Watched | None = None


@dataclass
class LayerCache(State):
    """What a layer needs to go on from a segment's token to the next."""

    # B x G x P x d, for [slots; sinks; short-term memory; segment]; G heads, which others may share
    keys: Tensor
    values: Tensor
    contents: Any  # of the memory; () without one


class DecoderLayer(nn.Module):
    """Two passes: `forward` takes a segment, `step` one token, over the same keys and the same
    contents of the memory."""

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        memory: LongTermMemory | None,
        attention: Attention,
        dropout: float = 0.0,
        activation_dropout: float = 0.0,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        normalize_before: bool = True,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        gated: bool = False,
    ) -> None:
        """gated: the feed-forward net is W (f(G y) * V y) without biases, and not W f(V y)."""
        super().__init__()
        # in this order: optimizers number the parameters
        self.attention, self.memory = attention, memory
        self.attention_norm = norm(dim)
        self.gate = nn.Linear(dim, ffn_dim, bias=False) if gated else None
        self.inner = nn.Linear(dim, ffn_dim, bias=not gated)
        self.outer = nn.Linear(ffn_dim, dim, bias=not gated)
        self.ffn_norm = norm(dim)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.activation_dropout = nn.Dropout(activation_dropout)
        self.normalize_before = normalize_before
        for linear in (self.gate, self.inner, self.outer):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def forward(
        self,
        x: Tensor,
        recent: Tensor,
        looked: Tensor | None,
        state: State | None,
        segment: Segment,
        plan: LayerPlan,
        output: bool = True,
    ) -> tuple[Tensor | None, Tensor, Tensor | None, State | None, LayerExtra]:
        """x: B x T x e.  recent: B x W x e.  looked: B x W x 2, how much its vectors were looked at
        and how often they could be, None if it does not matter.  state: of the memory, None if
        there is none or it is off.  output: False if only the states are wanted: then x is None."""
        source = self.source(x)
        left, kept = segment.short_term.split(recent, segment.joining)
        context = torch.cat([kept[:, kept.size(1) - segment.shown :], source], dim=1)
        memory = None if state is None else self.memory
        trace = seen = marks = None
        watched = None if memory is None else segment.watched
        if looked is not None:
            gone, marks = segment.short_term.split(looked, segment.joining)
            if memory is not None and segment.leaving is not None:
                left = pick(left, rate(gone), segment.leaving)
                if watched is not None:
                    numbers = pick(watched.numbers[..., None], rate(gone), segment.leaving)
                    watched = replace(watched, numbers=numbers.squeeze(2))
        if memory is not None:
            if watched is not None:
                moves = memory.moves(state, plan.write, segment.key)
                watched = replace(watched, vectors=left, moves=moves)
            state, trace = memory.write(left, state, plan.write, self.attention, segment.key)
        keys = context
        if memory is not None and plan.slots:
            slots = self._slots(memory, state, plan.slots, context.dtype)
            keys = torch.cat([slots, context], dim=1)
        query = self.attention.queries(source)
        extra = LayerExtra()
        out = None
        if output or marks is not None:
            key, value = self.attention.project(keys)
        if marks is not None:
            new = marks.new_zeros(*context.shape[:2], 2)
            if memory is not None:
                new = self.attention.looked(query, key, plan.positions, segment.mask)
                new = new[:, plan.slots :]
            looked = segment.short_term.push_looked(marks, new, segment.shown, segment.lengths)
        if output:

            def attend(first: int = 0, drop: bool = True, value: Tensor = value) -> Tensor:
                return self.attention.attend(query, key, value, plan.positions, first, drop)

            contents = self.contents(memory, state, x.dtype)
            found, added, seen = self._find(query, attend, memory, plan.slots, contents)
            if memory is not None and segment.goals is not None:
                extra = self._learn(memory, query, seen, trace, plan, segment, segment.goals)
                if added is not None:
                    extra.logs["ltm_share"] = _share(added, found, segment, segment.goals)
            if watched is not None and memory is not None and plan.slots:
                seen = _slot_weights(attend, key, plan.slots, memory.num_slots)
            extra.seen = seen
            if self.training and memory is not None and memory.has_slots and not plan.slots:
                found = found + take_part(memory)
            out = self.finish(x, found if added is None else found + added)
        elif memory is not None and memory.observes:
            seen = memory.look(query, state)
        if memory is not None:
            state = memory.observe(state, seen, segment.mask)
        extra.watched = watched
        if segment.shown == kept.size(1) and segment.lengths is None:
            recent = context.detach()
        else:
            recent = segment.short_term.push(kept, source.detach(), segment.lengths)
        return out, recent, looked, state, extra

    def open_cache(
        self, vectors: Tensor, state: State | None, positions: Any, room: int
    ) -> LayerCache:
        """vectors: B x K+S+T x e, [sinks; short-term memory; segment].  positions: of a cache, from
        the host.  room: columns for tokens to come."""
        memory = None if state is None else self.memory
        if memory is not None and memory.has_slots:
            slots = self._slots(memory, state, memory.num_slots, vectors.dtype)
            vectors = torch.cat([slots, vectors], dim=1)
        keys, values = self.attention.project_shared(vectors)
        keys = self.attention.placed(keys, positions)
        contents = self.contents(memory, state, vectors.dtype)
        return LayerCache(F.pad(keys, (0, 0, 0, room)), F.pad(values, (0, 0, 0, room)), contents)

    def step(self, x: Tensor, cache: LayerCache, place: Place, table: Any, ltm: bool) -> Tensor:
        """One token a row, x: B x 1 x e, in the middle of a segment; its key and value go into
        the cache, in place.  ltm: whether the long-term memory is on."""
        source = self.source(x)
        query = self.attention.queries(source)
        self.attention.keep(source, cache.keys, cache.values, place, table)

        def attend(first: int = 0, drop: bool = True) -> Tensor:
            return self.attention.attend_token(query, cache.keys, cache.values, place, table, first)

        memory = self.memory if ltm else None
        slots = 0 if memory is None else memory.num_slots
        found, added, _ = self._find(query, attend, memory, slots, cache.contents)
        return self.finish(x, found if added is None else found + added)

    @staticmethod
    def _slots(memory: LongTermMemory, state: State | None, shown: int, dtype: Any) -> Tensor:
        """The last `shown` slots, as keys and values are made of them.  -> B x `shown` x e"""
        slots = memory.slots(state)[0].to(dtype)
        slots = slots[:, slots.size(1) - shown :]
        return slots if memory.correction is None else memory.correction(slots)

    def contents(
        self, memory: LongTermMemory | None, state: State | None, dtype: torch.dtype
    ) -> Any:
        """What reads need of the memory's state; nothing if it is read by its slots."""
        if memory is None or memory.has_slots:
            return ()
        return memory.contents(state, self.attention, dtype)

    def _find(
        self,
        query: Tensor,
        attend: Callable[..., Tensor],
        memory: LongTermMemory | None,
        slots: int,
        contents: Any,
    ) -> tuple[Tensor, Tensor | None, Any]:
        """Z = W^O A + W^M D, of a segment or a token.  -> W^O A, W^M D (None if it is in the
        first), what the memory has seen.  All B x T x e."""
        project = self.attention.output
        if memory is None:
            return project(side_by_side(attend())), None, None
        if not memory.has_slots:
            own = attend()
            change, seen = memory.read(query, own, contents)
            if memory.output is None:
                return project(side_by_side(own + change)), None, seen
            return project(side_by_side(own)), memory.output(side_by_side(change)), seen
        if memory.output is None:
            return project(side_by_side(attend())), None, None
        own = attend(slots)
        # dropout is no difference that slots make
        plain = attend(slots, False) if self.training and self.attention.dropout else own
        change = (attend(0, False) if slots else plain) - plain
        return project(side_by_side(own)), memory.output(side_by_side(change)), None

    def _learn(
        self,
        memory: LongTermMemory,
        query: Tensor,
        seen: Any,
        trace: Any,
        plan: LayerPlan,
        segment: Segment,
        goals: Goals,
    ) -> LayerExtra:
        real = torch.ones_like(goals.counted) if segment.mask is None else segment.mask
        met = Encounter(
            query=query,
            seen=seen,
            trace=trace,
            plan=plan.write,
            real=real,
            counted=goals.counted & real & plan.write.filled[:, None],
            settings=goals.settings,
            attention=self.attention,
        )
        with torch.no_grad():
            logs = memory.logs(met)
        return LayerExtra(memory.losses(met), logs)

    def source(self, x: Tensor) -> Tensor:
        """The vectors that queries, keys and values are made from."""
        return self.attention_norm(x) if self.normalize_before else x

    def finish(self, x: Tensor, found: Tensor) -> Tensor:
        """What follows the attention."""
        x = self._residual(x, found, self.attention_norm)
        y = self.ffn_norm(x) if self.normalize_before else x
        if self.gate is None:
            y = self.activation(self.inner(y))
        else:
            y = self.activation(self.gate(y)) * self.inner(y)
        return self._residual(x, self.outer(self.activation_dropout(y)), self.ffn_norm)

    def _residual(self, x: Tensor, update: Tensor, norm: nn.Module) -> Tensor:
        x = x + self.dropout(update)
        return x if self.normalize_before else norm(x)


@torch.no_grad()
def _slot_weights(attend: Callable[..., Tensor], key: Tensor, shown: int, slots: int) -> Weights:
    """What each of all `slots` gets of the attention: what is found if the values say whose they
    are.  key: B x H x P x d, of which the first are the last `shown` slots."""
    whose = torch.eye(slots, dtype=key.dtype, device=key.device)[slots - shown :]
    whose = F.pad(whose, (0, 0, 0, key.size(2) - shown)).expand(*key.shape[:2], -1, -1)
    return Weights(attend(0, False, whose).float())


@torch.no_grad()
def _share(
    memory: Tensor, attention: Tensor, segment: Segment, goals: Goals
) -> tuple[Tensor, Tensor]:
    """|W^M D| / (|W^M D| + |W^O A|), with the norms over all real tokens of the segment; it counts
    as often as there are targets."""
    if segment.mask is not None:
        memory, attention = (x * segment.mask[..., None] for x in (memory, attention))
    exact = torch.promote_types(memory.dtype, torch.float)
    size = torch.linalg.vector_norm(memory, dtype=exact)
    share = size / (size + torch.linalg.vector_norm(attention, dtype=exact)).clamp(min=1e-20)
    counted = goals.counted.sum()
    return share * counted, counted
