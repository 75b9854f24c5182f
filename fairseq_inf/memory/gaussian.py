"""The paper's reader: each head looks at the signal through one Gaussian."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .basis import GaussianBasis
from .contract import Encounter, as_heads
from .density import GaussianDensity
from .precision import in_full
from .reader import Reader
from .signal import ContinuousState, Signal

# B rows, T tokens, N basis functions, H heads, d head width, e = H d


class GaussianReader(Reader):
    """mu and var of a query's Gaussian are one affine map each of its N scores K q / sqrt(d)."""

    def __init__(self, dim: int, num_heads: int, basis: GaussianBasis) -> None:
        super().__init__(dim, num_heads)
        self.basis = basis
        self.locate = nn.Linear(basis.num_basis, 2)  # scores -> logit of mu, pre-softplus of var

    @torch.no_grad()
    def start_silent(self, layer: int, layers: int) -> None:
        """Reads begin at the newest part of the signal, over a share of it that grows from layer
        to layer, since a fine-tuning is too short to move them there from one place."""
        super().start_silent(layer, layers)
        share = 0.05 * 16 ** (layer / max(layers - 1, 1))  # 0.05 to 0.8
        mu, var = 1 - min(share, 0.5), share**2
        self.locate.bias[0] = math.log(mu / (1 - mu))
        self.locate.bias[1] = math.log(math.expm1(var))

    def contents(
        self, store: Signal, state: ContinuousState, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """-> probes: B x H x d x 2, values B W^V: B x H x N x d"""
        values = as_heads(self.value(state.coefficients.to(dtype)), self.num_heads)
        return self._probes(state.coefficients), values

    def _probes(self, coefficients: Tensor) -> Tensor:
        """Only w . (K q) = (K^T w) . q is needed of the scores K q, K = B W^K, so K itself is never
        formed.  -> B x H x d x 2"""
        b, h = coefficients.size(0), self.num_heads
        with in_full(coefficients):
            exact = coefficients.dtype
            probes = self.locate.weight.to(exact) @ coefficients  # B x 2 x e
            probes = F.linear(probes, self.key.weight.to(exact)).view(b, 2, h, -1)
            return probes.permute(0, 2, 3, 1) / math.sqrt(self.key.in_features // h)

    def _locate(self, query: Tensor, probes: Tensor) -> GaussianDensity:
        """-> of B x H x T"""
        with in_full(query):
            logits = query.to(probes.dtype) @ probes + self.locate.bias.to(probes.dtype)
            mu, var = logits.unbind(-1)
            return GaussianDensity(torch.sigmoid(mu), F.softplus(var).clamp(min=1e-6))

    def read(
        self, query: Tensor, contents: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, GaussianDensity]:
        """z = V^T E_p[psi], with mu and var of p from the query's scores."""
        probes, values = contents
        density = self._locate(query, probes)
        with in_full(query):
            weights = density.expect(self.basis).to(query.dtype)  # B x H x T x N
        return weights @ values, density

    def look(self, query: Tensor, store: Signal, state: ContinuousState) -> GaussianDensity:
        return self._locate(query, self._probes(state.coefficients))

    def mass(self, seen: GaussianDensity, bins: int, mask: Tensor | None) -> Tensor:
        edges = torch.linspace(0, 1, bins + 1, dtype=seen.mu.dtype, device=seen.mu.device)
        below = seen.cdf(edges)  # B x H x T x D+1
        if mask is None:
            total = below.sum(dim=(1, 2))
        else:
            weight = mask.to(below.dtype)[:, None, None, :]  # B x 1 x 1 x T
            total = (weight @ below).sum(dim=(1, 2))
        return total.diff(dim=-1)

    def losses(self, met: Encounter) -> dict[str, Tensor]:
        """KL(N(mu, var) || N(mu, sigma_0^2)), over heads and tokens."""
        kl = met.seen.kl(met.settings["kl_sigma"])
        return {"kl": (kl * met.counted[:, None]).sum()}

    def logs(self, met: Encounter) -> dict[str, tuple[Tensor, Tensor]]:
        counted = met.counted[:, None]
        sigma = (met.seen.var.sqrt() * counted).sum()
        return {"ltm_sigma": (sigma, counted.sum() * self.num_heads)}
