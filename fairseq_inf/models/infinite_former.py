"""The ∞-former: a continuous long-term memory of what leaves the short-term memory."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Optional

from fairseq.dataclass import ChoiceEnum

from fairseq_inf.memory import (
    SCHEDULES,
    ContinuousMemory,
    GaussianBasis,
    GibbsReader,
    Schedule,
)

from .memory_lm import MemoryConfig, MemoryLM, register
from .settings import numbers, setting, told_by_flags


@dataclass
class InfiniteFormerConfig(MemoryConfig):
    ltm_basis: int = setting(256, "basis functions of the long-term memory, N")
    ltm_widths: str = setting(
        "auto", "widths of the basis functions, which share them evenly; auto: one of 1/N"
    )
    ltm_schedule: ChoiceEnum(list(SCHEDULES)) = setting(
        "uniform", "how the past is contracted: to tau at each write, as the paper does; so that "
        "all of it has the same room; or room in proportion to 1 / age",
    )  # fmt: skip
    ltm_tau: Optional[float] = setting(
        None, "share of the signal that the past is contracted to (default: 0.5); of a uniform "
        "schedule its ceiling (default: none)", read_with={"ltm_schedule": "constant,uniform"},
    )  # fmt: skip
    ltm_oldest: Optional[int] = setting(
        None, "age in tokens that a logarithmic schedule loses (default: 1,000,000)",
        read_with={"ltm_schedule": "logarithmic"},
    )  # fmt: skip
    ltm_density: ChoiceEnum(["gaussian", "gibbs"]) = setting(
        "gibbs", "how a query reads: through one Gaussian, as the paper does, or through "
        "exp(q . k(t)) over all of time",
    )  # fmt: skip
    ltm_gain: Optional[float] = setting(
        None, "how loud a Gibbs memory is at first, by head; it is learned.  Text wants it quiet; "
        "where the memory is all that counts, 1 learns faster (default: 0.1)",
        read_with={"ltm_density": "gibbs"}, otherwise=0.1,
    )  # fmt: skip
    ltm_samples: Optional[int] = setting(
        None,
        "samples of the past at a write, M (default: N, or 2N if the schedule is not constant)",
    )
    ltm_ridge: float = setting(0.5, "penalty of the ridge regression")
    ltm_sticky: bool = setting(False, "sample the past where the last segment looked at it")
    ltm_threshold: int = setting(0, "forget everything after this many vectors; 0 for never")
    ltm_layers: Optional[str] = setting(
        None, "layers with a long-term memory, 0,1,.. (default: all)"
    )


PAPER = {"ltm_schedule": "constant", "ltm_density": "gaussian"}


@register(
    "infinite_former_lm",
    InfiniteFormerConfig,
    wt103={"ltm_basis": 150, "ltm_widths": "0.01,0.05", **PAPER},
    sorting={"ltm_basis": 1024, "ltm_widths": "0.01,0.05", "ltm_tau": 0.75, **PAPER},
    gpt2={"ltm_basis": 512, "ltm_widths": "0.005,0.01", **PAPER},
)
class InfiniteFormerLM(MemoryLM):
    @classmethod
    def build_memory(cls, cfg: Any) -> Callable[[int], ContinuousMemory | None]:
        if cfg.ltm_basis < 1:
            raise ValueError(
                f"--ltm-basis must be at least 1, got {cfg.ltm_basis}: "
                "models without a long-term memory are transformer_xl_lm, gpt2_lm and llama_lm"
            )
        widths = [1 / cfg.ltm_basis]
        if cfg.ltm_widths != "auto":
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
        dim, heads = cfg.decoder_embed_dim, cfg.decoder_attention_heads

        def memory(number: int) -> ContinuousMemory:
            store: dict[str, Any] = {"schedule": build_schedule(cfg)}
            if cfg.ltm_density == "gibbs":
                reader = GibbsReader(dim, heads, GaussianBasis(cfg.ltm_basis, widths), cfg.ltm_gain)
                # the density chooses what to read: no gate; where it has looked, point by point
                store |= {"reader": reader, "gated": False, "bins": cfg.ltm_basis}
            return ContinuousMemory(
                dim, heads, cfg.ltm_basis, widths, samples=cfg.ltm_samples, ridge=cfg.ltm_ridge,
                sticky=cfg.ltm_sticky, threshold=cfg.ltm_threshold,
                seed=cfg.seed * 1000 + number, **store,
            )  # fmt: skip

        def build(number: int) -> ContinuousMemory | None:
            names = "widths tau oldest samples ridge threshold gain".split()
            with told_by_flags(num_basis="ltm_basis", **{name: f"ltm_{name}" for name in names}):
                return memory(number) if number in layers else None

        return build


def build_schedule(cfg: Any) -> Schedule:
    """Its fields are settings, if there are such: `tau` is --ltm-tau."""
    kind: Any = SCHEDULES[str(cfg.ltm_schedule)]
    given = {one.name: getattr(cfg, f"ltm_{one.name}", None) for one in fields(kind)}
    return kind(**{name: value for name, value in given.items() if value is not None})
