"""fairseq-inf-worth: how much of a long context's worth a memory wins back, book by book.

    fairseq-inf-worth data-bin/smollm2 --path imported/smollm2-slots/checkpoint.pt \\
        --tokens 4096 --memory "{}" --memory "{'ltm_policy': 'last'}"

Each document of the split is a stream of its first --tokens, read in segments of L, and counted
from token --context on.  In bits a token:

    alone     each segment for itself, without anything of those before it
    context   each segment with the --context tokens right before it, anew: a long context
    short     with the short-term memory (and sinks) alone
    memory    with the long-term memory as well; each --memory is a dict of overrides
    share     (short - memory) / (short - context)
    another   as `memory`, but each document is read with the long-term memory of another one: what
              training has taught the model of such texts is in it, what the text said is not

The first two do not depend on a memory, and are kept in a file (--cache, or beside the checkpoint).
Floats are what a stream keeps between two segments; times are those of a token, by that of the host
alone.
"""

import argparse
import ast
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.data import Dictionary, data_utils
from torch import Tensor

from fairseq_inf.errors import Failure, plain_errors
from fairseq_inf.hub import from_pretrained
from fairseq_inf.modules import LayerState

# B documents, T tokens of a segment


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


def bits(x: Tensor, targets: Tensor) -> Tensor:
    """x: what the decoder makes of a segment.  -> B x T"""
    logits = x.float().flatten(0, 1)
    found = F.cross_entropy(logits, targets.flatten(), reduction="none") / math.log(2)
    return found.view_as(targets)


def of_another(decoder: Any, state: Any) -> Any:
    """The state with the long-term memory of another row, and with what goes on to it."""
    short = decoder.short_term

    def roll(x: Tensor) -> Tensor:
        sinks, left, visible = x.split([short.sinks, x.size(1) - short.size, short.length], dim=1)
        return torch.cat([sinks, left.roll(1, dims=0), visible], dim=1)

    layers = [
        LayerState(own.window.map(roll), own.memory.map(lambda x: x.roll(1, dims=0)))
        for own in state.layers
    ]
    return replace(state, layers=tuple(layers))


@torch.inference_mode()
def streamed(
    decoder: Any, texts: Tensor, length: int, begin: int, another: bool = False
) -> tuple[Tensor, float, int]:
    """Segment by segment with all that is remembered.  another: with another document's memory.
    -> B x tokens from `begin` on, seconds a token, floats that a stream keeps"""
    state, found, seconds = decoder.initial_state(len(texts)), [], 0.0
    for at in range(0, texts.size(1) - 1, length):
        targets = texts[:, at + 1 : at + length + 1]
        part, counts = texts[:, at : at + targets.size(1)], at + length > begin
        since, before = time.process_time(), state
        x, state, _ = decoder(part, state, project=counts)
        if counts:
            if another:
                x, _, _ = decoder(part, of_another(decoder, before))
            seconds += time.process_time() - since
            found.append(bits(x, targets))
    out = torch.cat(found, dim=1)
    tensors = [own.window.vectors for own in state.layers]
    if decoder.ltm_enabled:
        tensors = [x for x in state.tensors().values() if x.is_floating_point()]
    floats = sum(x[0].numel() for x in tensors)
    return out[:, out.size(1) - (texts.size(1) - 1 - begin) :], seconds / out.numel(), floats


@torch.inference_mode()
def with_context(
    decoder: Any, texts: Tensor, length: int, begin: int, context: int
) -> tuple[Tensor, float]:
    """Each segment after the `context` tokens before it, from nothing: in a new short-term memory
    that holds them all.  -> B x tokens from `begin` on, seconds a token"""
    found, seconds = [], 0.0
    for at in range(begin, texts.size(1) - 1, length):
        state, end = decoder.initial_state(len(texts)), min(at + length, texts.size(1) - 1)
        if context:
            _, state, _ = decoder(texts[:, at - context : at], state, project=False)
        since = time.process_time()
        x, _, _ = decoder(texts[:, at:end], state)
        seconds += time.process_time() - since
        found.append(bits(x, texts[:, at + 1 : end + 1]))
    out = torch.cat(found, dim=1)
    return out, seconds / out.numel()


def load(path: Path, data: Path, dtype: torch.dtype, **settings: Any) -> tuple[Any, int]:
    """-> decoder, L"""
    hub = from_pretrained(str(path.parent), path.name, str(data.resolve()), **settings)
    return hub.model.to(dtype).decoder, hub.length


def once(file: Path, key: str, compute: Callable[[], Any]) -> list[Any]:
    """What does not depend on the long-term memory, in a file.  -> bits of each document, and the
    rest of what `compute` gives"""
    found = json.loads(file.read_text()) if file.is_file() else {}
    if key not in found:
        out, *more = compute()
        found[key] = [out.mean(dim=1).tolist(), *more]
        file.write_text(json.dumps(found, indent=1) + "\n")
    return found[key]


def new_parser(prog: str, description: str) -> argparse.ArgumentParser:
    title, _, text = description.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog, description=f"{title.split(': ')[-1]}\n\n{text}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("data", type=Path, help="data-bin of fairseq-inf-prepare")
    parser.add_argument("--path", type=Path, required=True, help="checkpoint with a memory")
    parser.add_argument("--split", default="valid")
    parser.add_argument("--tokens", type=int, default=4096, help="of each document")
    parser.add_argument("--context", type=int, default=2048, help="of which so many do not count")
    parser.add_argument("--bf16", action="store_true", help="weights and activations in bfloat16")
    return parser


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, torch.dtype]:
    """-> arguments, and the dtype that they ask for"""
    args = parser.parse_args()
    logging.disable(logging.INFO)
    if not args.path.is_file():
        parser.error(f"--path {args.path} does not exist")
    if not 0 < args.context < args.tokens:
        parser.error(f"--context {args.context} must be below --tokens {args.tokens}")
    return args, torch.bfloat16 if args.bf16 else torch.float


def show(name: str, found: list[float], *more: str) -> None:
    mean = sum(found) / len(found)
    print(f"{name:<40} {mean:.4f} ", *(f"{x:.4f}" for x in found), *more, flush=True)


def measure(
    args: argparse.Namespace, dtype: torch.dtype, rows: list[tuple[str, dict[str, Any]]]
) -> None:
    texts = documents(args.data, args.split, args.tokens)
    print(f"{len(texts)} documents, tokens {args.context} to {args.tokens} of each, bits a token")
    off = {"stm_length": args.context, "sink_tokens": 0, "ltm_enabled": False}
    host, length = load(args.path, args.data, dtype, **off)
    digest = hashlib.blake2b(host.layers[0].inner.weight.detach().float().numpy().tobytes())
    file = args.cache or args.path.with_suffix(".worth.json")
    asked = [args.split, args.tokens, args.context, length, dtype, digest.hexdigest()[:16]]
    key = " ".join(map(str, asked))
    sizes = (texts, length, args.context)
    alone, unit = once(file, f"{key} alone", lambda: with_context(host, *sizes, 0))
    context, _ = once(file, f"{key} context", lambda: with_context(host, *sizes, args.context))
    show("alone", alone)
    show(f"with {args.context} tokens before", context)

    def cost(floats: int, seconds: float) -> str:
        return f"{floats:,} floats, time {seconds / unit:.2f}"

    for text, settings in rows:
        same = {k: v for k, v in settings.items() if k in ("stm_length", "sink_tokens")}
        decoder, _ = load(args.path, args.data, dtype, **same, ltm_enabled=False)
        name = f"short {decoder.stm_length} {decoder.short_term.sinks}"
        short, seconds, floats = once(
            file,
            f"{key} {name}",
            lambda d=decoder: streamed(d, *sizes),  # type: ignore[misc]
        )
        show(name, short, cost(floats, seconds))
        decoder, _ = load(args.path, args.data, dtype, **settings)
        out, seconds, floats = streamed(decoder, *sizes)
        found = out.mean(dim=1).tolist()
        each = [(a - b) / (a - c) for a, b, c in zip(short, found, context, strict=True)]
        share = (sum(short) - sum(found)) / (sum(short) - sum(context))
        shares = f"share {share:.3f} ({' '.join(f'{x:.3f}' for x in each)})"
        show(f"memory {text}", found, shares, cost(floats, seconds))
        if decoder.ltm_enabled and len(texts) > 1:
            out, _, _ = streamed(decoder, *sizes, another=True)
            show("memory of another document", out.mean(dim=1).tolist())


def main() -> None:
    parser = new_parser("fairseq-inf-worth", __doc__ or "")
    parser.add_argument("--memory", action="append", metavar="OVERRIDES", help="a row each")
    parser.add_argument("--cache", type=Path, help="file of the figures without a memory")
    args, dtype = parse(parser)
    try:
        rows = [(text, dict(ast.literal_eval(text))) for text in args.memory or ["{}"]]
    except (ValueError, SyntaxError, TypeError):
        parser.error("--memory must be a dict as {'ltm_policy': 'last'}")
    with plain_errors(parser.prog):
        measure(args, dtype, rows)


if __name__ == "__main__":
    main()
