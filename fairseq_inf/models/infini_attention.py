"""Infini-attention (Munkhdalai et al., 2024): old keys and values in one matrix a head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fairseq.dataclass import ChoiceEnum

from fairseq_inf.memory import InfiniMemory

from .memory_lm import MemoryConfig, MemoryLM, register
from .settings import setting


@dataclass
class InfiniAttentionConfig(MemoryConfig):
    infini_update: ChoiceEnum(["linear", "delta"]) = setting(
        "linear", "what a key adds: its value, or how far that is from what the memory has for it"
    )


@register("infini_attention_lm", InfiniAttentionConfig, wt103={}, sorting={})
class InfiniAttentionLM(MemoryLM):
    @classmethod
    def build_memory(cls, cfg: Any) -> Callable[[int], InfiniMemory]:
        return lambda number: InfiniMemory(
            cfg.decoder_embed_dim, cfg.decoder_attention_heads, str(cfg.infini_update)
        )
