"""Train a set of configs alike, over several seeds, and print one table.

    python scripts/compare.py examples/wikitext103/config/small --data data-bin/pg19 --seeds 1 2 3 \
        --jobs 2 --out compare/pg19 task.stream_layout=documents

The first argument is a folder of hydra configs.  Every config runs with the same data, seeds and
overrides, --jobs trainings at a time with an equal share of the cores; then the test split is
read with the last checkpoint of each, with its long-term memory and without.  With
--context-window each model that has no memory at all has a second row: the same checkpoints, read
in windows that overlap by that many tokens.  A run that was broken off goes on where it stopped
(its minutes are those of the last start), and a finished one is not run again.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path

from omegaconf import OmegaConf
from runs import (
    MODELS,
    add_rows,
    checkpoint_settings,
    evaluate,
    find_rows,
    once,
    shown,
    side_by_side,
    spread,
    threads_each,
)
from runs import train as train_config

# test perplexities of the paper, for the configs of examples/NAME
PAPER = {
    "wikitext103": (
        "WikiText-103",
        dict(zip(MODELS, ("24.52", "24.41", "24.29", "24.22"), strict=True)),
    ),
    "gpt2": (
        "WikiText-103 / PG-19",
        {
            "gpt2": "16.85 / 33.44",
            "compressive_transformer": "16.87 / 33.09",
            "infinite_former": "16.64 / 32.61",
            "infinite_former_sticky": "16.61 / 32.48",
        },
    ),
}


def train(args, row, seed):
    """One run, or what an earlier one has left.  -> its results"""
    folder = row.folder(args.out, seed)
    asked = {
        "--data": args.data,
        "--split": args.split,
        "--eval-rows": args.eval_rows,
        "overrides": row.overrides,
        "config": row.config.read_text(),
    }

    if args.context_window:
        asked["--context-window"] = args.context_window

    def work():
        seconds = train_config(
            row.config, args.data, seed, folder, row.overrides, args.threads, args.cpu
        )
        checkpoint = folder / "checkpoint_last.pt"

        def measure(log, **how):
            return evaluate(
                args.data, checkpoint, args.split, args.eval_rows, folder / log, args.threads,
                args.cpu, **how,
            )  # fmt: skip

        result = {"config": row.name, "seed": seed, "seconds": seconds}
        result["on"] = measure("test.log")
        settings = checkpoint_settings(checkpoint)
        if settings["has_memory"]:
            result["off"] = measure("test-off.log", off=True)
        elif args.context_window and not settings["has_past"]:
            result["sliding"] = measure("test-sliding.log", context=args.context_window)
        return result

    return once(folder, asked, work)


def table(results, rows):
    """Markdown: mean and standard deviation over the seeds, each of them, and what it took."""
    data, paper = PAPER.get(rows[0].config.parent.parent.parent.name, ("", {}))
    words = all("word_ppl" in r["on"] for r in results)
    head = ["model", "perplexity", "by seed", *["per word"] * words, "memory off", "minutes"]
    head += [f"paper, {data}"] * bool(paper)
    lines = [head, ["---"] * len(head)]

    def line(name, own, found, off, stem):
        values = [r["ppl"] for r in found]
        cells = [name, spread(values), ", ".join(f"{v:.2f}" for v in values)]
        cells += [spread([r["word_ppl"] for r in found])] if words else []
        cells += [spread([r["ppl"] for r in off]) if off else "–"]
        cells += [f"{statistics.mean(r['seconds'] for r in own) / 60:.1f}"]
        lines.append(cells + [paper.get(stem, "–")] * bool(paper))

    for name in (row.name for row in rows):
        own = sorted((r for r in results if r["config"] == name), key=lambda r: r["seed"])
        if not own:
            continue
        off = [r["off"] for r in own if "off" in r]
        line(shown(name), own, [r["on"] for r in own], off, name)
        if "sliding" in own[0]:
            line(f"{shown(name)}, sliding window", own, [r["sliding"] for r in own], [], None)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def paired(results, rows):
    """Each model against the first one, seed by seed: data and order are the same."""
    ppl = {(r["config"], r["seed"]): r["on"]["ppl"] for r in results}
    base = rows[0].name
    for name in (row.name for row in rows[1:]):
        seeds = [s for n, s in sorted(ppl) if n == name and (base, s) in ppl]
        if seeds:
            gains = [100 * (ppl[name, s] / ppl[base, s] - 1) for s in seeds]
            yield f"{name} against {base}: perplexity {spread(gains, '+')} %, seed by seed"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_rows(parser)
    parser.add_argument("--data", required=True, help="data-bin with train, valid and test")
    parser.add_argument("--out", default="compare", help="folder for checkpoints and results")
    parser.add_argument("--split", default="test", help="split to evaluate on")
    parser.add_argument("--eval-rows", type=int, default=4, help="streams of the evaluation")
    parser.add_argument(
        "--context-window", type=int, default=0, help="overlap of the windows, see above"
    )
    args = parser.parse_intermixed_args()
    rows = find_rows(parser, args)
    if args.eval_rows < 1:
        parser.error(f"--eval-rows must be at least 1, got {args.eval_rows}")
    for row in rows if args.context_window else ():  # known before hours of training
        length = OmegaConf.select(row.settings(), "task.tokens_per_sample")
        if length is not None and not 0 < args.context_window < length:
            parser.error(
                f"--context-window {args.context_window} must be from 1 to {length - 1}: windows "
                f"of {row.config.name} have task.tokens_per_sample={length} tokens"
            )
    args.threads = threads_each(args.jobs)
    results = side_by_side(
        args.jobs,
        [partial(train, args, row, seed) for seed in args.seeds for row in rows],
        lambda result: f"{result['config']} seed {result['seed']}: {result['on']['ppl']:.2f}",
    )
    text = "\n".join([table(results, rows), "", *paired(results, rows)])
    (Path(args.out) / "table.md").write_text(text + "\n")
    print(f"\n{text}")


if __name__ == "__main__":
    main()
