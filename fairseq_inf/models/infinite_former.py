"""The ∞-former: a continuous long-term memory of what leaves the short-term memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

from fairseq_inf.memory import ContinuousMemory

from .flags import numbers, setting, told_by_flags
from .memory_lm import MemoryLM, MemoryLMConfig, register


@dataclass
class InfiniteFormerConfig(MemoryLMConfig):
    ltm_basis: int = setting(256, "basis functions of the long-term memory, N")
    ltm_widths: str = setting(
        "0.01,0.05", "widths of the basis functions, which share them evenly; auto: 2/N,8/N"
    )
    ltm_tau: float = setting(0.5, "share of the signal that the past is contracted to, in ]0,1[")
    ltm_samples: Optional[int] = setting(None, "samples of the past at a write, M (default: N)")
    ltm_ridge: float = setting(0.5, "penalty of the ridge regression")
    ltm_sticky: bool = setting(False, "sample the past where the last segment looked at it")
    ltm_bins: int = setting(128, "bins of the histogram of sticky memories, D")
    ltm_layers: Optional[str] = setting(
        None, "layers with a long-term memory, 0,1,.. (default: all)"
    )
    ltm_threshold: int = setting(0, "forget everything after this many vectors; 0 for never")


@register(
    "infinite_former_lm",
    InfiniteFormerConfig,
    wt103={"ltm_basis": 150, "ltm_widths": "0.01,0.05", "ltm_tau": 0.5},
    sorting={"ltm_basis": 1024, "ltm_widths": "0.01,0.05", "ltm_tau": 0.75},
    gpt2={"ltm_basis": 512, "ltm_widths": "0.005,0.01", "ltm_tau": 0.5},
)
class InfiniteFormerLM(MemoryLM):
    @classmethod
    def build_memory(cls, cfg: Any) -> Callable[[int], ContinuousMemory | None]:
        if cfg.ltm_basis < 1:
            raise ValueError(
                f"--ltm-basis must be at least 1, got {cfg.ltm_basis}: "
                "the model without a long-term memory is --arch transformer_xl_lm, or gpt2_lm"
            )
        if cfg.ltm_widths == "auto":
            # each width has N/2 centres, 2/N apart
            widths = [2 / cfg.ltm_basis, 8 / cfg.ltm_basis]
        else:
            widths = numbers(cfg.ltm_widths, "--ltm-widths (auto, or 0.01,0.05)", float)
        layers = set(range(cfg.decoder_layers))
        if cfg.ltm_layers is not None:
            chosen = set(numbers(cfg.ltm_layers, "--ltm-layers", int))
            if not chosen <= layers:
                raise ValueError(
                    f"--ltm-layers {cfg.ltm_layers} names a layer that is not among the "
                    f"{cfg.decoder_layers} layers, which count from 0"
                )
            layers = chosen

        def build(number: int) -> ContinuousMemory | None:
            if number not in layers:
                return None
            names = ("widths", "tau", "samples", "ridge", "sticky", "bins", "threshold")
            with told_by_flags(num_basis="ltm_basis", **{name: f"ltm_{name}" for name in names}):
                return ContinuousMemory(
                    cfg.decoder_embed_dim,
                    cfg.decoder_attention_heads,
                    cfg.ltm_basis,
                    widths,
                    tau=cfg.ltm_tau,
                    samples=cfg.ltm_samples,
                    ridge=cfg.ltm_ridge,
                    sticky=cfg.ltm_sticky,
                    bins=cfg.ltm_bins,
                    threshold=cfg.ltm_threshold,
                    seed=cfg.seed * 1000 + number,
                )

        return build
