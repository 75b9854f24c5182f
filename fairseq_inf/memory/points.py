"""A signal at points: what a density is over, or slots of the host's own attention."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .errors import SettingError
from .schedule import Logarithmic
from .signal import ContinuousState, SignalMemory, WritePlan

# B rows, N basis functions, D points of the signal, e width


class PointsMemory(SignalMemory):
    """X(t) at the middles t = (p - 1/2) / D of D equal parts; zeros where nothing has come to
    yet."""

    places: Tensor  # D
    at_points: Tensor  # D x N

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_basis: int,
        widths: Sequence[float] = (0.01, 0.05),
        *,
        points: int,
        **kwargs: Any,
    ) -> None:
        """points: D; they are the bins of a sticky memory, too."""
        if points < 1:
            raise SettingError(f"{{points}} must be positive, got {points}")
        super().__init__(dim, num_heads, num_basis, widths, **{**kwargs, "bins": points})
        self.points = points
        places = (torch.arange(points, dtype=torch.float64) + 0.5) / points
        self.register_buffer("places", places, persistent=False)
        self.register_buffer("at_points", self.basis.evaluate(places), persistent=False)

    def signal(self, state: ContinuousState) -> Tensor:
        """-> B x D x e, in float32 at least"""
        exact = state.coefficients.dtype
        with torch.autocast(state.coefficients.device.type, enabled=False):
            x = self.at_points.to(exact) @ state.coefficients
            if isinstance(self.schedule, Logarithmic):
                x = x * self.reached(self.schedule, state.tokens)[..., None]
        return x

    def reached(self, schedule: Logarithmic, tokens: Tensor) -> Tensor:
        """Whether so many vectors, B, have come to each point.  -> B x D"""
        return schedule.age(self.places) <= tokens[:, None]


class SlotsOfSignal(PointsMemory):
    """The points are slots: further keys and values of the host's own attention, by its own maps,
    so that nothing has to be learned before they serve.  What is written is not gated."""

    has_slots = True

    def __init__(self, *args: Any, points: int, sticky: bool = False, **kwargs: Any) -> None:
        if sticky:
            raise SettingError(
                "{sticky} is not for points that the host's attention reads, which does not tell "
                "where it has looked"
            )
        super().__init__(*args, points=points, **kwargs)
        self.num_slots = points

    def make_maps(self) -> None:
        self.gate = None

    def start_silent(self, layer: int, layers: int) -> None:
        self.output = nn.Linear(self.dim, self.dim, bias=False)
        nn.init.zeros_(self.output.weight)

    def plan_key(self) -> Hashable:
        return self.points, super().plan_key()

    def plan(self, counts: Sequence[int], state: ContinuousState) -> WritePlan:
        plan = super().plan(counts, state)
        held = self._held(plan.tokens).tolist()
        return replace(plan, slots=max(held), held=held)

    def _held(self, tokens: Tensor) -> Tensor:
        """How many points are slots, those of the right end: all that something has come to."""
        if isinstance(self.schedule, Logarithmic):
            return self.reached(self.schedule, tokens).sum(dim=1)
        return (tokens > 0) * self.points

    def slots(self, state: ContinuousState) -> tuple[Tensor, Tensor]:
        return self.signal(state), self._held(state.tokens)
