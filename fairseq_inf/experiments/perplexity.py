"""The perplexity of a checkpoint by token, as fairseq-eval-lm gives it, and by word.

    python -m fairseq_inf.experiments.perplexity data-bin/gpt2-pg19 \\
        --path checkpoints/mine/checkpoint_best.pt

By word: exp(-(sum of the log-probabilities of all tokens of the split) / words), where the words
are those of the raw text between white space, as fairseq-inf-prepare has counted them.  The sum
does not depend on how a text is cut into tokens, so that models with different encodings can be
compared; perplexities by token cannot.
"""

import argparse
import tempfile
from pathlib import Path

from fairseq_inf.errors import Failure, plain_errors

from .runs import Result, evaluate, threads_each


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="data-bin of fairseq-inf-prepare")
    parser.add_argument("--path", type=Path, required=True, help="checkpoint")
    parser.add_argument("--split", default="test")
    parser.add_argument("--batch-size", type=int, default=1, help="streams side by side")
    parser.add_argument("--memory-off", action="store_true", help="without the long-term memory")
    parser.add_argument(
        "--context-window",
        type=int,
        default=0,
        help="for a model without any memory: windows of --tokens-per-sample that overlap by that",
    )
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    args = parser.parse_args()
    if not args.path.is_file():
        parser.error(f"--path {args.path} does not exist")
    if not (args.data / "documents.json").is_file():
        parser.error(
            f"{args.data} has no documents.json, which says how many words it has: "
            "make it with fairseq-inf-prepare"
        )
    with plain_errors("perplexity"):
        found = measure(args)
        print(f"{found['tokens']:,} tokens, perplexity {found['ppl']:.2f}")
        if "words" not in found:
            raise Failure(
                f"{args.data / 'documents.json'} does not count the words of these tokens of "
                f"{args.split}: make the data with fairseq-inf-prepare"
            )
        print(f"{found['words']:,} words, perplexity {found['word_ppl']:.2f}")


def measure(args: argparse.Namespace) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "eval.log"
        try:
            return evaluate(
                args.data.resolve(), args.path.resolve(), args.split, args.batch_size, log,
                threads_each(1), args.cpu, args.memory_off, args.context_window,
            )  # fmt: skip
        except Failure as failure:  # the log goes with its folder
            raise Failure(str(failure).replace(f", see {log}", "")) from None


if __name__ == "__main__":
    main()
