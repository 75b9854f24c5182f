"""Infini-attention (Munkhdalai et al., 2024): old keys and values in one matrix a head."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fairseq.dataclass import ChoiceEnum

from fairseq_inf.memory import InfiniMemory

from .flags import setting, told_by_flags
from .memory_lm import MemoryLM, MemoryLMConfig, register


@dataclass
class InfiniAttentionConfig(MemoryLMConfig):
    infini_update: ChoiceEnum(["linear", "delta"]) = setting(  # type: ignore[valid-type]
        "linear", "what a key adds: its value, or how far that is from what the memory has for it"
    )


@register(
    "infini_attention_lm",
    InfiniAttentionConfig,
    wt103={"infini_update": "linear"},
    sorting={"infini_update": "linear"},
    gpt2={"infini_update": "linear"},
)
class InfiniAttentionLM(MemoryLM):
    @classmethod
    def build_memory(cls, cfg: Any) -> Callable[[int], InfiniMemory]:
        def build(number: int) -> InfiniMemory:
            with told_by_flags(update="infini_update"):
                return InfiniMemory(
                    cfg.decoder_embed_dim, cfg.decoder_attention_heads, str(cfg.infini_update)
                )

        return build
