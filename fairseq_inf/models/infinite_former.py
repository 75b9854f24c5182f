"""The ∞-former: a continuous long-term memory of what leaves the short-term memory."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum

from fairseq_inf.memory import ContinuousMemory, GibbsMemory, SignalMemory, SlotsOfSignal

from .flags import numbers, setting, told_by_flags
from .memory_lm import MemoryLM, MemoryLMConfig, register

logger = logging.getLogger(__name__)


@dataclass
class InfiniteFormerConfig(MemoryLMConfig):
    ltm_basis: int = setting(256, "basis functions of the long-term memory, N")
    ltm_widths: str = setting(
        "auto", "widths of the basis functions, which share them evenly; auto: one of 1/N"
    )
    ltm_tau: Optional[float] = setting(
        None, "share of the signal that the past is contracted to (default: 0.5); "
        "of a uniform schedule its ceiling (default: none)",
    )  # fmt: skip
    ltm_samples: Optional[int] = setting(
        None,
        "samples of the past at a write, M (default: N, or 2N if the schedule is not constant)",
    )
    ltm_ridge: float = setting(0.5, "penalty of the ridge regression")
    ltm_sticky: bool = setting(False, "sample the past where the last segment looked at it")
    ltm_bins: int = setting(128, "bins of the histogram of sticky memories, D")
    ltm_layers: Optional[str] = setting(
        None, "layers with a long-term memory, 0,1,.. (default: all)"
    )
    ltm_threshold: int = setting(0, "forget everything after this many vectors; 0 for never")
    ltm_schedule: ChoiceEnum(["constant", "uniform", "logarithmic"]) = setting(
        "uniform", "how the past is contracted: to tau at each write, as the paper does; so that "
        "all of it has the same room; or room in proportion to 1 / age", before="constant",
    )  # fmt: skip
    ltm_oldest: int = setting(
        1_000_000, "age in tokens that a logarithmic schedule loses", before=1_000_000
    )
    ltm_density: ChoiceEnum(["gaussian", "gibbs", "host"]) = setting(
        "gibbs", "how a query reads: through one Gaussian; exp(q . k(t)) over all of time; or as "
        "further keys of the host's own attention", before="gaussian",
    )  # fmt: skip
    ltm_points: Optional[int] = setting(
        None, "points of the signal that a Gibbs density is over, or that the host's attention "
        "reads, D (default: N)", before=None,
    )  # fmt: skip
    ltm_gain: float = setting(
        0.1, "how loud a Gibbs memory is at first, by head; it is learned", before=0.1
    )


PAPER = {"ltm_schedule": "constant", "ltm_density": "gaussian"}


@register(
    "infinite_former_lm",
    InfiniteFormerConfig,
    wt103={"ltm_basis": 150, "ltm_widths": "0.01,0.05", "ltm_tau": 0.5, **PAPER},
    sorting={"ltm_basis": 1024, "ltm_widths": "0.01,0.05", "ltm_tau": 0.75, **PAPER},
    gpt2={"ltm_basis": 512, "ltm_widths": "0.005,0.01", "ltm_tau": 0.5, **PAPER},
)
class InfiniteFormerLM(MemoryLM):
    @classmethod
    def build_memory(cls, cfg: Any) -> Callable[[int], SignalMemory | None]:
        if cfg.ltm_basis < 1:
            raise ValueError(
                f"--ltm-basis must be at least 1, got {cfg.ltm_basis}: "
                "the model without a long-term memory is --arch transformer_xl_lm, or gpt2_lm"
            )
        if cfg.ltm_widths == "auto":
            widths = [1 / cfg.ltm_basis]
        else:
            widths = numbers(cfg.ltm_widths, "--ltm-widths (auto, or 0.01,0.05)", float)
        if cfg.ltm_schedule == "uniform" and cfg.ltm_tau is not None:
            logger.info(f"--ltm-tau {cfg.ltm_tau} is the ceiling of the uniform schedule")
        layers = set(range(cfg.decoder_layers))
        if cfg.ltm_layers is not None:
            chosen = set(numbers(cfg.ltm_layers, "--ltm-layers", int))
            if not chosen <= layers:
                raise ValueError(
                    f"--ltm-layers {cfg.ltm_layers} names a layer that is not among the "
                    f"{cfg.decoder_layers} layers, which count from 0"
                )
            layers = chosen

        def build(number: int) -> SignalMemory | None:
            if number not in layers:
                return None
            kind: type[SignalMemory] = ContinuousMemory
            own: dict[str, Any] = {"bins": cfg.ltm_bins}
            if cfg.ltm_density == "gibbs":
                kind, own = GibbsMemory, {"points": cfg.ltm_points, "gain": cfg.ltm_gain}
            if cfg.ltm_density == "host":
                points = cfg.ltm_basis if cfg.ltm_points is None else cfg.ltm_points
                kind, own = SlotsOfSignal, {"points": points}
            names = "widths tau oldest samples ridge sticky bins threshold points gain".split()
            with told_by_flags(num_basis="ltm_basis", **{name: f"ltm_{name}" for name in names}):
                return kind(
                    cfg.decoder_embed_dim,
                    cfg.decoder_attention_heads,
                    cfg.ltm_basis,
                    widths,
                    schedule=str(cfg.ltm_schedule),
                    tau=cfg.ltm_tau,
                    oldest=cfg.ltm_oldest,
                    samples=cfg.ltm_samples,
                    ridge=cfg.ltm_ridge,
                    sticky=cfg.ltm_sticky,
                    threshold=cfg.ltm_threshold,
                    seed=cfg.seed * 1000 + number,
                    **own,
                )

        return build
