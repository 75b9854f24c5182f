"""Transformer-XL (Dai et al., 2019): relative positions, any norm, adaptive embeddings."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.dataclass import FairseqDataclass
from fairseq.modules import AdaptiveSoftmax, LayerNorm
from torch import Tensor, nn

from fairseq_inf.models.decoder import MemoryDecoder
from fairseq_inf.modules import DecoderLayer, RelativeAttention, sinusoids


def activation(name: Any) -> Any:
    if name == "gelu_accurate":  # the same function in one pass
        return partial(F.gelu, approximate="tanh")
    return utils.get_activation_fn(name)


@dataclass
class TransformerXLHostConfig(FairseqDataclass):
    pass


class TransformerXLDecoder(MemoryDecoder):
    Config = TransformerXLHostConfig
    # the paper's experiments: appendices D and C.1
    architectures = {
        "wt103": {
            "decoder_layers": 16,
            "decoder_embed_dim": 410,
            "decoder_ffn_embed_dim": 2100,
            "decoder_attention_heads": 10,
            "decoder_post_norm": True,
            "activation_fn": "relu",
            "adaptive_input": True,
            "adaptive_input_factor": 1,
            "adaptive_input_cutoff": "20000,40000,200000",
            "adaptive_softmax_cutoff": "20000,40000,200000",
            "adaptive_softmax_factor": 1,
            "tie_adaptive_weights": True,
            "tie_adaptive_proj": True,
            "stm_length": 150,
        },
        "sorting": {
            "decoder_layers": 3,
            "decoder_embed_dim": 300,
            "decoder_ffn_embed_dim": 300,
            "decoder_attention_heads": 6,
            "dropout": 0.0,
            "stm_length": 1024,
        },
    }

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Module, build_memory: Any):
        super().__init__(cfg, dictionary, embed_tokens, build_memory)
        self.norm = nn.Identity() if cfg.decoder_post_norm else LayerNorm(self.dim)
        if cfg.adaptive_softmax_cutoff:
            self.adaptive_softmax = AdaptiveSoftmax(
                len(dictionary),
                self.dim,
                [int(cutoff) for cutoff in cfg.adaptive_softmax_cutoff.split(",")],
                dropout=cfg.adaptive_softmax_dropout,
                factor=cfg.adaptive_softmax_factor,
                adaptive_inputs=embed_tokens if cfg.tie_adaptive_weights else None,
                tie_proj=cfg.tie_adaptive_proj,
            )
        else:
            self.output_projection = nn.Linear(self.dim, len(dictionary), bias=False)
            if cfg.untie_embeddings or cfg.adaptive_input:
                nn.init.normal_(self.output_projection.weight, std=self.dim**-0.5)
            else:
                self.output_projection.weight = embed_tokens.weight

    def build_layer(self, cfg: Any, memory: Any) -> DecoderLayer:
        return DecoderLayer(
            self.dim,
            cfg.decoder_ffn_embed_dim,
            memory,
            RelativeAttention(self.dim, cfg.decoder_attention_heads, cfg.attention_dropout),
            dropout=cfg.dropout,
            activation_dropout=cfg.activation_dropout,
            activation=activation(cfg.activation_fn),
            normalize_before=not cfg.decoder_post_norm,
            norm=LayerNorm,
        )

    def embed(self, tokens: Tensor, place: Tensor) -> Tensor:
        return self.dropout(self.embed_tokens(tokens) * math.sqrt(self.dim))

    def head(self, x: Tensor) -> Tensor:
        x = self.dropout(self.norm(x))
        return x if self.output_projection is None else self.output_projection(x)

    def positions(
        self, slots: int, shown: int, queries: int, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._distances(slots + shown + queries - 1, -1), hidden

    def cache_positions(self, slots: int, length: int) -> Tensor:
        return self._distances(slots + self.short_term.size + length - 1, 0)

    def _distances(self, farthest: int, nearest: int) -> Tensor:
        """Encoded distances farthest, farthest - 1 .. nearest."""
        like = self.layers[0].inner.weight
        positions = torch.arange(farthest, nearest - 1, -1, device=like.device)
        return self.dropout(sinusoids(positions, self.dim).to(like.dtype))
