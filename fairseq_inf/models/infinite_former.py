"""The ∞-former: a continuous long-term memory of what leaves the short-term memory."""

from dataclasses import dataclass
from typing import Optional

from fairseq.models import register_model

from fairseq_inf.memory import ContinuousMemory

from .memory_lm import GPT2_SIZES, MemoryLM, MemoryLMConfig, architecture, numbers, setting


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


@register_model("infinite_former_lm", dataclass=InfiniteFormerConfig)
class InfiniteFormerLM(MemoryLM):
    memory_settings = (
        "ltm_basis",
        "ltm_widths",
        "ltm_tau",
        "ltm_samples",
        "ltm_ridge",
        "ltm_sticky",
        "ltm_bins",
        "ltm_layers",
        "ltm_threshold",
    )

    @classmethod
    def build_memory(cls, cfg):
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

        def build(number):
            if number not in layers:
                return None
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


architecture("infinite_former_lm", "wt103", ltm_basis=150, ltm_widths="0.01,0.05", ltm_tau=0.5)
architecture("infinite_former_lm", "sorting", ltm_basis=1024, ltm_widths="0.01,0.05", ltm_tau=0.75)
for size in GPT2_SIZES:
    architecture("infinite_former_lm", size, ltm_basis=512, ltm_widths="0.005,0.01", ltm_tau=0.5)
