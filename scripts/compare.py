"""Train a set of configs alike, over several seeds, and print one table.

    python scripts/compare.py examples/wikitext103/config/small --data data-bin/pg19 --seeds 1 2 3 \
        --jobs 2 --out compare/pg19 task.stream_layout=documents

The first argument is a folder of hydra configs.  Every config runs with the same data, seeds and
overrides, --jobs trainings at a time with an equal share of the cores; then the test split is
read with the last checkpoint of each, with its long-term memory and without.  A run that was
broken off goes on where it stopped (its minutes are those of the last start), and a finished one is
not run again.
"""

import argparse
import re
import statistics
from functools import partial
from pathlib import Path

from runs import MODELS, ROOT, once, run, side_by_side, spread, threads_each, tool
from runs import train as train_config

# WikiText-103 from scratch, test perplexity: table 2 of the paper
PAPER = dict(zip(MODELS, (24.52, 24.41, 24.29, 24.22), strict=True))


def evaluate(args, checkpoint, settings, overrides, log):
    command = [
        tool("fairseq-eval-lm"), args.data, "--user-dir", str(ROOT / "fairseq_inf"),
        "--task", "long_sequence_lm", "--path", str(checkpoint), "--gen-subset", args.split,
        "--tokens-per-sample", settings["tokens_per_sample"], "--batch-size", str(args.eval_rows),
        "--stream-layout", settings["stream_layout"],
        "--document-separator", settings["document_separator"],
        "--model-overrides", repr(overrides),
    ]  # fmt: skip
    _, printed = run(command + ["--cpu"] * args.cpu, log, args.threads)
    tokens = re.findall(r"Evaluated ([\d,]+) tokens", printed)[-1]
    loss = re.findall(r"Loss \(base 2\): (\S+), Perplexity: (\S+)", printed)[-1]
    return {"tokens": int(tokens.replace(",", "")), "bits": float(loss[0]), "ppl": float(loss[1])}


def train(args, config, seed):
    """One run, or what an earlier one has left.  -> its results"""
    folder = Path(args.out).resolve() / config.stem / f"seed{seed}"
    asked = {
        "--data": args.data,
        "--split": args.split,
        "--eval-rows": args.eval_rows,
        "overrides": args.overrides,
        "config": config.read_text(),
    }

    def work():
        seconds = train_config(
            config, args.data, seed, folder, args.overrides, args.threads, args.cpu
        )
        checkpoint = folder / "checkpoint_last.pt"
        settings = task_settings(checkpoint)
        on = evaluate(args, checkpoint, settings, {}, folder / "test.log")
        result = {"config": config.stem, "seed": seed, "seconds": seconds, "on": on}
        if settings["model"] != "transformer_xl_lm":
            off = {"ltm_enabled": False}
            result["off"] = evaluate(args, checkpoint, settings, off, folder / "test-off.log")
        return result

    return once(folder, asked, work)


def task_settings(checkpoint):
    """What the evaluation must know of the training."""
    import torch

    cfg = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)["cfg"]
    names = ("tokens_per_sample", "stream_layout", "document_separator")
    return {**{n: str(cfg["task"][n]) for n in names}, "model": cfg["model"]["_name"]}


def table(results, configs):
    """Markdown: mean and standard deviation over the seeds, each of them, and what it took."""
    lines = [
        "| model | perplexity | by seed | memory off | minutes | paper, WikiText-103 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in (config.stem for config in configs):
        own = sorted((r for r in results if r["config"] == name), key=lambda r: r["seed"])
        if not own:
            continue
        values = [r["on"]["ppl"] for r in own]
        off = [r["off"]["ppl"] for r in own if "off" in r]
        cells = [
            name.replace("_", " "),
            spread(values),
            ", ".join(f"{v:.2f}" for v in values),
            spread(off) if off else "–",
            f"{statistics.mean(r['seconds'] for r in own) / 60:.1f}",
            f"{PAPER[name]:.2f}" if name in PAPER else "–",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def paired(results, configs):
    """Each model against the first one, seed by seed: data and order are the same."""
    ppl = {(r["config"], r["seed"]): r["on"]["ppl"] for r in results}
    base = configs[0].stem
    for name in (config.stem for config in configs[1:]):
        seeds = [s for n, s in sorted(ppl) if n == name and (base, s) in ppl]
        if seeds:
            gains = [100 * (ppl[name, s] / ppl[base, s] - 1) for s in seeds]
            yield f"{name} against {base}: perplexity {spread(gains, '+')} %, seed by seed"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "configs",
        nargs="+",
        help="folders of hydra configs or single .yaml files, and hydra overrides, a=b, for all",
    )
    parser.add_argument("--data", required=True, help="data-bin with train, valid and test")
    parser.add_argument("--out", default="compare", help="folder for checkpoints and results")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--jobs", type=int, default=1, help="trainings side by side")
    parser.add_argument("--split", default="test", help="split to evaluate on")
    parser.add_argument("--eval-rows", type=int, default=4, help="streams of the evaluation")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    args = parser.parse_intermixed_args()
    args.overrides = [word for word in args.configs if "=" in word]
    args.data = str(Path(args.data).resolve())
    paths = [Path(word).resolve() for word in args.configs if "=" not in word]
    configs = [c for p in paths for c in (sorted(p.glob("*.yaml")) if p.is_dir() else [p])]
    configs.sort(key=lambda c: list(PAPER).index(c.stem) if c.stem in PAPER else len(PAPER))
    if not configs or not all(config.is_file() for config in configs):
        parser.error(f"no hydra configs (*.yaml) in {', '.join(map(str, paths)) or 'nothing'}")
    if not (Path(args.data) / "dict.txt").is_file():
        parser.error(
            f"--data {args.data} has no dict.txt: name a folder that fairseq-preprocess wrote"
        )
    stems = [config.stem for config in configs]
    if len(set(stems)) < len(stems) or len(set(args.seeds)) < len(args.seeds):
        parser.error("configs of the same name, or a seed twice, would share a folder")
    if args.jobs < 1 or args.eval_rows < 1:
        parser.error("--jobs and --eval-rows must be at least 1")
    args.threads = threads_each(args.jobs)
    results = side_by_side(
        args.jobs,
        [partial(train, args, config, seed) for seed in args.seeds for config in configs],
        lambda result: f"{result['config']} seed {result['seed']}: {result['on']['ppl']:.2f}",
    )
    text = "\n".join([table(results, configs), "", *paired(results, configs)])
    (Path(args.out) / "table.md").write_text(text + "\n")
    print(f"\n{text}")


if __name__ == "__main__":
    main()
