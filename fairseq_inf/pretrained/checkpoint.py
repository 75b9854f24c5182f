"""A checkpoint as fairseq-train would write it before the first update."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf

from fairseq_inf.data import dictionary_state
from fairseq_inf.errors import Failure
from fairseq_inf.models.memory_lm import MemoryLM, host_of

from .layout import Config, Layout


def architecture(layout: Layout, arch: str) -> type[MemoryLM]:
    """The model of an architecture in this host."""
    if host_of(arch) != layout.name:
        known = f"{layout.name}_lm, infinite_former_lm_{layout.name}, …"
        raise Failure(f"--arch {arch} is not a {layout.title}: {known}")
    return ARCH_MODEL_REGISTRY[arch]


def lengths(model: type[MemoryLM], layout: Layout, config: Config) -> dict[str, int]:
    """A segment, and a short-term memory if there is one, that the model has positions for."""
    stm, positions = getattr(model.config, "stm_length", 0), layout.get(config, "decoder_positions")
    length = min(512, positions // 2 if stm else positions)
    found = {"tokens_per_sample": length}
    return {**found, "stm_length": min(stm, positions - length)} if stm else found


def build(model: type[MemoryLM], settings: dict[str, Any], dictionary: Dictionary) -> MemoryLM:
    """settings: of the configuration, where they are not the default"""
    cfg = model.config(**settings)
    cfg.seed = 1
    return model.build_model(cfg, SimpleNamespace(source_dictionary=dictionary))


def save_checkpoint(
    path: Path, model: MemoryLM, settings: dict[str, Any], task: Any, dictionary: Dictionary
) -> None:
    """settings: of `build`.  task: the configuration of --task long_sequence_lm"""
    cfg = OmegaConf.structured(FairseqConfig)
    cfg.model, cfg.task = model.config(_name=model.arch, **settings), task
    cfg.criterion = {"_name": "cross_entropy_with_kl"}
    history = {
        "criterion_name": "CrossEntropyWithKL",
        "optimizer_name": "FairseqAdam",
        "lr_scheduler_state": {},
        "num_updates": 0,
    }
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "optimizer_history": [history],
        "task_state": dictionary_state(dictionary),
        "extra_state": {},
    }
    with open(path, "wb") as file:  # by name torch does not tell of a full disk
        torch.save(state, file)
