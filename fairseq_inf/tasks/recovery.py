"""What a killed training leaves behind is mended, or named, before fairseq loads it."""

import glob
import logging
import os
import shutil
from collections import defaultdict
from typing import Any

import torch

from fairseq_inf.files import whole_file

from .checkpoints import is_whole

logger = logging.getLogger(__name__)


def allow_broadcast() -> None:
    """Let fairseq send a checkpoint from the first process to the others.

    It sends the checkpoint's configuration by torch.save and torch.load, and torch from 2.6 on
    loads none but listed classes.  These hold plain values and no code.
    """
    if hasattr(torch.serialization, "add_safe_globals"):
        from fairseq.distributed import utils as distributed_utils
        from omegaconf import DictConfig, ListConfig, base, nodes

        torch.serialization.add_safe_globals(
            [distributed_utils._TensorPlaceholder, DictConfig, ListConfig, nodes.AnyNode]
            + [base.ContainerMetadata, base.Metadata, Any, dict, list, int, defaultdict]
        )


def resume_path(save_dir: str, restore_file: str) -> str | None:
    """The checkpoint that fairseq is going to load, if it is there."""
    if restore_file == "checkpoint_last.pt":
        restore_file = os.path.join(save_dir, restore_file)
    return restore_file if os.path.isfile(restore_file) else None


def mend(path: str, save_dir: str) -> None:
    """Make sure that the checkpoint to resume from is whole.

    fairseq writes a checkpoint under its own name in one step, then copies it to
    checkpoint_last.pt: a kill in mid-copy leaves half a file there and a whole one beside it.
    """
    if is_whole(path):
        return
    pattern = os.path.join(glob.escape(save_dir), "checkpoint*.pt")
    whole = [other for other in glob.glob(pattern) if is_whole(other)]
    if os.path.basename(path) != "checkpoint_last.pt" or not whole:
        raise ValueError(
            f"checkpoint {path} is truncated: remove it to begin anew, "
            "or name a whole one with --restore-file"
        )
    newest = max(whole, key=os.path.getmtime)
    with whole_file(path) as copy:
        shutil.copyfile(newest, copy)
    logger.warning(f"{path} was truncated by a kill: restored from {newest}")
