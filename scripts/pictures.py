"""Make the pictures of the README: the idea, and what a model that has learned to recall looks at.

    bash examples/recall/prepare.sh data-bin/recall
    python scripts/pictures.py --data data-bin/recall --cpu

trains examples/recall's small Gibbs model, lets fairseq-inf-inspect read the first test document,
and leaves docs/idea.png, docs/densities.png, docs/space.png, and where there is a chromium
docs/page.png, a picture of the page.  It says how often the words of the pair that was asked for
light up.
"""

import argparse
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from fairseq.data import Dictionary, data_utils

from fairseq_inf.analysis.figures import at_tokens, sharpest
from fairseq_inf.analysis.report import pyplot
from fairseq_inf.analysis.trace import Trace
from fairseq_inf.experiments.recall.data import distances_back, find_keys, in_window
from fairseq_inf.experiments.runs import run, tool, train
from fairseq_inf.memory import GaussianBasis, GaussianDensity, ridge_operator

ROOT = Path(__file__).resolve().parent.parent
ON_A_SCREEN = 180  # tokens before the chosen one
CONFIG = ROOT / "examples/recall/config/small/infinite_former_gibbs.yaml"
TAU, T, N = 0.5, 24, 48
BLUE, ORANGE, GREEN = "#3b6ea5", "#d98032", "#4c9a5f"


def fit(basis, positions, values):
    return (values @ ridge_operator(basis, positions, 0.01)).float()


def draw_idea(path):
    """Fit, contract, read: with the memory's own code."""
    plt = pyplot()
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
    figure.savefig(path, dpi=110)


def first_document(data, path):
    """Write the first document of the test split as a text.  -> its tokens, and which are keys"""
    words = Dictionary.load(str(Path(data) / "dict.txt"))
    tokens = data_utils.load_indexed_dataset(str(Path(data) / "test"), words, "mmap")[0].numpy()
    tokens = tokens[:-1]  # but for the end
    path.write_text(" ".join(words[token] for token in tokens))
    return tokens, find_keys(words)


def lit_up(trace, tokens, is_key):
    """Of values that are not in sight any more and are told right: the token, whether it looks most
    at a word of its own pair (words in one cell of a density get the same), what such words get of
    the reads, what share of all words they are, what the one that is looked at most gets, and how
    far back it is.  -> array of 6 columns"""
    back = distances_back(tokens, is_key)
    asked = np.flatnonzero(back)
    far = ~in_window(back, trace.info["length"], trace.info["short_term"])
    right = np.exp(-trace.column("loss.on")) > 0.5
    picks = [int(token) for token, own in zip(asked, far, strict=True) if own and right[token]]
    found, layer = [], sharpest(trace)
    for token, places in at_tokens(trace, layer, picks):
        masses = trace.density(layer, token).mass(places.edges()).mean(dim=0).numpy()
        at = trace.numbers(f"own.{layer}", places) - 1  # tokens
        key = tokens[token - 1]
        own = np.where(is_key[tokens[at]], tokens[at], tokens[np.maximum(at - 1, 0)]) == key
        best = np.where(own, masses, 0).argmax()
        most = own.any() and masses[best] > 0.99 * masses.max()
        found.append((token, most, masses[own].sum(), own.mean(), masses[best], token - at[best]))
    return np.array(found).reshape(-1, 6)


def photograph(page, path):
    names = (os.environ.get("CHROME"), "chromium", "chromium-browser", "google-chrome")
    program = next((found for name in names if name and (found := shutil.which(name))), None)
    if program is None:
        print(f"no chromium: {path} stays as it is")
        return
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            "headless", "no-sandbox", "disable-gpu", "no-first-run", "hide-scrollbars",
            "disable-background-networking", "disable-component-update", "disable-sync",
            "window-size=1400,900", "virtual-time-budget=4000", f"user-data-dir={folder}",
            f"screenshot={path}",
        ]  # fmt: skip
        command = [program, *(f"--{flag}" for flag in flags), page]
        subprocess.run(command, check=True, capture_output=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="what examples/recall/prepare.sh has made")
    parser.add_argument("--out", default="pictures", help="folder for the model and the inspection")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    args = parser.parse_args()
    out, docs = Path(args.out).resolve(), ROOT / "docs"
    draw_idea(docs / "idea.png")
    model = out / "model"
    model.mkdir(parents=True, exist_ok=True)
    data = str(Path(args.data).resolve())
    train(CONFIG, data, 1, model, [], 1, args.cpu)
    tokens, is_key = first_document(data, out / "recall.txt")
    command = [
        tool("fairseq-inf-inspect"), str(out / "recall.txt"),
        "--path", str(model / "checkpoint_last.pt"), "--data", data, "--output", str(out / "seen"),
    ]  # fmt: skip
    _, printed = run(command + ["--cpu"] * args.cpu, out / "inspect.log", 1)
    print(printed.splitlines()[-2])
    trace = Trace(out / "seen/trace")
    found = lit_up(trace, tokens, is_key)
    _, lit, mass, chance, _, _ = found.mean(axis=0)
    print(
        f"{len(found)} right answers out of sight: {found[:, 1].sum():.0f} look most at a word of "
        f"their own pair ({100 * lit:.0f} %), which gets {100 * mass:.0f} % of their reads and is "
        f"{100 * chance:.1f} % of the words"
    )
    for name in ("densities.png", "space.png"):
        shutil.copyfile(out / "seen" / name, docs / name)
    near = found[(found[:, 1] > 0) & (found[:, 5] < ON_A_SCREEN)]
    best = int(near[near[:, 4].argmax(), 0])
    print(f"the picture of the page is of token {best}")
    photograph(f"file://{out}/seen/index.html#{best}", docs / "page.png")


if __name__ == "__main__":
    logging.disable(logging.INFO)  # fairseq lets through what every library says
    main()
