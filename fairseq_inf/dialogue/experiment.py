"""Train configs on document-grounded dialogue, answer the test split, and print one table.

    python -m fairseq_inf.dialogue.experiment examples/dialogue/config/smollm2 \
        --data data-bin/dialogue-smollm2 --without data-bin/dialogue-smollm2-without \
        --host imported/dialogue-smollm2/checkpoint.pt --seeds 2 3 --jobs 2 --cpu

The first argument is a folder of hydra configs, or single ones; those whose names end in
_without_document are trained and tested on --without.  Each is trained over the seeds, --jobs
trainings at a time; the perplexity of its last checkpoint is measured on the test split.  What
takes longer is done with the first seed alone: it answers, its perplexity is measured on
conversations without their documents, too, and with --facts it is asked for names of the documents.
--out gets table.md, and as examples.md what the last row says and looks at.  A run that was broken
off goes on where it stopped; a finished one is not run again.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_inf.analysis.report import table
from fairseq_inf.errors import plain_errors
from fairseq_inf.experiments import runs
from fairseq_inf.files import write_text

from .facts import QUESTIONS
from .scores import MEASURES, bootstrap, compare

WITHOUT = "_without_document"
SHOWN = ("f1", "rouge1", "rougeL", "meteor", "bleu", "chrf")
# perplexity, F1, ROUGE-1, ROUGE-L and METEOR of the paper, with GPT-2
PAPER = {
    "host_without_document": "19.43, 7.82, 12.18, 10.17, 6.10",
    "host": "18.53, 8.64, 14.61, 12.03, 7.15",
    "compressive_transformer": "18.02, 8.78, 14.74, 12.14, 7.29",
    "infinite_former": "18.02, 8.92, 15.28, 12.51, 7.52",
    "infinite_former_sticky": "18.04, 9.01, 15.37, 12.56, 7.55",
}
Result = dict[str, Any]


def measure(args: argparse.Namespace, first: bool, row: runs.Row, folder: Path) -> Result:
    """Test a row that has been trained in a folder.  first: with the first seed"""
    how = ["--facts"] * (args.facts and first and row.data != args.without)
    if first and row.name == args.shown:
        how += ["--examples", str(folder / "examples.md")]
    answers = evaluate(args, row.data, folder, "answers", args.answered if first else 0, *how)
    result = {name: answers[name] for name in ("statistics", "facts")}
    result["ppl"] = answers["measures"]["ppl"]["value"]
    if first and row.data != args.without:
        other = evaluate(args, args.without, folder, "without", 0)
        result["without"] = other["measures"]["ppl"]["value"]
    return result


def evaluate(
    args: argparse.Namespace, data: str, folder: Path, name: str, answered: int | None, *how: str
) -> Result:
    """answered: how many conversations.  -> what fairseq-inf-dialogue writes, or has written"""
    output = folder / f"{name}.json"
    if not output.is_file():
        command = [
            sys.executable, "-m", "fairseq_inf.dialogue.evaluate", data,
            "--path", str(folder / "checkpoint_last.pt"), "--output", str(output), *how,
        ]  # fmt: skip
        command += ["--cpu"] * args.cpu + ["--bf16"] * args.bf16
        for flag, count in (("--answered", answered), ("--conversations", args.conversations)):
            command += [] if count is None else [flag, str(count)]
        runs.run(command, output.with_suffix(".log"), args.threads)
    return json.loads(output.read_text())


def pooled(results: Sequence[Result]) -> dict[str, np.ndarray]:
    """The statistics of all seeds of a config that have them together: of each measure C x K."""
    by_seed = {name: [r["statistics"].get(name) for r in results] for name in MEASURES}
    return {name: np.sum([x for x in xs if x], axis=0) for name, xs in by_seed.items() if any(xs)}


def report(results: Sequence[Result], rows: Sequence[runs.Row], seeds: Sequence[int]) -> str:
    """-> the table, and which differences from the host are more than chance"""
    asked = [kind for kind in QUESTIONS if any(kind in r["facts"] for r in results)]
    head = ["model", "perplexity", "by seed", "without document"]
    head += [*asked, *(MEASURES[name].title for name in SHOWN), "minutes", "paper"]
    lines, compared = [], []
    by_row = {row.name: [r for r in results if r["config"] == row.name] for row in rows}
    for name, mine in by_row.items():
        mine.sort(key=lambda r: seeds.index(r["seed"]))
        values = [r["ppl"] for r in mine]
        cells = [runs.shown(name), runs.spread(values), ", ".join(f"{v:.2f}" for v in values)]
        cells.append(f"{mine[0]['without']:.2f}" if "without" in mine[0] else "–")
        for kind in asked:
            share = mine[0]["facts"].get(kind)
            cells.append(f"{100 * share[0]:.0f} %" if share else "–")
        measures = bootstrap(pooled(mine))
        cells += ["{value:.2f} ({low:.2f}–{high:.2f})".format(**measures[kind]) for kind in SHOWN]
        cells.append(runs.spread([r["seconds"] / 60 for r in mine]))
        lines.append([*cells, PAPER.get(name, "–")])
        if name != "host" and "host" in by_row:
            against = compare(pooled(mine), pooled(by_row["host"]))
            said = [
                f"{MEASURES[kind].title} {x['difference']:+.2f} (p = {x['p']:.3f})"
                for kind, x in against.items()
                if kind in ("ppl", *SHOWN)
            ]
            compared.append(f"{name} against host: {', '.join(said)}")
    return "\n".join([table(head, lines), "", *compared])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    runs.add_rows(parser)
    add = parser.add_argument
    add("--data", required=True, help="data-bin of examples/dialogue/prepare.sh")
    add("--without", required=True, help="the same, made with --without-document")
    add("--host", required=True, help="checkpoint that all begin from")
    add("--out", default="dialogue", help="folder for checkpoints and results")
    add("--bf16", action="store_true", help="measure in bfloat16")
    add("--conversations", type=int, help="of the test split, the first that many")
    add("--answered", type=int, help="of these, the first that many (all)")
    add("--facts", action="store_true", help="ask for names in the documents, too")
    args = parser.parse_intermixed_args()
    if args.answered is not None and args.answered < 1:
        parser.error(f"--answered must be at least 1, got {args.answered}")
    rows = runs.find_rows(parser, args)
    args.without, args.host = (str(Path(x).resolve()) for x in (args.without, args.host))
    for flag, path in (("--without", Path(args.without) / "dict.txt"), ("--host", Path(args.host))):
        if not path.is_file():
            parser.error(f"{flag}: {path} does not exist")
    args.shown = rows[-1].name
    for row in rows:
        row.overrides = [f"checkpoint.finetune_from_model='{args.host}'", *row.overrides]
        if row.config.stem.endswith(WITHOUT):
            row.data = args.without
    calls = []
    for seed in args.seeds:
        first = seed == args.seeds[0]
        asked = {"--conversations": args.conversations, "--bf16": args.bf16}
        asked |= {"--answered": args.answered if first else 0, "--facts": args.facts and first}
        test = partial(measure, args, first)
        calls += [partial(runs.work, args, Path(args.out), row, seed, test, asked) for row in rows]
    with plain_errors("fairseq_inf.dialogue.experiment"):
        results = runs.side_by_side(
            args.jobs,
            calls,
            lambda result: f"{result['config']} seed {result['seed']}: {result['ppl']:.2f}",
        )
    text = report(results, rows, args.seeds)
    write_text(Path(args.out) / "table.md", text + "\n")
    examples = rows[-1].folder(args.out, args.seeds[0]) / "examples.md"
    if examples.is_file():  # a row that was not the last one when it was measured has none
        shutil.copy(examples, args.out)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
