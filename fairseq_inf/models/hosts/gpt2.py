"""GPT-2 (Radford et al., 2019) as the host of a memory."""

from dataclasses import dataclass
from typing import Any

from fairseq.modules import LayerNorm
from torch import Tensor, nn

from fairseq_inf.models.flags import flag, refuse
from fairseq_inf.modules import DecoderLayer, GPT2Attention, slot_bias

from .pretrained import PretrainedDecoder, PretrainedHostConfig
from .transformer_xl import activation


@dataclass
class GPT2HostConfig(PretrainedHostConfig):
    pass


class GPT2Decoder(PretrainedDecoder):
    """Learned positions, counted from the beginning of each segment; no short-term memory."""

    absent: Tensor
    Config = GPT2HostConfig
    title = "GPT-2"
    encoding = "GPT-2's byte pair encoding (fairseq-inf-prepare --bpe gpt2)"
    architectures = {
        size: {
            "decoder_layers": layers,
            "decoder_embed_dim": width,
            "decoder_ffn_embed_dim": 4 * width,
            "decoder_attention_heads": heads,
            "activation_fn": "gelu_accurate",
            "attention_dropout": 0.1,
            "stm_length": 0,
        }
        for size, (layers, width, heads) in {
            "gpt2": (12, 768, 12),
            "gpt2_medium": (24, 1024, 16),
            "gpt2_large": (36, 1280, 20),
            "gpt2_xl": (48, 1600, 25),
        }.items()
    }

    @classmethod
    def refuse(cls, cfg: Any) -> None:
        refuse(
            cfg,
            "GPT-2",
            "decoder_post_norm",
            "untie_embeddings",
            "adaptive_input",
            "adaptive_softmax_cutoff",
        )
        for name in ("stm_length", "sink_tokens"):
            if getattr(cfg, name):
                raise ValueError(
                    f"{flag(name)} must be 0 for GPT-2, got {getattr(cfg, name)}: its positions "
                    "begin anew with each segment, so that keys of earlier ones do not fit"
                )

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
            activation_dropout=cfg.activation_dropout,
            activation=activation(cfg.activation_fn),
            norm=LayerNorm,
        )

    def embed(self, tokens: Tensor, place: Tensor) -> Tensor:
        return self.dropout(self.embed_tokens(tokens) + self.embed_positions(place))

    def positions(self, slots: int, shown: int, queries: int, hidden: Tensor) -> Tensor:
        return hidden

    def slot_bias(self, slots: int, like: Tensor) -> Tensor:
        return slot_bias(self.layers[0].attention.num_heads, slots, like)
