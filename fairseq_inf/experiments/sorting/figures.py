"""Run the sorting experiment and draw its figures.

    fairseq-inf-sorting lengths --cpu --jobs 2    # accuracy against length, all memories
    fairseq-inf-sorting basis --cpu --jobs 2      # accuracy and regression error against N

Each makes its data, trains the configs of examples/sorting/config/SCALE over the seeds, --jobs
trainings at a time, tests the last checkpoint of each on sequences that it was not trained on, and
writes a PNG, the numbers as CSV, and a table.  A run that was broken off goes on where it stopped,
and a finished one is not run again, so that the figures can be drawn anew in seconds.
"""

import json
import logging
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils

from fairseq_inf.analysis.regression import regression_error
from fairseq_inf.analysis.report import pyplot, save, table, write_csv
from fairseq_inf.errors import Failure
from fairseq_inf.experiments.runs import (
    Result,
    Row,
    add_runs,
    check_runs,
    run_rows,
    spread,
    sub_commands,
    validate,
)
from fairseq_inf.experiments.synthetic import make_folder

from . import data
from .data import SUMMARY, chance_accuracy, draw, oracle_accuracy

VOCABULARY = 20
# lengths, about 4, 8, 16 and, in small, 32 segments; compression rates for them: the highest that
# the paper tried, but 6 for 12 in small; sizes of train, valid and test; N of the second figure
SCALES: dict[str, dict[str, Any]] = {
    "paper": {
        "segment": 1024,
        "lengths": (4000, 8000, 16000),
        "rates": (2, 6, 12),
        "sizes": (8000, 800, 800),
        "basis": (256, 512, 1024, 2048, 4096),
    },
    "small": {
        "segment": 64,
        "lengths": (256, 512, 1024, 2048),
        "rates": (2, 6, 6, 6),
        "sizes": (20000, 400, 800),
        "basis": (16, 32, 64, 128, 256),
    },
}
# of the second figure: config, widths of the basis functions
MEMORIES = {
    "widths 0.01,0.05": ("infinite_former", "0.01,0.05"),
    "widths auto": ("infinite_former", "auto"),
    "uniform and Gibbs": ("infinite_former_gibbs", "auto"),
}
NAMES = {
    "transformer_xl": "Transformer-XL",
    "compressive_transformer": "compressive",
    "infinite_former": "∞-former",
    "infinite_former_sticky": "∞-former, sticky",
    "infini_attention": "Infini-attention",
    "infinite_former_gibbs": "∞-former, uniform and Gibbs",
}


def models(args: Namespace) -> list[str]:
    """-> the names of this scale's configs, in the order of table and figure"""
    there = [name for name in NAMES if (args.configs / args.scale / f"{name}.yaml").is_file()]
    return [name for name in there if not args.models or name in args.models]


def prepare(args: Namespace, length: int) -> str:
    """Make the data of a length, or see that it is there.  -> its folder"""
    folder = Path(args.data).resolve() / f"sorting-{args.scale}-{length}"
    sizes = SCALES[args.scale]["sizes"]
    wanted = {"length": length, "vocabulary": VOCABULARY, "sizes": list(sizes), "seed": 1}
    if not folder.exists():
        make_folder(str(folder), data.make, wanted, SUMMARY)
    summary = folder / SUMMARY
    if not summary.is_file() or json.loads(summary.read_text()) != wanted:
        raise Failure(f"{folder} is not data of {wanted}: remove it, or name another --data")
    return str(folder)


def measure(args: Namespace, row: Row, folder: Path) -> Result:
    checkpoint, log = folder / "checkpoint_last.pt", folder / "test.log"
    measured = validate("sorting", row.data, checkpoint, log, args, "--eval-order")
    names = ("accuracy", "exact_match", "kendall_tau", "nll_loss")
    result = {name: measured[name] for name in names}
    if row.config.stem in {config for config, _ in MEMORIES.values()}:
        result["regression_error"] = test_regression(checkpoint, row.data)
    return result


def run_all(args: Namespace, cases: Iterable[tuple[Row, Result]]) -> list[Result]:
    """cases: rows, and what is known of each.  -> results, with what is known"""
    rows, known = zip(*cases, strict=True)
    results = run_rows(
        args,
        rows,
        lambda row, folder: measure(args, row, folder),
        lambda result: f"{result['accuracy']:.2f} %",
        out=Path(args.out) / args.scale,
    )
    of = {row.name: facts for row, facts in zip(rows, known, strict=True)}
    return [{**result, **of[result["config"]]} for result in results]


def test_regression(checkpoint: Path, folder: str) -> float:
    """-> relative error of the memories, the mean over layers and 96 test sequences"""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], arg_overrides={"data": folder}
    )
    task.load_dataset("test")
    dataset, eos = task.dataset("test"), torch.tensor([task.dictionary.eos()])
    # read as in validation: eos, then the line without its own
    lines = [torch.cat([eos, dataset[i][:-1]]) for i in range(min(96, len(dataset)))]
    decoder, length = model.eval().decoder, task.cfg.tokens_per_sample
    errors = [regression_error(decoder, part, length) for part in torch.stack(lines).split(8)]
    return statistics.mean(error for part in errors for error in part)


def references(args: Namespace, lengths: Iterable[int]) -> list[Result]:
    """What counting would reach, on sequences like those of the test.  -> rows of the CSV"""
    segment = SCALES[args.scale]["segment"]
    rows: list[Result] = []
    for length in lengths:
        rng = np.random.default_rng(length)
        told = [draw(rng, VOCABULARY, length) for _ in range(800)]
        window = 2 * segment + (length + 1) % segment  # what self-attention of Transformer-XL sees
        for name, accuracy in (
            ("chance", chance_accuracy(VOCABULARY)),
            ("counts what Transformer-XL sees", oracle_accuracy(told, VOCABULARY, window)),
            ("counts everything", oracle_accuracy(told, VOCABULARY)),
        ):
            rows.append({"model": name, "length": length, "accuracy": round(100 * accuracy, 2)})
    return rows


def write(args: Namespace, name: str, columns: Sequence[str], rows: Iterable[Result]) -> Path:
    path = Path(args.out) / args.scale / f"{name}.csv"
    write_csv(path, columns, rows)
    return path.with_suffix(".png")


def columns_of(results: Iterable[Result], *names: str) -> dict[tuple[Any, ...], list[Result]]:
    """Results by the values of these names."""
    found: dict[tuple[Any, ...], list[Result]] = {}
    for result in results:
        found.setdefault(tuple(result[name] for name in names), []).append(result)
    return found


def lengths(args: Namespace) -> None:
    """Accuracy of all models against the length of the sequence."""
    scale = SCALES[args.scale]
    every = zip(scale["lengths"], scale["rates"], strict=True)
    chosen = {n: rate for n, rate in every if not args.lengths or n in args.lengths}
    cases = []
    for length, rate in chosen.items():
        folder = prepare(args, length)
        for model in models(args):
            overrides = []
            if model == "compressive_transformer":
                overrides.append(f"model.compression_rate={rate}")
            if args.scale == "paper" and length == 16000:
                overrides.append("optimization.lr=[0.0002]")
            config = args.configs / args.scale / f"{model}.yaml"
            overrides += args.overrides
            row = Row(config, overrides, data=folder, name=f"{model}-{length}")
            cases.append((row, {"model": model, "length": length}))
    results = run_all(args, cases)
    results.sort(key=lambda r: ([*NAMES].index(r["model"]), r["length"], r["seed"]))
    marks = references(args, chosen)
    names = "model length seed accuracy exact_match kendall_tau nll_loss seconds".split()
    png = write(args, "lengths", names, results + marks)
    draw_lengths(png, results, marks, [*chosen])
    print(f"\n{lengths_table(results, marks, [*chosen])}\n\nfigure: {png}")


def lengths_table(
    results: Sequence[Result], marks: Sequence[Result], lengths: Sequence[int]
) -> str:
    found = columns_of(results, "model", "length")
    head = ["accuracy, %", *(f"length {n:,}" for n in lengths), "from first to last"]
    lines = []
    for model in [name for name in NAMES if (name, lengths[0]) in found]:
        cells = [spread([r["accuracy"] for r in found[model, n]]) for n in lengths]
        means = [statistics.mean(r["accuracy"] for r in found[model, n]) for n in lengths]
        lines.append([NAMES[model], *cells, f"{means[-1] - means[0]:+.2f}"])
    for (name,), rows in columns_of(marks, "model").items():
        lines.append([name, *(f"{row['accuracy']:.2f}" for row in rows), ""])
    text = table(head, lines)
    head = ["exact match, % / Kendall's τ", *(f"length {n:,}" for n in lengths)]
    lines = [
        [
            NAMES[model],
            *(
                f"{statistics.mean(r['exact_match'] for r in found[model, n]):.2f} / "
                f"{statistics.mean(r['kendall_tau'] for r in found[model, n]):.3f}"
                for n in lengths
            ),
        ]
        for model in NAMES
        if (model, lengths[0]) in found
    ]
    return text + "\n\n" + table(head, lines)


def draw_lengths(
    path: Path, results: Sequence[Result], marks: Sequence[Result], lengths: Sequence[int]
) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(6, 4.8))
    found = columns_of(results, "model", "length")
    places = range(len(lengths))
    for number, model in enumerate(name for name in NAMES if (name, lengths[0]) in found):
        means = [statistics.mean(r["accuracy"] for r in found[model, n]) for n in lengths]
        axes.plot(places, means, color=f"C{number}", marker="o", label=NAMES[model])
        for place, length in zip(places, lengths, strict=True):
            each = [r["accuracy"] for r in found[model, length]]
            axes.plot([place] * len(each), each, "_", color=f"C{number}", markersize=12)
    for number, ((name,), rows) in enumerate(columns_of(marks, "model").items()):
        style = (":", "-.", "--")[number]
        axes.plot(places, [r["accuracy"] for r in rows], style, color="0.5", lw=1, label=name)
    axes.set_xticks(list(places), [f"{n:,}" for n in lengths])
    axes.set_xlabel("length of the sequence")
    axes.set_ylabel("accuracy, %")
    axes.set_ylim(0, 100)
    axes.legend(fontsize=8, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    save(plt, figure, path)


def basis(args: Namespace) -> None:
    """Accuracy and regression error of the ∞-former against N, at the middle length."""
    scale = SCALES[args.scale]
    length = scale["lengths"][1]
    folder, cases = prepare(args, length), []
    for memory, (model, widths) in MEMORIES.items():
        for n in scale["basis"] if model in models(args) else ():
            name, overrides = f"{model}-{length}", []
            if n != scale["segment"] or memory == "widths auto":  # else of the first figure
                name += f"-N{n}-{widths}"
                overrides += [f"model.ltm_basis={n}", f"model.ltm_widths='{widths}'"]
            row = Row(
                args.configs / args.scale / f"{model}.yaml", overrides, data=folder, name=name
            )
            cases.append((row, {"memory": memory, "basis": n, "length": length}))
    results = run_all(args, cases)
    results.sort(key=lambda r: ([*MEMORIES].index(r["memory"]), r["basis"], r["seed"]))
    names = "memory basis length seed accuracy regression_error exact_match kendall_tau seconds"
    png = write(args, "basis", names.split(), results)
    draw_basis(png, results, scale["basis"], length)
    print(f"\n{basis_table(results, scale['basis'])}\n\nfigure: {png}")


def basis_table(results: Sequence[Result], sizes: Sequence[int]) -> str:
    found = columns_of(results, "memory", "basis")
    head = ["", "", *(f"N = {n}" for n in sizes)]
    lines = []
    for (memory,) in columns_of(results, "memory"):
        for name, label in (("accuracy", "accuracy, %"), ("regression_error", "regression error")):
            cells = [spread([r[name] for r in found[memory, n]]) for n in sizes]
            lines.append([memory, label, *cells])
    return table(head, lines)


def draw_basis(path: Path, results: Sequence[Result], sizes: Sequence[int], length: int) -> None:
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8))
    found = columns_of(results, "memory", "basis")
    for axes, name, label in (
        (panels[0], "accuracy", "accuracy, %"),
        (panels[1], "regression_error", "relative regression error"),
    ):
        for number, (memory,) in enumerate(columns_of(results, "memory")):
            means = [statistics.mean(r[name] for r in found[memory, n]) for n in sizes]
            axes.plot(sizes, means, color=f"C{number}", marker="o", label=memory)
            for n in sizes:
                each = [r[name] for r in found[memory, n]]
                axes.plot([n] * len(each), each, "_", color=f"C{number}", markersize=10)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(n) for n in sizes])
        axes.set_xlabel("basis functions, N")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    panels[0].legend(fontsize=8)
    figure.suptitle(f"∞-former, sequences of {length:,} tokens", fontsize=10)
    save(plt, figure, path)


def run(figure: str) -> None:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("overrides", nargs="*", help="hydra overrides, a=b, for all trainings")
    add("--configs", type=Path, default="examples/sorting/config", help="folder of the scales")
    add("--scale", choices=SCALES, default="small")
    add("--models", nargs="+", choices=NAMES, help="only these configs")
    if figure == "lengths":
        add("--lengths", type=int, nargs="+", help="only these of the scale")
    add_runs(parser)
    add("--data", default="data-bin", help="folder for the data")
    add("--out", default="sorting", help="folder for checkpoints, results and figures")
    args = parser.parse_intermixed_args()
    check_runs(parser, args)
    args.configs = args.configs.resolve()
    wrong = [word for word in args.overrides if "=" not in word]
    if wrong:
        parser.error(f"{wrong[0]} is not a hydra override: it must be name=value")
    wanted = NAMES if figure == "lengths" else {config for config, _ in MEMORIES.values()}
    if not set(models(args)) & set(wanted):
        which = f"--models {' '.join(args.models)}: " if args.models else ""
        parser.error(f"{which}--configs {args.configs} has no such config in {args.scale}")
    unknown = set(getattr(args, "lengths", None) or ()) - set(SCALES[args.scale]["lengths"])
    if unknown:
        known = ", ".join(map(str, SCALES[args.scale]["lengths"]))
        parser.error(f"--lengths {min(unknown)} must be one of {known}")
    logging.disable(logging.INFO)  # fairseq lets through what every library says
    (lengths if figure == "lengths" else basis)(args)


def main() -> None:
    sub_commands(
        "fairseq-inf-sorting",
        {
            "make": ("make the data: sequences, and their tokens by falling frequency", data.main),
            "lengths": ("accuracy of all memories against length", lambda: run("lengths")),
            "basis": ("accuracy and regression error against N", lambda: run("basis")),
        },
    )


if __name__ == "__main__":
    main()
