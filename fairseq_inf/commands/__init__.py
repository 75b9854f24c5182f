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
