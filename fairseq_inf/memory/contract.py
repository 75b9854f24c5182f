"""What a long-term memory is to the decoder, its layers, generation and the criterion.

A memory takes the vectors that leave the short-term memory of its layer, and changes what the
layer's attention finds.  With the heads A of the host's own attention, the layer computes

    Z = W^O A + W^M D,

where D is what the memory adds to them, head by head, and W^M its own output projection, or W^O if
it has none.  There are two ways to D:

- `read` gives it, from the queries and A;
- or the memory has slots, vectors that are further keys of the host's attention: with A' the heads
  of one softmax over slots and all other keys, D = A' - A.

What a memory keeps is a State: tensors with the rows first, of the same shape and kind for ever,
zeros when it is empty.  It is a value: `write` returns another one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .state import State

# B rows, T tokens, W vectors that have left the short-term memory, C slots, H heads, d head width,
# e = H d


class HostAttention(Protocol):
    """What a memory may ask of the attention that it serves."""

    num_heads: int

    def project(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Keys, without their positions, and values: B x P x e -> 2 of B x H x P x d"""
        ...

    def by_content(self, query: Tensor, vectors: Tensor, visible: Tensor) -> Tensor:
        """What queries (B x H x T x d) find in vectors (B x P x e) where `visible` (B x P)."""
        ...


@dataclass(kw_only=True)
class Plan:
    """What a write does to each row, in numbers that the CPU knows.  A memory may add to it."""

    filled: Tensor  # B, bool: the memory is not empty afterwards
    slots: int = 0  # the most slots that a row shows afterwards
    held: Sequence[int] = ()  # how many each row shows, at the right end


@dataclass
class Goals:
    """What is learned beside the likelihood: which tokens count, and the criterion's settings."""

    counted: Tensor  # B x T, bool: tokens with a target
    settings: dict[str, float] = field(default_factory=dict)


@dataclass
class Encounter:
    """One segment's encounter with a memory, for its losses and logs."""

    query: Tensor  # B x H x T x d, the host's
    seen: Any  # second result of `read`
    trace: Any  # second result of `write`
    plan: Any  # of the write
    real: Tensor  # B x T, bool: no padding
    counted: Tensor  # B x T, bool: a target, and the memory is not empty
    settings: dict[str, float]  # the criterion's
    attention: HostAttention


class LongTermMemory(nn.Module):
    """Base of every memory.  `initial_state`, `plan` and `write` must be there, and `contents` with
    `read` or `slots`; the rest has a default."""

    has_slots = False  # whether it is read as further keys of the host's attention
    num_slots = 0  # C
    observes = False  # whether a state depends on where the last segment has looked
    output: nn.Module | None  # W^M; None, as it is unless set: the host's W^O

    def __init__(self) -> None:
        super().__init__()
        self.register_module("output", None)

    def initial_state(self, rows: int, device: Any = None, dtype: Any = None) -> State:
        """An empty memory: zeros."""
        raise NotImplementedError

    def plan(self, counts: Sequence[int], state: Any) -> Any:
        """counts: how many vectors each row takes.  -> Plan, made once a segment for all layers
        with the same `plan_key`"""
        raise NotImplementedError

    def plan_key(self) -> Hashable:
        """Layers of one class with equal keys have the same plans."""
        return id(self)

    def write(
        self,
        vectors: Tensor,
        state: Any,
        plan: Any,
        attention: HostAttention | None = None,
        key: Tensor | None = None,
    ) -> tuple[State, Any]:
        """vectors: B x W x e, of which a row takes the last as its plan says.  key: B, a hash of
        all that was read, to draw random numbers from.  -> state, what `losses` wants of it"""
        raise NotImplementedError

    def contents(self, state: Any, attention: HostAttention | None, dtype: torch.dtype) -> Any:
        """What `read` needs of the state, whatever the query: tensors with the rows first, in
        tuples or a State.  It is kept while tokens are generated."""
        raise NotImplementedError

    def read(self, query: Tensor, own: Tensor, contents: Any) -> tuple[Tensor, Any]:
        """query: B x H x T x d, without positions, of a segment or of one token.  own: what the
        host's attention finds, alike.  -> D: B x H x T x d, and what the memory has seen"""
        raise NotImplementedError

    def look(self, query: Tensor, state: Any) -> Any:
        """Only what `read` has seen, for a memory that observes."""
        raise NotImplementedError

    def slots(self, state: Any) -> tuple[Tensor, Tensor]:
        """-> B x C x e, the newest at the right end, and how many of them are real: B"""
        raise NotImplementedError

    def observe(self, state: Any, seen: Any, mask: Tensor | None) -> State:
        """The state after a segment has looked.  mask: B x T, true for real tokens."""
        return state

    def losses(self, met: Encounter) -> dict[str, Tensor]:
        """Sums over tokens of what is learned beside the likelihood, by name.  The criterion has
        a weight and a line of the log for each."""
        return {}

    def logs(self, met: Encounter) -> dict[str, tuple[Tensor, Tensor]]:
        """What the log shows, by name: a sum, and of how many."""
        return {}

    def start_silent(self, layer: int, layers: int) -> None:
        """Add exactly nothing at first, so that a pretrained host starts as it was: a W^M of
        zeros."""
        raise NotImplementedError


def as_heads(x: Tensor, num_heads: int) -> Tensor:
    """B x P x e -> B x H x P x d"""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def side_by_side(heads: Tensor) -> Tensor:
    """B x H x T x d -> B x T x e"""
    return heads.transpose(1, 2).flatten(2)


def take_part(module: nn.Module) -> Tensor:
    """A zero that depends on every parameter: data-parallel training waits for each gradient."""
    return sum(0 * p.flatten()[0] for p in module.parameters())  # type: ignore[return-value]


def check_empty(state: State, rows: int) -> None:
    """What is promised of a new state: the rows first in every tensor, and zeros."""
    for name, x in state.tensors().items():
        if x.shape[:1] != (rows,):
            raise AssertionError(
                f"{name} of a new {type(state).__name__} has not {rows} rows first"
            )
        if bool(x.any()):
            raise AssertionError(f"{name} of a new {type(state).__name__} is not zero")


def check_same(before: State, after: State) -> None:
    """What is promised of a state that follows another: the same tensors in shape and kind."""
    old, new = before.tensors(), after.tensors()
    if old.keys() != new.keys():
        raise AssertionError(f"a {type(before).__name__} became a {type(after).__name__}")
    for name, x in new.items():
        if x.shape != old[name].shape or x.dtype != old[name].dtype:
            raise AssertionError(
                f"{name} of a {type(after).__name__} was {old[name].dtype} "
                f"{tuple(old[name].shape)} and became {x.dtype} {tuple(x.shape)}"
            )
