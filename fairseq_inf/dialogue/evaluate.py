"""fairseq-inf-dialogue: answer every turn of true conversations, and measure the answers.

The model reads each conversation of a split, its document first, and answers each turn but the
first from all that was said before it; what was really said comes into its memory only afterwards.
It prints perplexity (on all turns), F1, ROUGE, METEOR, BLEU and chrF, each with the interval that
95 % of the bootstrap draws of whole conversations lie in, and writes them with all answers to a
JSON file.  With --compare it reads two such files and says how likely the differences are chance.
"""

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_inf.analysis.report import table
from fairseq_inf.commands import check_draws, warn_of_bf16
from fairseq_inf.errors import Failure, plain_errors
from fairseq_inf.files import check_writable, write_text

from .scores import MEASURES, bootstrap, by_conversation, compare, load_meteor, statistics


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fairseq-inf-dialogue", description=__doc__.split(": ")[1].splitlines()[0]
    )
    add = parser.add_argument
    add("data", nargs="?", metavar="DATA_BIN", help="what examples/dialogue/prepare.sh wrote")
    add("--path", help="checkpoint of the model")
    add("--output", type=Path, help="JSON file to write")
    add("--compare", nargs=2, type=Path, metavar="JSON", help="two of these files; nothing else")
    add("--split", default="test")
    add("--conversations", type=int, help="take the first that many of the split (all)")
    add("--answered", type=int, help="answer the first that many only (all); 0: perplexity alone")
    search = parser.add_mutually_exclusive_group()
    search.add_argument("--topp", type=float, default=0.9, help="nucleus that is drawn from (0.9)")
    search.add_argument("--greedy", action="store_true", help="always the likeliest token")
    search.add_argument("--beam", type=int, help="beam search with that many hypotheses")
    add("--max-tokens", type=int, default=50, help="of an answer (50)")
    add("--seed", type=int, default=1, help="of the draws (1)")
    add("--rows", type=int, default=16, help="conversations side by side (16)")
    add("--branches", type=int, default=64, help="answers side by side (64)")
    add("--memory-off", action="store_true", help="without the long-term memory")
    add("--examples", type=Path, help="file for a few answers, with what they looked at")
    add("--facts", action="store_true", help="ask for names that stand in the documents, too")
    add("--bf16", action="store_true", help="weights and activations in bfloat16")
    add("--cpu", action="store_true", help="do not use a GPU")
    args = parser.parse_args()
    if not args.compare and not (args.data and args.path and args.output):
        parser.error("give DATA_BIN, --path and --output, or --compare with two files")
    check_draws(parser, args)
    for name in ("rows", "branches", "conversations", "beam", "answered"):
        value, least = getattr(args, name), int(name != "answered")
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}, got {value}")
    if args.examples and args.answered == 0:
        parser.error("--examples needs answers: --answered must be at least 1")
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """-> what the JSON file holds"""
    from fairseq_inf.hub import open_hub

    from .answers import Answers
    from .facts import AMONG, known_facts
    from .looks import explain
    from .turns import MARKERS

    for path in filter(None, (args.output, args.examples)):
        check_writable(str(path))
    if args.answered != 0:
        load_meteor()  # fails now rather than later
    hub = open_hub(args.path, args.data, args.cpu)
    if args.bf16:
        warn_of_bf16(hub.device)
        hub = hub.bfloat16()
    missing = [word for word in MARKERS if word not in hub.dictionary]
    if missing:
        raise Failure(
            f"--path {args.path} does not know {', '.join(missing)}: name a model of --task "
            "dialogue, or one that fairseq-inf-import made with the --dict of DATA_BIN."
        )
    if args.memory_off and not hub.model.has_memory:
        raise Failure(f"--path {args.path} has no long-term memory: leave --memory-off out.")
    hub.model.decoder.ltm_enabled &= not args.memory_off
    hub.task.load_dataset(args.split)
    begin = time.time()
    answers = Answers(hub, hub.task.dataset(args.split), args.conversations)
    if args.facts and len(answers.documents) < AMONG:
        raise Failure(
            f"--facts needs {AMONG} documents to compare, these conversations have "
            f"{len(answers.documents)}: leave it out, or take more of the split."
        )
    settings: dict[str, Any] = {"sampling": True, "sampling_topp": args.topp}  # of fairseq's
    if args.greedy or args.beam:
        settings = {"beam": args.beam or 1}
    settings["max_tokens"] = args.max_tokens
    turns = answers.run(args.answered, args.rows, args.branches, args.seed, True, **settings)
    seconds = time.time() - begin

    likely = np.array([[said.nll, said.tokens] for said in turns])
    sums = {"ppl": by_conversation(likely, [said.conversation for said in turns])}
    count = len(answers.streams)
    answered = count if args.answered is None else min(args.answered, count)
    responses = [said for said in turns if said.turn > 0 and said.conversation < answered]
    if responses:
        each = statistics([said.answer for said in responses], [said.text for said in responses])
        numbers = [said.conversation for said in responses]
        sums |= {name: by_conversation(x, numbers) for name, x in each.items()}
    if args.examples:
        write_text(args.examples, explain(answers, answered))
    asked = {name: x for name, x in vars(args).items() if name != "compare"} | settings
    return {
        "asked": {name: str(x) if isinstance(x, Path) else x for name, x in asked.items()},
        "seconds": round(seconds, 1),
        "conversations": count,
        "answered": answered,
        "responses": len(responses),
        "measures": bootstrap(sums),
        "facts": known_facts(answers) if args.facts else {},
        "statistics": {name: x.tolist() for name, x in sums.items()},
        "turns": [vars(said) for said in turns],
    }


def show(result: dict[str, Any]) -> str:
    lines = [
        [MEASURES[name].title, f"{x['value']:.2f}", f"{x['low']:.2f}–{x['high']:.2f}"]
        for name, x in result["measures"].items()
    ]
    for name, (share, gain) in result["facts"].items():
        lines.append([f"{name} known", f"{100 * share:.0f} %", f"{gain:+.2f} nats"])
    return table(["measure", "value", "95 % of draws"], lines)


def load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise Failure(f"--compare {path} does not exist or is not a file.")
    try:
        result = json.loads(path.read_text())
        [(x["conversation"], x["text"]) for x in result["turns"]]
        result["statistics"]["ppl"], result["measures"]["ppl"], result["answered"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise Failure(f"--compare {path} is not what fairseq-inf-dialogue has written.") from None
    return result


def show_difference(paths: list[Path]) -> str:
    results = [load(path) for path in paths]
    one, other = ([(x["conversation"], x["text"]) for x in r["turns"]] for r in results)
    if one != other or len({r["answered"] for r in results if r["answered"]}) > 1:
        raise Failure(f"{paths[0]} and {paths[1]} are of different conversations.")
    both = [name for name in MEASURES if all(name in r["statistics"] for r in results)]
    mine, theirs = ({name: np.array(r["statistics"][name]) for name in both} for r in results)
    lines = []
    for name, x in compare(mine, theirs).items():
        values = [f"{r['measures'][name]['value']:.2f}" for r in results]
        lines.append([MEASURES[name].title, *values, f"{x['difference']:+.2f}", f"{x['p']:.3f}"])
    return table(["measure", *(path.stem for path in paths), "difference", "p"], lines)


def main() -> None:
    args = parse()
    logging.disable(logging.INFO)
    with plain_errors("fairseq-inf-dialogue"):
        if args.compare:
            print(show_difference(args.compare))
            return
        result = measure(args)
        write_text(args.output, json.dumps(result, indent=1) + "\n")
    print(show(result))
    print(
        f"{result['responses']:,} responses of {result['answered']:,} conversations, and the "
        f"likelihood of all {result['conversations']:,}, are in {args.output} after "
        f"{result['seconds']:.0f} seconds",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
