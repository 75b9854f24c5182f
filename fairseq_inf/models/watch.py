"""What the memories of a decoder do with each segment, seen from outside: nothing in a decoder
knows of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_inf.memory import LongTermMemory, Move, Weights
from fairseq_inf.modules import DecoderLayer

from .decoder import MemoryDecoder

# B rows, W vectors that have left the short-term memory


@dataclass
class Written:
    """What a segment has written to the memory of a layer, and what it has seen there."""

    memory: LongTermMemory
    plan: Any
    sinks: int
    numbers: Tensor  # B x W: which vectors of its stream they are
    vectors: Tensor  # B x W x e
    after: Any  # the state
    moves: list[Move] | None  # what the write does to the places of all; None if it has none
    seen: Any = None  # a density, or the Weights of slots

    def row(self, row: int = 0) -> tuple[Tensor, Tensor]:
        """The vectors of a row that its move gives new places.  -> numbers: n, vectors: n x e"""
        kept = self.memory.kept(row, self.after)
        if kept is not None:
            assert self.moves is not None
            return kept + self.sinks, self.memory.at(self.after, self.moves[row].new)[row]
        taken = slice(self.vectors.size(1) - self.plan.counts[row], None)
        return self.numbers[row, taken], self.vectors[row, taken]


class Watch:
    """with Watch(decoder) as watch: after each segment, `watch.layers` has by its number what each
    layer with a memory has done."""

    def __init__(self, decoder: MemoryDecoder) -> None:
        self.decoder = decoder
        self.layers: dict[int, Written] = {}
        self.met: list[Any] = []  # each layer's Encounter, or None

    def __enter__(self) -> Watch:
        self._hooks = [
            self.decoder.register_forward_pre_hook(self._begin),
            self.decoder.register_forward_hook(self._end),
        ]
        for number, layer in enumerate(self.decoder.layers):
            if layer.memory is not None:
                layer.memory.write = partial(self._write, number, layer.memory, layer.memory.write)
                if layer.memory.num_slots:
                    for name in ("attend", "apart"):
                        method = getattr(layer.attention, name)
                        watched = partial(getattr(self, f"_{name}"), number, layer, method)
                        setattr(layer.attention, name, watched)
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for layer in self.decoder.layers:
            for part, names in ((layer.memory, ("write",)), (layer.attention, ("attend", "apart"))):
                for name in names:
                    if part is not None and name in vars(part):
                        delattr(part, name)

    def _begin(self, decoder: Any, args: tuple[Any, ...]) -> None:
        state, short_term = args[1], self.decoder.short_term
        waiting = state.layers[0].window.vectors.size(1) - short_term.size
        place = torch.arange(-waiting, 0)
        numbers = (state.position - short_term.length)[:, None] + place
        self._numbers = numbers.to(state.key.device)
        self.layers = {}

    def _end(self, decoder: Any, args: tuple[Any, ...], output: Any) -> None:
        self.met = output[2]["layers"]
        for number, met in enumerate(self.met):
            if met is not None and met.seen is not None:
                self.layers[number].seen = met.seen

    def _write(
        self, number: int, memory: LongTermMemory, write: Any,
        vectors: Tensor, state: Any, plan: Any, attention: Any, key: Tensor, marks: Tensor,
    ) -> Any:  # fmt: skip
        after, trace = write(vectors, state, plan, attention, key, marks)
        moves = memory.moves(state, after, plan, key)
        sinks = self.decoder.short_term.sinks
        self.layers[number] = Written(memory, plan, sinks, self._numbers, vectors, after, moves)
        return after, trace

    def _attend(
        self, number: int, layer: DecoderLayer, attend: Any,
        query: Tensor, key: Tensor, value: Tensor, positions: Any,
    ) -> Tensor:  # fmt: skip
        if number in self.layers:
            weights = layer.attention.weights(query, key, positions)
            self._saw(number, weights, self.layers[number].plan.slots)
        return attend(query, key, value, positions)

    def _apart(
        self, number: int, layer: DecoderLayer, apart: Any,
        weights: Tensor, values: Tensor, slots: int,
    ) -> Any:  # fmt: skip
        self._saw(number, weights, slots)
        return apart(weights, values, slots)

    @torch.no_grad()
    def _saw(self, number: int, weights: Tensor, shown: int) -> None:
        if shown:
            absent = self.layers[number].memory.num_slots - shown
            weights = F.pad(weights[..., :shown], (absent, 0))
            self.layers[number].seen = Weights(weights.float())
