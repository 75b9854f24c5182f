"""The commands of the installed package, a file each."""

import argparse
import io
import sys
from pathlib import Path
from typing import Any

from fairseq_inf.errors import Failure

BRACKETS = "What is in brackets is what an option is without being given."


def command_line(name: str, text: str, **settings: Any) -> argparse.ArgumentParser:
    """A parser.  text: the module's, which begins "NAME: what it does"."""
    head = text.splitlines()[0].split(": ", 1)[1]
    settings["epilog"] = "\n".join(filter(None, [settings.get("epilog"), BRACKETS]))
    return argparse.ArgumentParser(prog=name, description=head, **settings)


def add_model(parser: argparse.ArgumentParser, required: bool = True) -> None:
    """What commands that read with a model share."""
    parser.add_argument(
        "--path", required=required, help="checkpoint of the model, or the folder of an import"
    )
    parser.add_argument("--data", help="data-bin that it was trained on (the checkpoint's folder)")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")
    parser.add_argument(
        "--weights",
        choices=("float32", "bf16", "int8", "int4"),
        help="bits of a pretrained host's weights: the fewer, the faster (float32)",
    )


def open_model(args: argparse.Namespace, **settings: Any) -> Any:
    """-> MemoryHub of what `add_model` asks for"""
    from fairseq_inf.hub import open_hub

    return open_hub(args.path, args.data, args.cpu, weights=args.weights, **settings)


def text_named(name: str, parser: argparse.ArgumentParser) -> Path | io.TextIOWrapper:
    """A file to read, or - for the standard input, which is read as a file is."""
    if name == "-":
        return io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8-sig", errors="strict")
    if not Path(name).is_file():
        parser.error(f"{name} does not exist or is not a file")
    return Path(name)


def counted(count: int, name: str) -> str:
    """ "1 token is", "2 tokens are\""""
    return f"{count:,} {name} is" if count == 1 else f"{count:,} {name}s are"


def check_least(args: argparse.Namespace, **least: int) -> None:
    """least: of each option what it may be at least, if it is given."""
    for name, bound in least.items():
        value = getattr(args, name)
        if value is not None and value < bound:
            raise Failure(f"--{name.replace('_', '-')} must be at least {bound}, got {value}")


def warn_of_bf16(device: Any) -> None:
    """Where products in bfloat16 are slower than in float32."""
    if device.type == "cpu" and not _multiplies_bf16():
        print(
            "--bf16 is slower here, and not exact: this CPU has no products in bfloat16; leave it "
            "out",
            file=sys.stderr,
        )


def _multiplies_bf16() -> bool:
    try:
        facts = Path("/proc/cpuinfo").read_text()
    except OSError:
        return True  # who knows
    return not facts.startswith("processor") or bool(set(BF16) & set(facts.split()))


BF16 = ("avx512_bf16", "amx_bf16", "bf16")  # as Linux calls it on Intel's, AMD's and Arm's


def check_draws(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """What commands that draw answers share: --topp, --max-tokens, --seed."""
    from fairseq_inf.tasks.prompts import LONGEST

    if args.topp is not None and not 0 < args.topp <= 1:
        parser.error(f"--topp must be above 0 and at most 1, got {args.topp}")
    if not 1 <= args.max_tokens <= LONGEST:
        parser.error(f"--max-tokens must be from 1 to {LONGEST:,}, got {args.max_tokens}")
    if not abs(args.seed) < 2**63:
        parser.error(f"--seed must be a number of 64 bits, got {args.seed}")
