"""Train configs on document-grounded dialogue, answer the test split, and print one table.

    python scripts/dialogue.py examples/dialogue/config/smollm2 --data data-bin/dialogue-smollm2 \
        --without data-bin/dialogue-smollm2-without --host imported/dialogue-smollm2/checkpoint.pt \
        --seeds 2 3 --jobs 2 --cpu

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
from functools import partial
from pathlib import Path

import numpy as np
from runs import (
    add_rows,
    find_rows,
    once,
    run,
    shown,
    side_by_side,
    spread,
    threads_each,
    train,
)

from fairseq_inf.analysis.facts import QUESTIONS
from fairseq_inf.analysis.report import table
from fairseq_inf.analysis.scores import MEASURES, bootstrap, compare

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


def work(args, row, seed):
    """Train and test one row, or what an earlier call has left.  -> its results"""
    folder = row.folder(args.out, seed)
    bare, first = row.config.stem.endswith(WITHOUT), seed == args.seeds[0]
    answered, facts = args.answered if first else 0, args.facts and first and not bare
    data = args.without if bare else args.data
    asked = {
        "--data": data,
        "--host": args.host,
        "--conversations": args.conversations,
        "--answered": answered,
        "--bf16": args.bf16,
        "--facts": facts,
        "overrides": row.overrides,
        "config": row.config.read_text(),
    }

    def measure():
        overrides = [f"checkpoint.finetune_from_model='{args.host}'", *row.overrides]
        seconds = train(row.config, data, seed, folder, overrides, args.threads, args.cpu)
        checkpoint = folder / "checkpoint_last.pt"
        more = ["--facts"] * facts
        if first and row.name == args.shown:
            more += ["--examples", str(folder / "examples.md")]
        answers = evaluate(args, data, checkpoint, folder / "answers.json", answered, *more)
        result = {"config": row.name, "seed": seed, "seconds": seconds}
        result.update({name: answers[name] for name in ("statistics", "facts")})
        result["ppl"] = answers["measures"]["ppl"]["value"]
        if first and not bare:
            other = evaluate(args, args.without, checkpoint, folder / "without.json", 0)
            result["without"] = other["measures"]["ppl"]["value"]
        return result

    return once(folder, asked, measure)


def evaluate(args, data, checkpoint, output, answered, *how):
    """answered: how many conversations.  -> what fairseq-inf-dialogue writes, or has written"""
    if not output.is_file():
        command = [
            sys.executable, "-m", "fairseq_inf.commands.dialogue", data,
            "--path", str(checkpoint), "--output", str(output), *how,
        ]  # fmt: skip
        command += ["--cpu"] * args.cpu + ["--bf16"] * args.bf16
        for flag, count in (("--answered", answered), ("--conversations", args.conversations)):
            command += [] if count is None else [flag, str(count)]
        run(command, output.with_suffix(".log"), args.threads)
    return json.loads(output.read_text())


def pooled(results):
    """The statistics of all seeds of a config that have them together: of each measure C x K."""
    found = {name: [r["statistics"].get(name) for r in results] for name in MEASURES}
    return {name: np.sum([x for x in own if x], axis=0) for name, own in found.items() if any(own)}


def report(results, rows, seeds):
    """-> the table, and which differences from the host are more than chance"""
    asked = [kind for kind in QUESTIONS if any(kind in r["facts"] for r in results)]
    head = ["model", "perplexity", "by seed", "without document"]
    head += [*asked, *(MEASURES[name].title for name in SHOWN), "minutes", "paper"]
    lines, compared = [], []
    found = {row.name: [r for r in results if r["config"] == row.name] for row in rows}
    for own in found.values():
        own.sort(key=lambda r: seeds.index(r["seed"]))
    for name, own in found.items():
        values = [r["ppl"] for r in own]
        cells = [shown(name), spread(values), ", ".join(f"{v:.2f}" for v in values)]
        cells.append(f"{own[0]['without']:.2f}" if "without" in own[0] else "–")
        for kind in asked:
            share = own[0]["facts"].get(kind)
            cells.append(f"{100 * share[0]:.0f} %" if share else "–")
        measures = bootstrap(pooled(own))
        cells += ["{value:.2f} ({low:.2f}–{high:.2f})".format(**measures[kind]) for kind in SHOWN]
        cells.append(spread([r["seconds"] / 60 for r in own]))
        lines.append([*cells, PAPER.get(name, "–")])
        if name != "host" and "host" in found:
            against = compare(pooled(own), pooled(found["host"]))
            said = [
                f"{MEASURES[kind].title} {x['difference']:+.2f} (p = {x['p']:.3f})"
                for kind, x in against.items()
                if kind in ("ppl", *SHOWN)
            ]
            compared.append(f"{name} against host: {', '.join(said)}")
    return "\n".join([table(head, lines), "", *compared])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_rows(parser)
    parser.add_argument("--data", required=True, help="data-bin of examples/dialogue/prepare.sh")
    parser.add_argument("--without", required=True, help="the same, made with --without-document")
    parser.add_argument("--host", required=True, help="checkpoint that all begin from")
    parser.add_argument("--out", default="dialogue", help="folder for checkpoints and results")
    parser.add_argument("--bf16", action="store_true", help="measure in bfloat16")
    parser.add_argument("--conversations", type=int, help="of the test split, the first that many")
    parser.add_argument("--answered", type=int, help="of these, the first that many (all)")
    parser.add_argument("--facts", action="store_true", help="ask for names in the documents, too")
    args = parser.parse_intermixed_args()
    if args.answered is not None and args.answered < 1:
        parser.error(f"--answered must be at least 1, got {args.answered}")
    rows = find_rows(parser, args)
    args.without, args.host = (str(Path(x).resolve()) for x in (args.without, args.host))
    for flag, path in (("--without", Path(args.without) / "dict.txt"), ("--host", Path(args.host))):
        if not path.is_file():
            parser.error(f"{flag}: {path} does not exist")
    args.threads, args.shown = threads_each(args.jobs), rows[-1].name
    results = side_by_side(
        args.jobs,
        [partial(work, args, row, seed) for seed in args.seeds for row in rows],
        lambda result: f"{result['config']} seed {result['seed']}: {result['ppl']:.2f}",
    )
    text = report(results, rows, args.seeds)
    (Path(args.out) / "table.md").write_text(text + "\n")
    examples = rows[-1].folder(args.out, args.seeds[0]) / "examples.md"
    if examples.is_file():  # a row that was not the last one when it was measured has none
        shutil.copy(examples, args.out)
    print(f"\n{text}")


if __name__ == "__main__":
    main()
