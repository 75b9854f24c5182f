"""The sorting task: list the tokens of a sequence by falling frequency, which drifts.

    fairseq-inf-sorting make data-bin/sorting-4000 --length 4000

Each sequence has two distributions of its own over the V tokens, p0 and p1, integers from 1 to 9
that are normalised.  Token i of T is drawn from alpha p0 + (1 - alpha) p1 with alpha = i / (T - 1)
for i = 0 .. T-1, so that the end of a sequence says little about its beginning.  A line is the
sequence, the separator, and the V tokens: the most frequent first, of equally frequent ones the one
that came first, at last those that did not occur, in numeric order.
"""

import argparse
import os
from collections.abc import Iterable, Sequence

import numpy as np
from fairseq.data import Dictionary
from tqdm import tqdm

from fairseq_inf.data.binary import binarize
from fairseq_inf.data.streams import StreamDataset
from fairseq_inf.experiments.synthetic import SPLITS, check_least, make_folder

SEPARATOR = "<sep>"
SUMMARY = "sorting.json"  # of a data-bin: what it was made with


def draw(rng: np.random.Generator, vocabulary: int, length: int) -> np.ndarray:
    """-> the tokens of one sequence, integers below `vocabulary`: T"""
    p0, p1 = rng.integers(1, 10, size=(2, vocabulary))
    alpha = np.arange(length) / max(length - 1, 1)
    late = rng.random(length) < alpha
    place = rng.random(length)
    # a token as often in the table as its integer says, so that a place in it is a draw
    tables = [np.repeat(np.arange(vocabulary), p) for p in (p1, p0)]
    drawn = [table[(place * len(table)).astype(np.int64)] for table in tables]
    return np.where(late, drawn[1], drawn[0])


def sort(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """-> the V tokens by falling frequency, ties by first appearance, absent ones at last"""
    counts = np.bincount(tokens, minlength=vocabulary)
    first = np.arange(len(tokens), len(tokens) + vocabulary)  # absent: in numeric order
    np.minimum.at(first, tokens, np.arange(len(tokens)))
    return np.lexsort((first, -counts))


def chance_accuracy(vocabulary: int) -> float:
    """Share of the target tokens that a guess among those not named yet gets right."""
    return sum(1 / left for left in range(1, vocabulary + 1)) / vocabulary


def oracle_accuracy(
    sequences: Iterable[np.ndarray], vocabulary: int, window: int | None = None
) -> float:
    """Share of the target tokens that a counter gets right, which is told the right ones before.

    It counts all tokens, or the last `window` of them; between tokens that it has counted equally
    often it guesses.
    """
    rng = np.random.default_rng(0)
    right = total = 0
    for tokens in sequences:
        target = sort(tokens, vocabulary)
        seen = tokens[max(len(tokens) - window, 0) :] if window is not None else tokens
        counts = np.bincount(seen, minlength=vocabulary) + rng.random(vocabulary) / 2
        remaining = counts[target]
        # told what came before, it names the most frequent of the rest
        best = np.maximum.accumulate(remaining[::-1])[::-1]
        right += int((remaining == best).sum())
        total += vocabulary
    return right / total


def kendall_tau(order: Sequence[int], found: Sequence[int]) -> float:
    """Pairs of `order` that stand in the same order in `found`, less those in the other one, by
    all pairs.  A token's place in `found` is its first; those that are missing share the last."""
    place = {token: i for i, token in reversed(list(enumerate(found)))}
    ranks = np.array([place.get(token, len(found)) for token in order])
    agree = np.sign(ranks[None, :] - ranks[:, None])[np.triu_indices(len(order), 1)]
    return float(agree.mean()) if len(agree) else 1.0


def dictionary(vocabulary: int) -> Dictionary:
    words = Dictionary()
    for token in range(vocabulary):
        words.add_symbol(str(token))
    words.add_symbol(SEPARATOR)
    return words


def find_question(dataset: StreamDataset, document: int) -> int:
    """Where in a document the separator is, after which its answer stands."""
    tokens = dataset[document].numpy()
    found = np.flatnonzero(tokens == dataset.dictionary.index(SEPARATOR))
    if len(found) != 1 or found[0] + 2 >= len(tokens):
        raise ValueError(
            f"line {document + 1} of {dataset.name} must have {SEPARATOR} once, between a sequence "
            "and its answer"
        )
    return int(found[0])


def find_answer(dataset: StreamDataset, document: int) -> np.ndarray:
    """-> of each token of a document whether it is of the answer"""
    place = np.arange(dataset.num_tokens(document))
    return (place > find_question(dataset, document)) & (place < len(place) - 1)


def make(folder: str, length: int, vocabulary: int, sizes: Sequence[int], seed: int) -> None:
    """Write dict.txt and the three splits into a folder."""
    words = dictionary(vocabulary)
    words.save(os.path.join(folder, "dict.txt"))
    index = np.array([words.index(str(token)) for token in range(vocabulary)])
    separator, eos = words.index(SEPARATOR), words.eos()
    for number, (split, size) in enumerate(zip(SPLITS, sizes, strict=True)):
        rng = np.random.default_rng([seed, number, length, vocabulary])
        sequences = (
            draw(rng, vocabulary, length)
            for _ in tqdm(range(size), desc=split, unit=" sequences", mininterval=1)
        )
        lines = (
            np.concatenate([index[tokens], [separator], index[sort(tokens, vocabulary)], [eos]])
            for tokens in sequences
        )
        binarize(folder, split, lines, words)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the data of the sorting task.")
    parser.add_argument("folder", help="folder to make, with dict.txt, train, valid and test")
    parser.add_argument("--length", type=int, default=4000, help="tokens to sort, T")
    parser.add_argument("--vocabulary", type=int, default=20, help="different tokens, V")
    parser.add_argument(
        "--sizes", type=int, nargs=3, default=[8000, 800, 800], help="sequences of each split"
    )
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    check_least(parser, args, {"length": 1, "vocabulary": 2, "sizes": 1, "seed": 0})
    made = {name: vars(args)[name] for name in ("length", "vocabulary", "sizes", "seed")}
    make_folder(args.folder, make, made, SUMMARY)
    print(f"wrote {sum(args.sizes):,} sequences of {args.length:,} tokens to {args.folder}")
