"""Train configs on the recall task and draw accuracy against distance.

    fairseq-inf-recall run examples/recall/config/small --data data-bin/recall --cpu --jobs 2

The first argument is a folder of hydra configs, or single ones.  Each is trained over the seeds,
--jobs trainings at a time, and its last checkpoint reads the test split, with its long-term memory
and without; a PNG, the numbers as CSV and a table are left in --out.  --also adds a row of one of
the configs with other settings.  A run that was broken off goes on where it stopped, and a finished
one is not run again, so that the figure can be drawn anew in seconds.
"""

import json
import logging
import statistics
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, data_utils

from fairseq_inf.analysis.report import pyplot, save, table, write_csv
from fairseq_inf.experiments.runs import (
    Result,
    Row,
    add_rows,
    find_rows,
    remembers,
    run_rows,
    shown,
    spread,
    sub_commands,
    validate,
)
from fairseq_inf.files import write_text

from . import data
from .data import SUMMARY, bin_edges, distances_back, find_keys, in_window

OFF = ", memory off"
HOT = "hot"  # the bin of hot keys
Edge = int | str  # the upper end of a bin, or HOT
ByEdge = dict[Edge, list[float]]


def measure(args: Namespace, row: Row, folder: Path) -> Result:
    checkpoint = folder / "checkpoint_last.pt"
    accuracy, recall = test(args, checkpoint, folder / "test.log")
    result = {"accuracy": accuracy, "floats": state_size(checkpoint, row.data), "recall": recall}
    if remembers(checkpoint)[0]:
        _, result["off"] = test(args, checkpoint, folder / "test-off.log", off=True)
    return result


def test(
    args: Namespace, checkpoint: Path, log: Path, off: bool = False
) -> tuple[float, list[tuple[Edge, float]]]:
    """off: without the long-term memory.  -> accuracy, and that of each bin by its end; the last of
    them has hot keys, if there are any"""
    measured = validate("recall", args.data, checkpoint, log, args, off=off)
    recall = {
        name.removeprefix("recall_"): value
        for name, value in measured.items()
        if name.startswith("recall_")
    }
    hot = recall.pop(HOT, None)
    found: list[tuple[Edge, float]] = [
        (edge, recall[str(edge)]) for edge in sorted(map(int, recall))
    ]
    return measured["accuracy"], found + ([] if hot is None else [(HOT, hot)])


def state_size(checkpoint: Path, data: str) -> int:
    """-> how many floats one row of the model's state has"""
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], arg_overrides={"data": data}
    )
    tensors = model.decoder.initial_state(1).tensors().values()
    return sum(x.numel() for x in tensors if x.is_floating_point())


def references(folder: str, sizes: Iterable[tuple[int, int]]) -> dict[str, ByEdge]:
    """What chance would recall, and who sees a segment and its short-term memory and guesses the
    rest, of the test split.  sizes: of each such, L and S."""
    words = Dictionary.load(str(Path(folder) / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(Path(folder) / "test"), words, "mmap")
    chance = 100 / json.loads((Path(folder) / SUMMARY).read_text())["values"]
    # hot keys are counted apart
    back = [distances_back(line.numpy(), find_keys(words, "k")) for line in lines]
    distance = np.concatenate([x[x > 0] for x in back])
    marks: dict[str, ByEdge] = {"chance": {}}
    for length, stm_length in sizes:
        seen = np.concatenate([in_window(x, length, stm_length) for x in back])
        window = marks.setdefault(f"window of {length + stm_length}", {})
        below = 0
        for edge in bin_edges(length, max(lines.sizes)):
            inside = (distance >= below) & (distance < edge)
            below = edge
            if inside.any():
                marks["chance"][edge] = [round(chance, 2)]
                window[edge] = [round(chance + (100 - chance) * seen[inside].mean(), 2)]
    return marks


def bin_names(edges: set[Edge], length: int) -> dict[Edge, str]:
    """-> how each bin is called, by its upper end"""
    ends = sorted(edge for edge in edges if isinstance(edge, int))
    names: dict[Edge, str] = {
        edge: f"< {edge:,}" if edge == length else f"{edge // 2:,}–{edge:,}" for edge in ends
    }
    return {**names, HOT: f"hot, ≥ {2 * length:,}"} if HOT in edges else names


def by_distance(results: Iterable[Result]) -> dict[str, ByEdge]:
    """-> accuracies of the seeds by config and bin"""
    found: dict[str, ByEdge] = {}
    for result in results:
        for name, key in ((result["config"], "recall"), (f"{result['config']}{OFF}", "off")):
            for edge, value in result.get(key, []):
                found.setdefault(name, {}).setdefault(edge, []).append(value)
    return found


def shades(rows: Iterable[str]) -> dict[str, Any]:
    """-> a color of each row by its name: those of one config are shades of one color, the config
    with the most rows has the first"""
    from matplotlib.colors import to_rgb

    families: dict[str, list[str]] = {}
    for row in rows:
        families.setdefault(row.split(",")[0], []).append(row)
    colors = {}
    for number, family in enumerate(sorted(families.values(), key=len, reverse=True)):
        base = np.array(to_rgb(f"C{number}"))
        for i, row in enumerate(family):
            light = 0.6 * (1 - (i + 1) / len(family))
            colors[row] = tuple(base * (1 - light) + light)
    return colors


def draw(
    path: Path, found: Mapping[str, ByEdge], marks: Mapping[str, ByEdge], names: dict[Edge, str]
) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9.5, 4.4))
    place = {edge: i for i, edge in enumerate(names)}
    colors = shades([config for config in found if not config.endswith(OFF)])
    for config, values in found.items():
        if config.endswith(OFF) and len(colors) > 3:
            continue  # in the table only
        color = colors[config.removesuffix(OFF)]
        how = {"ls": "--", "lw": 1} if config.endswith(OFF) else {"marker": "o", "ms": 4}
        at = [place[edge] for edge in values]
        mean = np.array([statistics.mean(each) for each in values.values()])
        off = np.array([statistics.pstdev(each) for each in values.values()])
        axes.plot(at, mean, color=color, label=shown(config), **how)
        axes.fill_between(at, mean - off, mean + off, color=color, alpha=0.2, lw=0)
    for number, (config, values) in enumerate(marks.items()):
        at, heights = [place[edge] for edge in values], [each[0] for each in values.values()]
        style = (":", "-.", "--")[number % 3]
        axes.plot(at, heights, style, color="0.5", lw=1, label=config)
    axes.set_xticks(list(place.values()), [names[edge] for edge in place])
    axes.set_xlabel("tokens since the pair last stood")
    axes.set_ylabel("values recalled, %")
    axes.set_ylim(0, 100)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    save(plt, figure, path)


def report(args: Namespace, results: list[Result], rows: Sequence[Row]) -> str:
    """Write CSV, PNG and table.md.  -> the table"""
    order = {row.name: number for number, row in enumerate(rows)}
    first: dict[str, int] = {}  # of each config: its rows stand together, the smallest state first
    for name, number in order.items():
        first.setdefault(name.split(",")[0], number)

    def place(r: Result) -> tuple[int, ...]:
        return first[r["config"].split(",")[0]], r["floats"], order[r["config"]], r["seed"]

    results.sort(key=place)
    settings = [row.settings() for row in rows]
    sizes = sorted({(one.task.tokens_per_sample, one.model.stm_length) for one in settings})
    found, marks = by_distance(results), references(args.data, sizes)
    edges = {edge for values in [*found.values(), *marks.values()] for edge in values}
    names = bin_names(edges, sizes[0][0])
    lists = [
        {**result, "distance": edge, "accuracy": value, "memory": memory}
        for result in results
        for memory, key in (("on", "recall"), ("off", "off"))
        for edge, value in result.get(key, [])
    ]
    lists += [
        {"config": name, "distance": edge, "accuracy": value}
        for name, values in marks.items()
        for edge, (value,) in values.items()
    ]
    columns = "config memory seed distance accuracy floats seconds".split()
    out = Path(args.out)
    write_csv(out / "recall.csv", columns, lists)
    draw(out / "recall.png", found, marks, names)
    lines = []
    for name, values in [*found.items(), *marks.items()]:
        runs = [r for r in results if r["config"] == name]
        cost = ["", ""]
        if runs:
            minutes = statistics.mean(r["seconds"] for r in runs) / 60
            cost = [f"{runs[0]['floats']:,}", f"{minutes:.1f}"]
        cells = [spread(values[edge]) if edge in values else "" for edge in names]
        lines.append([shown(name), *cells, *cost])
    text = table(["recalled, %", *names.values(), "floats", "minutes"], lines)
    write_text(out / "table.md", text + "\n")
    return text


def run() -> None:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_rows(parser)
    parser.add_argument("--data", required=True, help="what fairseq-inf-recall make has made")
    parser.add_argument(
        "--out", default="recall", help="folder for checkpoints, results and figure"
    )
    args = parser.parse_intermixed_args()
    rows = find_rows(parser, args)
    if not (Path(args.data) / SUMMARY).is_file():
        parser.error(f"--data {args.data} has no {SUMMARY}: make it with fairseq-inf-recall make")
    logging.disable(logging.INFO)  # fairseq lets through what every library says
    results = run_rows(
        args,
        rows,
        lambda row, folder: measure(args, row, folder),
        lambda result: f"{result['accuracy']:.2f} %",
    )
    print(f"\n{report(args, results, rows)}\n\nfigure: {Path(args.out) / 'recall.png'}")


def main() -> None:
    sub_commands(
        "fairseq-inf-recall",
        {
            "make": ("make the data: a key that returns must bring its value", data.main),
            "run": ("train configs on it, and draw accuracy against distance", run),
        },
    )


if __name__ == "__main__":
    main()
