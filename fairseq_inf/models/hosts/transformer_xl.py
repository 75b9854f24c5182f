"""Transformer-XL (Dai et al., 2019): relative positions, any norm, adaptive embeddings."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.dataclass import ChoiceEnum
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax, LayerNorm
from torch import Tensor, nn

from fairseq_inf.models.decoder import MemoryDecoder, WindowConfig
from fairseq_inf.models.settings import numbers, setting
from fairseq_inf.modules import DecoderLayer, RelativeAttention, SlotLine, sinusoids

FACTOR = 1  # as the paper: the bands of adaptive embeddings are as wide as the model


def _cutoffs(cfg: Any, dictionary: Any) -> list[int]:
    cutoffs = numbers(cfg.adaptive_cutoff, "--adaptive-cutoff", int)
    if cutoffs != sorted(set(cutoffs)) or cutoffs[0] < 1 or cutoffs[-1] > len(dictionary):
        raise ValueError(
            f"--adaptive-cutoff must rise and stay within the {len(dictionary)} words of the "
            f"dictionary, got {cfg.adaptive_cutoff}"
        )
    return cutoffs


def activation(name: Any) -> Any:
    if name == "gelu_accurate":  # the same function in one pass
        return partial(F.gelu, approximate="tanh")
    return utils.get_activation_fn(name)


@dataclass
class TransformerXLConfig(WindowConfig):
    decoder_post_norm: bool = setting(False, "layer norm after each block and not before it")
    activation_fn: ChoiceEnum(utils.get_available_activation_fns()) = setting(
        "gelu", "activation of the feed-forward nets"
    )
    token_shift: Optional[float] = setting(
        None, "tell each token the one before it: E[w] + s * E[w before], with s learned, a number "
        "a channel, and of this standard deviation at first; it may be 0 (default: not told)",
        least=0,
    )  # fmt: skip
    untie_embeddings: bool = setting(False, "an output projection apart from the embeddings")
    adaptive_cutoff: Optional[str] = setting(
        None, "cutoffs a,b,c of adaptive embeddings and of an adaptive softmax that is tied to them"
    )


class TransformerXLDecoder(MemoryDecoder):
    """Slots stand one after the other before the short-term memory."""

    name, title = "transformer_xl", "Transformer-XL"
    Config = TransformerXLConfig
    # the paper's experiments: appendices D and C.1
    architectures = {
        "wt103": {
            "decoder_layers": 16,
            "decoder_embed_dim": 410,
            "decoder_ffn_embed_dim": 2100,
            "decoder_attention_heads": 10,
            "decoder_post_norm": True,
            "activation_fn": "relu",
            "adaptive_cutoff": "20000,40000,200000",
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

    @classmethod
    def check(cls, cfg: Any) -> None:
        if cfg.adaptive_cutoff and cfg.untie_embeddings:
            raise ValueError(
                "--untie-embeddings is not read with --adaptive-cutoff, which ties the adaptive "
                "softmax to the embeddings: leave it out"
            )

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Module, build_memory: Any):
        super().__init__(cfg, dictionary, embed_tokens, build_memory)
        self.norm = nn.Identity() if cfg.decoder_post_norm else LayerNorm(self.dim)
        if cfg.adaptive_cutoff:
            self.adaptive_softmax = AdaptiveSoftmax(
                len(dictionary),
                self.dim,
                _cutoffs(cfg, dictionary),
                dropout=0,
                factor=FACTOR,
                adaptive_inputs=embed_tokens,
                tie_proj=True,
            )
        else:
            self.output_projection = nn.Linear(self.dim, len(dictionary), bias=False)
            if cfg.untie_embeddings:
                nn.init.normal_(self.output_projection.weight, std=self.dim**-0.5)
            else:
                self.output_projection.weight = embed_tokens.weight

    @classmethod
    def build_embedding(cls, cfg: Any, dictionary: Any) -> nn.Module:
        if not cfg.adaptive_cutoff:
            return super().build_embedding(cfg, dictionary)
        dim, cutoffs = cfg.decoder_embed_dim, _cutoffs(cfg, dictionary)
        return AdaptiveInput(len(dictionary), dictionary.pad(), dim, FACTOR, dim, cutoffs)

    def build_layer(self, cfg: Any, memory: Any) -> DecoderLayer:
        return DecoderLayer(
            self.dim,
            cfg.decoder_ffn_embed_dim,
            memory,
            RelativeAttention(self.dim, cfg.decoder_attention_heads, cfg.attention_dropout),
            dropout=cfg.dropout,
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
        self, slots: SlotLine, shown: int, queries: int, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._distances(slots.shown + shown + queries - 1, -1), hidden

    def cache_positions(self, slots: SlotLine, length: int) -> Tensor:
        return self._distances(slots.shown + self.short_term.size + length - 1, 0)

    def _distances(self, farthest: int, nearest: int) -> Tensor:
        """Encoded distances farthest, farthest - 1 .. nearest."""
        like = self.layers[0].inner.weight
        positions = torch.arange(farthest, nearest - 1, -1, device=like.device)
        return self.dropout(sinusoids(positions, self.dim).to(like.dtype))
