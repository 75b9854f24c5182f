"""A signal that each head reads through a Gibbs density: it can point at a content."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .contract import Encounter, as_heads
from .density import CellDensity
from .points import PointsMemory
from .signal import ContinuousState

# B rows, T tokens, N basis functions, D points of the signal, H heads, d head width, e = H d


@dataclass
class GibbsDensity(CellDensity):
    """p(t) proportional to exp(q . k(t) / sqrt(d)), on D points, each in the middle of its cell."""

    query: Tensor  # B x H x T x d
    keys: Tensor  # B x H x D x d

    def masses(self, every: int = 1) -> Tensor:
        """Of each point, for one query in `every`.  -> B x H x T' x D"""
        query = self.query[:, :, ::every].float()
        scores = query @ self.keys.float().transpose(2, 3)
        return torch.softmax(scores / math.sqrt(query.size(-1)), dim=-1)


class GibbsMemory(PointsMemory):
    """z = sum over D points t of p(t) V X(t), p(t) ~ exp(q . K X(t) / sqrt(d)).

    It is silent at first, its W^M is zero, so that a model begins as its host does.

    There is no gate: the density chooses what to read, and a gate, which costs as much as keys,
    values and output together, has not recalled more.

    A mean of many vectors is shorter than a vector: with `normalize` each X(t) is brought to unit
    root mean square first, which points better; without, all of them together still count what was
    stored.
    """

    gated = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_basis: int,
        widths: Sequence[float] = (0.01, 0.05),
        *,
        points: int | None = None,
        normalize: bool = True,
        **kwargs: Any,
    ) -> None:
        """points: D, N unless given."""
        points = num_basis if points is None else points
        super().__init__(dim, num_heads, num_basis, widths, points=points, **kwargs)
        self.normalize = normalize
        nn.init.zeros_(self.output.weight)

    def signal(self, state: ContinuousState) -> Tensor:
        x = super().signal(state)
        return _at_unit_length(x) if self.normalize else x

    def contents(
        self, state: ContinuousState, attention: Any, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """-> keys, values: B x H x D x d"""
        x = self.signal(state).to(dtype)
        keys, values = (as_heads(f(x), self.num_heads) for f in (self.key, self.value))
        return keys.contiguous(), values.contiguous()  # a token's read is thrice as fast so

    def read(
        self, query: Tensor, own: Tensor | None, contents: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, GibbsDensity]:
        keys, values = contents
        found = F.scaled_dot_product_attention(query, keys, values)
        return found, GibbsDensity(query.detach(), keys.detach())

    def look(self, query: Tensor, state: ContinuousState) -> GibbsDensity:
        keys, _ = self.contents(state, None, query.dtype)
        return GibbsDensity(query, keys)

    def logs(self, met: Encounter) -> dict[str, tuple[Tensor, Tensor]]:
        """Standard deviation and entropy (in nats) of p, of one query in eight."""
        masses = met.seen.masses(8)
        counted = met.counted[:, None, ::8]
        places = self.places.to(masses)
        mean = masses @ places
        sigma = (masses @ places.square() - mean.square()).clamp(min=0).sqrt()
        entropy = -(masses * masses.clamp(min=1e-30).log()).sum(dim=-1)
        of = counted.sum() * self.num_heads
        return {
            "ltm_sigma": ((sigma * counted).sum(), of),
            "ltm_entropy": ((entropy * counted).sum(), of),
        }

    def looked(self, seen: GibbsDensity, mask: Tensor | None) -> Tensor:
        masses = seen.masses()
        if mask is not None:
            masses = masses * mask[:, None, :, None]
        return masses.sum(dim=(1, 2))


def _at_unit_length(x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + 1e-6)
