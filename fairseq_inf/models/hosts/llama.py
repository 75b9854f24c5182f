"""Llama (Touvron et al., 2023) as the host of a memory."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_inf.models.decoder import WindowConfig
from fairseq_inf.models.settings import setting
from fairseq_inf.modules import DecoderLayer, RMSNorm, RotaryAttention, SlotLine, rotations

from .pretrained import PretrainedDecoder


@dataclass
class LlamaConfig(WindowConfig):
    """SmolLM2-135M, unless told otherwise."""

    decoder_layers: int = setting(30, "number of layers", least=1)
    decoder_embed_dim: int = setting(576, "width of the model, e", least=2)
    decoder_ffn_embed_dim: int = setting(1536, "inner width of the feed-forward nets", least=1)
    decoder_attention_heads: int = setting(9, "attention heads, H", least=1)
    decoder_key_heads: Optional[int] = setting(
        None, "heads of keys and values, which divide those of queries (default: a third of them, "
        "or as many if that is no whole number)", least=1,
    )  # fmt: skip
    dropout: float = setting(
        0.0, "dropout of embeddings and of each block's output", least=0, below=1, kept=False
    )
    decoder_positions: int = setting(
        8192, "the most positions of slots, short-term memory and segment", least=1
    )
    rope_theta: float = setting(100000.0, "base of the rotary positions", least=1e-9)
    norm_eps: float = setting(1e-5, "what is added in the normalization", least=1e-30)
    untie_embeddings: bool = setting(False, "an output projection apart from the embeddings")


class LlamaDecoder(PretrainedDecoder):
    """Rotary positions that end with the segment: its first token is at K + S, and the short-term
    memory right before it, from K on.  The slots of a memory go back from K, `spacing` from one to
    the next, and the K sinks end where the last slot that there is room for is: at 0 .. K - 1
    without slots."""

    name, title = "llama", "Llama"
    Config = LlamaConfig
    encoding = "the tokenizer of the model that was imported"

    @classmethod
    def check(cls, cfg: Any) -> None:
        heads, keys = cfg.decoder_attention_heads, cfg.decoder_key_heads
        if cfg.decoder_embed_dim // heads % 2:
            raise ValueError(
                f"--decoder-embed-dim {cfg.decoder_embed_dim} over --decoder-attention-heads "
                f"{heads} must be even for Llama, which turns pairs"
            )
        if keys is None:
            cfg.decoder_key_heads = keys = heads // 3 if heads % 3 == 0 else heads
        if heads % keys:
            raise ValueError(
                f"--decoder-key-heads {keys} must divide --decoder-attention-heads {heads}"
            )

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, build_memory: Any):
        super().__init__(cfg, dictionary, embed_tokens, build_memory)
        self.theta = cfg.rope_theta
        self.norm = RMSNorm(self.dim, cfg.norm_eps)
        self.output_projection = nn.Linear(self.dim, len(dictionary), bias=False)
        if cfg.untie_embeddings:
            self.initialize(self.output_projection)
        else:
            self.output_projection.weight = embed_tokens.weight
            self.initialize()

    def build_layer(self, cfg: Any, memory: Any) -> DecoderLayer:
        return DecoderLayer(
            self.dim,
            cfg.decoder_ffn_embed_dim,
            memory,
            RotaryAttention(
                self.dim,
                cfg.decoder_attention_heads,
                cfg.decoder_key_heads,
                cfg.attention_dropout,
            ),
            dropout=cfg.dropout,
            activation=F.silu,
            norm=partial(RMSNorm, eps=cfg.norm_eps),
            gated=True,
        )

    def embed(self, tokens: Tensor, place: Tensor) -> Tensor:
        return self.dropout(self.embed_tokens(tokens))

    def positions(
        self, slots: SlotLine, shown: int, queries: int, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._rotations(slots, shown, queries), hidden

    def cache_positions(self, slots: SlotLine, length: int) -> Tensor:
        return self._rotations(slots, self.short_term.size, length)

    def _rotations(self, slots: SlotLine, shown: int, queries: int) -> Tensor:
        """Of slots, the last `shown` of sinks and short-term memory, and queries."""
        like, size, sinks = self.layers[0].inner.weight, self.short_term.size, self.short_term.sinks
        places = torch.arange(size - shown, size + queries, device=like.device).float()
        places[: max(0, shown - size + sinks)] -= slots.reach
        back = sinks + torch.arange(-slots.shown, 0, device=like.device) * slots.spacing
        width = self.layers[0].attention.head_dim
        return rotations(torch.cat([back, places]), width, self.theta, like.dtype)

    def slot_positions(self) -> int:
        if not self.ltm_enabled:
            return 0
        memories = (layer.memory for layer in self.layers if layer.memory is not None)
        return max((math.ceil(x.spacing * x.num_slots) for x in memories), default=0)
