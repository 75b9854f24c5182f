"""Transformer-XL (Dai et al., 2019): the short-term memory alone."""

from dataclasses import dataclass

from fairseq.models import register_model

from .memory_lm import MemoryLM, MemoryLMConfig, architecture


@dataclass
class TransformerXLConfig(MemoryLMConfig):
    pass


@register_model("transformer_xl_lm", dataclass=TransformerXLConfig)
class TransformerXLLM(MemoryLM):
    pass


architecture("transformer_xl_lm", "wt103")
architecture("transformer_xl_lm", "sorting", stm_length=2048)
