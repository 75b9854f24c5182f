"""fairseq-inf-evaluate: EleutherAI's lm-evaluation-harness, with the model fairseq_inf.

    fairseq-inf-evaluate --model fairseq_inf --model_args path=imported/smollm2 --tasks TASKS
    fairseq-inf-evaluate run --help

It is lm_eval's own command, which finds no models of other packages by itself.
"""

import sys

from fairseq_inf.errors import Failure, plain_errors

COMMAND = "fairseq-inf-evaluate"


def main() -> None:
    if sys.argv[1:2] in ([], ["-h"], ["--help"]):
        print(f"usage: {COMMAND} ARGUMENTS OF lm_eval\n\n{__doc__}")
        return
    with plain_errors(COMMAND):
        try:
            from lm_eval.__main__ import cli_evaluate
        except ImportError:
            raise Failure(
                "lm_eval is not installed: pip install 'fairseq_inf[evaluation]'"
            ) from None

        from . import harness  # noqa: F401  (registers the model)

        cli_evaluate()


if __name__ == "__main__":
    main()
