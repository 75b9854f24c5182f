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
from typing import Any

from fairseq_inf.analysis.report import pyplot
from fairseq_inf.commands import text_named
from fairseq_inf.errors import Failure, plain_errors

COMMAND = "fairseq-inf-inspect"


def parse() -> argparse.Namespace:
    head, _, rest = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description=head.split(": ")[1],
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("text", nargs="?", help="file in UTF-8, or - for standard input")
    parser.add_argument("--path", help="checkpoint of the model")
    parser.add_argument("--data", help="data-bin that it was trained on")
    parser.add_argument("--output", required=True, help="folder to make")
    parser.add_argument("--trace", help="in place of a text and a model: a trace of before")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    args = parser.parse_args()
    given = {"TEXT": args.text, "--path": args.path, "--data": args.data}
    for name, value in given.items():
        if args.trace and value:
            parser.error(f"--trace has been read already: leave {name} out")
        if not args.trace and not value:
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
    if not os.access(parent, os.W_OK):
        raise Failure(f"--output {output} cannot be made: {parent} is not yours")


def open_hubs(args: argparse.Namespace) -> tuple[Any, Any]:
    """-> the model, and the same with memories that are sticky where its own are not, or the other
    way; None if its memories cannot be either"""
    import torch

    from fairseq_inf.models.memory_lm import MemoryLM

    folder, checkpoint = os.path.split(os.path.abspath(args.path))
    hub = MemoryLM.from_pretrained(folder, checkpoint, args.data)
    hubs, sticky = [hub], hub.cfg.model.get("ltm_sticky")
    if sticky is not None:
        with contextlib.suppress(ValueError):  # settings that exclude the other one
            other = MemoryLM.from_pretrained(folder, checkpoint, args.data, ltm_sticky=not sticky)
            hubs.append(other)
    if torch.cuda.is_available() and not args.cpu:
        hubs = [own.cuda() for own in hubs]
    return hub, hubs[1] if len(hubs) > 1 else None


def read(args: argparse.Namespace, folder: Path) -> None:
    """Leave a trace."""
    from fairseq_inf.analysis.inspection import inspect

    hub, other = open_hubs(args)
    name = "the text" if args.named == "-" else args.named
    inspect(hub, args.text, name, folder, other, progress=True)


def main() -> None:
    args = parse()
    output, begin = Path(args.output), time.time()
    partial = output.with_name(output.name + ".partial")
    with plain_errors(COMMAND):
        check_output(output)
        pyplot()  # to learn before the text is read whether it is there
        if args.trace:
            from fairseq_inf.analysis.trace import Trace

            Trace(args.trace)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            if args.trace:
                shutil.copytree(args.trace, partial / "trace")
            else:
                read(args, partial / "trace")
            told = show(partial)
            if output.exists():
                shutil.rmtree(output)
            partial.rename(output)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    seconds = time.time() - begin
    print(f"{told}\nopen {output / 'index.html'} in a browser; it took {seconds:.0f} seconds")


def show(folder: Path) -> str:
    """Make of a trace all that is to be looked at.  -> what to say"""
    from fairseq_inf.analysis.figures import draw, held, write_tables
    from fairseq_inf.analysis.page import write_page
    from fairseq_inf.analysis.trace import Trace

    trace = Trace(folder / "trace")
    draw(trace, folder)
    if held(trace):
        write_tables(trace, folder)
    write_page(trace, folder / "index.html")
    found, text = trace.info["perplexity"], trace.info["text"]
    told = f"{text}: {trace.info['tokens']:,} tokens, perplexity {found['on']:.2f}, and "
    return told + f"{found['off']:.2f} without the long-term memory"


if __name__ == "__main__":
    main()
