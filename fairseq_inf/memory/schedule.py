"""Where the past goes when new vectors are written, and the linear maps of such a write."""

import math
from dataclasses import dataclass

import torch

from .basis import ridge_operator

STEPS = 16  # different ages to an octave, so that writes at many ages share their operators


@dataclass
class Places:
    """Of one write: samples of the past, taken at `sampled`, are fitted at `moved`, the new vectors
    at `new`; `weights` is what each of both counts in the regression."""

    sampled: torch.Tensor  # M, or none for a first write
    moved: torch.Tensor  # as many
    new: torch.Tensor  # T
    weights: torch.Tensor  # M + T


def _count(size, offset=1.0):
    return torch.arange(size, dtype=torch.float64) + offset


class Constant:
    """The paper's: a write contracts the past to tau.

    Samples at m/M, new vectors at tau + (1 - tau) i/T, and each of them counts alike.
    """

    def __init__(self, tau):
        self.tau = tau

    def step(self, held, new):
        """All that a write of `new` vectors to `held` ones depends on besides their number: equal
        steps have equal operators.  Here what the past is contracted to."""
        return self.tau if held else 0.0

    def places(self, step, new, samples):
        even = _count(samples if step else 0) / samples
        i = _count(new) / new
        return Places(even, step * even, step + (1 - step) * i, even.new_ones(len(even) + new))


class Uniform:
    """Every vector ever stored has the same room: the past is contracted to held / (held + new),
    or to the ceiling if that is less.

    Samples and vectors stand in the middle of their share of the line, and one counts as much as
    its share: a new vector 1, a sample of the past as many vectors as it stands for.  held / new is
    rounded to STEPS an octave.
    """

    def __init__(self, ceiling=1.0):
        self.ceiling = ceiling

    def step(self, held, new):
        if not held:
            return 0.0
        share, octave = math.frexp(held / new)
        ratio = math.ldexp(round(share * 2 * STEPS) / (2 * STEPS), octave)
        return min(ratio / (1 + ratio), self.ceiling)

    def places(self, step, new, samples):
        even = _count(samples if step else 0, 0.5) / samples
        i = _count(new, 0.5) / new
        stands_for = step / (1 - step) * new / samples
        weights = torch.cat([torch.full_like(even, stands_for), torch.ones_like(i)])
        return Places(even, step * even, step + (1 - step) * i, weights)


class Logarithmic:
    """Room in proportion to 1 / age: age a stands at t = 1 - log(1 + a/a0) / log(1 + A/a0).

    A write makes all that is there older by as much, which is one map, t -> t', at any time, the
    first one included: what no vector has come to yet is fitted to the zeros of an empty signal.
    As in a uniform memory all count by their share of the line: the newest vector 1.
    """

    def __init__(self, recent, oldest):
        """recent: a0, up to which age the room is about even.  oldest: A, the age that is lost."""
        self.recent, self.oldest = recent, oldest
        self.octaves = math.log1p(oldest / recent)

    def place(self, age):
        return 1 - torch.log1p(age / self.recent) / self.octaves

    def step(self, held, new):
        return None

    def places(self, step, new, samples):
        even = _count(samples, 0.5) / samples
        age = self.recent * torch.expm1((1 - even) * self.octaves)
        young = new - _count(new, 0.5)
        # dt/da, by that of age 0
        room, moved_room, new_room = (1 / (1 + a / self.recent) for a in (age, age + new, young))
        per_sample = self.recent * self.octaves / samples
        weights = torch.cat([per_sample * moved_room / room, new_room])
        return Places(even, self.place(age + new), self.place(young), weights)


def write_operators(basis, places, ridge):
    """The linear maps of one write, B <- A B + C X, in float64.

    -> (A: N x N, P: N x M, C: N x T), where P fits samples taken anywhere in the past and
    A = P psi(sampled) those taken where the places say; both are None where there is no past.
    """
    g = ridge_operator(basis, torch.cat([places.moved, places.new]), ridge, places.weights).T
    samples = len(places.moved)
    if not samples:
        return None, None, g
    past, fit = g[:, :samples], g[:, samples:]
    return past @ basis.evaluate(places.sampled), past, fit
