"""Write the source of Python's standard library as a folder of documents.

One document a module, named after the module, in train/, validation/ and test/
(about 90, 5 and 5 percent), the layout that fairseq-inf-prepare reads. A module's split
depends on its name alone, so that it is the same in every run and Python version.
"""

import argparse
import hashlib
import sys
import sysconfig
from pathlib import Path

from fairseq_inf.errors import plain_errors
from fairseq_inf.files import whole_folder

TEST_FOLDERS = {"test", "tests", "idle_test"}
SMALLEST_MODULE = 200  # bytes


def split_of(module):
    """The split that a module belongs to, by a hash of its dotted name."""
    bucket = int(hashlib.sha256(module.encode()).hexdigest(), 16) % 20
    return {0: "validation", 1: "test"}.get(bucket, "train")


def modules(stdlib):
    """Pairs of dotted name and text of the library's modules, sorted by name."""
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).with_suffix("").parts
        if TEST_FOLDERS.intersection(parts[:-1]) or path.stat().st_size < SMALLEST_MODULE:
            continue
        if not all(part.isidentifier() for part in parts):  # site-packages, the build's own files
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # a few modules declare another encoding
            continue
        yield ".".join(parts), text


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="folder to write, new or empty")
    output = parser.parse_args().output
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    counts = {split: [0, 0] for split in ("train", "validation", "test")}
    with plain_errors("stdlib_corpus"), whole_folder(output) as folder:
        for split in counts:
            (folder / split).mkdir()
        for name, text in modules(stdlib):
            split, written = split_of(name), text.encode()
            (folder / split / f"{name}.txt").write_bytes(written)
            counts[split][0] += 1
            counts[split][1] += len(written)
        if not counts["train"][0]:
            sys.exit(f"{stdlib} holds no modules: run this with a Python that has its source.")
    for split, (documents, size) in counts.items():
        print(f"{split:10} {documents:4} modules {size / 1e6:6.2f} MB")


if __name__ == "__main__":
    main()
