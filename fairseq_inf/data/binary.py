"""Numbers of words as fairseq's binary data, which fairseq-preprocess would write alike."""

import os
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from fairseq.data import Dictionary, indexed_dataset

from fairseq_inf.errors import Failure


def binarize(
    folder: str | os.PathLike[str], split: str, lines: Iterable[np.ndarray], words: Dictionary
) -> None:
    """Write one split.  lines: arrays of numbers that end with that of eos"""
    prefix = os.path.join(folder, split)
    builder = indexed_dataset.make_builder(f"{prefix}.bin", "mmap", len(words))
    for line in lines:
        builder.add_item(torch.from_numpy(line))
    builder.finalize(f"{prefix}.idx")


def numbers_of(tokens: Sequence[str], words: Dictionary) -> np.ndarray:
    """Of tokens that are all in the dictionary."""
    found = np.array([words.index(token) for token in tokens])
    if (found == words.unk()).any():
        token = tokens[int((found == words.unk()).argmax())]
        raise Failure(f"the encoding has {token}, its dictionary has not: prepare it again")
    return found
