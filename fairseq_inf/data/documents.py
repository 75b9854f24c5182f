"""Documents of a folder to a fairseq data-bin: found, encoded by several processes, binarized."""

import io
import signal
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
from fairseq.data import Dictionary
from tqdm import tqdm

from fairseq_inf.errors import Failure
from fairseq_inf.files import read_text

from .binary import binarize, numbers_of
from .encoding import Encoding

SPLITS = {"train": ["train"], "valid": ["validation", "valid"], "test": ["test"]}
Sized = list[tuple[Path, int]]  # documents with their bytes
encoding: Encoding  # of a worker, and its dictionary
words: Dictionary


def dictionary_of(encoding: Encoding) -> Dictionary:
    return Dictionary.load(io.StringIO(encoding.dictionary()))


def check_document(path: Path) -> tuple[Path, int]:
    """The path with the document's size in bytes, 0 for one without words."""
    return path, path.stat().st_size if read_text(path).strip() else 0


def encode_document(path: Path) -> tuple[np.ndarray, dict[str, int]]:
    """The document's numbers and its counts."""
    text = read_text(path)
    tokens = [token for part in encoding.encode(text) for token in part]
    line = numbers_of([*tokens, words.eos_word], words)
    counts = {"documents": 1, "words": len(text.split()), "tokens": len(line)}
    return line, counts | {"bytes": len(text.encode())}


def start_worker(kind: type[Encoding] | None = None, path: Path | None = None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the work
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if kind is not None and path is not None:
        global encoding, words
        encoding = kind(path)
        words = dictionary_of(encoding)


def in_parallel(
    function: Callable[[Path], Any], items: Iterable[Path], workers: int, *start: Any
) -> Iterator[Any]:
    """Yield the function's results in order, with few of them in memory at any time."""
    with ProcessPoolExecutor(workers, initializer=start_worker, initargs=start) as pool:
        running: deque[Future] = deque()
        try:
            for item in items:
                running.append(pool.submit(function, item))
                if len(running) > 2 * workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        except BrokenProcessPool:
            raise Failure(
                "a worker was killed, most likely for lack of memory: use fewer --workers"
            ) from None


def find_documents(folder: Path, workers: int, most: int | None = None) -> dict[str, Sized]:
    """The paths and sizes of every split's documents, each of them read once to check it.
    most: how many of train/ to take."""
    if all((folder / name).is_dir() for name in SPLITS["valid"]):
        raise Failure(f"{folder} has both validation/ and valid/: keep one of them.")
    documents = {}
    for split, names in SPLITS.items():
        paths = sorted(path for name in names for path in (folder / name).glob("*.txt"))
        if split == "train":
            paths = paths[:most]
        results = in_parallel(check_document, paths, workers)
        checked = list(tqdm(results, f"checking {split}", len(paths), unit="doc", disable=None))
        for path, size in checked:
            if not size:
                print(f"{path} is empty and left out.")
        documents[split] = [(path, size) for path, size in checked if size]
        if not documents[split]:
            print(f"{folder / names[0]} has no documents (*.txt): there will be no {split} split.")
    return {split: found for split, found in documents.items() if found}


def encode_split(
    documents: Sized, folder: Path, split: str, workers: int, by: Encoding
) -> dict[str, int]:
    """Write a line of tokens for every document and return the split's counts."""
    counts: Counter[str] = Counter()
    size = sum(size for _, size in documents)
    bar = tqdm(None, f"encoding {split}", size, unit="B", unit_scale=True, disable=None)

    def lines() -> Iterator[np.ndarray]:
        paths = [path for path, _ in documents]
        for line, document in in_parallel(encode_document, paths, workers, type(by), by.path):
            yield line
            counts.update(document)
            bar.update(document["bytes"])

    with bar:
        binarize(folder, split, lines(), dictionary_of(by))
    return dict(counts)
