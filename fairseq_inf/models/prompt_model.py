"""A language model as fairseq's generator takes one: an encoder that reads the prompts into the
memory, and a decoder that goes on."""

from typing import Any

import torch
from fairseq import search
from fairseq.models import FairseqIncrementalDecoder
from torch import Tensor, nn

from .decoder import MemoryDecoder
from .generation import Continuation, Opened, Reading, new_reading, read
from .memory_lm import check_numbers


class Nucleus(search.Sampling):
    """fairseq's: tokens are drawn from the likeliest ones that have p together.  Only as many as
    usually do are sorted, which takes most of the time of a small model's token otherwise."""

    USUAL = 4096

    def _sample_topp(self, lprobs: Tensor) -> tuple[Tensor, Tensor]:
        values, indices = lprobs.topk(min(self.USUAL, lprobs.size(2)))
        if values.exp().sum(dim=2).min() < self.sampling_topp:
            return super()._sample_topp(lprobs)
        probs, order = super()._sample_topp(values)
        return probs, indices.gather(2, order)


class PromptReader(nn.Module):
    """The part of an encoder in fairseq's generator: reads the prompts into the memory."""

    def __init__(self, decoder: MemoryDecoder, length: int) -> None:
        super().__init__()
        self.decoder, self.length = decoder, length

    def forward_torchscript(self, net_input: dict[str, Any]) -> dict[str, Reading | Opened]:
        """net_input: src_tokens, src_lengths and, if there is one, the `memory` to go on from, a
        Reading of one row or of as many as the prompts; or an Opened, and no prompts.
        -> {"reading": Reading or Opened}"""
        tokens, lengths = net_input["src_tokens"], net_input["src_lengths"]
        reading = net_input.get("memory")
        if isinstance(reading, Opened):
            return {"reading": reading}
        if reading is None:
            reading = new_reading(self.decoder, len(tokens), self.length)
        elif reading.num_rows != len(tokens):
            reading = reading.rows(torch.zeros_like(lengths))
        return {"reading": read(self.decoder, reading, tokens, lengths)}

    def reorder_encoder_out(
        self, encoder_out: dict[str, Reading | Opened], order: Tensor
    ) -> dict[str, Reading | Opened]:
        same = torch.arange(len(order), device=order.device)
        if all(reading.num_rows == len(order) for reading in encoder_out.values()):
            if torch.equal(order, same):  # an opened one is large
                return encoder_out
        return {name: reading.rows(order) for name, reading in encoder_out.items()}


class PromptContinuer(FairseqIncrementalDecoder):
    """The part of a decoder in fairseq's generator: the first output is that of the prompt's last
    token, whatever the generator's own first token is; each later one follows the last token."""

    def __init__(self, decoder: MemoryDecoder) -> None:
        super().__init__(decoder.dictionary)
        self.decoder = decoder

    def forward(
        self, prev_output_tokens: Tensor, encoder_out: Any = None, incremental_state: Any = None
    ) -> tuple[Tensor, None]:
        if prev_output_tokens.size(1) == 1:
            # one reading a hypothesis from here on
            reading = encoder_out.pop("reading")
            incremental_state["continuation"] = Continuation(self.decoder, reading)
            check_numbers(incremental_state["continuation"].output)
            return incremental_state["continuation"].output.clone(), None
        return incremental_state["continuation"].feed(prev_output_tokens[:, -1]).clone(), None

    def reorder_incremental_state(
        self, incremental_state: dict[str, Any], new_order: Tensor
    ) -> None:
        incremental_state["continuation"].reorder(new_order)


class PromptModel(nn.Module):
    """Encoder and decoder."""

    def __init__(self, model: Any, length: int) -> None:
        super().__init__()
        self.encoder = PromptReader(model.decoder, length)
        self.decoder = PromptContinuer(model.decoder)
        self.get_normalized_probs = model.get_normalized_probs

    def max_decoder_positions(self) -> int:
        return self.decoder.decoder.max_positions()
