"""One layer of the decoder: what leaves the window is written, the queries look at the window and
at the memory, what they find is spoken into the residual stream; then the feed-forward net."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_inf.memory import (
    Encounter,
    LongTermMemory,
    ShortTermMemory,
    State,
    Window,
    side_by_side,
    take_part,
)

from .attention import Attention, Place

# B rows, T tokens of the segment, C slots, K sinks, S short-term length, P keys, H heads, G of them
# with keys of their own, d head width, e = H d


@dataclass
class LayerState(State):
    window: Window
    memory: Any  # State of the long-term memory; () without one


@dataclass
class LayerCache(State):
    """What a layer needs to go on from a segment's token to the next."""

    # B x G x P x d, for [slots; sinks; short-term memory; segment]; G heads, which others may share
    keys: Tensor
    values: Tensor
    contents: Any  # of the memory; () without one


@dataclass
class Segment:
    """What every layer needs to know of a segment, worked out once."""

    short_term: ShortTermMemory
    joining: tuple[Tensor, Tensor] | None  # what has left and becomes a sink
    shown: int  # sinks and short-term memory, of the row that sees most
    read: Tensor  # B, of the CPU: real tokens
    lengths: Tensor | None  # the same where the model is, None if there is no padding
    mask: Tensor | None  # B x T: true for real tokens, None if there is no padding
    real: Tensor  # the same, never None
    key: Tensor  # B: hash of the stream so far

    surprise: Tensor | None  # B x W, of what has left, if a memory wants it

    def split(self, window: Window, surprise: bool) -> tuple[Window, Window]:
        """-> what has left, and what is in sight.  surprise: whether the former has it as a mark"""
        left, visible = self.short_term.split(window, self.joining)
        if surprise and self.surprise is not None:
            left = replace(left, marks=torch.cat([left.marks, self.surprise[..., None]], dim=2))
        return left, visible

    def push(self, visible: Window, view: SegmentView, marks: Tensor | None) -> Window:
        """The window after the segment."""
        source = view.source.detach()
        projected = visible.projected[:, :0]
        projected = projected.new_zeros(*source.shape[:2], projected.size(2))
        context = None
        if projected.size(2):
            context = view.projected.detach().to(projected.dtype)
            projected = context[:, context.size(1) - source.size(1) :]
        whole = self.shown == visible.vectors.size(1) and self.lengths is None
        if whole and not visible.marks.size(2):
            vectors = torch.cat([visible.vectors, source], dim=1)
            nothing = visible.marks.new_zeros(*vectors.shape[:2], 0)
            return Window(vectors, nothing, nothing if context is None else context)
        return self.short_term.push(visible, source, projected, marks, self.lengths)


@dataclass
class LayerPlan:
    """The same for all layers whose memories have the same plan."""

    write: Any  # the memory's Plan; None without a memory, or if it is off
    positions: Any  # of the keys [slots; sinks; short-term memory; segment], for the attention

    @property
    def slots(self) -> int:
        return 0 if self.write is None else self.write.slots


def before(
    slots: tuple[Tensor, Tensor] | None, others: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Keys and values of slots, and the others behind them."""
    if slots is None:
        return others
    keys, values = (torch.cat(both, dim=2) for both in zip(slots, others, strict=True))
    return keys, values


class SegmentView:
    """What the queries of a segment may look at."""

    def __init__(
        self,
        attention: Attention,
        source: Tensor,
        past: Window,
        slots: tuple[Tensor, Tensor] | None,
        positions: Any,
        contents: Any,
    ) -> None:
        """past: [sinks; short-term memory], as far as it is in sight.  slots: keys and values"""
        self.attention, self.source, self.positions = attention, source, positions
        self._past = past
        self.query, self.contents = attention.queries(source), contents
        self.slots = 0 if slots is None else slots[0].size(2)
        self._slots = slots

    @cached_property
    def projected(self) -> Tensor:
        """Of [sinks; short-term memory; segment]."""
        past, known = self._past.projected, not torch.is_grad_enabled()
        if not (known and past.size(2)):
            past = self.attention.key_value(self._past.vectors)
        return torch.cat([past, self.attention.key_value(self.source)], dim=1)

    @cached_property
    def keys_values(self) -> tuple[Tensor, Tensor]:
        return before(self._slots, self.attention.heads(self.projected))

    @property
    def values(self) -> Tensor:
        return self.keys_values[1]

    def attend(self) -> Tensor:
        return self.attention.attend(self.query, *self.keys_values, self.positions)

    def weights(self, every: int = 1) -> Tensor:
        return self.attention.weights(self.query, self.keys_values[0], self.positions, every)


class TokenView:
    """The same of one query a row, in the middle of a segment."""

    def __init__(
        self, attention: Attention, source: Tensor, cache: LayerCache, place: Place, table: Any
    ) -> None:
        self.attention, self.keys, self.values = attention, cache.keys, cache.values
        self.query, self.contents, self.slots = (
            attention.queries(source),
            cache.contents,
            place.slots,
        )
        self.place, self.table = place, table

    def attend(self) -> Tensor:
        return self.attention.mix(self.weights(), self.values)

    def weights(self) -> Tensor:
        return self.attention.token_weights(self.query, self.keys, self.place, self.table)


class DecoderLayer(nn.Module):
    """`forward` takes a segment, `step` one token with the cache of those before it, which is many
    times as fast as a segment of one; both `look` alike."""

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        memory: LongTermMemory | None,
        attention: Attention,
        dropout: float = 0.0,
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
        self.normalize_before = normalize_before
        for linear in (self.gate, self.inner, self.outer):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    @property
    def num_marks(self) -> int:
        return 0 if self.memory is None else self.memory.num_marks

    def forward(
        self, x: Tensor, state: LayerState, segment: Segment, plan: LayerPlan, speak: bool = True
    ) -> tuple[Tensor | None, LayerState, Encounter | None]:
        """x: B x T x e.  speak: False if only the state is wanted: then x and the encounter are
        None."""
        source = self.source(x)
        memory = None if plan.write is None else self.memory
        left, visible = segment.split(state.window, memory is not None and memory.wants_surprise)
        stored, trace = self.write(memory, left, state.memory, segment, plan)
        view = self.view(memory, source, visible, stored, segment, plan)
        out = met = None
        if speak:
            attended, added, seen = self.look(view, memory)
            out = self.speak(x, attended, added)
            if memory is not None:
                met = Encounter(memory, self.attention, view.query, seen, trace, plan.write,
                                attended, added, segment.real)  # fmt: skip
        marks = self.mark(memory, view, segment)
        if memory is not None and memory.observes:
            if marks is not None:
                seen = marks[:, : view.slots]
            else:
                seen = met.seen if met is not None else memory.look(view.query, stored)
            stored = memory.observe(stored, seen, segment.mask)
        marks = None if marks is None else marks[:, view.slots :]
        return out, LayerState(segment.push(visible, view, marks), stored), met

    def step(
        self, x: Tensor, cache: LayerCache, place: Place, table: Any, remember: bool
    ) -> Tensor:
        """One token a row, x: B x 1 x e, in the middle of a segment; its key and value go into
        the cache, in place.  remember: whether the long-term memory is on."""
        source = self.source(x)
        self.attention.keep(source, cache.keys, cache.values, place, table)
        view = TokenView(self.attention, source, cache, place, table)
        attended, added, _ = self.look(view, self.memory if remember else None)
        return self.speak(x, attended, added)

    def source(self, x: Tensor) -> Tensor:
        """The vectors that queries, keys and values are made from."""
        return self.attention_norm(x) if self.normalize_before else x

    def write(
        self, memory: LongTermMemory | None, left: Window, stored: Any, segment: Segment,
        plan: LayerPlan,
    ) -> tuple[Any, Any]:  # fmt: skip
        if memory is None:
            return stored, None
        return memory.write(
            left.vectors, stored, plan.write, self.attention, segment.key, left.marks
        )

    def view(
        self, memory: LongTermMemory | None, source: Tensor, visible: Window, stored: Any,
        segment: Segment, plan: LayerPlan,
    ) -> SegmentView:  # fmt: skip
        hidden = visible.vectors.size(1) - segment.shown
        past, slots = visible.map(lambda x: x[:, hidden:]), None
        if memory is not None and plan.slots:
            slots = memory.slots(stored, self.attention, source.dtype, plan.slots)
        contents = self.contents(memory, stored, source.dtype)
        return SegmentView(self.attention, source, past, slots, plan.positions, contents)

    def look(
        self, view: SegmentView | TokenView, memory: LongTermMemory | None
    ) -> tuple[Tensor, Tensor | None, Any]:
        """Z = W^O A + W^M D.  -> W^O A, W^M D (None if it is in the first), what the memory has
        seen.  All B x T x e."""
        change = seen = None
        if memory is not None and view.slots and memory.output is not None:
            heads, change = self.attention.apart(view.weights(), view.values, view.slots)
        else:
            heads = view.attend()
            if memory is not None and not memory.num_slots:
                change, seen = memory.read(view.query, heads, view.contents)
                if memory.output is None:
                    heads, change = heads + change, None
        attended = self.attention.output(side_by_side(heads))
        if self.training and memory is not None and memory.num_slots and not view.slots:
            attended = attended + take_part(memory)
        if change is None or memory is None:
            return attended, None, seen
        return attended, memory.output(side_by_side(change)), seen

    def speak(self, x: Tensor, attended: Tensor, added: Tensor | None) -> Tensor:
        """Into the residual stream, and what follows the attention."""
        x = self._residual(x, attended if added is None else attended + added, self.attention_norm)
        y = self.ffn_norm(x) if self.normalize_before else x
        if self.gate is None:
            y = self.activation(self.inner(y))
        else:
            y = self.activation(self.gate(y)) * self.inner(y)
        return self._residual(x, self.outer(y), self.ffn_norm)

    def mark(
        self, memory: LongTermMemory | None, view: SegmentView, segment: Segment
    ) -> Tensor | None:
        if memory is None or not memory.num_marks:
            return None
        with torch.no_grad():
            weights = view.weights(memory.every)
            return memory.mark(weights, view.query.size(2), segment.mask)

    def open_cache(
        self, window: Window, stored: Any, remember: bool, positions: Any, room: int
    ) -> LayerCache:
        """window: [sinks; short-term memory; segment], B x K+S+T.  remember: whether the
        long-term memory is on.  positions: of a cache, from the host.  room: columns for tokens to
        come."""
        memory, slots, vectors = self.memory if remember else None, None, window.vectors
        if memory is not None and memory.num_slots:
            slots = memory.slots(stored, self.attention, vectors.dtype, memory.num_slots)
        projected = window.projected
        if not projected.size(2):
            projected = self.attention.key_value(vectors)
        keys, values = before(slots, self.attention.heads(projected))
        keys = self.attention.placed(keys, positions)
        contents = self.contents(memory, stored, vectors.dtype)
        return LayerCache(F.pad(keys, (0, 0, 0, room)), F.pad(values, (0, 0, 0, room)), contents)

    def contents(self, memory: LongTermMemory | None, stored: Any, dtype: torch.dtype) -> Any:
        """What reads need of the memory's state; nothing if it is read by its slots."""
        if memory is None or memory.num_slots:
            return ()
        return memory.contents(stored, self.attention, dtype)

    def _residual(self, x: Tensor, update: Tensor, norm: nn.Module) -> Tensor:
        x = x + (self.dropout(update) if self.training else update)
        return x if self.normalize_before else norm(x)
