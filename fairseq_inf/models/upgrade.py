"""Checkpoints of version 0.3: their configuration as it is now."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import open_dict

from .memory_lm import MemoryLM

# what a model of then had in a setting that is gone; another value cannot be loaded
GONE = {"compression": "conv", "ltm_bins": 128, "ltm_samples": None}
ADAPTIVE = (
    "adaptive_input", "adaptive_input_factor", "adaptive_input_cutoff", "adaptive_softmax_cutoff",
    "adaptive_softmax_factor", "adaptive_softmax_dropout", "tie_adaptive_weights",
    "tie_adaptive_proj",
)  # fmt: skip
# what models were that did not say so
BEFORE = {"ltm_schedule": "constant", "ltm_density": "gaussian"}


def upgrade(cfg: Any) -> None:
    """The configuration of a checkpoint's model, in place."""
    name, host = str(cfg.get("_name") or cfg.get("arch")), str(cfg.get("decoder_host"))
    with open_dict(cfg):
        if host not in ("None", "transformer_xl"):
            name = name.removesuffix(f"_{host}")
            name = f"{host}_lm" if name == "transformer_xl_lm" else f"{name}_{host}"
        model = ARCH_MODEL_REGISTRY.get(name)
        if model is None or not issubclass(model, MemoryLM):
            return
        cfg["_name"] = model.arch
        for old, value in GONE.items():
            if cfg.get(old, value) not in (value, str(value)):
                raise ValueError(
                    f"the checkpoint has {old} {cfg[old]}, which this version has no more: load it "
                    "with version 0.3"
                )
        if "adaptive_input" in cfg:
            _upgrade_adaptive(cfg)
        names = {one.name for one in fields(model.config)}
        for one in fields(model.config):
            if one.name not in cfg:
                cfg[one.name] = BEFORE.get(one.name, one.default)
        for old in [key for key in cfg if key not in names and key != "_name"]:
            del cfg[old]


def _upgrade_adaptive(cfg: Any) -> None:
    asked, factor, cutoff, out, out_factor, dropout, tied, tied_proj = (
        cfg.pop(name, None) for name in ADAPTIVE
    )
    if not asked and not out:
        return
    alike = (cutoff or out) == out and factor == out_factor and not dropout
    if not (asked and alike and tied and tied_proj):
        raise ValueError(
            "the checkpoint has an adaptive softmax that is not tied to its adaptive embeddings, "
            "which this version has no more: load it with version 0.3"
        )
    cfg["adaptive_cutoff"], cfg["adaptive_factor"] = out, factor
