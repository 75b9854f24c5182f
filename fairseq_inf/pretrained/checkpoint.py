"""A checkpoint as fairseq-train would write it before the first update."""

import argparse
import contextlib
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_CONFIG_REGISTRY
from omegaconf import OmegaConf, open_dict

import fairseq_inf.models
import fairseq_inf.tasks.long_sequence_lm
from fairseq_inf.data.encoding import Failure

from .layout import Config, Layout

PLUGIN = Path(fairseq_inf.models.__file__).parent.parent


def build(
    layout: Layout, arch: str, config: Config, flags: list[str], data: Path
) -> tuple[Any, Any, Any]:
    """-> configuration, task and model.  config: of the pretrained model.  flags: further ones.
    data: the folder with dict.txt"""
    settings = argparse.Namespace()
    if arch in ARCH_CONFIG_REGISTRY:
        ARCH_CONFIG_REGISTRY[arch](settings)
    if getattr(settings, "decoder_host", None) != layout.name:
        known = f"{layout.name}_lm, infinite_former_lm_{layout.name}, …"
        raise Failure(f"--arch {arch} is not a {layout.title}: {known}")
    words = [str(data), "--user-dir", str(PLUGIN), "--task", "long_sequence_lm", "--arch", arch]
    words += ["--stream-layout", "documents", "--criterion", "cross_entropy_with_kl"]
    words += ["--optimizer", "adam", *layout.flags(config)]
    words += lengths(getattr(settings, "stm_length", 0), layout.get(config, "decoder_positions"))
    words += flags
    with warnings.catch_warnings(), tempfile.TemporaryFile("w+") as said:
        warnings.simplefilter("ignore")  # of fairseq's use of hydra
        try:
            with contextlib.redirect_stderr(said):  # its whole usage, and then what is wrong
                args = options.parse_args_and_arch(options.get_training_parser(), input_args=words)
        except SystemExit:
            said.seek(0)
            raise Failure(said.read().splitlines()[-1].split("error: ")[-1]) from None
        cfg = convert_namespace_to_omegaconf(args)
    for name, value in layout.settings.items():
        if getattr(cfg.model, name) != value:
            flag = f"--{name.replace('_', '-')} {getattr(cfg.model, name)}"
            raise Failure(f"{flag} is not {layout.title}'s: leave it out")
    task = tasks.setup_task(cfg.task)
    return cfg, task, task.build_model(cfg.model)


def lengths(stm: int, positions: int) -> list[str]:
    """A segment, and a short-term memory if there is one, that the model has positions for."""
    length = min(512, positions // 2 if stm else positions)
    words = ["--tokens-per-sample", str(length)]
    return [*words, "--stm-length", str(min(stm, positions - length))] if stm else words


def save_checkpoint(path: Path, cfg: Any, task: Any, model: torch.nn.Module, data: Path) -> None:
    """data: the folder where dict.txt will be"""
    with open_dict(cfg):
        cfg.task.data, cfg.common.user_dir = str(data), None
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "optimizer_history": [
            {
                "criterion_name": "CrossEntropyWithKL",
                "optimizer_name": "FairseqAdam",
                "lr_scheduler_state": {},
                "num_updates": 0,
            }
        ],
        "task_state": task.state_dict(),
        "extra_state": {},
    }
    with open(path, "wb") as file:
        torch.save(state, file)
