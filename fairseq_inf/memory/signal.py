"""The store of a continuous memory: a past of any length, written as a signal of N coefficients."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_inf.errors import SettingError

from .basis import GaussianBasis, without_tail
from .contract import Move, Plan, take_part
from .precision import in_full
from .sampling import histogram_quantiles, uniform
from .schedule import Constant, Schedule, write_operators
from .state import COUNTER, Ranges, State

# B rows, T tokens, N basis functions, M samples of the past, D bins of a histogram, e width


@dataclass
class ContinuousState(State):
    coefficients: Tensor  # B x N x e, never in half precision: X(t) = B^T psi(t)
    longest: Tensor  # B: length of the longest vector ever stored
    histogram: Tensor  # B x D: where the last segment looked; zeros when not sticky
    tokens: Tensor = field(
        metadata=COUNTER
    )  # B: how many vectors the signal holds; 0 is an empty memory

    def ranges(self) -> Ranges:
        written = self.coefficients.flatten(1).any(dim=1).long()
        yield "tokens", written, torch.iinfo(torch.long).max
        yield "longest", 0, math.inf
        yield "histogram", 0, 1


@dataclass(kw_only=True)
class WritePlan(Plan):
    """Which rows take how many vectors, and what becomes of their past."""

    groups: list[WriteGroup]
    inverse: Tensor | None  # puts the rows of the groups back in order
    tokens: Tensor  # B: how many vectors each row holds afterwards

    @property
    def writes(self) -> bool:
        return any(group.count for group in self.groups)


@dataclass
class WriteGroup:
    rows: Tensor | None  # None for all
    count: int  # vectors that each of them takes
    first: bool  # to an empty memory
    step: float | None  # of the schedule


def plan_write(
    counts: Sequence[int], tokens: Tensor, schedule: Schedule, threshold: int = 0
) -> WritePlan:
    """Group rows that are written alike.

    counts: how many vectors each row takes.  tokens: B, how many it holds; with a threshold,
    a row that would hold more than that many forgets everything first.
    """
    after: list[int] = []
    groups: dict[Any, list[int]] = {}
    for row, (count, old) in enumerate(zip(counts, tokens.tolist(), strict=True)):
        if count and threshold and old + count > threshold:
            old = 0
        how = (count, old == 0, schedule.step(old, count)) if count else (0, False, None)
        groups.setdefault(how, []).append(row)
        after.append(old + count)
    held_after = torch.tensor(after)
    inverse = None
    each: list[Tensor | None] = [None]
    if len(groups) > 1:
        picked = [torch.tensor(rows) for rows in groups.values()]
        each, inverse = [*picked], torch.cat(picked).argsort()
    listed = [WriteGroup(rows, *how) for rows, how in zip(each, groups, strict=True)]
    return WritePlan(
        counts=counts, filled=held_after > 0, groups=listed, inverse=inverse, tokens=held_after
    )


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # what is kept must serve a training later
def update_operators(
    num_basis: int,
    widths: tuple[float, ...],
    schedule: Schedule,
    samples: int,
    ridge: float,
    count: int,
    step: float | None,
    sampled: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The linear maps of one write, B <- A B + C X, for `count` new vectors.

    -> (A: N x N, P: N x M, C: N x T), where P fits samples taken anywhere in the past and
    A = P psi those taken where the schedule says.  A is None if its powers grow, as they may with
    few samples and a slow schedule; P is None where it is not needed, which is unless `sampled`.
    """

    def kept(x: Tensor) -> Tensor:
        return without_tail(x, dtype).to(device, dtype).contiguous()

    basis = GaussianBasis(num_basis, widths)
    carry, past, fit = write_operators(basis, schedule.design(step, count, samples), ridge)
    if carry is None or past is None:
        return None, None, kept(fit)
    steady = not _grows(carry)
    return (
        kept(carry) if steady else None,
        kept(past) if sampled or not steady else None,
        kept(fit),
    )


def _grows(a: Tensor) -> bool:
    """Whether the powers of a matrix do not vanish, by squaring it."""
    for _ in range(40):
        size = float(a.norm())
        if size < 0.5 or size > 1e8:
            break
        a = a @ a
    return size >= 0.5


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Regression, densities and samples are computed in float32 at least."""
    return torch.promote_types(dtype, torch.float32)


class Signal(nn.Module):
    """A signal X(t) = B^T psi(t) on [0, 1]; how it forgets is the schedule's, how it is read a
    reader's.

    The vectors and the carried coefficients are constants for the gradient; the gate, where there
    is one, is not: new vectors are sigmoid(conv(X)) * X then, as in the paper.
    A sticky one samples the past where the last segment has looked: at random in training mode,
    drawn from `seed` and the `key` of the row, at the quantiles in evaluation mode.
    """

    gate: nn.Conv1d | None

    def __init__(
        self,
        dim: int,
        basis: GaussianBasis,
        schedule: Schedule | None = None,
        samples: int | None = None,
        ridge: float = 0.5,
        sticky: bool = False,
        threshold: int = 0,
        gated: bool = True,
        bins: int = 128,
        seed: int = 0,
    ) -> None:
        """schedule: the paper's unless given.  samples: M, as the schedule wants them unless given.
        threshold: forget everything after so many vectors, 0 for never.
        bins: of the histogram of where a segment has looked, D."""
        super().__init__()
        for name, value, holds, wanted in (
            ("ridge", ridge, 0 < ridge < math.inf, "positive"),
            ("bins", bins, bins >= 1, "positive"),
            ("samples", samples, samples is None or samples >= 1, "positive"),
            ("threshold", threshold, threshold >= 0, "at least 0"),
        ):
            if not holds:
                raise SettingError(f"{{{name}}} must be {wanted}, got {value}")
        self.dim, self.basis, self.num_basis = dim, basis, basis.num_basis
        self.schedule = Constant() if schedule is None else schedule
        self.samples = samples or self.schedule.samples(self.num_basis)
        self.ridge, self.sticky, self.threshold = ridge, sticky, threshold
        self.bins, self.seed = bins, seed
        self.gate = nn.Conv1d(dim, dim, kernel_size=3, padding=1) if gated else None

    def initial_state(self, rows: int, device: Any = None, dtype: Any = None) -> ContinuousState:
        exact = _exact(dtype or torch.float)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=exact, device=device)

        return ContinuousState(
            coefficients=zeros(self.num_basis, self.dim),
            longest=zeros(),
            histogram=zeros(self.bins if self.sticky else 0),
            tokens=torch.zeros(rows, dtype=torch.long),
        )

    def plan_key(self) -> Hashable:
        return self.threshold, self.schedule

    def plan(self, counts: Sequence[int], state: ContinuousState) -> WritePlan:
        return plan_write(counts, state.tokens, self.schedule, self.threshold)

    def write(
        self, vectors: Tensor, state: ContinuousState, plan: WritePlan, key: Tensor | None = None
    ) -> ContinuousState:
        with in_full(vectors):
            coefficients, longest = self._write(vectors.detach(), state.detach(), plan, key)
        return ContinuousState(coefficients, longest, state.histogram, plan.tokens)

    def at(self, state: ContinuousState, places: Tensor, psi: Tensor | None = None) -> Tensor:
        """X(t), in float32 at least; zeros where nothing has come to yet.  places: t, K of all
        rows.  psi: of them, if it is known.  -> B x K x e"""
        with in_full(state.coefficients):
            if psi is None:
                psi = self.basis.evaluate(places)
            x = psi.to(state.coefficients) @ state.coefficients
            if self.sticky:  # what was looked at is drawn out to the whole line
                return x
            reached = self.schedule.reached(places, state.tokens.to(places.device))
            return x if reached is None else x * reached[..., None]

    @torch.no_grad()
    def observe(self, state: ContinuousState, mass: Tensor) -> ContinuousState:
        """mass: of a segment's densities in each bin, over heads and real tokens: B x D"""
        mass = mass.clamp(min=0)
        size = mass.sum(dim=-1, keepdim=True)
        histogram = torch.where(size > 0, mass / size.clamp(min=1e-30), state.histogram)
        return replace(state, histogram=histogram)

    def _write(
        self, vectors: Tensor, state: ContinuousState, plan: WritePlan, key: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Update the rows as the plan says.  -> coefficients: B x N x e, longest: B"""
        if not plan.writes:
            if self.gate is None or not self.training:
                return state.coefficients, state.longest
            return state.coefficients + take_part(self.gate), state.longest
        parts = []
        for group in plan.groups:
            rows, part, x, keys = group.rows, state, vectors, key
            if rows is not None:
                part, x = state.rows(rows), vectors[rows]
                keys = None if key is None else key[rows]
            if group.count:
                parts.append(self._update(x[:, x.size(1) - group.count :], part, group, keys))
            else:
                parts.append((part.coefficients, part.longest))
        if plan.inverse is None:
            return parts[0]
        coefficients, longest = (torch.cat(part)[plan.inverse] for part in zip(*parts, strict=True))
        return coefficients, longest

    def _update(
        self, x: Tensor, state: ContinuousState, group: WriteGroup, key: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """B <- A B + C X, with X behind the gate.

        Where a sticky memory keeps looking at one place, the fit of samples of a fit overshoots
        a little with every write, and would grow without bound: unless A alone makes it shrink, no
        sample of the past may be longer than the longest vector that was ever stored.
        """
        x = self._gated(x).to(state.coefficients.dtype)
        carry, past, fit = update_operators(
            self.num_basis, self.basis.distinct_widths, self.schedule, self.samples, self.ridge,
            group.count, group.step, self.sticky, x.dtype, x.device,
        )  # fmt: skip
        new = fit @ x
        longest = torch.linalg.vector_norm(x.detach(), dim=-1).amax(dim=-1)
        if group.first:
            return new, longest
        longest = torch.maximum(longest, state.longest)
        if not self.sticky and carry is not None:
            return new + carry @ state.coefficients, longest
        sampled = (
            self.basis.evaluate(self._sample(state.histogram, group.step, key)) @ state.coefficients
        )
        length = torch.linalg.vector_norm(sampled, dim=-1, keepdim=True).clamp(min=1e-30)
        sampled = sampled * (state.longest[:, None, None] / length).clamp(max=1)
        return new + past @ sampled, longest

    def _gated(self, x: Tensor) -> Tensor:
        """sigmoid(conv(X)) * X over the width of three vectors, as one product."""
        if self.gate is None:
            return x
        b, t, e = x.shape
        padded = F.pad(x, (0, 0, 1, 1))
        windows = torch.cat([padded[:, i : i + t] for i in range(3)], dim=-1)  # B x T x 3e
        weight = self.gate.weight.permute(0, 2, 1).reshape(e, 3 * e)
        return torch.sigmoid(F.linear(windows, weight, self.gate.bias)) * x

    def _sample(self, histogram: Tensor, step: float | None, key: Tensor | None) -> Tensor:
        """The M positions of the past to keep, in order.  -> B x M"""
        rows = histogram.size(0)
        if not self.sticky:
            sampled = self.schedule.design(step, 1, self.samples).sampled
            return sampled.to(histogram).expand(rows, -1)
        if self.training:
            if key is None:
                key = torch.zeros(rows, dtype=torch.long, device=histogram.device)
            levels = uniform(key + self.seed, self.samples).sort(dim=-1).values.to(histogram)
        else:
            steps = torch.arange(self.samples, device=histogram.device)
            levels = ((steps.to(histogram) + 0.5) / self.samples).expand(rows, -1)
        return histogram_quantiles(histogram, levels)

    def moves(self, state: ContinuousState, plan: WritePlan, key: Tensor | None) -> list[Move]:
        """A write to a line that is not sticky takes t to where the schedule moves it; a sticky one
        what stood between two samples to between the places that these get."""
        ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
        still = Move(ends[:0], ends, ends)
        moves = [still] * len(plan.tokens)
        for group in plan.groups:
            if not group.count:
                continue
            rows = range(len(moves)) if group.rows is None else group.rows.tolist()
            design = self.schedule.design(group.step, group.count, self.samples)
            if group.first:
                begin = self.schedule.begin(group.count)
                move = Move(design.new, ends, ends, forgets=True, begin=begin)
                sampled = None
            else:
                move = self._straight(group, design.new)
                sampled = self._sample(state.histogram, group.step, key) if self.sticky else None
            for row in rows:
                moves[row] = move
                if sampled is not None:
                    at = sampled[row].double().cpu().clamp(0, 1)
                    knots = torch.cat([ends[:1], at, ends[1:]])
                    landed = torch.cat([move(ends[:1]), design.moved, move(ends[1:])])
                    moves[row] = Move(design.new, knots, landed)
        return moves

    def _straight(self, group: WriteGroup, new: Tensor) -> Move:
        """The schedule's own map."""
        straight = self.schedule.straight
        knots = torch.linspace(0, 1, 2 if straight else 1025, dtype=torch.float64)

        def exact(t: Tensor) -> Tensor:
            return self.schedule.move(t, group.step, group.count)

        return Move(new, knots, exact(knots), None if straight else exact)

    def stored(self, vectors: Tensor) -> Tensor:
        return self._gated(vectors)
