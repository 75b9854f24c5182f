"""A transformer that keeps some of its old keys and values whole, those that a policy rates highest
of all that ever left its window, and reads them by its own attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fairseq.dataclass import ChoiceEnum

from fairseq_inf.memory import POLICIES, PRECISIONS, SelectiveMemory

from .memory_lm import MemoryConfig, MemoryLM, register
from .settings import setting, told_by_flags


@dataclass
class SelectiveMemoryConfig(MemoryConfig):
    ltm_slots: int = setting(256, "keys and values that are kept, C", least=1)
    ltm_policy: str = setting(
        "surprise,looks",
        f"which, by {', '.join(POLICIES)}; of some with commas between them each has the same "
        "share of the places, with strokes (last/looks) of the layers",
    )
    ltm_precision: ChoiceEnum(list(PRECISIONS)) = setting(
        "full", "what they are kept in: as they are, or in 2 or 1 bytes a number"
    )
    ltm_rank: int = setting(
        0, "rank of a learned correction of what is kept, none at first; 0: no such", least=0
    )


@register(
    "selective_memory_lm",
    SelectiveMemoryConfig,
    llama={"sink_tokens": 4, "ltm_slots": 1024, "ltm_policy": "last/surprise,looks"},
)
class SelectiveMemoryLM(MemoryLM):
    @classmethod
    def build_memory(cls, cfg: Any) -> Callable[[int], SelectiveMemory]:
        heads = cfg.decoder_attention_heads
        shared = getattr(cfg, "decoder_key_heads", None) or heads
        width = 2 * shared * (cfg.decoder_embed_dim // heads)

        def build(number: int) -> SelectiveMemory:
            by_depth = cfg.ltm_policy.split("/")
            policy = by_depth[number * len(by_depth) // cfg.decoder_layers]
            with told_by_flags(policy="ltm_policy"):
                return SelectiveMemory(
                    width, cfg.ltm_slots, policy, str(cfg.ltm_precision), cfg.ltm_rank
                )

        return build
