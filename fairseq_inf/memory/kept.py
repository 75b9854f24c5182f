"""Old vectors as they were, while they are looked at: heavy hitters (Zhang et al., 2023)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .contract import HostAttention, LongTermMemory, Plan
from .errors import SettingError
from .state import Ranges, State

HALF = 256  # vectors that come until a look counts half

# B rows, C slots, W vectors that have left the short-term memory, e width


@dataclass
class KeptState(State):
    slots: Tensor  # B x C x e, in the order of the stream, the newest at the right end
    marks: Tensor  # B x C, float32: how much each was looked at, of late above all
    held: Tensor  # B: how many slots are real

    def ranges(self) -> Ranges:
        yield "held", 0, self.slots.size(1)
        yield "marks", 0, torch.inf


@dataclass(kw_only=True)
class KeepingPlan(Plan):
    counts: Tensor  # B: vectors that come
    kept: Tensor  # B: slots afterwards


class KeptMemory(LongTermMemory):
    """Whenever vectors come, the C that were looked at most stay, of these and of the slots.

    What attention returns to stays for ever; the marks of all others fade.  The slots are constants
    for the gradient.
    """

    has_slots = True
    ranks = True

    def __init__(self, dim: int, length: int) -> None:
        super().__init__()
        if length < 0:
            raise SettingError(f"{{length}} must be at least 0, got {length}")
        self.dim, self.num_slots = dim, length

    def start_silent(self, layer: int, layers: int) -> None:
        self.output = nn.Linear(self.dim, self.dim, bias=False)
        nn.init.zeros_(self.output.weight)

    def initial_state(self, rows: int, device: Any = None, dtype: Any = None) -> KeptState:
        shape = (rows, self.num_slots)
        return KeptState(
            slots=torch.zeros(*shape, self.dim, dtype=dtype or torch.float, device=device),
            marks=torch.zeros(shape, device=device),
            held=torch.zeros(rows, dtype=torch.long, device=device),
        )

    def plan_key(self) -> Hashable:
        return self.num_slots

    def plan(self, counts: Sequence[int], state: KeptState) -> KeepingPlan:
        before = zip(counts, state.held.tolist(), strict=True)
        held = [min(count + old, self.num_slots) for count, old in before]
        new, kept = (torch.tensor(x, device=state.held.device) for x in (counts, held))
        return KeepingPlan(filled=kept > 0, slots=max(held), held=held, counts=new, kept=kept)

    def slots(self, state: KeptState) -> tuple[Tensor, Tensor]:
        return state.slots, state.held

    def write(
        self,
        vectors: Tensor,
        state: KeptState,
        plan: KeepingPlan,
        attention: HostAttention | None = None,
        key: Tensor | None = None,
        looked: Tensor | None = None,
    ) -> tuple[KeptState, None]:
        """looked: B x W, how much each of the vectors was looked at."""
        assert looked is not None, "what stays is what was looked at"
        state, width = state.detach(), vectors.size(1)
        fade = 0.5 ** (plan.counts[:, None] / HALF)
        every = torch.cat([state.slots, vectors.detach().to(state.slots.dtype)], dim=1)
        marks = torch.cat([state.marks * fade, looked.to(state.marks.dtype)], dim=1)
        place = torch.arange(every.size(1), device=every.device)
        # of the slots and of the vectors the last ones are real
        end = torch.where(place < self.num_slots, self.num_slots, self.num_slots + width)
        count = torch.where(place < self.num_slots, state.held[:, None], plan.counts[:, None])
        absent = place < end - count
        rank = marks.masked_fill(absent, -1).argsort(dim=1, descending=True, stable=True)
        rank = rank.argsort(dim=1)
        stays = torch.where(rank < plan.kept[:, None], place, -1).sort(dim=1).values
        stays = stays[:, width:]  # B x C, those that stay at the right end
        index = stays.clamp(min=0)
        slots = every.gather(1, index[..., None].expand(-1, -1, self.dim))
        gone = stays < 0
        return KeptState(
            slots=slots.masked_fill(gone[..., None], 0),
            marks=marks.gather(1, index).masked_fill(gone, 0),
            held=plan.kept,
        ), None

    def mark(self, state: KeptState, looked: Tensor) -> KeptState:
        """looked: B x n, what the last n slots got of a segment's looks."""
        marks = state.marks.clone()
        marks[:, marks.size(1) - looked.size(1) :] += looked
        return KeptState(state.slots, marks, state.held)
