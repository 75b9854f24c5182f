"""The continuous long-term memory: N coefficients that hold a past of any length."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn

from .basis import GaussianBasis, ridge_operator
from .density import GaussianDensity
from .sampling import histogram_quantiles, uniform
from .state import State

# B rows, T tokens, N basis functions, M samples of the past, H heads, d head width, e = H d


@dataclass
class ContinuousState(State):
    coefficients: torch.Tensor  # B x N x e, never in half precision: X(t) = B^T psi(t)
    longest: torch.Tensor  # B: length of the longest vector ever stored
    histogram: torch.Tensor  # B x D: where the last segment looked; zeros when not sticky
    tokens: torch.Tensor  # B: how many vectors the signal holds; 0 is an empty memory

    def ranges(self):
        written = self.coefficients.flatten(1).any(dim=1).long()
        yield "tokens", written, torch.iinfo(torch.long).max
        yield "longest", 0, math.inf
        yield "histogram", 0, 1


@dataclass
class WritePlan:
    """Which rows take how many vectors.  The same for every layer, so it is made once a segment."""

    groups: list  # of (row numbers or None for all, number of vectors, is this the first write)
    inverse: torch.Tensor | None  # puts the rows of the groups back in order
    tokens: torch.Tensor  # B: how many vectors each row holds afterwards

    @property
    def writes(self):
        return any(count for _, count, _ in self.groups)


def plan_write(counts, tokens, threshold=0):
    """Group rows that take equally many vectors and that are alike empty or not.

    counts: how many vectors each row takes.  tokens: B, how many it holds; with a threshold,
    a row that would hold more than that many forgets everything first.
    """
    held = tokens.tolist()
    after, groups = [], {}
    for row, (count, old) in enumerate(zip(counts, held, strict=True)):
        if count and threshold and old + count > threshold:
            old = 0
        groups.setdefault((count, count > 0 and old == 0), []).append(row)
        after.append(old + count)
    after = torch.tensor(after, device=tokens.device)
    if len(groups) == 1:
        (count, first) = next(iter(groups))
        return WritePlan([(None, count, first)], None, after)
    listed = [
        (torch.tensor(rows, device=tokens.device), count, first)
        for (count, first), rows in groups.items()
    ]
    return WritePlan(listed, torch.cat([rows for rows, _, _ in listed]).argsort(), after)


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # what is kept must serve a training later
def update_operators(num_basis, widths, tau, samples, ridge, count, first, dtype, device):
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


def _exact(dtype):
    """Regression, densities and samples are computed in float32 at least."""
    return torch.promote_types(dtype, torch.float32)


class ContinuousMemory(nn.Module):
    """(query, vectors, state) -> (output, density, new state): write the vectors, then read.

    The vectors and the carried coefficients are constants for the gradient; the gate is not.
    Sticky samples of the past are random in training mode, drawn from `seed` and the `key` of
    the row, and the quantiles of the histogram in evaluation mode.
    """

    def __init__(
        self,
        dim,
        num_heads,
        num_basis,
        widths=(0.01, 0.05),
        tau=0.5,
        samples=None,
        ridge=0.5,
        sticky=False,
        bins=128,
        threshold=0,
        seed=0,
    ):
        super().__init__()
        for flag, value, holds in (
            ("--ltm-tau", tau, 0 < tau < 1),
            ("--ltm-ridge", ridge, 0 < ridge < math.inf),
            ("--ltm-bins", bins, bins >= 1),
            ("--ltm-samples", samples, samples is None or samples >= 1),
            ("--ltm-threshold", threshold, threshold >= 0),
        ):
            if not holds:
                wanted = {
                    "--ltm-tau": "strictly between 0 and 1",
                    "--ltm-threshold": "at least 0",
                }.get(flag, "positive")
                raise ValueError(f"{flag} must be {wanted}, got {value}")
        if dim % num_heads:
            raise ValueError(f"{dim} dimensions cannot be split evenly between {num_heads} heads")
        self.dim, self.num_heads, self.num_basis = dim, num_heads, num_basis
        self.basis = GaussianBasis(num_basis, widths)
        self.tau, self.samples, self.ridge = tau, samples or num_basis, ridge
        self.sticky, self.bins, self.threshold, self.seed = sticky, bins, threshold, seed

        self.gate = nn.Conv1d(dim, dim, kernel_size=3, padding=1)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)  # no bias: an empty memory adds nothing
        self.locate = nn.Linear(num_basis, 2)  # scores -> logit of mu, pre-softplus of var
        for linear in (self.key, self.value, self.output):
            nn.init.xavier_uniform_(linear.weight)

    @property
    def needs_queries(self):
        """Whether a write depends on what the segment before it has looked at."""
        return self.sticky

    def initial_state(self, rows, device=None, dtype=None):
        exact = _exact(dtype or self.key.weight.dtype)
        return ContinuousState(
            coefficients=torch.zeros(rows, self.num_basis, self.dim, dtype=exact, device=device),
            longest=torch.zeros(rows, dtype=exact, device=device),
            histogram=torch.zeros(
                rows, self.bins if self.sticky else 0, dtype=exact, device=device
            ),
            tokens=torch.zeros(rows, dtype=torch.long, device=device),
        )

    def plan(self, counts, state):
        """counts: how many vectors each row takes."""
        return plan_write(counts, state.tokens, self.threshold)

    def forward(self, query, vectors, state, plan=None, mask=None, key=None, output=True):
        """query: B x H x T x d.  vectors: B x W x e, of which a row takes the last as its plan says
        (all without a plan).  mask: B x T, true for real tokens.  key: B, for sticky sampling.
        output: False if only the state is wanted, and then the query is needed by a sticky memory
        alone, and the first result is None.
        -> B x T x e, GaussianDensity of B x H x T, ContinuousState"""
        if plan is None:
            plan = self.plan([vectors.size(1)] * vectors.size(0), state)
        with torch.autocast(vectors.device.type, enabled=False):
            coefficients, longest = self._write(vectors.detach(), state, plan, key)
        found = density = None
        if output:
            probes, values = self.probes_and_values(coefficients, query.dtype)
            found, density = self.read(query, probes, values)
        elif self.sticky:
            density = self.locate_reads(query, self.probes(coefficients))
        histogram = self._histogram(density, mask, state) if self.sticky else state.histogram
        return found, density, ContinuousState(coefficients, longest, histogram, plan.tokens)

    def _write(self, vectors, state, plan, key):
        """Update the rows as the plan says.  -> coefficients: B x N x e, longest: B"""
        state = state.detach()
        if not plan.writes:
            # the gate takes part in every step, or data-parallel training waits for its gradient
            unused = 0 * sum(p.flatten()[0] for p in self.gate.parameters()) if self.training else 0
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
        return tuple(torch.cat(part)[plan.inverse] for part in zip(*parts, strict=True))

    def _update(self, x, state, first, key):
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

    def _gated(self, x):
        """sigmoid(conv(X)) * X over the width of three vectors, as one product."""
        b, t, e = x.shape
        padded = F.pad(x, (0, 0, 1, 1))
        windows = torch.cat([padded[:, i : i + t] for i in range(3)], dim=-1)  # B x T x 3e
        weight = self.gate.weight.permute(0, 2, 1).reshape(e, 3 * e)
        return torch.sigmoid(F.linear(windows, weight, self.gate.bias)) * x

    def _sample(self, histogram, key):
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

    def probes_and_values(self, coefficients, dtype):
        """What reads need of the signal B, whatever the query.
        -> probes: B x H x d x 2, values B W^V: B x H x N x d"""
        b, h = coefficients.size(0), self.num_heads
        values = self.value(coefficients.to(dtype))
        values = values.view(b, self.num_basis, h, -1).transpose(1, 2)
        return self.probes(coefficients), values

    def probes(self, coefficients):
        """Only w . (K q) = (K^T w) . q is needed of the scores K q, K = B W^K, so K itself is never
        formed.  -> B x H x d x 2"""
        b, h = coefficients.size(0), self.num_heads
        with torch.autocast(coefficients.device.type, enabled=False):
            exact = coefficients.dtype
            probes = self.locate.weight.to(exact) @ coefficients  # B x 2 x e
            probes = F.linear(probes, self.key.weight.to(exact)).view(b, 2, h, -1)
            return probes.permute(0, 2, 3, 1) / math.sqrt(self.dim // h)

    def locate_reads(self, query, probes):
        """-> GaussianDensity of B x H x T"""
        with torch.autocast(query.device.type, enabled=False):
            logits = query.to(probes.dtype) @ probes + self.locate.bias.to(probes.dtype)
            mu, var = logits.unbind(-1)
            return GaussianDensity(torch.sigmoid(mu), F.softplus(var).clamp(min=1e-6))

    def read(self, query, probes, values):
        """z = V^T E_p[psi], with mu and var of p from the query's scores."""
        b, h, t, d = query.shape
        density = self.locate_reads(query, probes)
        with torch.autocast(query.device.type, enabled=False):
            weights = density.expect(self.basis).to(query.dtype)  # B x H x T x N
        z = (weights @ values).transpose(1, 2).reshape(b, t, h * d)
        return self.output(z), density

    @torch.no_grad()
    def _histogram(self, density, mask, state):
        """Share of the last segment's densities, over heads and real tokens, in each of D bins."""
        like = density.mu
        edges = torch.linspace(0, 1, self.bins + 1, dtype=like.dtype, device=like.device)
        below = density.cdf(edges)  # B x H x T x D+1
        if mask is None:
            total = below.sum(dim=(1, 2))
        else:
            weight = mask.to(below.dtype)[:, None, None, :]  # B x 1 x 1 x T
            total = (weight @ below).sum(dim=(1, 2))
        counts = total.diff(dim=-1).clamp(min=0)
        size = counts.sum(dim=-1, keepdim=True)
        return torch.where(size > 0, counts / size.clamp(min=1e-30), state.histogram)
