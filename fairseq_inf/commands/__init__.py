"""The commands of the installed package, a file each."""

import argparse
import io
import sys
from pathlib import Path


def text_named(name: str, parser: argparse.ArgumentParser) -> Path | io.TextIOWrapper:
    """A file to read, or - for the standard input; either with its line breaks as they are."""
    if name == "-":
        return io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", errors="strict", newline="")
    if not Path(name).is_file():
        parser.error(f"{name} does not exist or is not a file")
    return Path(name)


def check_draws(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """What commands that draw answers share: --topp, --max-tokens, --seed."""
    from fairseq_inf.tasks.long_sequence_lm import LONGEST

    if not 0 < args.topp <= 1:
        parser.error(f"--topp must be above 0 and at most 1, got {args.topp}")
    if not 1 <= args.max_tokens <= LONGEST:
        parser.error(f"--max-tokens must be from 1 to {LONGEST:,}, got {args.max_tokens}")
    if not abs(args.seed) < 2**63:
        parser.error(f"--seed must be a number of 64 bits, got {args.seed}")
