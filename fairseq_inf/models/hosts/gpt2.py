"""GPT-2 (Radford et al., 2019) as the host of a memory."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.nn.functional as F
from fairseq.modules import LayerNorm
from torch import Tensor, nn

from fairseq_inf.models.decoder import DecoderConfig
from fairseq_inf.models.settings import setting
from fairseq_inf.modules import DecoderLayer, GPT2Attention, SlotLine, slot_bias

from .pretrained import PretrainedDecoder


@dataclass
class GPT2Config(DecoderConfig):
    """GPT-2 small, unless told otherwise."""

    decoder_layers: int = setting(12, "number of layers", least=1)
    decoder_embed_dim: int = setting(768, "width of the model, e", least=2)
    decoder_ffn_embed_dim: int = setting(3072, "inner width of the feed-forward nets", least=1)
    decoder_attention_heads: int = setting(12, "attention heads, H", least=1)
    attention_dropout: float = setting(
        0.1, "dropout of the attention weights", least=0, below=1, kept=False
    )
    decoder_positions: int = setting(
        1024, "the most positions of slots, short-term memory and segment", least=1
    )


class GPT2Decoder(PretrainedDecoder):
    """Learned positions, counted from the beginning of each segment, so that keys of earlier ones
    do not fit: no short-term memory, and no sinks.  Slots have a bias by their age."""

    name, title = "gpt2", "GPT-2"
    Config = GPT2Config
    encoding = "GPT-2's byte pair encoding (fairseq-inf-prepare --bpe gpt2)"

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, build_memory: Any):
        super().__init__(cfg, dictionary, embed_tokens, build_memory)
        self.norm = LayerNorm(self.dim)
        self.output_projection = nn.Linear(self.dim, len(dictionary), bias=False)
        self.output_projection.weight = embed_tokens.weight
        self.embed_positions = nn.Embedding(cfg.decoder_positions, self.dim)
        self.initialize(self.embed_positions)

    def build_layer(self, cfg: Any, memory: Any) -> DecoderLayer:
        return DecoderLayer(
            self.dim,
            cfg.decoder_ffn_embed_dim,
            memory,
            GPT2Attention(self.dim, cfg.decoder_attention_heads, cfg.attention_dropout),
            dropout=cfg.dropout,
            activation=partial(F.gelu, approximate="tanh"),
            norm=LayerNorm,
        )

    def embed(self, tokens: Tensor, place: Tensor) -> Tensor:
        return self.dropout(self.embed_tokens(tokens) + self.embed_positions(place))

    def positions(self, slots: SlotLine, shown: int, queries: int, hidden: Tensor) -> Tensor:
        return hidden

    def slot_bias(self, slots: int, like: Tensor) -> Tensor:
        return slot_bias(self.layers[0].attention.num_heads, slots, like)
