"""Documents of a folder to a fairseq data-bin: found, encoded by several processes, binarized."""

import signal
import subprocess
import sys
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from fairseq_inf.errors import Failure

from .encoding import Encoding

SPLITS = {"train": ["train"], "valid": ["validation", "valid"], "test": ["test"]}
Sized = list[tuple[Path, int]]  # documents with their bytes
encoding: Encoding  # of a worker


def read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise Failure(f"{path} is not UTF-8: convert it or take it away.") from None


def check_document(path: Path) -> tuple[Path, int]:
    """The path with the document's size in bytes, 0 for one without words."""
    return path, path.stat().st_size if read(path).strip() else 0


def encode_document(path: Path) -> tuple[str, dict[str, int]]:
    """The document's line of tokens and its counts."""
    text = read(path)
    line = " ".join(" ".join(part) for part in encoding.encode(text) if part)
    tokens = line.count(" ") + 2  # and </s>
    counts = {"documents": 1, "words": len(text.split()), "tokens": tokens}
    return line, counts | {"bytes": path.stat().st_size}


def start_worker(kind: type[Encoding] | None = None, path: Path | None = None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the work
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if kind is not None and path is not None:
        global encoding
        encoding = kind(path)


def in_parallel(
    function: Callable[[Path], Any], items: Iterable[Path], workers: int, *start: Any
) -> Iterator[Any]:
    """Yield the function's results in order, with few of them in memory at any time."""
    with ProcessPoolExecutor(workers, initializer=start_worker, initargs=start) as pool:
        running: deque[Future] = deque()
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > 2 * workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


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


def encode_split(documents: Sized, output: Path, workers: int, by: Encoding) -> dict[str, int]:
    """Write a line of tokens for every document and return the split's counts."""
    counts: Counter[str] = Counter()
    size = sum(size for _, size in documents)
    bar = tqdm(None, f"encoding {output.name}", size, unit="B", unit_scale=True, disable=None)
    with bar, open(output, "w", encoding="utf-8", newline="\n") as file:
        paths = [path for path, _ in documents]
        for line, document in in_parallel(encode_document, paths, workers, type(by), by.path):
            file.write(line + "\n")
            counts.update(document)
            bar.update(document["bytes"])
    return dict(counts)


def binarize(counts: dict[str, dict[str, int]], folder: Path, data: Path, workers: int) -> None:
    """Run fairseq-preprocess on the folder's text and check that all of it arrived."""
    print("binarizing with fairseq-preprocess ...", flush=True)
    command = [sys.executable, "-m", "fairseq_cli.preprocess", "--only-source"]
    command += ["--srcdict", f"{folder / 'dict.txt'}", "--destdir", f"{data}"]
    command += ["--workers", str(workers)]
    for split in counts:
        command += [f"--{split}pref", f"{folder / split}"]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        reason = (run.stdout.strip().splitlines() or ["no message"])[-1]
        raise Failure(f"fairseq-preprocess failed with code {run.returncode}: {reason}")
    Path(data, "preprocess.log").unlink()
    for split, count in counts.items():
        with open(data / f"{split}.idx", "rb") as index:
            index.seek(18)  # behind the format's name, its version and the type of the tokens
            sizes = array("i")
            sizes.fromfile(index, int.from_bytes(index.read(8), "little"))
        if (len(sizes), sum(sizes)) != (count["documents"], count["tokens"]):
            raise Failure(f"fairseq-preprocess did not keep all text of {split}: use --workers 1.")
