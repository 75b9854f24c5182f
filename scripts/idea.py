"""Draw the picture of the README, with the memory's own code: python scripts/idea.py"""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from fairseq_inf.memory import GaussianBasis, GaussianDensity, ridge_operator

TAU, T, N = 0.5, 24, 48
BLUE, ORANGE, GREEN = "#3b6ea5", "#d98032", "#4c9a5f"


def fit(basis, positions, values):
    return (values @ ridge_operator(basis, positions, 0.01)).float()


def main():
    torch.manual_seed(11)
    basis = GaussianBasis(N, (0.03, 0.08))
    even = torch.arange(1, T + 1, dtype=torch.float64) / T
    walk = torch.randn(2 * T, dtype=torch.float64).cumsum(0) * 0.45
    old, new = walk[:T] - walk[:T].mean(), walk[T:] - walk[:T].mean()
    t = torch.linspace(0.5 / T, 1, 500)

    figure, axes = plt.subplots(1, 3, figsize=(12, 2.9), sharey=True)
    first = fit(basis, even, old)
    axes[0].plot(t, basis.evaluate(t) @ first, color=BLUE, lw=2, label="signal of N coefficients")
    axes[0].plot(even, old, "o", color=BLUE, ms=4, alpha=0.6, label="vectors that left (one of e)")
    axes[0].set_title("1  fit what leaves the short-term memory")

    past = basis.evaluate(even.float()).double() @ first.double()
    places = torch.cat([TAU * even, TAU + (1 - TAU) * even])
    second = fit(basis, places, torch.cat([past, new]))
    axes[1].plot(t, basis.evaluate(t) @ second, color="#555555", lw=2, label="signal, N again")
    axes[1].plot(TAU * even, past, "o", color=BLUE, ms=4, alpha=0.6, label="the past, in [0, τ]")
    axes[1].plot(places[T:], new, "o", color=ORANGE, ms=4, alpha=0.8, label="the new, in ]τ, 1]")
    axes[1].axvline(TAU, color="#999999", ls=":", lw=1)
    axes[1].set_title("2  contract it and fit the new vectors beside it")

    density = GaussianDensity(torch.tensor([0.3]), torch.tensor([0.05**2]))
    read = (density.expect(basis) @ second).item()
    bell = torch.exp(-0.5 * ((t - 0.3) / 0.05) ** 2)
    low = min(old.min().item(), new.min().item()) - 0.8
    axes[2].plot(t, basis.evaluate(t) @ second, color="#555555", lw=2)
    axes[2].fill_between(
        t, low, low + 1.3 * bell, color=GREEN, alpha=0.35, label="a head's N(μ, σ²)"
    )
    axes[2].plot([0.3], [read], "D", color=GREEN, ms=8, label="what it reads, in closed form")
    axes[2].set_title("3  read it through a Gaussian a head")
    for axis in axes:
        axis.legend(loc="upper left", fontsize=8, frameon=False)
        axis.set_xlabel("t: 0 oldest, 1 newest")
        axis.set_yticks([])
        axis.spines[["top", "right", "left"]].set_visible(False)
    high = max(old.max().item(), new.max().item())
    axes[0].set_ylim(low, high + 0.5 * (high - low))
    figure.tight_layout()
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
