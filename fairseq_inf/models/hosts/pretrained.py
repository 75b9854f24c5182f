"""What hosts with weights from elsewhere share: their own words, and no more positions than they
have learned."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_inf.models.decoder import MemoryDecoder
from fairseq_inf.modules import BITS, PackedLinear, pack


class PretrainedDecoder(MemoryDecoder):
    """A subclass makes `norm`, which the head begins with, and `output_projection`, and calls
    `initialize` at last."""

    pretrained = True
    encoding: str  # what texts are encoded with, in messages
    norm: nn.Module
    output_projection: Any
    absent: Tensor

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, build_memory: Any):
        super().__init__(cfg, dictionary, embed_tokens, build_memory)
        self.num_positions = cfg.decoder_positions
        # -inf for words of the dictionary that the pretrained model does not have
        self.register_buffer("absent", torch.zeros(len(dictionary)))

    def initialize(self, *others: nn.Module) -> None:
        """Weights as GPT-2 draws them, and silent memories.  others: maps beside the embedding of
        tokens and those of the layers."""
        modules: list[Any] = [self.embed_tokens, *others]
        for layer in self.layers:
            attention = layer.attention
            modules += [attention.query, attention.key_value, attention.output]
            modules += [layer.inner, layer.outer]
            if layer.gate is not None:
                modules.append(layer.gate)
        for module in modules:
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        nn.init.zeros_(self.embed_tokens.weight[self.dictionary.pad()])
        for layer in self.layers:
            for module in (layer.attention.output, layer.outer):
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * len(self.layers)))
        self.start_silent()

    def head(self, x: Tensor) -> Tensor:
        x, words = self.norm(x), self.output_projection
        if isinstance(words, nn.Linear):
            return F.linear(x, words.weight, self.absent)
        return words(x) + self.absent

    def pack(self, weights: str) -> None:
        """For an inference: the host's linear maps in bfloat16 or fewer bits, and all else in
        bfloat16.  weights: of BITS, below 32."""
        tied = self.embed_tokens.weight is self.output_projection.weight
        parts = [part for layer in self.layers for part in (layer, layer.attention)]
        pack(parts, weights)
        self.output_projection = PackedLinear(self.output_projection, max(8, BITS[weights]))
        if tied:
            self.embed_tokens.weight = self.output_projection.weight
        self.bfloat16()

    def check_length(self, length: int) -> None:
        most, stm, sinks = self.num_positions, self.stm_length, self.short_term.sinks
        slots = self.slot_positions()
        if slots + sinks + stm + length > most:
            kept = f" after a short-term memory of {stm}" if stm else ""
            kept += f" after {sinks} sinks" if sinks else ""
            kept += f" after slots over {slots} positions" if slots else ""
            lower = "--tokens-per-sample or --stm-length" if stm else "--tokens-per-sample"
            raise ValueError(
                f"a segment of {length} tokens{kept} is longer than the {most} positions of this "
                f"{self.title}: lower {lower}"
            )

    def slot_positions(self) -> int:
        """How many positions the slots of a memory are spread over."""
        return 0

    def check_tokens(self, tokens: Tensor) -> None:
        if tokens.device.type != "cpu":
            return  # it would be waited for
        alien = (self.absent[tokens] != 0) & (tokens != self.dictionary.pad())
        if alien.any():
            word = self.dictionary[int(tokens[alien][0])]
            raise ValueError(
                f"the text has {word}, which is not a token of this {self.title}: encode it with "
                f"{self.encoding}"
            )
