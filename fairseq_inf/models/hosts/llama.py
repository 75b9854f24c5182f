"""Llama (Touvron et al., 2023) as the host of a memory."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_inf.models.flags import flag, refuse, setting
from fairseq_inf.modules import DecoderLayer, RMSNorm, RotaryAttention, rotations

from .pretrained import PretrainedDecoder, PretrainedHostConfig


@dataclass
class LlamaHostConfig(PretrainedHostConfig):
    decoder_key_heads: Optional[int] = setting(
        None, "heads of keys and values, for Llama (default: as many as of queries)"
    )
    rope_theta: float = setting(10000.0, "base of the rotary positions, for Llama")
    norm_eps: float = setting(1e-5, "what is added in the normalization, for Llama")
    slot_spacing: float = setting(
        0.0, "positions from one slot of a memory to the next, back from the short-term memory, "
        "for Llama; 0: all at the first", before=0.0,
    )  # fmt: skip


class LlamaDecoder(PretrainedDecoder):
    """Rotary positions that end with the segment: its first token is at K + S, the short-term
    memory right before it, and the sinks at 0 .. K - 1.  The slots of a memory are at 0, or go back
    from there, `slot_spacing` from one to the next."""

    Config = LlamaHostConfig
    memory_fields = ("decoder_attention_heads", "rope_theta", "norm_eps", "slot_spacing")
    title = "Llama"
    encoding = "the tokenizer of the model that was imported"
    architectures = {
        "llama": {  # SmolLM2-135M
            "decoder_layers": 30,
            "decoder_embed_dim": 576,
            "decoder_ffn_embed_dim": 1536,
            "decoder_attention_heads": 9,
            "decoder_key_heads": 3,
            "decoder_positions": 8192,
            "rope_theta": 100000.0,
            "norm_eps": 1e-5,
            "dropout": 0.0,
            "stm_length": 256,
        }
    }

    @classmethod
    def refuse(cls, cfg: Any) -> None:
        refuse(cfg, "Llama", "decoder_post_norm", "adaptive_input", "adaptive_softmax_cutoff")
        if str(cfg.activation_fn) != "gelu":  # the default, which stands for none given
            raise ValueError("--activation-fn is not for Llama, which has SiLU: leave it out")
        heads, keys = cfg.decoder_attention_heads, cfg.decoder_key_heads
        if cfg.decoder_embed_dim // heads % 2:
            raise ValueError(
                f"--decoder-embed-dim {cfg.decoder_embed_dim} over --decoder-attention-heads "
                f"{heads} must be even for Llama, which turns pairs"
            )
        if keys is not None and (keys < 1 or heads % keys):
            raise ValueError(
                f"--decoder-key-heads {keys} must divide --decoder-attention-heads {heads}"
            )
        for name in ("rope_theta", "norm_eps"):
            if not getattr(cfg, name) > 0:
                raise ValueError(f"{flag(name)} must be above 0, got {getattr(cfg, name)}")
        if not cfg.slot_spacing >= 0:
            raise ValueError(f"--slot-spacing must be at least 0, got {cfg.slot_spacing}")

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, build_memory: Any):
        super().__init__(cfg, dictionary, embed_tokens, build_memory)
        self.theta, self.slot_spacing = cfg.rope_theta, cfg.slot_spacing
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
            activation_dropout=cfg.activation_dropout,
            activation=F.silu,
            norm=partial(RMSNorm, eps=cfg.norm_eps),
            gated=True,
        )

    def embed(self, tokens: Tensor, place: Tensor) -> Tensor:
        return self.dropout(self.embed_tokens(tokens))

    def positions(
        self, slots: int, shown: int, queries: int, hidden: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self._rotations(slots, shown, queries), hidden

    def cache_positions(self, slots: int, length: int) -> Tensor:
        return self._rotations(slots, self.short_term.size, length)

    def _rotations(self, slots: int, shown: int, queries: int) -> Tensor:
        """Of the slots, back from 0, then of K + S - shown .. K + S + queries - 1."""
        like, kept = self.layers[0].inner.weight, self.short_term.size
        places = torch.arange(kept - shown, kept + queries, device=like.device)
        back = torch.arange(-slots, 0, device=like.device) * self.slot_spacing
        width = self.layers[0].attention.head_dim
        return rotations(torch.cat([back, places]), width, self.theta, like.dtype)

    def slot_positions(self) -> int:
        most = max((x.memory.num_slots for x in self.layers if x.memory is not None), default=0)
        return math.ceil(self.slot_spacing * most)
