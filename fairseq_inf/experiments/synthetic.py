"""Make a data-bin of documents that a generator draws: whole, or not at all."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq_inf.errors import plain_errors
from fairseq_inf.files import whole_folder

SPLITS = ("train", "valid", "test")


def check_least(parser: ArgumentParser, args: Namespace, least: dict[str, int]) -> None:
    """least: the least value that each option may have, by name."""
    for name, bound in least.items():
        value = getattr(args, name)
        value = min(value) if isinstance(value, list) else value
        if value < bound:
            parser.error(f"--{name} must be at least {bound}, got {value}")


def make_folder(name: str, make: Callable[..., None], made: dict[str, Any], summary: str) -> None:
    """Let `make(folder, **made)` fill a folder; its file `summary` says what it was made with."""
    with plain_errors(f"cannot write {name}"), whole_folder(Path(name)) as folder:
        make(str(folder), **made)
        (folder / summary).write_text(json.dumps(made))
