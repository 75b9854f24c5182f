"""fairseq-inf-compare: train a set of configs alike, over several seeds, and print one table.

    fairseq-inf-compare examples/wikitext103/config/small --data data-bin/pg19 --seeds 1 2 3 \\
        --jobs 2 --out compare/pg19 task.stream_layout=documents

Every config runs with the same data, seeds and overrides, --jobs trainings at a time with an equal
share of the cores; then the test split is read with the last checkpoint of each, with its long-term
memory and without.  With --context-window each model that has no memory at all has a second row:
the same checkpoints, read in windows that overlap by that many tokens.  A run that was broken off
goes on where it stopped (its minutes are those of the last start), and a finished one is not run
again.
"""

import statistics
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fairseq_inf.analysis.report import table
from fairseq_inf.errors import plain_errors
from fairseq_inf.files import write_text

from .runs import (
    MODELS,
    Result,
    Row,
    add_rows,
    evaluate,
    find_rows,
    remembers,
    run_rows,
    shown,
    spread,
)

# test perplexities of the paper, for the configs of examples/NAME
PAPER: dict[str, tuple[str, dict[str, str]]] = {
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


def report(results: Sequence[Result], rows: Sequence[Row]) -> str:
    """Markdown: mean and standard deviation over the seeds, each of them, and what it took."""
    data, paper = PAPER.get(rows[0].config.parent.parent.parent.name, ("", {}))
    words = all("word_ppl" in r["on"] for r in results)
    head = ["model", "perplexity", "by seed", *["per word"] * words, "memory off", "minutes"]
    head += [f"paper, {data}"] * bool(paper)
    lines = []

    def line(name: str, runs: list[Result], how: str, stem: str = "") -> None:
        found, off = [r[how] for r in runs], [r["off"]["ppl"] for r in runs if "off" in r]
        values = [r["ppl"] for r in found]
        cells = [name, spread(values), ", ".join(f"{v:.2f}" for v in values)]
        cells += [spread([r["word_ppl"] for r in found])] if words else []
        cells += [spread(off) if off else "–"]
        cells += [f"{statistics.mean(r['seconds'] for r in runs) / 60:.1f}"]
        lines.append(cells + [paper.get(stem, "–")] * bool(paper))

    for name in (row.name for row in rows):
        runs = sorted((r for r in results if r["config"] == name), key=lambda r: r["seed"])
        line(shown(name), runs, "on", name)
        if "sliding" in runs[0]:
            line(f"{shown(name)}, sliding window", runs, "sliding")
    return "\n".join([table(head, lines), "", *paired(results, rows)])


def paired(results: Sequence[Result], rows: Sequence[Row]) -> Iterator[str]:
    """Each model against the first one, seed by seed: data and order are the same."""
    ppl = {(r["config"], r["seed"]): r["on"]["ppl"] for r in results}
    base = rows[0].name
    for row in rows[1:]:
        gains = [100 * (x / ppl[base, seed] - 1) for (n, seed), x in ppl.items() if n == row.name]
        yield f"{row.name} against {base}: perplexity {spread(gains, '+')} %, seed by seed"


def main() -> None:
    title, _, text = (__doc__ or "").partition("\n\n")
    parser = ArgumentParser(
        "fairseq-inf-compare", description=f"{title.split(': ')[1]}\n\n{text}",
        formatter_class=RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_rows(parser)
    add = parser.add_argument
    add("--data", required=True, help="data-bin with train, valid and test")
    add("--out", default="compare", help="folder for checkpoints and results")
    add("--split", default="test", help="split to evaluate on")
    add("--eval-rows", type=int, default=4, help="streams of the evaluation")
    add("--context-window", type=int, default=0, help="overlap of the windows, see above")
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

    def measure(row: Row, folder: Path) -> Result:
        checkpoint = folder / "checkpoint_last.pt"

        def read(log: str, **how: Any) -> Result:
            return evaluate(
                row.data, checkpoint, args.split, args.eval_rows, folder / log, args.threads,
                args.cpu, **how,
            )  # fmt: skip

        result = {"on": read("test.log")}
        has_memory, has_past = remembers(checkpoint)
        if has_memory:
            result["off"] = read("test-off.log", off=True)
        elif args.context_window and not has_past:
            result["sliding"] = read("test-sliding.log", context=args.context_window)
        return result

    asked = {"--split": args.split, "--eval-rows": args.eval_rows}
    if args.context_window:
        asked["--context-window"] = args.context_window
    with plain_errors(parser.prog):
        results = run_rows(args, rows, measure, lambda r: f"{r['on']['ppl']:.2f}", asked)
    told = report(results, rows)
    write_text(Path(args.out) / "table.md", told + "\n")
    print(f"\n{told}")


if __name__ == "__main__":
    main()
