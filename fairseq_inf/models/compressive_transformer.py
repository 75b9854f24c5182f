"""The compressive transformer (Rae et al., 2019): old vectors, a few to a slot."""

from dataclasses import dataclass

from fairseq.dataclass import ChoiceEnum
from fairseq.models import register_model

from fairseq_inf.memory import CompressiveMemory

from .memory_lm import GPT2_SIZES, MemoryLM, MemoryLMConfig, architecture, setting


@dataclass
class CompressiveTransformerConfig(MemoryLMConfig):
    cmem_length: int = setting(256, "slots of the compressed memory, C")
    compression_rate: int = setting(4, "vectors that go into one slot, c")
    compression: ChoiceEnum(["conv", "mean", "max"]) = setting(
        "conv", "how c vectors become one: a learned convolution, or pooling"
    )


@register_model("compressive_transformer_lm", dataclass=CompressiveTransformerConfig)
class CompressiveTransformerLM(MemoryLM):
    memory_settings = ("cmem_length", "compression_rate", "compression")

    @classmethod
    def build_memory(cls, cfg):
        return lambda number: CompressiveMemory(
            cfg.decoder_embed_dim, cfg.cmem_length, cfg.compression_rate, str(cfg.compression)
        )


architecture("compressive_transformer_lm", "wt103", cmem_length=150, compression_rate=4)
architecture("compressive_transformer_lm", "sorting", cmem_length=1024, compression_rate=6)
for size in GPT2_SIZES:
    architecture("compressive_transformer_lm", size, cmem_length=512, compression_rate=4)
