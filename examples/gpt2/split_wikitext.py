"""Split WikiText's files into articles: FOLDER/{train,valid,test}/NNNNN.txt.

An article begins with a heading of the first level, ` = Title = `, between blank lines.  The
articles of a split, one after another, are the very text.
"""

import argparse
import re
import sys
from pathlib import Path

from fairseq_inf.errors import plain_errors
from fairseq_inf.files import whole_folder

HEADING = re.compile(r"(?m)^ *\n(?P<heading> = (?!= ).*(?<! =) = \n)(?= *\n)")


def articles(text):
    """The parts of a text that begin with a heading; what stands before the first is its own."""
    begins = [match.start("heading") for match in HEADING.finditer(text)]
    borders = [0, *begins[1:], len(text)]
    return [text[a:b] for a, b in zip(borders, borders[1:], strict=False)]


def find(folder, split):
    for name in (f"wiki.{split}.raw", f"wiki.{split}.tokens"):
        if (folder / name).is_file():
            return folder / name
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("input", type=Path, help="folder with wiki.*.raw or wiki.*.tokens")
    parser.add_argument("output", type=Path, help="folder to make")
    args = parser.parse_args()
    found = {split: find(args.input, split) for split in ("train", "valid", "test")}
    if not any(found.values()):
        sys.exit(f"{args.input} has no wiki.train.raw or wiki.train.tokens, nor of valid or test")
    with plain_errors("split_wikitext"), whole_folder(args.output) as folder:
        for split, path in found.items():
            if path is None:
                print(f"{args.input} has no {split} split")
                continue
            (folder / split).mkdir()
            try:
                parts = articles(path.read_bytes().decode("utf-8"))
            except UnicodeDecodeError:
                sys.exit(f"{path} is not UTF-8: fetch it again")
            for number, part in enumerate(parts):
                (folder / split / f"{number:05}.txt").write_bytes(part.encode("utf-8"))
            print(f"{split}: {len(parts):,} articles")


if __name__ == "__main__":
    main()
