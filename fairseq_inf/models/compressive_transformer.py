"""The compressive transformer (Rae et al., 2019): old vectors, a few to a slot."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fairseq.dataclass import ChoiceEnum

from fairseq_inf.memory import CompressiveMemory

from .flags import setting, told_by_flags
from .memory_lm import MemoryLM, MemoryLMConfig, register


@dataclass
class CompressiveTransformerConfig(MemoryLMConfig):
    cmem_length: int = setting(256, "slots of the compressed memory, C")
    compression_rate: int = setting(4, "vectors that go into one slot, c")
    compression: ChoiceEnum(["conv", "mean", "max"]) = setting(
        "conv", "how c vectors become one: a learned convolution, or pooling"
    )


@register(
    "compressive_transformer_lm",
    CompressiveTransformerConfig,
    wt103={"cmem_length": 150, "compression_rate": 4},
    sorting={"cmem_length": 1024, "compression_rate": 6},
    gpt2={"cmem_length": 512, "compression_rate": 4},
)
class CompressiveTransformerLM(MemoryLM):
    @classmethod
    def build_memory(cls, cfg: Any) -> Callable[[int], CompressiveMemory]:
        def build(number: int) -> CompressiveMemory:
            with told_by_flags(length="cmem_length", rate="compression_rate"):
                return CompressiveMemory(
                    cfg.decoder_embed_dim, cfg.cmem_length, cfg.compression_rate,
                    str(cfg.compression),
                )  # fmt: skip

        return build
