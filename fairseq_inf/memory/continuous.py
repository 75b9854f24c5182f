"""The continuous long-term memory: N coefficients that hold a past of any length."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .basis import GaussianBasis, ridge_operator
from .contract import Encounter, LongTermMemory, Plan, as_heads, side_by_side, take_part
from .density import GaussianDensity
from .errors import SettingError
from .sampling import histogram_quantiles, uniform
from .state import State

# B rows, T tokens, N basis functions, M samples of the past, H heads, d head width, e = H d


@dataclass
class ContinuousState(State):
    coefficients: Tensor  # B x N x e, never in half precision: X(t) = B^T psi(t)
    longest: Tensor  # B: length of the longest vector ever stored
    histogram: Tensor  # B x D: where the last segment looked; zeros when not sticky
    tokens: Tensor  # B: how many vectors the signal holds; 0 is an empty memory


@dataclass(kw_only=True)
class WritePlan(Plan):
    """Which rows take how many vectors."""

    # row numbers or None for all, number of vectors, is this the first write
    groups: list[tuple[Tensor | None, int, bool]]
    inverse: Tensor | None  # puts the rows of the groups back in order
    tokens: Tensor  # B: how many vectors each row holds afterwards

    @property
    def writes(self) -> bool:
        return any(count for _, count, _ in self.groups)


def plan_write(counts: Sequence[int], tokens: Tensor, threshold: int = 0) -> WritePlan:
    """Group rows that take equally many vectors and that are alike empty or not.

    counts: how many vectors each row takes.  tokens: B, how many it holds; with a threshold,
    a row that would hold more than that many forgets everything first.
    """
    held = tokens.tolist()
    after: list[int] = []
    groups: dict[tuple[int, bool], list[int]] = {}
    for row, (count, old) in enumerate(zip(counts, held, strict=True)):
        if count and threshold and old + count > threshold:
            old = 0
        groups.setdefault((count, count > 0 and old == 0), []).append(row)
        after.append(old + count)
    held_after = torch.tensor(after, device=tokens.device)
    listed: list[tuple[Tensor | None, int, bool]] = []
    inverse = None
    if len(groups) == 1:
        listed += [(None, *next(iter(groups)))]
    else:
        each = [torch.tensor(rows, device=tokens.device) for rows in groups.values()]
        listed += [(rows, *how) for how, rows in zip(groups, each, strict=True)]
        inverse = torch.cat(each).argsort()
    return WritePlan(filled=held_after > 0, groups=listed, inverse=inverse, tokens=held_after)


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # what is kept must serve a training later
def update_operators(
    num_basis: int,
    widths: tuple[float, ...],
    tau: float,
    samples: int,
    ridge: float,
    count: int,
    first: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """The linear maps of one write, B <- A B + C X, for `count` new vectors.

    First write: t_i = i/T and only C = G^T.  Later: the past is sampled at m/M and fitted at
    tau m/M, the new vectors at tau + (1 - tau) i/T.  -> (A: N x N, P: N x M, C: N x T), where
    P fits samples taken anywhere in the past and A = P psi(m/M) those taken evenly; A is None if
    its powers grow, as they may with tau near 1 and few vectors a write.
    """
    basis = GaussianBasis(num_basis, widths)
    new = torch.arange(1, count + 1, dtype=torch.float64) / count
    if first:
        fit = ridge_operator(basis, new, ridge).T
        return None, None, fit.to(device, dtype).contiguous()
    even = torch.arange(1, samples + 1, dtype=torch.float64) / samples
    g = ridge_operator(basis, torch.cat([tau * even, tau + (1 - tau) * new]), ridge).T
    past, fit = g[:, :samples], g[:, samples:]
    carry = past @ basis.evaluate(even)
    grows = torch.linalg.eigvals(carry).abs().max() >= 1
    carry, past, fit = (x.to(device, dtype).contiguous() for x in (carry, past, fit))
    return None if grows else carry, past, fit


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Regression, densities and samples are computed in float32 at least."""
    return torch.promote_types(dtype, torch.float32)


class ContinuousMemory(LongTermMemory):
    """A signal X(t) = B^T psi(t) on [0, 1], read through one density a head and query.

    The vectors and the carried coefficients are constants for the gradient; the gate is not.
    Sticky samples of the past are random in training mode, drawn from `seed` and the `key` of
    the row, and the quantiles of the histogram in evaluation mode.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_basis: int,
        widths: Sequence[float] = (0.01, 0.05),
        tau: float = 0.5,
        samples: int | None = None,
        ridge: float = 0.5,
        sticky: bool = False,
        bins: int = 128,
        threshold: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        for name, value, holds, wanted in (
            ("tau", tau, 0 < tau < 1, "strictly between 0 and 1"),
            ("ridge", ridge, 0 < ridge < math.inf, "positive"),
            ("bins", bins, bins >= 1, "positive"),
            ("samples", samples, samples is None or samples >= 1, "positive"),
            ("threshold", threshold, threshold >= 0, "at least 0"),
        ):
            if not holds:
                raise SettingError(f"{{{name}}} must be {wanted}, got {value}")
        if dim % num_heads:
            raise SettingError(f"{dim} dimensions cannot be split evenly between {num_heads} heads")
        self.dim, self.num_heads, self.num_basis = dim, num_heads, num_basis
        self.basis = GaussianBasis(num_basis, widths)
        self.tau, self.samples, self.ridge = tau, samples or num_basis, ridge
        self.sticky, self.bins, self.threshold, self.seed = sticky, bins, threshold, seed
        self.observes = sticky

        del self.output  # optimizers number the parameters: it stands behind `value`
        self.gate = nn.Conv1d(dim, dim, kernel_size=3, padding=1)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)  # no bias: an empty memory adds nothing
        self.locate = nn.Linear(num_basis, 2)  # scores -> logit of mu, pre-softplus of var
        for linear in (self.key, self.value, self.output):
            nn.init.xavier_uniform_(linear.weight)

    @torch.no_grad()
    def start_silent(self, layer: int, layers: int) -> None:
        """Reads begin at the newest part of the signal, over a share of it that grows from layer
        to layer, since a fine-tuning is too short to move them there from one place."""
        nn.init.zeros_(self.output.weight)
        share = 0.05 * 16 ** (layer / max(layers - 1, 1))  # 0.05 to 0.8
        mu, var = 1 - min(share, 0.5), share**2
        self.locate.bias[0] = math.log(mu / (1 - mu))
        self.locate.bias[1] = math.log(math.expm1(var))

    def initial_state(self, rows: int, device: Any = None, dtype: Any = None) -> ContinuousState:
        exact = _exact(dtype or self.key.weight.dtype)

        def zeros(*shape: int, dtype: torch.dtype = exact) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        return ContinuousState(
            coefficients=zeros(self.num_basis, self.dim),
            longest=zeros(),
            histogram=zeros(self.bins if self.sticky else 0),
            tokens=zeros(dtype=torch.long),
        )

    def plan_key(self) -> Hashable:
        return self.threshold

    def plan(self, counts: Sequence[int], state: ContinuousState) -> WritePlan:
        return plan_write(counts, state.tokens, self.threshold)

    def forward(
        self,
        query: Tensor,
        vectors: Tensor,
        state: ContinuousState,
        plan: WritePlan | None = None,
        mask: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, GaussianDensity, ContinuousState]:
        """Write, then read, for a decoder of one's own.

        query: B x H x T x d.  vectors: B x W x e, of which a row takes the last as its plan says
        (all without a plan).  mask: B x T, true for real tokens.  key: B, for sticky sampling.
        -> B x T x e, GaussianDensity of B x H x T, ContinuousState"""
        if plan is None:
            plan = self.plan([vectors.size(1)] * vectors.size(0), state)
        state, _ = self.write(vectors, state, plan, key=key)
        found, density = self.read(query, None, self.contents(state, None, query.dtype))
        return self.output(side_by_side(found)), density, self.observe(state, density, mask)

    def write(
        self,
        vectors: Tensor,
        state: ContinuousState,
        plan: WritePlan,
        attention: Any = None,
        key: Tensor | None = None,
    ) -> tuple[ContinuousState, None]:
        with torch.autocast(vectors.device.type, enabled=False):
            coefficients, longest = self._write(vectors.detach(), state.detach(), plan, key)
        return ContinuousState(coefficients, longest, state.histogram, plan.tokens), None

    def _write(
        self, vectors: Tensor, state: ContinuousState, plan: WritePlan, key: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Update the rows as the plan says.  -> coefficients: B x N x e, longest: B"""
        if not plan.writes:
            unused = take_part(self.gate) if self.training else 0
            return state.coefficients + unused, state.longest
        parts = []
        for rows, count, first in plan.groups:
            part, x, own = state, vectors, key
            if rows is not None:
                part, x, own = state.rows(rows), vectors[rows], None if key is None else key[rows]
            if count:
                parts.append(self._update(x[:, x.size(1) - count :], part, first, own))
            else:
                parts.append((part.coefficients, part.longest))
        if plan.inverse is None:
            return parts[0]
        coefficients, longest = (torch.cat(part)[plan.inverse] for part in zip(*parts, strict=True))
        return coefficients, longest

    def _update(
        self, x: Tensor, state: ContinuousState, first: bool, key: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """B <- A B + C (sigmoid(conv(X)) * X).

        Where a sticky memory keeps looking at one place, the fit of samples of a fit overshoots
        a little with every write, and would grow without bound: unless A alone makes it shrink, no
        sample of the past may be longer than the longest vector that was ever stored.
        """
        x = self._gated(x).to(state.coefficients.dtype)
        carry, past, fit = update_operators(
            self.num_basis, self.basis.distinct_widths, self.tau, self.samples, self.ridge,
            x.size(1), first, x.dtype, x.device,
        )  # fmt: skip
        new = fit @ x
        longest = torch.linalg.vector_norm(x.detach(), dim=-1).amax(dim=-1)
        if first:
            return new, longest
        longest = torch.maximum(longest, state.longest)
        if not self.sticky and carry is not None:
            return new + carry @ state.coefficients, longest
        sampled = self.basis.evaluate(self._sample(state.histogram, key)) @ state.coefficients
        length = torch.linalg.vector_norm(sampled, dim=-1, keepdim=True).clamp(min=1e-30)
        sampled = sampled * (state.longest[:, None, None] / length).clamp(max=1)
        return new + past @ sampled, longest

    def _gated(self, x: Tensor) -> Tensor:
        """sigmoid(conv(X)) * X over the width of three vectors, as one product."""
        b, t, e = x.shape
        padded = F.pad(x, (0, 0, 1, 1))
        windows = torch.cat([padded[:, i : i + t] for i in range(3)], dim=-1)  # B x T x 3e
        weight = self.gate.weight.permute(0, 2, 1).reshape(e, 3 * e)
        return torch.sigmoid(F.linear(windows, weight, self.gate.bias)) * x

    def _sample(self, histogram: Tensor, key: Tensor | None) -> Tensor:
        """The M positions of the past to keep, in order.  -> B x M"""
        rows = histogram.size(0)
        if not self.sticky:
            return (torch.arange(1, self.samples + 1).to(histogram) / self.samples).expand(rows, -1)
        if self.training:
            if key is None:
                key = torch.zeros(rows, dtype=torch.long, device=histogram.device)
            levels = uniform(key + self.seed, self.samples).sort(dim=-1).values.to(histogram)
        else:
            steps = torch.arange(self.samples, device=histogram.device)
            levels = ((steps.to(histogram) + 0.5) / self.samples).expand(rows, -1)
        return histogram_quantiles(histogram, levels)

    def contents(
        self, state: ContinuousState, attention: Any, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """-> probes: B x H x d x 2, values B W^V: B x H x N x d"""
        values = as_heads(self.value(state.coefficients.to(dtype)), self.num_heads)
        return self._probes(state.coefficients), values

    def _probes(self, coefficients: Tensor) -> Tensor:
        """Only w . (K q) = (K^T w) . q is needed of the scores K q, K = B W^K, so K itself is never
        formed.  -> B x H x d x 2"""
        b, h = coefficients.size(0), self.num_heads
        with torch.autocast(coefficients.device.type, enabled=False):
            exact = coefficients.dtype
            probes = self.locate.weight.to(exact) @ coefficients  # B x 2 x e
            probes = F.linear(probes, self.key.weight.to(exact)).view(b, 2, h, -1)
            return probes.permute(0, 2, 3, 1) / math.sqrt(self.dim // h)

    def _locate(self, query: Tensor, probes: Tensor) -> GaussianDensity:
        """-> of B x H x T"""
        with torch.autocast(query.device.type, enabled=False):
            logits = query.to(probes.dtype) @ probes + self.locate.bias.to(probes.dtype)
            mu, var = logits.unbind(-1)
            return GaussianDensity(torch.sigmoid(mu), F.softplus(var).clamp(min=1e-6))

    def read(
        self, query: Tensor, own: Tensor | None, contents: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, GaussianDensity]:
        """z = V^T E_p[psi], with mu and var of p from the query's scores."""
        probes, values = contents
        density = self._locate(query, probes)
        with torch.autocast(query.device.type, enabled=False):
            weights = density.expect(self.basis).to(query.dtype)  # B x H x T x N
        return weights @ values, density

    def look(self, query: Tensor, state: ContinuousState) -> GaussianDensity:
        return self._locate(query, self._probes(state.coefficients))

    def losses(self, met: Encounter) -> dict[str, Tensor]:
        kl = met.seen.kl(met.settings["kl_sigma"])
        return {"kl": (kl * met.counted[:, None]).sum()}

    def logs(self, met: Encounter) -> dict[str, tuple[Tensor, Tensor]]:
        counted = met.counted[:, None]
        sigma = (met.seen.var.sqrt() * counted).sum()
        return {"ltm_sigma": (sigma, counted.sum() * self.num_heads)}

    @torch.no_grad()
    def observe(
        self, state: ContinuousState, seen: GaussianDensity, mask: Tensor | None
    ) -> ContinuousState:
        """Share of the segment's densities, over heads and real tokens, in each of D bins."""
        if not self.sticky:
            return state
        like = seen.mu
        edges = torch.linspace(0, 1, self.bins + 1, dtype=like.dtype, device=like.device)
        below = seen.cdf(edges)  # B x H x T x D+1
        if mask is None:
            total = below.sum(dim=(1, 2))
        else:
            weight = mask.to(below.dtype)[:, None, None, :]  # B x 1 x 1 x T
            total = (weight @ below).sum(dim=(1, 2))
        counts = total.diff(dim=-1).clamp(min=0)
        size = counts.sum(dim=-1, keepdim=True)
        histogram = torch.where(size > 0, counts / size.clamp(min=1e-30), state.histogram)
        return replace(state, histogram=histogram)
