"""Make a data-bin of documents that a generator draws: whole, or not at all."""

import json
import os
import shutil
import sys
import tempfile

import torch
from fairseq.data import indexed_dataset

SPLITS = ("train", "valid", "test")


def check_least(parser, args, least):
    """least: the least value that each option may have, by name."""
    for name, bound in least.items():
        value = getattr(args, name)
        value = min(value) if isinstance(value, list) else value
        if value < bound:
            parser.error(f"--{name} must be at least {bound}, got {value}")
    if os.path.exists(args.folder):
        parser.error(f"{args.folder} is there already: remove it, or name another folder")


def binarize(folder, split, lines, words):
    """Write one split as fairseq-preprocess does.  lines: arrays of indices that end with eos."""
    prefix = os.path.join(folder, split)
    builder = indexed_dataset.make_builder(f"{prefix}.bin", "mmap", len(words))
    for line in lines:
        builder.add_item(torch.from_numpy(line))
    builder.finalize(f"{prefix}.idx")


def make_folder(name, make, made, summary):
    """Let `make(folder, **made)` fill a folder; its file `summary` says what it was made with."""
    folder = os.path.abspath(name)
    partial = None
    try:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        partial = tempfile.mkdtemp(
            prefix=f"{os.path.basename(folder)}.", dir=os.path.dirname(folder)
        )
        make(partial, **made)
        with open(os.path.join(partial, summary), "w") as file:
            json.dump(made, file)
        os.chmod(partial, 0o755)
        os.rename(partial, folder)
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or "out of memory"
        sys.exit(f"cannot write {name}: {reason}")
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
