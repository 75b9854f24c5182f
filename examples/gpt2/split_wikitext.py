"""Split WikiText's files into articles: FOLDER/{train,valid,test}/NNNNN.txt.

An article begins with a heading of the first level, ` = Title = `, between blank lines.  The
articles of a split, one after another, are the very text.
"""

import argparse
import re
import shutil
import sys
import tempfile
from pathlib import Path

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
    if args.output.exists():
        sys.exit(f"{args.output} exists already: remove it, or name another folder")
    parent = args.output.absolute().parent
    scratch = None
    try:
        parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{args.output.name}.", dir=parent))
        for split, path in found.items():
            if path is None:
                print(f"{args.input} has no {split} split")
                continue
            (scratch / split).mkdir()
            parts = articles(path.read_bytes().decode("utf-8"))
            for number, part in enumerate(parts):
                (scratch / split / f"{number:05}.txt").write_bytes(part.encode("utf-8"))
            print(f"{split}: {len(parts):,} articles")
        scratch.chmod(0o755)
        scratch.rename(args.output)
    except UnicodeDecodeError:
        sys.exit(f"{path} is not UTF-8: fetch it again")
    except OSError as error:
        sys.exit(f"{args.output} cannot be written: {error.strerror}")
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
