"""Train configs on the recall task and draw accuracy against distance.

    python scripts/recall.py examples/recall/config/small --data data-bin/recall --cpu --jobs 2

The first argument is a folder of hydra configs, or single ones.  Each is trained over the seeds,
--jobs trainings at a time, and its last checkpoint reads the test split, with its long-term memory
and without; a PNG, the numbers as CSV and a table are left in --out.  --also adds a row of one of
the configs with other settings.  A run that was broken off goes on where it stopped, and a finished
one is not run again, so that the figure can be drawn anew in seconds.
"""

import argparse
import json
import logging
import re
import statistics
from functools import partial
from pathlib import Path

import numpy as np
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, data_utils
from matplotlib.colors import to_rgb
from runs import (
    ROOT,
    add_rows,
    checkpoint_settings,
    find_rows,
    once,
    run,
    shown,
    side_by_side,
    spread,
    threads_each,
    tool,
    train,
)

import fairseq_inf.models
import fairseq_inf.tasks.recall  # noqa: F401  (registers it)
from fairseq_inf.analysis.report import pyplot, save, table, write_csv
from fairseq_inf.data.recall import SUMMARY, bin_edges, distances_back, find_keys, in_window

OFF = ", memory off"
HOT = "hot"  # the bin of hot keys


def work(args, row, seed):
    """Train and test one row, or what an earlier call has left.  -> its results"""
    folder = row.folder(args.out, seed)
    asked = {"--data": args.data, "overrides": row.overrides, "config": row.config.read_text()}

    def measure():
        seconds = train(row.config, args.data, seed, folder, row.overrides, args.threads, args.cpu)
        checkpoint = folder / "checkpoint_last.pt"
        accuracy, recall = test(args, checkpoint, folder / "test.log")
        result = {"config": row.name, "seed": seed, "seconds": seconds, "accuracy": accuracy}
        result.update(floats=state_size(checkpoint, args.data), recall=recall)
        if checkpoint_settings(checkpoint)["has_memory"]:
            _, result["off"] = test(args, checkpoint, folder / "test-off.log", off=True)
        return result

    return once(folder, asked, measure)


def test(args, checkpoint, log, off=False):
    """off: without the long-term memory.  -> accuracy, and [end of a bin, accuracy] of each; the
    last of them has hot keys, if there are any"""
    command = [
        tool("fairseq-validate"), args.data, "--user-dir", str(ROOT / "fairseq_inf"),
        "--task", "recall", "--path", str(checkpoint), "--valid-subset", "test",
        "--batch-size", "40", "--log-format", "json", "--num-workers", "0",
        "--model-overrides", repr({"ltm_enabled": False} if off else {}),
    ]  # fmt: skip
    _, printed = run(command + ["--cpu"] * args.cpu, log, args.threads)
    measured = json.loads(re.findall(r"\| test \| ({.*})", printed)[-1])
    recall = {
        int(name.removeprefix("test_recall_")): float(value)
        for name, value in measured.items()
        if re.fullmatch(r"test_recall_\d+", name)
    }
    found = [[edge, recall[edge]] for edge in sorted(recall)]
    if "test_recall_hot" in measured:
        found.append([HOT, float(measured["test_recall_hot"])])
    return float(measured["test_accuracy"]), found


def state_size(checkpoint, data):
    """-> how many floats one row of the model's state has"""
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], arg_overrides={"data": data}
    )
    tensors = model.decoder.initial_state(1).tensors().values()
    return sum(x.numel() for x in tensors if x.is_floating_point())


def windows(rows):
    """The segments and short-term memories of the rows.  -> sorted (L, S)"""
    settings = [row.settings() for row in rows]
    return sorted({(own.task.tokens_per_sample, own.model.stm_length) for own in settings})


def references(args, sizes):
    """Chance, and what is known to whom a segment and its short-term memory are in sight, and who
    guesses the rest, on the test split.  -> rows of the CSV"""
    words = Dictionary.load(str(Path(args.data) / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(Path(args.data) / "test"), words, "mmap")
    chance = 100 / json.loads((Path(args.data) / SUMMARY).read_text())["values"]
    # hot keys are counted apart
    back = [distances_back(line.numpy(), find_keys(words, "k")) for line in lines]
    distance = np.concatenate([x[x > 0] for x in back])
    rows = []
    for length, stm_length in sizes:
        seen = np.concatenate([in_window(x, length, stm_length) for x in back])
        below = 0
        for edge in bin_edges(length, max(lines.sizes)):
            own = (distance >= below) & (distance < edge)
            below = edge
            if own.any():
                known = chance + (100 - chance) * seen[own].mean()
                for name, value in (
                    ("chance", chance),
                    (f"window of {length + stm_length}", known),
                ):
                    rows.append({"config": name, "distance": edge, "accuracy": round(value, 2)})
    unique = {(row["config"], row["distance"]): row for row in rows}
    return list(unique.values())


def bin_names(edges, length):
    """-> how each bin is called, by its upper end: dict"""
    names = {
        edge: f"< {edge:,}" if edge == length else f"{edge // 2:,}–{edge:,}"
        for edge in sorted(edges - {HOT})
    }
    return {**names, HOT: f"hot, ≥ {2 * length:,}"} if HOT in edges else names


def by_distance(results):
    """-> accuracies of the seeds by config and bin: dict of dict of list"""
    found = {}
    for result in results:
        for name, own in ((result["config"], "recall"), (f"{result['config']}{OFF}", "off")):
            for edge, value in result.get(own, []):
                found.setdefault(name, {}).setdefault(edge, []).append(value)
    return found


def shades(rows):
    """-> a color of each row by its name: those of one config are shades of one color, the config
    with the most rows has the first"""
    families = {}
    for row in rows:
        families.setdefault(row.split(",")[0], []).append(row)
    colors = {}
    for number, own in enumerate(sorted(families.values(), key=len, reverse=True)):
        base = np.array(to_rgb(f"C{number}"))
        for i, row in enumerate(own):
            light = 0.6 * (1 - (i + 1) / len(own))
            colors[row] = tuple(base * (1 - light) + light)
    return colors


def draw(path, found, marks, names):
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
        at, own = [place[edge] for edge in values], [each[0] for each in values.values()]
        style = (":", "-.", "--")[number % 3]
        axes.plot(at, own, style, color="0.5", lw=1, label=config)
    axes.set_xticks(list(place.values()), [names[edge] for edge in place])
    axes.set_xlabel("tokens since the pair last stood")
    axes.set_ylabel("values recalled, %")
    axes.set_ylim(0, 100)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    save(plt, figure, path)


def report(args, results, rows):
    """Write CSV, PNG and table.md.  -> the table"""
    order = {row.name: number for number, row in enumerate(rows)}
    first = {}  # of each config: its rows stand together, the smallest state first
    for row in rows:
        first.setdefault(row.name.split(",")[0], order[row.name])
    results.sort(
        key=lambda r: (
            first[r["config"].split(",")[0]], r["floats"], order[r["config"]], r["seed"]
        )
    )  # fmt: skip
    sizes = windows(rows)
    marks = references(args, sizes)
    found = by_distance(results)
    lines = {mark["config"]: {} for mark in marks}
    for mark in marks:
        lines[mark["config"]][mark["distance"]] = [mark["accuracy"]]
    edges = {edge for values in [*found.values(), *lines.values()] for edge in values}
    names = bin_names(edges, sizes[0][0])
    lists = [
        {**result, "distance": edge, "accuracy": value, "memory": memory}
        for result in results
        for memory, own in (("on", "recall"), ("off", "off"))
        for edge, value in result.get(own, [])
    ]
    columns = "config memory seed distance accuracy floats seconds".split()
    out = Path(args.out)
    write_csv(out / "recall.csv", columns, lists + marks)
    draw(out / "recall.png", found, lines, names)
    cells = []
    for config, values in found.items():
        own = [r for r in results if r["config"] == config]
        means = [spread(values[edge]) if edge in values else "" for edge in names]
        cost = ["", ""]
        if own:
            minutes = f"{statistics.mean(r['seconds'] for r in own) / 60:.1f}"
            cost = [f"{own[0]['floats']:,}", minutes]
        cells.append([shown(config), *means, *cost])
    for config, values in lines.items():
        known = [f"{values[edge][0]:.2f}" if edge in values else "" for edge in names]
        cells.append([config, *known, "", ""])
    head = ["recalled, %", *(names[edge] for edge in names), "floats", "minutes"]
    text = table(head, cells)
    (out / "table.md").write_text(text + "\n")
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_rows(parser)
    parser.add_argument("--data", required=True, help="what fairseq_inf.data.recall has made")
    parser.add_argument(
        "--out", default="recall", help="folder for checkpoints, results and figure"
    )
    args = parser.parse_intermixed_args()
    rows = find_rows(parser, args)
    if not (Path(args.data) / SUMMARY).is_file():
        parser.error(
            f"--data {args.data} has no {SUMMARY}: make it with python -m fairseq_inf.data.recall"
        )
    args.threads = threads_each(args.jobs)
    results = side_by_side(
        args.jobs,
        [partial(work, args, row, seed) for seed in args.seeds for row in rows],
        lambda r: f"{r['config']} seed {r['seed']}: {r['accuracy']:.2f} %",
    )
    print(f"\n{report(args, results, rows)}\n\nfigure: {Path(args.out) / 'recall.png'}")


if __name__ == "__main__":
    logging.disable(logging.INFO)  # fairseq lets through what every library says
    main()
