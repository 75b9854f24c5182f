"""Make the pictures of the README: the idea, and what a model that has learned to recall looks at.

    bash examples/recall/prepare.sh data-bin/recall
    python scripts/pictures.py --data data-bin/recall --cpu

trains examples/recall's small Gibbs model, lets fairseq-inf-inspect read the first
test document, and leaves docs/densities.png, docs/space.png, and where there is a chromium
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

import idea
import numpy as np
from fairseq.data import Dictionary, data_utils
from runs import ROOT, run, tool, train

from fairseq_inf.analysis.figures import at_tokens, sharpest
from fairseq_inf.analysis.trace import Trace
from fairseq_inf.data.recall import distances_back, find_keys, in_window

ON_A_SCREEN = 180  # tokens before the chosen one
CONFIG = ROOT / "examples/recall/config/small/infinite_former_gibbs.yaml"


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
    idea.main()
    out, docs = Path(args.out).resolve(), ROOT / "docs"
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
