"""GPT-2 (Radford et al., 2019) as the host of a memory."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from fairseq_inf.memory import CompressiveMemory, ContinuousMemory
from fairseq_inf.modules import GPT2Attention
from fairseq_inf.modules.gpt2_attention import slot_bias

from .decoder import MemoryDecoder


class GPT2Decoder(MemoryDecoder):
    """Learned positions, counted from the beginning of each segment; no short-term memory.  What
    a memory adds is zero at first, so that the model starts as GPT-2 does without one."""

    def __init__(self, cfg, dictionary, embed_tokens, build_memory, softmax_cutoff=None):
        super().__init__(cfg, dictionary, embed_tokens, build_memory, softmax_cutoff)
        self.embed_positions = nn.Embedding(cfg.decoder_positions, self.dim)
        # -inf for words of the dictionary that a pretrained GPT-2 does not have
        self.register_buffer("absent", torch.zeros(len(dictionary)))
        hosts = [self.embed_tokens, self.embed_positions]
        for layer in self.layers:
            attention = layer.attention
            hosts += [attention.query, attention.key_value, attention.output]
            hosts += [layer.inner, layer.outer]
        for module in hosts:
            nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
        nn.init.zeros_(self.embed_tokens.weight[dictionary.pad()])
        self.start_memories()
        for layer in self.layers:
            for module in (layer.attention.output, layer.outer):
                nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * len(self.layers)))

    @torch.no_grad()
    def start_memories(self):
        """Reads begin at the newest part of the signal, over a share of it that grows from layer
        to layer, since a fine-tuning is too short to move them there from one place."""
        shares = torch.logspace(math.log10(0.05), math.log10(0.8), len(self.layers)).tolist()
        for layer, share in zip(self.layers, shares, strict=True):
            if isinstance(layer.memory, ContinuousMemory):
                nn.init.zeros_(layer.memory.output.weight)
                mu, var = 1 - min(share, 0.5), share**2
                layer.memory.locate.bias[0] = math.log(mu / (1 - mu))
                layer.memory.locate.bias[1] = math.log(math.expm1(var))

    def build_attention(self, cfg, memory):
        compressive = isinstance(memory, CompressiveMemory)
        heads = cfg.decoder_attention_heads
        return GPT2Attention(self.dim, heads, cfg.attention_dropout, slots=compressive)

    def check_length(self, length):
        most = self.embed_positions.num_embeddings
        if length > most:
            raise ValueError(
                f"a segment of {length} tokens is longer than the {most} positions of this GPT-2: "
                "lower --tokens-per-sample"
            )

    def embed(self, tokens, place):
        self.check_length(tokens.size(1))
        alien = (self.absent[tokens] != 0) & (tokens != self.dictionary.pad())
        if alien.any():
            word = self.dictionary[int(tokens[alien][0])]
            raise ValueError(
                f"the text has {word}, which is not a token of this GPT-2: encode it with "
                "GPT-2's byte pair encoding (fairseq-inf-prepare --bpe gpt2)"
            )
        return self.dropout(self.embed_tokens(tokens) + self.embed_positions(place))

    def head(self, x):
        return F.linear(self.norm(x), self.output_projection.weight, self.absent)

    def distances(self, farthest, nearest):
        return None

    def bias_slots(self, hidden, slots):
        if not slots:
            return hidden
        bias = slot_bias(self.layers[0].attention.num_heads, slots, hidden)
        return hidden + F.pad(bias, (0, hidden.size(-1) - slots))
