"""What the commands share that measure a pretrained model with memories, one setting beside
another."""

import argparse
import ast
import contextlib
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fairseq.data import Dictionary, data_utils
from torch import Tensor

from fairseq_inf.commands import warn_of_bf16
from fairseq_inf.errors import Failure
from fairseq_inf.hub import MemoryHub, find_checkpoint, from_pretrained


def documents(data: Path, split: str, tokens: int) -> Tensor:
    """The first tokens of each document, and eos before them.  -> B x tokens + 1"""
    dictionary = Dictionary.load(str(data / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(data / split), dictionary)
    if lines is None:
        raise Failure(f"{data} has no split {split}")
    short = [number for number in range(len(lines)) if len(lines[number]) < tokens]
    if short:
        raise Failure(f"document {short[0]} of {split} has fewer than --tokens {tokens}")
    eos = torch.tensor([dictionary.eos()])
    return torch.stack([torch.cat([eos, lines[i][:tokens].long()]) for i in range(len(lines))])


def load(path: Path, data: Path, dtype: torch.dtype, **settings: Any) -> MemoryHub:
    return from_pretrained(str(path.parent), path.name, str(data.resolve()), **settings).to(dtype)


def digest_of(decoder: Any) -> str:
    """Of a host, whatever its memory."""
    weights = decoder.layers[0].inner.weight.detach().float().numpy().tobytes()
    return hashlib.blake2b(weights).hexdigest()[:16]


def once(file: Path, key: str, compute: Callable[[], Any]) -> Any:
    """What does not depend on the long-term memory is kept in a file, a line of JSON each, to which
    several processes may add."""
    for line in file.read_text().splitlines() if file.is_file() else ():
        with contextlib.suppress(ValueError):  # a line that a kill has cut off
            name, value = json.loads(line)
            if name == key:
                return value
    value = compute()
    with file.open("a") as kept:
        kept.write(f"\n{json.dumps([key, value])}\n")
    return value


def new_parser(prog: str, description: str, several: bool = False) -> argparse.ArgumentParser:
    """several: models and texts, by --path again and again and by other options for texts."""
    title, _, text = description.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog, description=f"{title.split(': ')[-1]}\n\n{text}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("data", type=Path, help="data-bin of fairseq-inf-prepare")
    how: dict[str, Any] = {"action": "append"} if several else {}
    add("--path", type=Path, required=True, help="checkpoint with a memory, or its folder", **how)
    add("--split", default=None if several else "valid")
    add("--tokens", type=int, default=8192 if several else 4096, help="of each document")
    add("--context", type=int, default=2048, help="of which so many do not count")
    add("--bf16", action="store_true", help="weights and activations in bfloat16")
    return parser


def add_memories(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--memory", action="append", metavar="OVERRIDES", help="a row each")


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, torch.dtype]:
    """-> arguments, and the dtype that they ask for"""
    args = parser.parse_args()
    logging.disable(logging.INFO)
    several = isinstance(args.path, list)
    try:
        paths = [find_checkpoint(path) for path in (args.path if several else [args.path])]
    except FileNotFoundError as error:
        parser.error(f"--path {error}")
    for path in paths:
        if not path.is_file():
            parser.error(f"--path {path} does not exist")
    args.path = paths if several else paths[0]
    if not 0 < args.context < args.tokens:
        parser.error(f"--context {args.context} must be below --tokens {args.tokens}")
    if args.bf16:
        warn_of_bf16(torch.device("cpu"))
    return args, torch.bfloat16 if args.bf16 else torch.float


def memories(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> list[tuple[str, dict[str, Any]]]:
    """-> each --memory as it was typed, and as a dict"""
    try:
        return [(text, dict(ast.literal_eval(text))) for text in args.memory or ["{}"]]
    except (ValueError, SyntaxError, TypeError):
        parser.error("--memory must be a dict as {'ltm_policy': 'last'}")
