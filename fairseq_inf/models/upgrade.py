"""Checkpoints of version 0.3 and of what came before 0.4: their configuration as it is now."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import open_dict

from .memory_lm import MemoryLM
from .settings import idle

# what a model of then had in a setting that its model has no more; another value cannot be loaded
GONE = {
    "compression": "conv", "ltm_bins": 128, "ltm_points": None, "ltm_pick": 1, "ltm_rank": 0,
    "ltm_start": "silent", "slot_spacing": 0.0, "ltm_density": "gaussian",
}  # fmt: skip
ADAPTIVE = (
    "adaptive_input", "adaptive_input_factor", "adaptive_input_cutoff", "adaptive_softmax_cutoff",
    "adaptive_softmax_factor", "adaptive_softmax_dropout", "tie_adaptive_weights",
    "tie_adaptive_proj",
)  # fmt: skip
# what models were that did not say so
BEFORE = {"ltm_schedule": "constant", "ltm_density": "gaussian"}
GPT2_SIZES = re.compile("_(medium|large|xl)$")  # had names


def upgrade(cfg: Any) -> None:
    """The configuration of a checkpoint's model, in place."""
    name, host = str(cfg.get("_name") or cfg.get("arch")), str(cfg.get("decoder_host"))
    with open_dict(cfg):
        if host not in ("None", "transformer_xl"):
            name = GPT2_SIZES.sub("", name).removesuffix(f"_{host}")
            alone = name in ("transformer_xl_lm", f"{host}_lm")
            name = f"{host}_lm" if alone else f"{name}_{host}"
        model = ARCH_MODEL_REGISTRY.get(name)
        if model is None or not issubclass(model, MemoryLM):
            return
        cfg["_name"] = model.arch
        names = {one.name: BEFORE.get(one.name, one.default) for one in fields(model.config)}
        old = "adaptive_input" in cfg  # every model had it
        if old:
            _refuse_gone(cfg, names)
            _upgrade_adaptive(cfg)
        for one, default in names.items():
            if one not in cfg:
                cfg[one] = default
        if old:
            for one in idle(cfg, model.config):  # had a default of its own
                cfg[one] = None
        for gone in [key for key in cfg if key not in names and key != "_name"]:
            del cfg[gone]


def _refuse_gone(cfg: Any, names: Iterable[str]) -> None:
    activation = {"activation_fn": "gelu_accurate"} if cfg.get("decoder_host") == "gpt2" else {}
    for name, value in (GONE | activation).items():
        is_gone = name not in names and cfg.get(name, value) not in (value, str(value))
        if is_gone or cfg.get(name) == "host":
            raise ValueError(
                f"the checkpoint has {name} {cfg[name]}, which this version has no more: load it "
                "with the version that wrote it"
            )


def _upgrade_adaptive(cfg: Any) -> None:
    asked, factor, cutoff, out, out_factor, dropout, tied, tied_proj = (
        cfg.pop(name, None) for name in ADAPTIVE
    )
    if not asked and not out:
        return
    alike = (cutoff or out) == out and factor == out_factor == 1 and not dropout
    if not (asked and alike and tied and tied_proj):
        raise ValueError(
            "the checkpoint has an adaptive softmax that is not tied to its adaptive embeddings, "
            "or bands narrower than the model, which this version has no more: load it with the "
            "version that wrote it"
        )
    cfg["adaptive_cutoff"] = out
