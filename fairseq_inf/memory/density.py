"""The densities through which a head reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .basis import GaussianBasis, exp_


@dataclass
class GaussianDensity:
    """p(t) = N(t; mu, var), one for every element of mu and var."""

    mu: Tensor
    var: Tensor

    def expect(self, basis: GaussianBasis) -> Tensor:
        """E_p[psi_j(t)] = N(mu; mu_j, var + sigma_j^2), over the whole line.  -> ... x N"""
        centers, widths = basis.tensors(self.mu)
        each = basis.num_basis // len(basis.distinct_widths)
        # the functions of one width share their spread: K of them for each of W widths
        distance = (self.mu[..., None] - centers[:each]) ** 2  # ... x K
        spread = self.var[..., None] + widths[::each] ** 2  # ... x W
        height = -0.5 * torch.log(2 * math.pi * spread)
        exponent = torch.addcmul(
            height[..., None], distance[..., None, :], -0.5 / spread[..., None]
        )
        return exp_(exponent).flatten(-2)

    def cdf(self, t: Tensor) -> Tensor:
        """P(x <= t).  t: K.  -> ... x K"""
        scaled = (t - self.mu[..., None]) * torch.rsqrt(2 * self.var)[..., None]
        return 0.5 * (1 + torch.erf(scaled))

    def mass(self, edges: Tensor) -> Tensor:
        """The mass of each bin between consecutive edges (D + 1 of them).  -> ... x D"""
        return self.cdf(edges).diff(dim=-1)

    def parts(self, most: int) -> dict[str, Tensor]:
        """What a trace keeps of each."""
        return {"mu": self.mu, "sigma": self.var.sqrt()}

    def kl(self, sigma0: float) -> Tensor:
        """KL(N(mu, var) || N(mu, sigma0^2)) = (v - log v - 1) / 2 with v = var / sigma0^2."""
        ratio = self.var / sigma0**2
        return 0.5 * (ratio - torch.log(ratio) - 1)


class CellDensity:
    """A density that is even on each of D equal cells of [0, 1]; the rest of it, if any, is
    elsewhere."""

    def masses(self) -> Tensor:
        """Of each cell.  -> ... x D"""
        raise NotImplementedError

    def mass(self, edges: Tensor) -> Tensor:
        """As that of a Gaussian: the mass between consecutive edges (K + 1).  -> ... x K"""
        masses = self.masses()
        place = edges.to(masses).clamp(0, 1) * masses.size(-1)
        cell = place.long().clamp(max=masses.size(-1) - 1)
        below = F.pad(masses.cumsum(dim=-1), (1, 0))[..., cell]
        return (below + (place - cell) * masses[..., cell]).diff(dim=-1)

    def parts(self, most: int) -> dict[str, Tensor]:
        """The cells with the most mass, up to `most`, their masses, and all that of the others."""
        masses = self.masses()
        mass, cell = masses.topk(min(most, masses.size(-1)), dim=-1)
        return {"cell": cell, "mass": mass, "rest": (masses.sum(-1) - mass.sum(-1)).clamp(min=0)}


@dataclass
class Weights(CellDensity):
    """Those of an attention, of which each slot is a cell."""

    weights: Tensor  # ... x D

    def masses(self) -> Tensor:
        return self.weights
