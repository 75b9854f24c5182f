"""No long-term memory: Transformer-XL (Dai et al., 2019), and each host alone."""

from dataclasses import dataclass

from .memory_lm import MemoryLM, MemoryLMConfig, register


@dataclass
class TransformerXLConfig(MemoryLMConfig):
    pass


@register("transformer_xl_lm", TransformerXLConfig, sorting={"stm_length": 2048})
class TransformerXLLM(MemoryLM):
    has_memory = False
