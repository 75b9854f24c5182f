"""A transformer that keeps some of its old keys and values whole, those that a policy rates highest
of all that ever left its window, and reads them by its own attention."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fairseq.dataclass import ChoiceEnum

from fairseq_inf.memory import POLICIES, PRECISIONS, SelectiveMemory

from .memory_lm import MemoryConfig, MemoryLM, register
from .settings import numbers, setting, told_by_flags


@dataclass
class SelectiveMemoryConfig(MemoryConfig):
    ltm_slots: str = setting(
        "256",
        "keys and values that a layer keeps, C; with strokes between them (256/512) of equal parts "
        "of the layers, 0 for none",
    )
    ltm_policy: str = setting(
        "surprise,looks",
        f"which, by {', '.join(POLICIES)}; of some with commas between them each has the same "
        "share of the places; with strokes (last/looks) of equal parts of the layers",
    )
    ltm_precision: ChoiceEnum(list(PRECISIONS)) = setting(
        "full", "what they are kept in: as they are, or in 2 or 1 bytes a number"
    )
    ltm_rank: int = setting(
        0, "rank of a learned correction of what is kept, none at first; 0: no such", least=0
    )


LLAMA = {  # by sixths of the layers
    "sink_tokens": 4,
    "ltm_slots": "0/768/768/2048/2048/512",  # 1,024 in the mean
    "ltm_policy": "last/surprise,last/surprise,last/"
    "surprise,looks,looks/surprise,looks,looks/looks",
    "ltm_precision": "int8",
}


@register("selective_memory_lm", SelectiveMemoryConfig, llama=LLAMA)
class SelectiveMemoryLM(MemoryLM):
    @classmethod
    def build_memory(cls, cfg: Any) -> Callable[[int], SelectiveMemory | None]:
        heads = cfg.decoder_attention_heads
        shared = getattr(cfg, "decoder_key_heads", None) or heads
        width = 2 * shared * (cfg.decoder_embed_dim // heads)
        policies = str(cfg.ltm_policy).split("/")
        slots = numbers(str(cfg.ltm_slots).replace("/", ","), "--ltm-slots", int)
        if min(slots) < 0 or not max(slots):
            raise ValueError(f"--ltm-slots must be at least 1, or 0 in some layers, got {slots}")

        def build(number: int) -> SelectiveMemory | None:
            def here(parts: list) -> Any:
                return parts[number * len(parts) // cfg.decoder_layers]

            if not here(slots):
                return None
            with told_by_flags(policy="ltm_policy"):
                return SelectiveMemory(
                    width, here(slots), here(policies), str(cfg.ltm_precision), cfg.ltm_rank
                )

        return build
