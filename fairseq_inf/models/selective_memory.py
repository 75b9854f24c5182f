"""A transformer that keeps some of its old vectors whole, those that a policy rates highest, and
reads them by its own attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fairseq.dataclass import ChoiceEnum

from fairseq_inf.memory import POLICIES, SelectiveMemory

from .memory_lm import MemoryConfig, MemoryLM, register
from .settings import setting


@dataclass
class SelectiveMemoryConfig(MemoryConfig):
    ltm_slots: int = setting(256, "vectors that are kept, C", least=1)
    ltm_pick: int = setting(
        4, "of so many vectors that leave the short-term memory one is kept; 1: all", least=1
    )
    ltm_policy: ChoiceEnum(list(POLICIES)) = setting(
        "looks", "which one: what self-attention has looked at most from afar, or any"
    )
    ltm_rank: int = setting(
        0, "rank of a learned correction of what is kept, none at first; 0: no such", least=0
    )


@register("selective_memory_lm", SelectiveMemoryConfig, llama={"sink_tokens": 4})
class SelectiveMemoryLM(MemoryLM):
    @classmethod
    def build_memory(cls, cfg: Any) -> Callable[[int], SelectiveMemory]:
        return lambda number: SelectiveMemory(
            cfg.decoder_embed_dim, cfg.ltm_slots, cfg.ltm_pick, str(cfg.ltm_policy), cfg.ltm_rank
        )
