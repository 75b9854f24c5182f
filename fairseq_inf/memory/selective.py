"""The selective memory: vectors kept whole, the host's own, which its own attention reads.

Of every `pick` vectors that leave the short-term memory one is kept, the one that a policy rates
highest, up to C of them, the oldest lost first.  A policy is a function in POLICIES: it gets what
is known of the vectors, and says who may stay."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fairseq_inf.errors import SettingError

from .contract import LongTermMemory, Move, Plan, shift, slot_at
from .sampling import uniform
from .short_term import push
from .state import Ranges, State

# B rows, C slots, W vectors that have left the short-term memory, T queries, P keys, H heads

EVERY = 8  # one query in so many says what is looked at
FAR = 64  # tokens away, from which a look says what will be looked at later


@dataclass
class Candidates:
    """Vectors that leave the short-term memory, and what is known of them."""

    looks: Tensor  # B x W: attention that fell on each while it was in sight, over all heads
    chances: Tensor  # B x W: of how many queries
    key: Tensor  # B: a hash of all that was read


def looks(left: Candidates) -> Tensor:
    """What self-attention has looked at most, by those that could: the heavy hitters of Zhang et
    al. (2023), from afar."""
    return left.looks / left.chances.clamp(min=1e-9)


def random(left: Candidates) -> Tensor:
    """Anything: what another policy has to beat."""
    return uniform(left.key, left.looks.size(1))


POLICIES: dict[str, Callable[[Candidates], Tensor]] = {"looks": looks, "random": random}


@dataclass
class SelectiveState(State):
    slots: Tensor  # B x C x e, the newest at the right end
    held: Tensor  # B: how many slots are real

    def ranges(self) -> Ranges:
        yield "held", 0, self.slots.size(1)


@dataclass(kw_only=True)
class SelectivePlan(Plan):
    """How many vectors of each row have left, and how many of them are kept."""

    left: Tensor  # B
    picks: Tensor  # B
    most: int  # picks of a row
    kept: Tensor  # B: slots afterwards


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
    """Slots are further keys of the host's attention by its own maps, from the start: nothing has
    to be learned before they serve."""

    num_marks = 2  # looks and chances
    every = EVERY

    def __init__(
        self, dim: int, slots: int, pick: int = 4, policy: str = "looks", rank: int = 0
    ) -> None:
        """rank: of a learned correction of the slots, 0 for none."""
        super().__init__()
        for name, value, least in (("slots", slots, 1), ("pick", pick, 1), ("rank", rank, 0)):
            if value < least:
                raise SettingError(f"{{{name}}} must be at least {least}, got {value}")
        if policy not in POLICIES:
            raise SettingError(f"{{policy}} must be one of {', '.join(POLICIES)}, got {policy}")
        self.dim, self.num_slots, self.pick, self.policy = dim, slots, pick, policy
        self.spacing = float(pick)  # a slot stands for so many vectors
        self.correction = Correction(dim, rank) if rank else None

    def start_silent(self, layer: int, layers: int) -> None:
        """It serves as it is."""

    def initial_state(self, rows: int, device: Any = None, dtype: Any = None) -> SelectiveState:
        return SelectiveState(
            slots=torch.zeros(rows, self.num_slots, self.dim, dtype=dtype, device=device),
            held=torch.zeros(rows, dtype=torch.long, device=device),
        )

    def plan_key(self) -> Hashable:
        return self.num_slots, self.pick

    def plan(self, counts: Sequence[int], state: SelectiveState) -> SelectivePlan:
        picks = [-(-count // self.pick) for count in counts]
        before = zip(picks, state.held.tolist(), strict=True)
        held = [min(old + new, self.num_slots) for new, old in before]
        left, taken, kept = (
            torch.tensor(x, device=state.held.device) for x in (counts, picks, held)
        )
        return SelectivePlan(
            counts=picks, filled=kept > 0, slots=max(held), held=held,
            left=left, picks=taken, most=max(picks), kept=kept,
        )  # fmt: skip

    def write(
        self,
        vectors: Tensor,
        state: SelectiveState,
        plan: SelectivePlan,
        attention: Any = None,
        key: Tensor | None = None,
        marks: Tensor | None = None,
    ) -> tuple[SelectiveState, None]:
        if marks is None or key is None:
            raise ValueError(
                "a selective memory is written with the marks of the vectors and a key"
            )
        index = self._picks(plan, marks, key)[..., None].expand(-1, -1, vectors.size(2))
        picked = vectors.detach().gather(1, index)
        slots = push(state.slots.detach(), picked, plan.picks)[:, plan.most :]
        return SelectiveState(slots, plan.kept), None

    def _picks(self, plan: SelectivePlan, marks: Tensor, key: Tensor) -> Tensor:
        """The best rated of each row, in their order, at the left end.  -> B x `most`"""
        width = marks.size(1)
        place = torch.arange(width, device=marks.device)
        rating = POLICIES[self.policy](Candidates(marks[..., 0], marks[..., 1], key)).float()
        rating = rating.masked_fill(place < width - plan.left[:, None], -torch.inf)
        rank = rating.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        index = torch.where(rank < plan.picks[:, None], place, width).sort(dim=1).values
        return index[:, : plan.most].clamp(max=width - 1)

    def chosen(self, row: int, plan: SelectivePlan, marks: Tensor, key: Tensor) -> Tensor:
        return self._picks(plan, marks, key)[row, : plan.counts[row]]

    def slots(self, state: SelectiveState) -> tuple[Tensor, Tensor]:
        slots = state.slots
        return slots if self.correction is None else self.correction(slots), state.held

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

    def moves(self, state: SelectiveState, plan: SelectivePlan, key: Tensor | None) -> list[Move]:
        rows = zip(plan.counts, state.held.tolist(), strict=True)
        return [shift(new, held, self.num_slots) for new, held in rows]

    def at(self, state: SelectiveState, places: Tensor) -> Tensor:
        return slot_at(state.slots, places)
