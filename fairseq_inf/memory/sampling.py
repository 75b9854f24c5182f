"""Positions drawn from a histogram, by a generator that is a function and not a hidden state."""

import torch
from torch import Tensor


def mix(x: Tensor) -> Tensor:
    """A bijection of the 64-bit integers that scatters them (the finaliser of splitmix64)."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x


def uniform(key: Tensor, count: int) -> Tensor:
    """`count` numbers in [0, 1) for every key: the same key gives the same numbers.

    key: B, int64.  -> B x count, float32
    """
    steps = torch.arange(1, count + 1, device=key.device) * -0x61C8864680B583EB
    bits = mix(mix(key)[:, None] + steps)
    return ((bits >> 40) & 0xFFFFFF).float() * 2.0**-24


def histogram_quantiles(histogram: Tensor, levels: Tensor) -> Tensor:
    """Where the distribution with these bin masses on [0, 1], even in each bin, reaches `levels`.

    Uniform random levels give random positions, levels (m - 1/2) / M the quantiles.
    A histogram of zeros counts as uniform.  histogram: B x D, levels: B x M.  -> B x M
    """
    bins = histogram.size(-1)
    total = histogram.sum(dim=-1, keepdim=True)
    histogram = torch.where(total > 0, histogram / total.clamp(min=1e-30), 1 / bins)
    cdf = histogram.cumsum(dim=-1)
    at = torch.searchsorted(cdf, levels.contiguous() * cdf[:, -1:]).clamp(max=bins - 1)
    mass = histogram.gather(-1, at)
    inside = (levels * cdf[:, -1:] - (cdf.gather(-1, at) - mass)) / mass.clamp(min=1e-30)
    return (at + inside.clamp(0, 1)) / bins
