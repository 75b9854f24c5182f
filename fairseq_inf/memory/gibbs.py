"""A reader that can point at a content: each head looks at the signal through a Gibbs density."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_inf.errors import SettingError

from .basis import GaussianBasis, without_tail
from .contract import Encounter, as_heads
from .density import CellDensity
from .precision import in_full
from .reader import Reader
from .signal import ContinuousState, Signal

# B rows, T tokens, N basis functions and points of the signal, H heads, d head width, e = H d


@dataclass
class GibbsDensity(CellDensity):
    """p(t) proportional to exp(q . k(t) / sqrt(d)), on N points, each in the middle of its cell."""

    query: Tensor  # B x H x T x d
    keys: Tensor  # B x H x N x d

    def masses(self, every: int = 1) -> Tensor:
        """Of each point, for one query in `every`.  -> B x H x T' x N"""
        query = self.query[:, :, ::every].float()
        scores = query @ self.keys.float().transpose(2, 3)
        return torch.softmax(scores / math.sqrt(query.size(-1)), dim=-1)


LOUDEST = 100.0  # a gain at first; attention itself is at 1


class GibbsReader(Reader):
    """z = sum over N points t of p(t) V X(t), p(t) ~ exp(q . K x(t) / sqrt(d)), and the heads get
    D = g z / |z|.

    A mean of many vectors is shorter than a vector.  Keys are made of x(t), which is X(t) at unit
    root mean square, so that a density can point wherever something stands; values of X(t) as it
    is, so that a read over many points still counts what was stored; what a head has found is
    brought to unit root mean square.

    It is silent at first, its W^M is zero, so that a model begins as its host does; and quiet, for
    an optimizer such as Adam moves every weight alike, and at full strength the first steps of W^M
    disturb the host more than the memory helps: the gain g, a number a head, begins small.

    What it reads wants no gate: the density chooses what to read, and a gate, which costs as much
    as keys, values and output together, has not recalled more.
    """

    places: Tensor  # N
    psi: Tensor  # N x N

    def __init__(self, dim: int, num_heads: int, basis: GaussianBasis, gain: float = 0.1) -> None:
        """gain: g at first."""
        if not 0 < gain <= LOUDEST:
            raise SettingError(f"{{gain}} must be above 0 and at most {LOUDEST:g}, got {gain}")
        super().__init__(dim, num_heads)
        places = (torch.arange(basis.num_basis, dtype=torch.float64) + 0.5) / basis.num_basis
        self.register_buffer("places", places, persistent=False)
        psi = without_tail(basis.evaluate(places), torch.float)
        self.register_buffer("psi", psi, persistent=False)
        self.gain = nn.Parameter(torch.full((num_heads,), float(gain)))  # g
        nn.init.zeros_(self.output.weight)

    def contents(
        self, store: Signal, state: ContinuousState, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """-> keys, values: B x H x N x d"""
        x = store.at(state, self.places, self.psi)
        keys = as_heads(self.key(_at_unit_length(x).to(dtype)), self.num_heads)
        values = as_heads(self.value(x.to(dtype)), self.num_heads)
        return keys.contiguous(), values.contiguous()  # a token's read is thrice as fast so

    def read(self, query: Tensor, contents: tuple[Tensor, Tensor]) -> tuple[Tensor, GibbsDensity]:
        keys, values = contents
        heads = _at_unit_length(F.scaled_dot_product_attention(query, keys, values))
        heads = self.gain[:, None, None].to(query.dtype) * heads.to(query.dtype)
        return heads, GibbsDensity(query.detach(), keys.detach())

    def look(self, query: Tensor, store: Signal, state: ContinuousState) -> GibbsDensity:
        keys, _ = self.contents(store, state, query.dtype)
        return GibbsDensity(query, keys)

    def mass(self, seen: GibbsDensity, bins: int, mask: Tensor | None) -> Tensor:
        masses = seen.masses()
        if mask is not None:
            masses = masses * mask[:, None, :, None]
        return masses.sum(dim=(1, 2))

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


def _at_unit_length(x: Tensor) -> Tensor:
    """In float32 at least; zeros stay zeros, and have a gradient of zero: in half precision that
    of a very short vector would be beyond all numbers."""
    if not torch.is_grad_enabled():  # nor, then, would autocast change anything
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x * x.square().mean(dim=-1, keepdim=True).add_(1e-6).rsqrt_()
    with in_full(x):
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        square = x.square().mean(dim=-1, keepdim=True)
        return x * torch.where(square > 0, torch.rsqrt(square + 1e-6), 0)
