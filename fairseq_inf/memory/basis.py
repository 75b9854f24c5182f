"""The radial basis functions of the signal, and the ridge regression onto them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_inf.errors import SettingError

MOST = 16_384  # basis functions, whose regression takes 2 GB


def least(dtype: torch.dtype) -> float:
    """What is smaller counts as 0: the product of two such is no normal number, and a CPU takes
    many times as long for each of those; far below what rounding leaves of a sum."""
    return math.sqrt(torch.finfo(torch.promote_types(dtype, torch.float32)).tiny)


def exp_(x: Tensor) -> Tensor:
    """e^x, or 0 if that is less than `least`.  In place."""
    with torch.no_grad():  # e^-inf has a gradient of 0
        torch.threshold_(x.detach(), math.log(least(x.dtype)), -math.inf)
    return x.exp_()


def normal_pdf(x: Tensor, var: Tensor) -> Tensor:
    """Density of N(0, var) at x."""
    return exp_(-0.5 * x**2 / var) * torch.rsqrt(2 * torch.pi * var)


def without_tail(x: Tensor, dtype: torch.dtype) -> Tensor:
    """For that dtype, which it is not in yet."""
    return x.masked_fill(x.abs() < least(dtype), 0)


class GaussianBasis:
    """psi_j(t) = N(t; mu_j, sigma_j^2) for j = 1..N.

    The N functions are shared evenly by the widths: each width has N / len(widths) centres
    linspace(0, 1), and the functions of one width stand together.
    """

    def __init__(self, num_basis: int, widths: Sequence[float]) -> None:
        widths = tuple(float(width) for width in widths)
        if not widths or not all(1e-6 <= width <= 1e6 for width in widths):
            raise SettingError(
                f"{{widths}} must be positive numbers from 1e-6 to 1e6, got {widths}"
            )
        if num_basis < 1 or num_basis % len(widths):
            raise SettingError(
                f"{{num_basis}} {num_basis} cannot be shared evenly by {len(widths)} widths: "
                f"make it a multiple of {len(widths)}, or change {{widths}}"
            )
        if num_basis > MOST:
            raise SettingError(
                f"{{num_basis}} must be at most {MOST:,}, got {num_basis:,}: a write is a matrix "
                f"of so many rows and columns, here {num_basis**2 * 8 / 1e9:,.0f} GB"
            )
        self.num_basis = num_basis
        self.distinct_widths = widths
        per_width = num_basis // len(widths)
        centers = torch.linspace(0, 1, per_width, dtype=torch.float64)
        if per_width == 1:
            centers += 0.5
        self.centers = centers.repeat(len(widths))  # N
        self.widths = torch.tensor(widths, dtype=torch.float64).repeat_interleave(per_width)  # N
        self._copies: dict[tuple[torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def tensors(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """(centers, widths) in the dtype and on the device of `like`."""
        key = (like.dtype, like.device)
        if key not in self._copies:
            with torch.inference_mode(False):  # what is kept must serve a training later
                self._copies[key] = self.centers.to(*key[::-1]), self.widths.to(*key[::-1])
        return self._copies[key]

    def evaluate(self, t: Tensor) -> Tensor:
        """psi(t).  ... -> ... x N"""
        centers, widths = self.tensors(t)
        return normal_pdf(t[..., None] - centers, widths**2)


def ridge_operator(
    basis: GaussianBasis, positions: Tensor, penalty: float, weights: Tensor | None = None
) -> Tensor:
    """G = W F^T (F W F^T + penalty I)^-1 with F = [psi(t_1) .. psi(t_T)], so that B^T = X^T G.

    F F^T has eigenvalues of 1e5 and more beside a penalty near 1: the solve is done in float64.
    positions, weights (the diagonal of W, 1 without): T.  -> T x N, in the dtype of the positions
    """
    f = basis.evaluate(positions.double()).T  # N x T
    weighted = f if weights is None else f * weights
    gram = weighted @ f.T
    gram.diagonal().add_(penalty)
    return torch.cholesky_solve(weighted, torch.linalg.cholesky(gram)).T.to(positions.dtype)
