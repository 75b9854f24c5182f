"""The compressive memory (Rae et al., 2019): old vectors, c of them to a slot."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_inf.errors import SettingError

from .contract import (
    Encounter,
    HostAttention,
    LongTermMemory,
    Move,
    Plan,
    shift,
    silent,
    slot_at,
    take_part,
)
from .short_term import push
from .state import COUNTER, Ranges, State

# B rows, C slots, c vectors to a slot, W vectors that have left the short-term memory, e width


@dataclass
class CompressiveState(State):
    slots: Tensor  # B x C x e, the newest at the right end
    pending: Tensor  # B x c-1 x e: too few for a slot yet, at the right end
    held: Tensor = field(metadata=COUNTER)  # B: how many slots are real
    waiting: Tensor = field(metadata=COUNTER)  # B: how many of `pending` are real

    def ranges(self) -> Ranges:
        yield "held", 0, self.slots.size(1)
        yield "waiting", 0, self.pending.size(1)


@dataclass(kw_only=True)
class CompressionPlan(Plan):
    """Which vectors become slots."""

    groups: Tensor  # B: slots that they make together with the pending ones
    kept: Tensor  # B: slots afterwards
    waiting: Tensor  # B: pending vectors afterwards
    most: int  # the most slots that a row makes


class CompressiveMemory(LongTermMemory):
    """First in, first out: the oldest slots are lost when there are more than C.

    The slots are constants for the model's own loss; the compression learns from what the queries
    find in the old vectors and in the slots made of them.  A convolution starts as the mean of
    its c vectors.
    """

    def __init__(self, dim: int, length: int, rate: int = 4) -> None:
        super().__init__()
        for name, value in (("length", length), ("rate", rate)):
            if value < 1:
                raise SettingError(f"{{{name}}} must be at least 1, got {value}")
        self.dim, self.num_slots, self.rate = dim, length, rate
        self.convolution = nn.Conv1d(dim, dim, kernel_size=rate, stride=rate)
        with torch.no_grad():
            weight, bias = self.convolution.parameters()
            weight.mul_(0.1).add_(torch.eye(dim)[..., None] / rate)
            bias.zero_()

    def start_silent(self, layer: int, layers: int) -> None:
        self.output = silent(self.dim)

    def initial_state(self, rows: int, device: Any = None, dtype: Any = None) -> CompressiveState:
        def zeros(*shape: int, dtype: Any = dtype or torch.float) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        return CompressiveState(
            slots=zeros(self.num_slots, self.dim),
            pending=zeros(self.rate - 1, self.dim),
            held=torch.zeros(rows, dtype=torch.long),
            waiting=torch.zeros(rows, dtype=torch.long),
        )

    def plan_key(self) -> Hashable:
        return self.num_slots, self.rate

    def plan(self, counts: Sequence[int], state: CompressiveState) -> CompressionPlan:
        before = zip(counts, state.waiting.tolist(), state.held.tolist(), strict=True)
        groups, held, waiting = [], [], []
        for count, waits, old in before:
            groups.append((count + waits) // self.rate)
            waiting.append((count + waits) % self.rate)
            held.append(min(old + groups[-1], self.num_slots))
        made, kept, left = (torch.tensor(x) for x in (groups, held, waiting))
        return CompressionPlan(
            filled=kept > 0,
            slots=max(held),
            held=held,
            counts=counts,
            groups=made,
            kept=kept,
            waiting=left,
            most=max(groups),
        )

    def slots(
        self, state: CompressiveState, attention: HostAttention, dtype: torch.dtype, shown: int
    ) -> tuple[Tensor, Tensor]:
        return attention.project(state.slots[:, self.num_slots - shown :].to(dtype))

    def write(
        self,
        vectors: Tensor,
        state: CompressiveState,
        plan: CompressionPlan | None = None,
        attention: Any = None,
        key: Tensor | None = None,
        marks: Tensor | None = None,
    ) -> tuple[CompressiveState, tuple[Tensor, Tensor]]:
        """-> state, and (old: B x `plan.most` c x e, new: B x `plan.most` x e), what was
        compressed and what became of it, of which the first `plan.groups` of a row are real"""
        if plan is None:
            plan = self.plan([vectors.size(1)] * vectors.size(0), state)
        state, vectors = state.detach(), vectors.detach()
        # each row's vectors without gaps at the right end, the pending ones first
        if min(plan.counts) < vectors.size(1):
            kept = vectors.size(1) - torch.tensor(plan.counts, device=vectors.device)[:, None]
            column = torch.arange(vectors.size(1) + self.rate - 1, device=vectors.device)
            behind = column - kept  # B x c-1+W: where a pending vector moves from
            waits = behind < self.rate - 1
            source = torch.where(waits, behind.clamp(min=0), column)
            lined = _pick(torch.cat([state.pending, vectors], dim=1), source)
        else:
            lined = torch.cat([state.pending, vectors], dim=1)
        groups, waiting = plan.groups.to(vectors.device), plan.waiting.to(vectors.device)
        total = groups * self.rate + waiting
        begin = (lined.size(1) - total)[:, None]
        step = torch.arange(plan.most * self.rate, device=vectors.device)
        old = _pick(lined, (begin + step).clamp(max=lined.size(1) - 1))
        new = self.compress(old)
        slots = push(state.slots, new.detach(), groups)[:, plan.most :]
        pending = lined[:, lined.size(1) - self.rate + 1 :]
        place = torch.arange(self.rate - 1, device=vectors.device)
        absent = place < self.rate - 1 - waiting[:, None]
        pending = pending.masked_fill(absent[..., None], 0)
        return CompressiveState(slots, pending, plan.kept, plan.waiting), (old, new)

    def moves(
        self, before: CompressiveState, after: Any, plan: CompressionPlan, key: Tensor | None
    ) -> list[Move]:
        """The line is C cells, a slot each, the newest at the right end; the c vectors of a slot
        share its cell evenly.  Vectors that wait for a slot have no place."""
        waited = zip(plan.groups.tolist(), before.held.tolist(), strict=True)
        return [shift(made, held, self.num_slots, self.rate) for made, held in waited]

    def at(self, state: CompressiveState, places: Tensor) -> Tensor:
        return slot_at(state.slots, places)

    def losses(self, met: Encounter) -> dict[str, Tensor]:
        """How far from what the queries find in the old vectors is what they find in the slots
        made of them: mean square over the width.  Only the compression gets a gradient."""
        if not torch.is_grad_enabled():
            return {}
        plan, query, (old, new) = met.plan, met.query, met.trace
        unused = take_part(self.convolution)
        if plan.most == 0:
            return {"reconstruction": unused}
        made = plan.groups.to(query.device)[:, None]
        groups = made.clamp(min=1)  # a row without any is left out below
        place = torch.arange(old.size(1), device=old.device)
        with torch.no_grad():
            target = met.attention.by_content(query, old, place < groups * self.rate)
        compressed = met.attention.by_content(query, new, place[: plan.most] < groups)
        error = (compressed - target).float().square().mean(dim=-1)  # B x T
        counted = (made > 0) & met.real
        return {"reconstruction": (error * counted).sum() + unused}

    def compress(self, vectors: Tensor) -> Tensor:
        """B x k c x e -> B x k x e"""
        b, width, e = vectors.shape
        groups = vectors.reshape(b, width // self.rate, self.rate, e)
        weight = self.convolution.weight.permute(0, 2, 1).reshape(e, self.rate * e)
        return F.linear(groups.flatten(2), weight, self.convolution.bias)


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """x: B x W x e, index: B x k.  -> B x k x e"""
    return x.gather(1, index[..., None].expand(-1, -1, x.size(2)))
