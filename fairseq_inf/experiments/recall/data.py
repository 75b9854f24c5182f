"""The recall task: a key that returns must bring its value.

    fairseq-inf-recall make data-bin/recall
    fairseq-inf-recall make data-bin/pairs-8 --mode pairs --pairs 8

A document is a stream of pairs "key value".  Which value a key has is drawn for each document, and
stays.  The next key is the r-th last one of all keys, r log-uniform (or uniform) from 1 to K, so
that keys return after short and long times; those that have not stood yet are the last ones, in a
random order.  Fillers stand between pairs.  With --hot some keys return again and again: each pair
is one of theirs with the probability --hot-share, whatever has stood before.  With --mode pairs a
document is n pairs of different keys, a gap of fillers, and one of the keys again with its value.
"""

import argparse
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary
from tqdm import tqdm

from fairseq_inf.data.binary import binarize
from fairseq_inf.data.streams import SegmentBatches, Spans, StreamDataset
from fairseq_inf.experiments.synthetic import SPLITS, check_least, make_folder

FILLER = "."
HOT = "h"  # how hot keys begin
SUMMARY = "recall.json"  # of a data-bin: what it was made with
AT_ONCE = 500  # documents that are drawn together


def draw_ranks(
    rng: np.random.Generator, shape: tuple[int, ...], keys: int, distances: str
) -> np.ndarray:
    """-> how many other keys have stood since the one to take, from 0 to K - 1"""
    if distances == "uniform":
        return rng.integers(keys, size=shape)
    return np.minimum((keys + 1) ** rng.random(shape) - 1, keys - 1).astype(np.int64)


def draw_keys(
    rng: np.random.Generator,
    documents: int,
    pairs: int,
    keys: int,
    distances: str,
    hot: int = 0,
    hot_share: float = 0.0,
) -> np.ndarray:
    """-> the keys of each document in their order, the hot ones are the first: D x P"""
    if hot:
        others = hot + draw_keys(rng, documents, pairs, keys - hot, distances)
        again = rng.random((documents, pairs)) < hot_share
        return np.where(again, rng.integers(hot, size=(documents, pairs)), others)
    stack = rng.permuted(np.tile(np.arange(keys), (documents, 1)), axis=1)  # the last one first
    ranks = draw_ranks(rng, (pairs, documents), keys, distances)
    drawn = np.empty((documents, pairs), dtype=np.int64)
    rows, place = np.arange(documents), np.arange(1, keys)
    for number, rank in enumerate(ranks):
        drawn[:, number] = taken = stack[rows, rank]
        stack[:, 1:] = np.where(place <= rank[:, None], stack[:, :-1], stack[:, 1:])
        stack[:, 0] = taken
    return drawn


def draw_streams(
    rng: np.random.Generator,
    documents: int,
    length: int,
    keys: int,
    values: int,
    fillers: float,
    distances: str,
    hot: int = 0,
    hot_share: float = 0.0,
) -> np.ndarray:
    """-> tokens: keys from 0 on, then values, then the filler: D x length"""
    pairs = int(length * (1 - fillers)) // 2
    drawn = draw_keys(rng, documents, pairs, keys, distances, hot, hot_share)
    belongs = keys + rng.integers(values, size=(documents, keys))
    # pairs and fillers in a random order; a pair begins after two tokens for each pair before it
    is_pair = np.arange(length - pairs) < pairs
    is_pair = rng.permuted(np.tile(is_pair, (documents, 1)), axis=1)
    begin = np.nonzero(is_pair)[1].reshape(documents, pairs) + np.arange(pairs)
    rows = np.arange(documents)[:, None]
    tokens = np.full((documents, length), keys + values)
    tokens[rows, begin] = drawn
    tokens[rows, begin + 1] = belongs[rows, drawn]
    return tokens


def draw_questions(
    rng: np.random.Generator, documents: int, pairs: int, gap: int, keys: int, values: int
) -> np.ndarray:
    """-> n pairs, a gap, a key and its value: D x (2n + gap + 2)"""
    drawn = rng.permuted(np.tile(np.arange(keys), (documents, 1)), axis=1)[:, :pairs]
    belongs = keys + rng.integers(values, size=(documents, pairs))
    rows, asked = np.arange(documents), rng.integers(pairs, size=documents)
    tokens = np.full((documents, 2 * pairs + gap + 2), keys + values)
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = drawn, belongs
    tokens[:, -2], tokens[:, -1] = drawn[rows, asked], belongs[rows, asked]
    return tokens


def last_stood(tokens: np.ndarray) -> np.ndarray:
    """How long ago each token stood before, 0 if it is new.  T -> T"""
    at = np.argsort(tokens, kind="stable")  # one word after the other
    again = tokens[at[1:]] == tokens[at[:-1]]
    found = np.zeros(len(tokens), dtype=np.int64)
    found[at[1:][again]] = np.diff(at)[again]
    return found


def distances_back(tokens: np.ndarray, is_key: np.ndarray) -> np.ndarray:
    """For each token how long ago the key before it last stood, 0 if that is no key or a new one.

    tokens: T.  is_key: of each word of the dictionary.  -> T"""
    found = np.zeros(len(tokens), dtype=np.int64)
    found[1:] = np.where(is_key[tokens[:-1]], last_stood(tokens[:-1]), 0)
    return found


def in_window(distances: np.ndarray, length: int, stm_length: int) -> np.ndarray:
    """Whether the value that each returning key brings is in its segment, or in the short-term
    memory before it.  distances: of one document.  -> bool for each distance that is not 0"""
    place = np.flatnonzero(distances)
    begin = place // length * length - stm_length
    return place - distances[place] + 1 >= begin  # eos is read first


def bin_edges(length: int, longest: int) -> list[int]:
    """Upper ends of the distances that are counted together: L, 2L, 4L, .. to the longest."""
    edges = [length]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    return edges


class RecallBatches(SegmentBatches):
    """Segments whose targets are the values of keys that have stood before; beside them, as
    `distance`, how long before, B x T, and the `edges` of the bins that it is counted in; where
    there are hot keys, `hot`, B x T, says whose they are."""

    def __init__(self, dataset: StreamDataset, spans: Spans, length: int, shard: slice) -> None:
        super().__init__(dataset, spans, length, shard)
        self.is_key = find_keys(dataset.dictionary)
        self.is_hot = torch.from_numpy(find_keys(dataset.dictionary, HOT))
        self.edges = bin_edges(length, int(dataset.sizes.max()))

    def __getitem__(self, index: int) -> dict[str, Any]:
        batch = super().__getitem__(index)
        distance = torch.zeros_like(batch["target"])
        for row, (begins, ends, _, _) in enumerate(self.tables):
            if index >= len(begins):
                continue
            begin, end = int(begins[index]), int(ends[index])
            document = int(np.searchsorted(self.dataset.documents, begin, side="right")) - 1
            first = int(self.dataset.documents[document])
            found = distances_back(self.dataset.read(first, end).numpy(), self.is_key)
            distance[row, : end - begin] = torch.from_numpy(found[begin - first :])
        asked = distance > 0
        batch["target"] = batch["target"].masked_fill(~asked, self.pad)
        batch["distance"], batch["edges"] = distance, self.edges
        batch["ntokens"] = int(asked.sum())
        if self.is_hot.any():
            batch["hot"] = asked & self.is_hot[batch["net_input"]["src_tokens"]]
        return batch


def dictionary(keys: int, values: int, hot: int = 0) -> Dictionary:
    words = Dictionary()
    for letter, count in (("h", hot), ("k", keys - hot), ("v", values)):
        for number in range(count):
            words.add_symbol(f"{letter}{number}")
    words.add_symbol(FILLER)
    return words


def find_keys(words: Dictionary, kind: str = "[hk]") -> np.ndarray:
    """-> of each word whether it is a key, or a key of a kind"""
    return np.array([re.fullmatch(rf"{kind}\d+", word) is not None for word in words.symbols])


def make(folder: str, mode: str, sizes: Sequence[int], seed: int, **options: Any) -> None:
    """Write dict.txt and the three splits into a folder."""
    words = dictionary(options["keys"], options["values"], options.get("hot", 0))
    words.save(os.path.join(folder, "dict.txt"))
    draws: dict[str, Callable[..., np.ndarray]] = {"stream": draw_streams, "pairs": draw_questions}
    draw = draws[mode]
    for number, (split, size) in enumerate(zip(SPLITS, sizes, strict=True)):
        rng = np.random.default_rng([seed, number])

        def lines(
            rng: np.random.Generator = rng, split: str = split, size: int = size
        ) -> Iterator[np.ndarray]:
            with tqdm(total=size, desc=split, unit=" documents", mininterval=1) as bar:
                for first in range(0, size, AT_ONCE):
                    tokens = draw(rng, min(AT_ONCE, size - first), **options) + words.nspecial
                    yield from np.pad(tokens, ((0, 0), (0, 1)), constant_values=words.eos())
                    bar.update(len(tokens))

        binarize(folder, split, lines(), words)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make the data of the recall task.")
    add = parser.add_argument
    add("folder", help="folder to make, with dict.txt, train, valid and test")
    add("--mode", choices=["stream", "pairs"], default="stream")
    add("--keys", type=int, default=64, help="different keys, K")
    add("--values", type=int, default=64, help="different values: chance is 1 / values")
    add("--length", type=int, default=1024, help="stream: tokens of a document and its end")
    add("--distances", choices=["log-uniform", "uniform"], default="log-uniform",
        help="stream: how many keys back the next one is")  # fmt: skip
    add("--fillers", type=float, default=0.0, help="stream: share of the tokens, between pairs")
    add("--hot", type=int, default=0, help="stream: keys that return again and again")
    add("--hot-share", type=float, default=0.05, help="stream: share of the pairs that are theirs")
    add("--pairs", type=int, default=8, help="pairs: how many, of different keys")
    add("--gap", type=int, default=256, help="pairs: fillers before the question")
    add("--sizes", type=int, nargs=3, default=[20000, 200, 800], help="documents of each split")
    add("--seed", type=int, default=1)
    args = parser.parse_args()
    least = {"keys": 2, "values": 2, "length": 5, "pairs": 1, "gap": 0, "sizes": 1, "seed": 0}
    check_least(parser, args, least)
    if not 0 <= args.fillers < 1:
        parser.error(f"--fillers must be from 0 to less than 1, got {args.fillers}")
    if args.hot and not 0 < args.hot <= args.keys - 2:
        parser.error(f"--hot must be from 0 to two less than --keys {args.keys}, got {args.hot}")
    if not 0 < args.hot_share < 1:
        parser.error(f"--hot-share must be strictly between 0 and 1, got {args.hot_share}")
    if args.mode == "pairs" and args.pairs > args.keys:
        parser.error(f"--pairs {args.pairs} wants as many --keys, got {args.keys}")
    return args


def main() -> None:
    args = parse()
    made = {name: vars(args)[name] for name in ("mode", "keys", "values", "sizes", "seed")}
    if args.mode == "stream":
        made.update(length=args.length - 1, fillers=args.fillers, distances=args.distances)
        if args.hot:
            made.update(hot=args.hot, hot_share=args.hot_share)
        length = args.length
    else:
        made.update(pairs=args.pairs, gap=args.gap)
        length = 2 * args.pairs + args.gap + 3
    make_folder(args.folder, make, made, SUMMARY)
    print(f"wrote {sum(args.sizes):,} documents of {length:,} tokens to {args.folder}")
