"""What a long-term memory is to the decoder, its layers, generation and the criterion.

A memory takes the vectors that leave the short-term memory of its layer, and changes what the
layer's attention finds.  With the heads A of the host's own attention, the layer computes

    Z = W^O A + W^M D,

where D is what the memory adds to them, head by head, and W^M its own output projection, or W^O if
it has none.  There are two ways to D:

- `read` gives it, from the queries and A;
- or the memory has slots, further keys and values of the host's attention: with A' the heads of one
  softmax over slots and all other keys, D = A' - A.

What a memory keeps is a State: tensors with the rows first, of the same shape and kind for ever,
zeros when it is empty.  It is a value: `write` returns another one.

With each segment a layer calls `write`, then `contents` and `read`, or `slots`, then `observe`;
before all layers the decoder calls `plan`.  With each generated token it calls `read` alone, with
the `contents` of the last segment's border.  What a memory learns beside the likelihood the
criterion asks of it, `losses`, by what a layer has told of its Encounter.  CONTRIBUTING.md has a
whole memory as an example.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .state import State

# B rows, T tokens, W vectors that have left the short-term memory, C slots, H heads, d head width,
# e = H d


class HostAttention(Protocol):
    """What a memory may ask of the attention that it serves."""

    num_heads: int

    def key_value(self, vectors: Tensor) -> Tensor:
        """Keys, without their positions, and values in one: B x P x e -> B x P x 2 G d"""
        ...

    def heads(self, projected: Tensor) -> tuple[Tensor, Tensor]:
        """Head by head: B x P x 2 G d -> 2 of B x G x P x d"""
        ...

    def project(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Both: B x P x e -> 2 of B x G x P x d, each for H / G heads of queries"""
        ...

    def by_content(self, query: Tensor, vectors: Tensor, visible: Tensor) -> Tensor:
        """What queries (B x H x T x d) find in vectors (B x P x e) where `visible` (B x P)."""
        ...


@dataclass(kw_only=True)
class Plan:
    """What a write does to each row.  A memory adds what its `write` needs, in a subclass with
    @dataclass(kw_only=True); `slots` and `held` are for memories that have slots."""

    counts: Sequence[int]  # how many vectors each row takes
    filled: Tensor  # B, bool, of the CPU: the memory is not empty afterwards
    slots: int = 0  # the most slots that a row shows afterwards, known to the CPU
    held: Sequence[int] = ()  # how many each row shows, at the right end


@dataclass
class Move:
    """What a write does to the line [0, 1] of one row's memory.

    What stood at t stands at `move(t)` afterwards, and is lost if that is below 0.  The vectors
    that have come, and have no place yet, take the places `new` in their order.
    """

    new: Tensor  # n, float64, rising
    knots: Tensor  # K >= 2, float64, rising: between two of them the map is a straight line
    landed: Tensor  # K: where they go
    exact: Callable[[Tensor], Tensor] | None = None  # the map itself, where knots only come near
    forgets: bool = False  # nothing that stood there before is left
    begin: float = 0.0  # if so, the left end of what the memory holds now

    def __call__(self, t: Tensor) -> Tensor:
        if self.exact is not None:
            return self.exact(t)
        if len(self.knots) == 2:  # without a search
            (left, right), (low, high) = self.knots, self.landed
            return torch.lerp(low, high, ((t - left) / (right - left)).clamp(0, 1))
        at = torch.searchsorted(self.knots, t, right=True).clamp(1, len(self.knots) - 1)
        left, right = self.knots[at - 1], self.knots[at]
        share = ((t - left) / (right - left).clamp(min=1e-300)).clamp(0, 1)
        return torch.lerp(self.landed[at - 1], self.landed[at], share)


def shift(made: int, held: int, slots: int, each: int = 1) -> Move:
    """What new slots do to those of a row, first in, first out.  The line is C cells, a slot each,
    the newest at the right end; the `each` vectors of a slot share its cell evenly.
    made: how many are new.  held: how many there were"""
    share = made / slots
    step = torch.arange(made * each, dtype=torch.float64) + 0.5
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    return Move(
        new=1 - share + step / (each * slots),
        knots=ends,
        landed=ends - share,
        forgets=not held and made > 0,
        begin=max(0.0, 1 - share),
    )


def slot_at(slots: Tensor, places: Tensor) -> Tensor:
    """The slots of the cells that the places are in.  B x C x e, K -> B x K x e"""
    count = slots.size(1)
    return slots[:, (places * count).long().clamp(0, count - 1).to(slots.device)]


@dataclass
class Encounter:
    """One segment's encounter with the memory of a layer: what losses, logs and onlookers go by."""

    memory: LongTermMemory
    attention: HostAttention
    query: Tensor  # B x H x T x d, the host's
    seen: Any  # second result of `read`
    trace: Any  # second result of `write`
    plan: Any  # of the write
    attended: Tensor  # W^O A: B x T x e
    added: Tensor | None  # W^M D; None if it is in W^O A
    real: Tensor  # B x T, bool: no padding
    # what the criterion says
    counted: Tensor = field(default_factory=lambda: torch.empty(0))  # B x T, bool: a target, and
    # the memory is not empty
    settings: Mapping[str, float] = field(default_factory=dict)

    def of(self, targets: Tensor, settings: Mapping[str, float]) -> Encounter:
        """targets: B x T, bool: tokens with a target.  settings: of the criterion, by name"""
        counted = targets & self.real & self.plan.filled.to(targets.device)[:, None]
        return replace(self, counted=counted, settings=settings)

    @torch.no_grad()
    def logs(self, targets: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Those of the memory, and what share it has in what the layer adds to the residual stream,
        |W^M D| / (|W^M D| + |W^O A|), with the norms over all real tokens."""
        logs = self.memory.logs(self)
        if self.added is not None:
            exact = torch.promote_types(self.added.dtype, torch.float)
            real = self.real[..., None]
            memory, attention = (
                torch.linalg.vector_norm(x * real, dtype=exact) for x in (self.added, self.attended)
            )
            of = targets.sum()
            logs["ltm_share"] = (memory / (memory + attention).clamp(min=1e-20) * of, of)
        return logs


class LongTermMemory(nn.Module):
    """Base of every memory.

    There must be `initial_state`, `plan`, `write` and `start_silent`; besides, either `contents`
    and `read`, or `num_slots` and `slots`; `look` if it `observes`, `mark` if it has `num_marks`.
    The rest has a default.  An empty memory must add exactly nothing, so that maps of values have
    no bias, and every parameter must have a gradient in every step, also then (`take_part`).
    """

    num_slots = 0  # C, for ever: further keys of the host's attention, some of which may be empty
    spacing = 0.0  # positions from one slot to the next, where the host has any; 0: all at one
    num_marks = 0  # numbers that go with each vector of the window, from `mark`
    every = 1  # one query in so many is asked for them
    wants_surprise = False  # whether a write wants to know what the model did not expect
    observes = False  # whether a state depends on where the last segment has looked
    output: Any  # W^M; None, as it is unless set: the host's W^O

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(type(self), "output"):  # a property of what it is made of
            self.output = None

    def initial_state(self, rows: int, device: Any = None, dtype: Any = None) -> State:
        """An empty memory: zeros in every tensor, the rows first.  dtype: of the model's weights,
        which may be half precision, too coarse for sums over a long stream."""
        raise NotImplementedError

    def plan(self, counts: Sequence[int], state: Any) -> Any:
        """counts: how many vectors each row takes, 0 or more.  state: before the write, of the
        first of all layers with the same `plan_key`, so that a plan may depend on its counters,
        which these layers have in common, and not on what one of them has stored.
        -> Plan, made once a segment for all of them"""
        raise NotImplementedError

    def plan_key(self) -> Hashable:
        """Layers of one class with equal keys have the same plans: the settings that `plan` looks
        at.  By default each layer has its own."""
        return id(self)

    def write(
        self,
        vectors: Tensor,
        state: Any,
        plan: Any,
        attention: HostAttention | None = None,
        key: Tensor | None = None,
        marks: Tensor | None = None,
    ) -> tuple[State, Any]:
        """vectors: B x W x e, W from 0 on, of which a row takes the last `counts[row]` that its
        plan was made for; those before them mean nothing.  Called for every segment, also where no
        row takes any.  Vectors and state are to be detached here, since the gradient ends with the
        segment.  key: B, a hash of all that was read, to draw random numbers from.  marks: of the
        vectors, B x W x `num_marks`, and behind these the surprise, if the memory wants it: the
        mean of -log p over a token and its neighbours, 0 if it is not known.
        -> state, what `losses` wants of it (None if nothing)"""
        raise NotImplementedError

    def contents(self, state: Any, attention: HostAttention | None, dtype: torch.dtype) -> Any:
        """What `read` needs of the state, whatever the query, in the dtype of the activations: a
        tensor with the rows first, a tuple of such, or a State.  It is kept while tokens are
        generated, and its rows change places with those of a beam."""
        raise NotImplementedError

    def read(self, query: Tensor, attended: Tensor, contents: Any) -> tuple[Tensor, Any]:
        """query: B x H x T x d, without positions, of a segment or of one token.  attended: A,
        alike.  -> D: B x H x T x d, exactly 0 for rows whose memory is empty, and what the memory
        has seen, for `observe`, `losses` and `logs` (None if nothing)"""
        raise NotImplementedError

    def look(self, query: Tensor, state: Any) -> Any:
        """Only what `read` would have seen: for a memory that observes, where a segment is read
        without output."""
        raise NotImplementedError

    def slots(
        self, state: Any, attention: HostAttention, dtype: torch.dtype, shown: int
    ) -> tuple[Tensor, Tensor]:
        """Keys without positions and values of the last `shown` slots, the newest at the right end.
        The state has `held`, how many are real: B.  -> 2 of B x G x shown x d"""
        raise NotImplementedError

    def mark(self, weights: Tensor, tokens: int, mask: Tensor | None) -> Tensor:
        """What a segment of T tokens adds to the marks of the vectors that it could attend to.
        weights: of one query in `every`, B x H x T' x P, the segment at the right end.  mask: B x
        T, true for real tokens; None if all are.  -> B x P x `num_marks`"""
        raise NotImplementedError

    def observe(self, state: Any, seen: Any, mask: Tensor | None) -> State:
        """The state after a segment has looked.  seen: as `read` says; of a memory with marks, what
        `mark` has for the slots.  mask: B x T, true for real tokens; None if all are."""
        return state

    # for an inspection: a memory that is a line on which vectors have their places

    def moves(self, before: Any, after: Any, plan: Any, key: Tensor | None) -> list[Move] | None:
        """What the write of this plan, from one state to the next, does to the places in each row;
        None if a vector has no place in this memory.  What `read` has seen then has `mass(edges)`
        and `parts(most)`, as the densities have, and `at` is there."""
        return None

    def stored(self, vectors: Tensor) -> Tensor:
        """B x n x e, as a write keeps them."""
        return vectors

    def kept(self, row: int, after: Any) -> Tensor | None:
        """Which of all the vectors that a row was ever given it keeps, if they are not those of its
        moves, in their order.  -> n"""
        return None

    def at(self, state: Any, places: Tensor) -> Tensor:
        """What the memory holds there.  places: K, of all rows.  -> B x K x e"""
        raise NotImplementedError

    def losses(self, met: Encounter) -> dict[str, Tensor]:
        """Sums over tokens of what is learned beside the likelihood, by name; those of all layers
        are added.  The criterion has a weight for each, 1 for a name that it does not know, and a
        line of the log."""
        return {}

    def logs(self, met: Encounter) -> dict[str, tuple[Tensor, Tensor]]:
        """What the log shows, by name: a sum, and of how many; without a gradient."""
        return {}

    def start_silent(self, layer: int, layers: int) -> None:
        """Add exactly nothing at first, so that a pretrained host starts as it was: an `output`
        that is a W^M of zeros, made here if there was none.  Called by such hosts when all layers
        are built.  layer: from 0 to layers - 1."""
        raise NotImplementedError


def silent(dim: int) -> nn.Linear:
    """A W^M of zeros."""
    output = nn.Linear(dim, dim, bias=False)
    nn.init.zeros_(output.weight)
    return output


def as_heads(x: Tensor, num_heads: int) -> Tensor:
    """B x P x e -> B x H x P x d"""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def side_by_side(heads: Tensor) -> Tensor:
    """B x H x T x d -> B x T x e"""
    return heads.transpose(1, 2).flatten(2)


def take_part(module: nn.Module) -> Tensor:
    """A zero that depends on every parameter: data-parallel training waits for each gradient."""
    return sum(0 * p.flatten()[0] for p in module.parameters())  # type: ignore[return-value]
