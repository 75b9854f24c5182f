"""Where the past goes when new vectors are written, and the linear maps of such a write."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fairseq_inf.errors import SettingError

from .basis import GaussianBasis, ridge_operator

STEPS = 16  # different ages to an octave, so that writes at many ages share their operators


@dataclass
class Design:
    """The regression of one write: samples of the past, taken at `sampled`, are fitted at `moved`,
    the new vectors at `new`; `weights` is what each of both counts in the regression."""

    sampled: Tensor  # M, or none for a first write
    moved: Tensor  # as many
    new: Tensor  # T
    weights: Tensor  # M + T


class Schedule(Hashable, Protocol):
    """Equal schedules are equal, and can be keys: operators are kept by them."""

    def step(self, held: int, new: int) -> float | None:
        """All that a write of `new` vectors to `held` ones depends on besides their number: equal
        steps have equal operators."""
        ...

    def move(self, t: Tensor, step: float | None, new: int) -> Tensor:
        """Where the write takes what stood at t."""
        ...

    def design(self, step: float | None, new: int, samples: int) -> Design: ...

    def begin(self, held: int) -> float:
        """The left end of what the first `held` vectors take of the line."""
        ...

    def reached(self, t: Tensor, held: Tensor) -> Tensor | None:
        """Whether anything of `held` vectors, B, has come to t, K; None: to all of the line.
        -> B x K"""
        ...

    def samples(self, num_basis: int) -> int:
        """How many samples of the past a write takes, unless told otherwise, M."""
        ...

    @property
    def straight(self) -> bool:
        """Whether `move` is a straight line."""
        ...


def _count(size: int, offset: float = 1.0) -> Tensor:
    return torch.arange(size, dtype=torch.float64) + offset


class _Contracting:
    """A write contracts the line by one factor, its step: what stands on it fills all of it."""

    straight = True
    tau: float

    def __post_init__(self) -> None:
        if not 0 < self.tau < 1 and self.tau != type(self).tau:
            raise SettingError(f"{{tau}} must be strictly between 0 and 1, got {self.tau}")

    def move(self, t: Tensor, step: float | None, new: int) -> Tensor:
        assert step is not None
        return step * t

    def begin(self, held: int) -> float:
        return 0.0

    def reached(self, t: Tensor, held: Tensor) -> None:
        return None


@dataclass(frozen=True)
class Constant(_Contracting):
    """The paper's: a write contracts the past to tau.

    Samples at m/M, new vectors at tau + (1 - tau) i/T, and each of them counts alike.
    """

    tau: float = 0.5

    def samples(self, num_basis: int) -> int:
        return num_basis

    def step(self, held: int, new: int) -> float | None:
        return self.tau if held else 0.0

    def design(self, step: float | None, new: int, samples: int) -> Design:
        assert step is not None
        even = _count(samples if step else 0) / samples
        i = _count(new) / new
        return Design(even, step * even, step + (1 - step) * i, even.new_ones(len(even) + new))


@dataclass(frozen=True)
class Uniform(_Contracting):
    """Every vector ever stored has the same room: the past is contracted to held / (held + new),
    or to the ceiling if that is less.

    Samples and vectors stand in the middle of their share of the line, and one counts as much as
    its share: a new vector 1, a sample of the past as many vectors as it stands for.  held / new is
    rounded to STEPS an octave.
    """

    tau: float = 1.0  # the ceiling

    def samples(self, num_basis: int) -> int:
        return 2 * num_basis

    def step(self, held: int, new: int) -> float | None:
        if not held:
            return 0.0
        share, octave = math.frexp(held / new)
        ratio = math.ldexp(round(share * 2 * STEPS) / (2 * STEPS), octave)
        return min(ratio / (1 + ratio), self.tau)

    def design(self, step: float | None, new: int, samples: int) -> Design:
        assert step is not None
        even = _count(samples if step else 0, 0.5) / samples
        i = _count(new, 0.5) / new
        stands_for = step / (1 - step) * new / samples
        weights = torch.cat([torch.full_like(even, stands_for), torch.ones_like(i)])
        return Design(even, step * even, step + (1 - step) * i, weights)


@dataclass(frozen=True)
class Logarithmic:
    """Room in proportion to 1 / age: age a stands at t = 1 - log(1 + a/a0) / log(1 + A/a0).

    A write makes all that is there older by as much, which is one map, t -> t', at any time, the
    first one included: what no vector has come to yet is fitted to the zeros of an empty signal.
    As in a uniform memory all count by their share of the line: the newest vector 1.
    """

    straight = False
    oldest: float = 1_000_000  # A, the age that is lost
    recent: float = 64  # a0, up to which age the room is about even

    def __post_init__(self) -> None:
        if self.oldest < 1:
            raise SettingError(f"{{oldest}} must be positive, got {self.oldest}")

    def samples(self, num_basis: int) -> int:
        return 2 * num_basis

    def reached(self, t: Tensor, held: Tensor) -> Tensor:
        return self.age(t) <= held[:, None]

    @property
    def octaves(self) -> float:
        return math.log1p(self.oldest / self.recent)

    def place(self, age: Tensor) -> Tensor:
        return 1 - torch.log1p(age / self.recent) / self.octaves

    def age(self, t: Tensor) -> Tensor:
        return self.recent * torch.expm1((1 - t) * self.octaves)

    def step(self, held: int, new: int) -> float | None:
        return None

    def move(self, t: Tensor, step: float | None, new: int) -> Tensor:
        return self.place(self.age(t) + new)

    def begin(self, held: int) -> float:
        return max(0.0, 1 - math.log1p(held / self.recent) / self.octaves)

    def design(self, step: float | None, new: int, samples: int) -> Design:
        even = _count(samples, 0.5) / samples
        age = self.age(even)
        young = new - _count(new, 0.5)
        # dt/da, by that of age 0
        room, moved_room, new_room = (1 / (1 + a / self.recent) for a in (age, age + new, young))
        per_sample = self.recent * self.octaves / samples
        weights = torch.cat([per_sample * moved_room / room, new_room])
        return Design(even, self.place(age + new), self.place(young), weights)


# by the name that a setting has
SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "constant": Constant,
    "uniform": Uniform,
    "logarithmic": Logarithmic,
}


def write_operators(
    basis: GaussianBasis, design: Design, ridge: float
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The linear maps of one write, B <- A B + C X, in float64.

    -> (A: N x N, P: N x M, C: N x T), where P fits samples taken anywhere in the past and
    A = P psi(sampled) those taken where the design says; both are None where there is no past.
    """
    g = ridge_operator(basis, torch.cat([design.moved, design.new]), ridge, design.weights).T
    samples = len(design.moved)
    if not samples:
        return None, None, g
    past, fit = g[:, :samples], g[:, samples:]
    return past @ basis.evaluate(design.sampled), past, fit
