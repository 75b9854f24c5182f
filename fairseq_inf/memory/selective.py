"""The selective memory: keys and values of the host's own, kept whole, which its attention reads.

Of all vectors that ever left the short-term memory the C best are kept.  A policy is a function in
POLICIES: it gets what is known of the vectors, those that are kept and those that come, and rates
them; the lowest rated go.  Of several policies each has the same share of the places."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_inf.errors import SettingError

from .contract import HostAttention, LongTermMemory, Move, Plan, slot_at
from .sampling import mix
from .state import COUNTER, Ranges, State

# B rows, C slots, W vectors that have left the short-term memory, n = C + W candidates, T queries,
# P keys, H heads of queries, G of keys, d head width

EVERY = 8  # one query in so many says what is looked at
FAR = 64  # tokens away, from which a look says what will be looked at later

PRECISIONS = ("full", "bfloat16", "int8")


@dataclass
class Candidates:
    """The slots and the vectors that have left the short-term memory, in the order of their age,
    and what is known of them: B x n of each."""

    looks: Tensor  # attention that has fallen on each, over all heads
    chances: Tensor  # of how many queries
    surprise: Tensor  # of the passage around its token; 0: not known
    number: Tensor  # which it is of all that ever left
    real: Tensor  # bool: a row may have fewer than n
    key: Tensor  # B: a hash of all that was read
    projected: Callable[[], Tensor]  # B x n x 2 G d: keys and values

    @cached_property
    def keys(self) -> Tensor:
        """B x n x G d, without positions"""
        return self.projected().chunk(2, dim=-1)[0]


def looks(left: Candidates) -> Tensor:
    """What self-attention has looked at most, by those that could: the heavy hitters of Zhang et
    al. (2023), from afar, and for as long as they are kept."""
    return left.looks / left.chances.clamp(min=1e-9)


def surprise(left: Candidates) -> Tensor:
    """What stands in a passage that the model did not expect."""
    return left.surprise


def last(left: Candidates) -> Tensor:
    """First in, first out: a longer window (Xiao et al., 2024)."""
    return left.number


def random(left: Candidates) -> Tensor:
    """Anything: what another policy has to beat."""
    return mix(left.number.long() + mix(left.key)[:, None]) >> 40


Policy = Callable[[Candidates], Tensor]
POLICIES: dict[str, Policy] = {
    policy.__name__: policy for policy in (looks, surprise, last, random)
}  # fmt: skip


def policies(names: str) -> list[Policy]:
    """names: one, or some with commas between them"""
    for name in names.split(","):
        if name not in POLICIES:
            raise SettingError(f"{{policy}} must be of {', '.join(POLICIES)}, got {name!r}")
    return [POLICIES[name] for name in names.split(",")]


def best(rating: Tensor, real: Tensor, places: int) -> Tensor:
    """Which of the real candidates are rated highest, of equals the newest.  B x n -> B x n"""
    rating = rating.double().masked_fill(~real, -torch.inf)
    highest = rating.argsort(dim=1, stable=True)[:, max(0, rating.size(1) - places) :]
    return torch.zeros_like(real).scatter(1, highest, True) & real


@dataclass
class SelectiveState(State):
    slots: Tensor  # B x C x 2 G d: keys without positions and values, the newest at the right end
    scales: Tensor  # B x C x 2: of the whole numbers that they are in int8; else B x C x 0
    marks: Tensor  # B x C x 3: looks, chances, surprise; the last only if a policy goes by it
    number: Tensor  # B x C: which it is of all that ever left
    held: Tensor = field(metadata=COUNTER)  # B: how many slots are real
    given: Tensor = field(metadata=COUNTER)  # B: how many have left

    def ranges(self) -> Ranges:
        yield "scales", 0, torch.inf
        yield "marks", 0, torch.inf
        yield "held", 0, self.slots.size(1)


EACH = ("slots", "scales", "marks", "number")  # what a state has of each slot


@dataclass(kw_only=True)
class SelectivePlan(Plan):
    """How many vectors of each row have left, and how many slots are real afterwards."""

    left: Tensor  # B
    kept: Tensor  # B


def joined(slots: SelectiveState, new: SelectiveState) -> SelectiveState:
    """The slots and those that come, one after the other."""
    each = {name: torch.cat([getattr(slots, name), getattr(new, name)], dim=1) for name in EACH}
    return replace(new, **each)


class Correction(nn.Module):
    """x + U V x + b, with U and b zero at first: slots as they are."""

    def __init__(self, dim: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, dim)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, slots: Tensor) -> Tensor:
        return slots + self.up(self.down(slots))


class SelectiveMemory(LongTermMemory):
    """Slots are further keys and values of the host's attention, one after the other right before
    its window: nothing has to be learned before they serve."""

    num_marks = 2  # looks and chances
    every = EVERY
    spacing = 1.0
    observes = True

    def __init__(
        self,
        dim: int,
        slots: int,
        policy: str = "surprise,looks",
        precision: str = "full",
        rank: int = 0,
    ) -> None:
        """dim: 2 G d, of a key and a value.  policy: one, or some with commas between them, which
        choose in their order.  rank: of a learned correction of the slots, 0 for none."""
        super().__init__()
        for name, value, least in (("slots", slots, 1), ("rank", rank, 0)):
            if value < least:
                raise SettingError(f"{{{name}}} must be at least {least}, got {value}")
        if precision not in PRECISIONS:
            raise SettingError(
                f"{{precision}} must be one of {', '.join(PRECISIONS)}, got {precision}"
            )
        self.policies = policies(policy)
        self.wants_surprise = surprise in self.policies
        self.dim, self.num_slots, self.precision = dim, slots, precision
        self.correction = Correction(dim, rank) if rank else None

    def start_silent(self, layer: int, layers: int) -> None:
        """It serves as it is."""

    def initial_state(self, rows: int, device: Any = None, dtype: Any = None) -> SelectiveState:
        def zeros(*shape: int, dtype: Any = torch.float) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        kinds = {"full": dtype or torch.float, "bfloat16": torch.bfloat16, "int8": torch.int8}
        return SelectiveState(
            slots=zeros(self.num_slots, self.dim, dtype=kinds[self.precision]),
            scales=zeros(self.num_slots, 2 if self.precision == "int8" else 0),
            marks=zeros(self.num_slots, 2 + self.wants_surprise),
            number=zeros(self.num_slots, dtype=torch.int32),
            held=torch.zeros(rows, dtype=torch.long),
            given=torch.zeros(rows, dtype=torch.long),
        )

    def plan_key(self) -> Hashable:
        return self.num_slots

    def plan(self, counts: Sequence[int], state: SelectiveState) -> SelectivePlan:
        before = zip(counts, state.held.tolist(), strict=True)
        held = [min(old + new, self.num_slots) for new, old in before]
        left, kept = (torch.tensor(x) for x in (counts, held))
        return SelectivePlan(
            counts=counts, filled=kept > 0, slots=max(held), held=held, left=left, kept=kept
        )

    @torch.no_grad()
    def write(
        self,
        vectors: Tensor,
        state: SelectiveState,
        plan: SelectivePlan,
        attention: HostAttention | None = None,
        key: Tensor | None = None,
        marks: Tensor | None = None,
    ) -> tuple[SelectiveState, None]:
        if attention is None or marks is None or key is None:
            raise ValueError(
                "a selective memory is written with the marks of the vectors, the attention that "
                "makes keys and values of them, and a key"
            )
        if not max(plan.counts):
            return state, None
        slots, scales = self.stored_as(attention.key_value(vectors), state.slots.dtype)
        given = state.given + plan.left
        place = torch.arange(-marks.size(1), 0, device=marks.device)
        number = given.to(marks.device)[:, None] + place
        new = SelectiveState(
            slots,
            scales,
            marks[..., : state.marks.size(2)].float(),
            number.int(),
            plan.left,
            given,
        )
        both = joined(state, new)
        index = self._best(both, plan, state.held, key)
        place = torch.arange(self.num_slots, device=key.device)
        empty = place < (self.num_slots - plan.kept.to(key.device))[:, None]
        rows = torch.arange(len(index), device=key.device)[:, None]

        def pick(x: Tensor) -> Tensor:
            return x[rows, index].masked_fill(empty if x.dim() == 2 else empty[..., None], 0)

        picked = {name: pick(getattr(both, name)) for name in EACH}
        return replace(new, held=plan.kept, **picked), None

    def _best(self, both: SelectiveState, plan: SelectivePlan, held: Tensor, key: Tensor) -> Tensor:
        """Which of the candidates are slots now, in their order, at the right end; before them any
        that are not real.  -> B x C"""
        n, c = both.number.size(1), self.num_slots
        place = torch.arange(n, device=key.device)
        held, left = (x.to(key.device)[:, None] for x in (held, plan.left))
        behind = torch.where(place < c, c - held, n - left)
        real = place >= behind
        looks, chances, *known = both.marks.unbind(2)
        surprise = known[0] if known else torch.zeros_like(looks)
        known_of = Candidates(
            looks, chances, surprise, both.number, real, key,
            lambda: self.restored(both.slots, both.scales),
        )  # fmt: skip
        stays = torch.zeros_like(real)
        for number, policy in enumerate(self.policies, start=1):
            places = number * c // len(self.policies) - (number - 1) * c // len(self.policies)
            stays |= best(policy(known_of), real & ~stays, places)
        # those that stay in their order behind C that do not
        return torch.where(stays, place, place - n).argsort(dim=1, stable=True)[:, n - c :]

    def stored_as(self, projected: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """As slots are stored.  B x n x 2 G d -> slots, scales"""
        if dtype != torch.int8:
            return projected.to(dtype), projected.new_zeros(*projected.shape[:2], 0).float()
        parts = projected.float().unflatten(-1, (2, -1))
        scales = parts.abs().amax(dim=-1) / 127
        return (parts / scales.clamp(min=1e-30)[..., None]).round().to(dtype).flatten(2), scales

    def restored(self, slots: Tensor, scales: Tensor) -> Tensor:
        if not scales.size(-1):
            return slots
        return (slots.float().unflatten(-1, (2, -1)) * scales[..., None]).flatten(2)

    def slots(
        self, state: SelectiveState, attention: HostAttention, dtype: torch.dtype, shown: int
    ) -> tuple[Tensor, Tensor]:
        first = self.num_slots - shown
        slots = self.restored(state.slots[:, first:], state.scales[:, first:]).to(dtype)
        return attention.heads(slots if self.correction is None else self.correction(slots))

    @torch.no_grad()
    def mark(self, weights: Tensor, tokens: int, mask: Tensor | None) -> Tensor:
        """Looks and chances: the weights of one query in EVERY, which stands for all, summed over
        queries and heads, and how many queries could look; their ratio is what tells keys apart.

        What is near is looked at for being near, which says little of later: from less than FAR
        tokens away a query hardly counts, and its weight a tenth of that, for keys that no other
        has seen."""
        weights = weights.float().sum(dim=1)  # B x T' x P
        keys = weights.size(2)
        place = torch.arange(keys, device=weights.device)
        away = place[keys - tokens :: EVERY, None] - place  # T' x P
        near = away < FAR
        counts = torch.where(near, 1e-3, 1.0).masked_fill(away < 0, 0).expand_as(weights)
        if mask is not None:
            counts = counts * mask[:, ::EVERY, None]
        weights = weights * torch.where(near, 0.1 * counts, counts)
        return EVERY * torch.stack([weights.sum(dim=1), counts.sum(dim=1)], dim=-1)

    def observe(self, state: SelectiveState, seen: Tensor, mask: Tensor | None) -> SelectiveState:
        """seen: what `mark` has for the last slots"""
        shown = seen.size(1)
        place = torch.arange(self.num_slots, device=seen.device)
        real = place >= (self.num_slots - state.held.to(seen.device))[:, None]
        marks = state.marks.clone()
        marks[:, self.num_slots - shown :, :2] += seen * real[:, self.num_slots - shown :, None]
        return replace(state, marks=marks)

    # for an inspection: the line is C cells, a slot each, and each write one of all of them anew

    def moves(
        self, before: Any, after: SelectiveState, plan: SelectivePlan, key: Any
    ) -> list[Move]:
        ends, count = torch.tensor([0.0, 1.0], dtype=torch.float64), self.num_slots
        cells = (torch.arange(count, dtype=torch.float64) + 0.5) / count
        return [
            Move(cells[count - held :], ends, ends, forgets=True, begin=1 - held / count)
            for held in plan.held
        ]

    def kept(self, row: int, after: SelectiveState) -> Tensor:
        return after.number[row, self.num_slots - int(after.held[row]) :].long()

    def at(self, state: SelectiveState, places: Tensor) -> Tensor:
        return slot_at(self.restored(state.slots, state.scales), places)
