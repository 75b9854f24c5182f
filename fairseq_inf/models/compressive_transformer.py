"""The compressive transformer (Rae et al., 2019): old vectors, a few to a slot."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fairseq_inf.memory import CompressiveMemory

from .memory_lm import MemoryConfig, MemoryLM, register
from .settings import setting


@dataclass
class CompressiveTransformerConfig(MemoryConfig):
    cmem_length: int = setting(256, "slots of the compressed memory, C", least=1)
    compression_rate: int = setting(4, "vectors that go into one slot, c", least=1)


@register(
    "compressive_transformer_lm",
    CompressiveTransformerConfig,
    wt103={"cmem_length": 150},
    sorting={"cmem_length": 1024, "compression_rate": 6},
    gpt2={"cmem_length": 512},
)
class CompressiveTransformerLM(MemoryLM):
    @classmethod
    def build_memory(cls, cfg: Any) -> Callable[[int], CompressiveMemory]:
        return lambda number: CompressiveMemory(
            cfg.decoder_embed_dim, cfg.cmem_length, cfg.compression_rate
        )
