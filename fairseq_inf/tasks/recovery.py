"""What a killed training leaves behind is mended, or named, before fairseq loads it."""

import glob
import logging
import os
import shutil
import zipfile

import torch

logger = logging.getLogger(__name__)


def is_whole(path):
    """A checkpoint is a zip file, whose directory is written last."""
    return zipfile.is_zipfile(path)


def mend_last_checkpoint(save_dir, restore_file):
    """Make sure that the checkpoint to resume from is whole.  -> its path, or None for none.

    fairseq writes a checkpoint under its own name in one step, then copies it to
    checkpoint_last.pt: a kill in mid-copy leaves half a file there and a whole one beside it.
    """
    path = restore_file
    if restore_file == "checkpoint_last.pt":
        path = os.path.join(save_dir, restore_file)
    if not os.path.isfile(path):
        return None
    if is_whole(path):
        return path
    whole = [p for p in glob.glob(os.path.join(glob.escape(save_dir), "checkpoint*.pt")) if is_whole(p)]
    if restore_file != "checkpoint_last.pt" or not whole:
        raise ValueError(
            f"checkpoint {path} is truncated: remove it to begin anew, "
            "or name a whole one with --restore-file"
        )
    newest = max(whole, key=os.path.getmtime)
    shutil.copyfile(newest, path + ".whole")
    os.replace(path + ".whole", path)
    logger.warning(f"{path} was truncated by a kill: restored from {newest}")
    return path


def check_task_state(path, task):
    """Refuse a checkpoint whose dictionary is another one, before fairseq reads its weights."""
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    task.load_state_dict(state.get("task_state", {}))
