"""Read a text as an evaluation does, and write down what the memories do meanwhile."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from fairseq_inf.errors import Failure
from fairseq_inf.hub import MemoryHub
from fairseq_inf.models.decoder import MemoryDecoder, score_features
from fairseq_inf.models.memory_lm import check_numbers
from fairseq_inf.models.watch import Watch, Written

from .sample import Sample
from .trace import TraceWriter

KEPT = 16  # cells of a density that a trace knows one by one
BINS = 128  # of the histograms
AGES = 2  # bins of the reconstruction error an octave

# T tokens of a segment, H heads


def segments(hub: MemoryHub, pieces: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut the tokens of a text, which come in pieces, as an evaluation does.  -> inputs, of which
    eos is the first, and targets: T each"""
    waiting = torch.tensor([hub.dictionary.eos()])
    for piece in pieces:
        waiting = torch.cat([waiting, piece])
        while len(waiting) > hub.length:
            yield waiting[: hub.length].to(hub.device), waiting[1 : hub.length + 1].to(hub.device)
            waiting = waiting[hub.length :]
    if len(waiting) > 1:
        yield waiting[:-1].to(hub.device), waiting[1:].to(hub.device)


class Reader:
    """A decoder's own reading of a text, a segment at a time."""

    def __init__(self, decoder: MemoryDecoder, memory: bool = True) -> None:
        self.decoder, self.memory = decoder, memory
        self.state = decoder.initial_state(1)
        self.loss = 0.0

    def read(self, inputs: Tensor, targets: Tensor) -> tuple[np.ndarray, dict[int, Written]]:
        """inputs, targets: T.  -> loss of each target, in nats, and what each layer has written"""
        decoder = self.decoder
        with _memory(decoder, self.memory), Watch(decoder) as watch:
            features, self.state, _ = decoder(inputs[None], self.state, head=False)
            loss = -score_features(decoder, features[0], targets)
        check_numbers(-loss)
        self.loss += float(loss.double().sum())
        return loss.cpu().numpy(), watch.layers


@contextmanager
def _memory(decoder: MemoryDecoder, enabled: bool) -> Iterator[None]:
    before = decoder.ltm_enabled
    try:
        decoder.ltm_enabled = enabled
        yield
    finally:
        decoder.ltm_enabled = before


class Errors:
    """How far what a memory gives back is from what it was given, |X^ - X|^2 and |X|^2 by age."""

    def __init__(self) -> None:
        self.sample = Sample()
        self.sums = np.zeros((AGES * 40, 2))

    def follow(self, written: Written, state: Any, position: int) -> None:
        """One write.  position: how many tokens have been read."""
        memory, moves = written.memory, written.moves or []
        numbers, vectors = written.row()
        if len(vectors):
            vectors = memory.stored(vectors[None])[0]
        self.sample.follow(moves[0], numbers, vectors)
        if not len(self.sample.t):
            return
        x = self.sample.vectors().float()
        found = memory.at(state, self.sample.t)[0].float()
        age = (position - self.sample.numbers()).clamp(min=1).double()
        at = (age.log2() * AGES).long().numpy()
        np.add.at(self.sums[:, 0], at, (found - x).square().sum(dim=-1).cpu().numpy())
        np.add.at(self.sums[:, 1], at, x.square().sum(dim=-1).cpu().numpy())


class LayerTrace:
    """What becomes of the memory of one layer, written to a trace."""

    def __init__(self, writer: TraceWriter, layer: int) -> None:
        self.writer, self.layer = writer, layer
        self.name = f"own.{layer}"
        self.errors = Errors()
        self.held = 0
        self.unread = 0  # tokens before the first that could read something
        self.cells = 0
        self.kind: str | None = None
        self.peaks = self.reads = 0.0

    def follow(self, written: Written, state: Any, position: int, tokens: int) -> None:
        """One segment.  tokens: T"""
        move, seen = (written.moves or [])[0], written.seen
        self.held = len(move.new) + (0 if move.forgets else self.held)
        self.errors.follow(written, state, position)
        add_write(self.writer, self.name, written)
        if not self.held or seen is None:
            self.unread += tokens
            self.writer.add(f"{self.name}.histogram", np.zeros((1, BINS), dtype="f4"))
            return
        edges = torch.linspace(0, 1, BINS + 1, dtype=torch.float64)
        masses = seen.mass(edges.to(state_device(state)).float())  # 1 x H x T x D
        histogram = masses.mean(dim=(1, 2)).float().cpu().numpy()
        self.writer.add(f"{self.name}.histogram", histogram)
        self.peaks += float(masses.amax(dim=-1).mean()) * tokens
        self.reads += tokens
        for part, values in seen.parts(KEPT).items():
            rows = values[0].transpose(0, 1).cpu()  # T x H x ..
            kind = torch.int32 if part == "cell" else torch.float16
            if part in ("mu", "sigma"):
                kind = torch.float32
            array = rows.to(kind).numpy()
            if self.unread:
                none = np.zeros((self.unread, *array.shape[1:]), dtype=array.dtype)
                self.writer.add(f"{self.name}.{part}", none)
            self.writer.add(f"{self.name}.{part}", array)
        self.unread = 0
        self.kind = "normal" if hasattr(seen, "mu") else "cells"
        if self.kind == "cells":
            self.cells = seen.masses().size(-1)

    def close(self, state: Any) -> dict[str, Any]:
        """Write what is known at the end.  -> what the trace says of the layer"""
        self.writer.add(f"{self.name}.errors", self.errors.sums)
        for name, x in state.tensors().items():
            if x.is_floating_point():
                self.writer.add(f"{self.name}.state.{name}", x.float().cpu().numpy())
        return {
            "layer": self.layer,
            "density": self.kind,
            "cells": self.cells,
            "kept": min(KEPT, self.cells),
            "focus": self.peaks / max(self.reads, 1),  # the mean of each read's largest bin
        }


def add_write(writer: TraceWriter, name: str, written: Written) -> None:
    """What a write does to all places, and which vectors come with it."""
    writer.add_move(name, (written.moves or [])[0])
    numbers, _ = written.row()
    writer.add(f"{name}.numbers", numbers.cpu().numpy().astype("i4"))


def state_device(state: Any) -> torch.device:
    return next(iter(state.tensors().values())).device


@torch.no_grad()
def inspect(
    hub: MemoryHub,
    text: Path | IO[str],
    name: str,
    folder: Path,
    other: MemoryHub | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Leave a trace of reading the text in a new folder.

    other: the same model with a memory that is sticky where its own is not, or the other way.
    -> what trace.json holds
    """
    decoder = hub.model.decoder
    if all(layer.memory is None for layer in decoder.layers):
        raise Failure("the model has no long-term memory to look into: name one that has by --path")
    writer = TraceWriter(folder)
    readers = {"on": Reader(decoder), "off": Reader(decoder, memory=False)}
    if other is not None:
        readers["other"] = Reader(other.model.decoder)
    traced: dict[int, LayerTrace] = {}
    seen = {"tokens": 0, "segments": 0, "bytes": 0}

    def read(inputs: Tensor, targets: Tensor) -> None:
        position = seen["tokens"]
        for kind, reader in readers.items():
            losses, layers = reader.read(inputs, targets)
            writer.add(f"loss.{kind}", losses)
            for number, written in layers.items():
                if written.moves is None:
                    continue
                if kind == "other":
                    add_write(writer, f"other.{number}", written)
                    continue
                if number not in traced:
                    traced[number] = LayerTrace(writer, number)
                state = decoder.memory_states(reader.state)[number]
                traced[number].follow(written, state, position, len(inputs))
        writer.add("tokens", targets.cpu().numpy().astype("i4"))
        seen["tokens"] += len(targets)
        seen["segments"] += 1

    def spell(words: list[str]) -> None:
        parts = [word.encode("utf-8", "replace") for word in words]
        ends = seen["bytes"] + np.cumsum([len(part) for part in parts])
        writer.add("text", np.frombuffer(b"".join(parts), dtype="u1"))
        writer.add("ends", ends.astype("i8"))
        seen["bytes"] = int(ends[-1])

    pieces = Pieces(hub)

    def spelled() -> Iterator[Tensor]:
        for tokens in hub.pieces(text, progress, name):
            spell([pieces(token) for token in tokens.tolist()])
            yield tokens

    for inputs, targets in segments(hub, spelled()):
        read(inputs, targets)
    states = decoder.memory_states(readers["on"].state)
    layers = [layer.close(states[number]) for number, layer in traced.items()]
    total = seen["tokens"]
    losses = {kind: reader.loss / total for kind, reader in readers.items()}
    info = {
        "text": Path(name).name,
        "model": hub.model.memory_flags,
        "tokens": total,
        "segments": seen["segments"],
        "length": hub.length,
        "short_term": decoder.stm_length,
        "heads": decoder.layers[0].attention.num_heads,
        "bins": BINS,
        "ages": AGES,
        "layers": layers,
        "sticky": [_sticky(hub), None if other is None else _sticky(other)],
        "perplexity": {kind: math.exp(min(loss, 700)) for kind, loss in losses.items()},
    }
    writer.close(info)
    return info


def _sticky(hub: MemoryHub) -> bool:
    return any(
        layer.memory is not None and layer.memory.observes for layer in hub.model.decoder.layers
    )


class Pieces:
    """What each token adds to the text.  Bytes that make a letter only together come with the last
    of them."""

    def __init__(self, hub: MemoryHub) -> None:
        self.hub = hub
        self.before: list[int] = []
        self.pending: list[int] = []
        self.decode: Callable[[list[int]], str] = lambda ids: hub.text_of(torch.tensor(ids))
        self.at_start = True

    def __call__(self, token: int) -> str:
        words = self.hub.dictionary
        if self.hub.encoding is None:
            if token == words.eos():
                self.at_start = True
                return "\n"
            blank = "" if self.at_start else " "
            self.at_start = False
            return blank + words[token]
        if token in (words.eos(), words.bos()):
            return "\n"
        self.pending.append(token)
        head = self.decode(self.before) if self.before else ""
        piece = self.decode(self.before + self.pending)[len(head) :]
        if piece.endswith("\ufffd") and len(self.pending) < 4:
            return ""
        self.before, self.pending = [token], []
        return piece
