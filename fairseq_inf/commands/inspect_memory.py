"""fairseq-inf-inspect: look into the memory of a model while it reads a text.

    fairseq-inf-inspect book.txt --path checkpoints/mine/checkpoint_best.pt --data data-bin/mine --output seen
    fairseq-inf-inspect --trace seen/trace --output again

OUTPUT gets index.html, a page to open in a browser; attention, densities, space, reconstruction and
gain, as .png and .svg; attended.csv and phrases.csv; and trace/, all the numbers that these are made
of, from which the second command makes them again.
"""  # noqa: E501

import argparse
import contextlib
import os
import shutil
import time
from pathlib import Path

from fairseq_inf.analysis.figures import FIGURES, draw, held, write_tables
from fairseq_inf.analysis.inspection import inspect
from fairseq_inf.analysis.page import write_page
from fairseq_inf.analysis.report import pyplot
from fairseq_inf.analysis.trace import Trace
from fairseq_inf.commands import add_model, command_line, open_model, text_named
from fairseq_inf.errors import Failure, plain_errors
from fairseq_inf.files import NO_RIGHT, whole_folder
from fairseq_inf.hub import MemoryHub

COMMAND = "fairseq-inf-inspect"
OWN = (  # files that are replaced if they are of an inspection of before
    *(f"{name}{kind}" for name in FIGURES for kind in (".png", ".svg")),
    *("index.html", "attended.csv", "phrases.csv"),
    *("trace/trace.json", "trace/trace.safetensors"),
)


def parse() -> argparse.Namespace:
    epilog = __doc__.partition("\n")[2]
    layout = argparse.RawDescriptionHelpFormatter
    parser = command_line(COMMAND, __doc__, epilog=epilog, formatter_class=layout)
    parser.add_argument("text", nargs="?", help="file in UTF-8, or - for standard input")
    add_model(parser, required=False)
    parser.add_argument("--output", required=True, type=Path, help="folder to make")
    parser.add_argument("--trace", help="in place of a text and a model: a trace of before")
    args = parser.parse_args()
    given = {"TEXT": args.text, "--path": args.path, "--data": args.data}
    for name, value in given.items():
        if args.trace and value:
            parser.error(f"--trace has been read already: leave {name} out")
        if not args.trace and not value and name != "--data":
            parser.error(f"{name} is missing: name it, or a trace by --trace")
    args.named = args.text
    if args.text:
        args.text = text_named(args.text, parser)
    return args


def check_output(output: Path) -> None:
    """A folder that is not there, is empty, or was made by this command before."""
    if output.is_dir() and any(output.iterdir()) and not (output / "trace/trace.json").is_file():
        raise Failure(f"--output {output} is a folder with other things in it: name a new one")
    if output.exists() and not output.is_dir():
        raise Failure(f"--output {output} is a file: name a folder")
    parent = output.absolute().parent
    if not parent.is_dir():
        raise Failure(f"--output {output} cannot be made: {parent} does not exist")
    for folder in (parent, output):
        if folder.is_dir() and not os.access(folder, os.W_OK):
            raise Failure(f"--output {output} cannot be made: {NO_RIGHT.format(folder)}")


def open_hubs(args: argparse.Namespace) -> tuple[MemoryHub, MemoryHub | None]:
    """-> the model, and the same with memories that are sticky where its own are not, or the other
    way; None if its memories cannot be either"""
    hub = open_model(args)
    sticky = hub.cfg.model.get("ltm_sticky")
    if sticky is not None:
        with contextlib.suppress(ValueError):  # settings that exclude the other one
            return hub, open_model(args, ltm_sticky=not sticky)
    return hub, None


def main() -> None:
    args, begin = parse(), time.time()
    with plain_errors(COMMAND):
        check_output(args.output)
        pyplot()  # to learn before the text is read whether it is there
        if args.trace:
            Trace(args.trace)
        if (args.output / "trace").is_dir():
            before = Trace(args.output / "trace").info["text"]
            print(f"{args.output} has the inspection of {before}: its files are replaced")
        with whole_folder(args.output, own=OWN) as folder:
            if args.trace:
                shutil.copytree(args.trace, folder / "trace")
            else:
                hub, other = open_hubs(args)
                name = "the text" if args.named == "-" else args.named
                inspect(hub, args.text, name, folder / "trace", other, progress=True)
            told = show(folder)
    seconds = time.time() - begin
    print(f"{told}\nopen {args.output / 'index.html'} in a browser; it took {seconds:.0f} seconds")


def show(folder: Path) -> str:
    """Make of a trace all that is to be looked at.  -> what to say"""
    trace = Trace(folder / "trace")
    draw(trace, folder)
    if held(trace):
        write_tables(trace, folder)
    write_page(trace, folder / "index.html")
    text, begins, count = trace.info["text"], trace.begins, trace.info["tokens"]
    told = f"{text}: {count:,} token{'s' * (count != 1)}"
    if begins >= count:
        if trace.info["layers"] and not held(trace):
            return f"{told}, too few for anything to have left the short-term memory"
        begins = 0
    on, off = (trace.perplexity(kind, begins) for kind in ("on", "off"))
    if begins:
        told += f"; the memory begins at token {begins:,}, {count - begins:,} have one, of these"
    return f"{told} perplexity {on:.2f}, and {off:.2f} without the long-term memory"


if __name__ == "__main__":
    main()
