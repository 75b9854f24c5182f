"""Root mean square normalization (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """w * x / sqrt(mean(x^2) + eps), with the quotient in single precision at least."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float))
        scale = torch.rsqrt(exact.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * (exact * scale).to(x.dtype)
