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
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_inf.errors import plain_errors
from fairseq_inf.modules import LayerState

from .measuring import add_memories, digest_of, documents, load, memories, new_parser, once, parse

# B documents, T tokens of a segment


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


def decoder_of(args: argparse.Namespace, dtype: torch.dtype, **settings: Any) -> tuple[Any, int]:
    """-> decoder, L"""
    hub = load(args.path, args.data, dtype, **settings)
    return hub.model.decoder, hub.length


def show(name: str, found: list[float], *more: str) -> None:
    mean = sum(found) / len(found)
    print(f"{name:<40} {mean:.4f} ", *(f"{x:.4f}" for x in found), *more, flush=True)


def measure(
    args: argparse.Namespace, dtype: torch.dtype, rows: list[tuple[str, dict[str, Any]]]
) -> None:
    texts = documents(args.data, args.split, args.tokens)
    print(f"{len(texts)} documents, tokens {args.context} to {args.tokens} of each, bits a token")
    off = {"stm_length": args.context, "sink_tokens": 0, "ltm_enabled": False}
    host, length = decoder_of(args, dtype, **off)
    file = args.cache or args.path.with_suffix(".worth.jsonl")
    asked = [args.split, args.tokens, args.context, length, dtype, digest_of(host)]
    key = " ".join(map(str, asked))
    sizes = (texts, length, args.context)

    def kept(name: str, compute: Callable[[], tuple[Any, ...]]) -> list[Any]:
        """-> bits of each document, and the rest of what `compute` gives"""

        def means() -> list[Any]:
            out, *more = compute()
            return [out.mean(dim=1).tolist(), *more]

        return once(file, f"{key} {name}", means)

    alone, unit = kept("alone", lambda: with_context(host, *sizes, 0))
    context, _ = kept("context", lambda: with_context(host, *sizes, args.context))
    show("alone", alone)
    show(f"with {args.context} tokens before", context)

    def cost(floats: int, seconds: float) -> str:
        return f"{floats:,} floats, time {seconds / unit:.2f}"

    for text, settings in rows:
        same = {k: v for k, v in settings.items() if k in ("stm_length", "sink_tokens")}
        decoder, _ = decoder_of(args, dtype, **same, ltm_enabled=False)
        name = f"short {decoder.stm_length} {decoder.short_term.sinks}"
        short, seconds, floats = kept(name, partial(streamed, decoder, *sizes))
        show(name, short, cost(floats, seconds))
        decoder, _ = decoder_of(args, dtype, **settings)
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
    add_memories(parser)
    parser.add_argument("--cache", type=Path, help="file of the figures without a memory")
    args, dtype = parse(parser)
    rows = memories(parser, args)
    with plain_errors(parser.prog):
        measure(args, dtype, rows)


if __name__ == "__main__":
    main()
