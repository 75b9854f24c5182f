"""What a checkpoint says of itself, asked before fairseq loads it."""

import ast
import difflib
import os
import pickle
import zipfile
from collections.abc import Collection, Iterable
from typing import Any

import torch

from fairseq_inf.memory import not_finite


def is_whole(path: str) -> bool:
    """A checkpoint is a zip file, whose directory is written last."""
    return zipfile.is_zipfile(path)


def open_checkpoint(path: str) -> dict[str, Any]:
    """What is in a checkpoint, the weights left on the disk.  fairseq with a torch before 2.6 would
    run the code that a checkpoint may hold: such a one is refused."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"checkpoint {path} does not exist or is not a file")
    if not is_whole(path):
        with open(path, "rb") as file:
            begins_as_one = b"PK\3\4".startswith(file.read(4))
        if begins_as_one:
            raise ValueError(f"checkpoint {path} is truncated: name a whole one")
        raise ValueError(f"{path} is not a checkpoint: name one that fairseq-train wrote")
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        raise ValueError(
            f"checkpoint {path} holds objects that run code when they are loaded, and is refused: "
            "name one that was trained with this plugin"
        ) from None
    except (RuntimeError, OSError, EOFError, KeyError):
        state = None
    if not isinstance(state, dict) or not isinstance(state.get("model"), dict):
        raise ValueError(f"{path} is not a checkpoint: name one that fairseq-train wrote")
    spoilt = not_finite(state["model"], may_be=".absent")
    if spoilt:
        raise ValueError(
            f"checkpoint {path} has NaN or infinity in {spoilt}: its training has diverged, or the "
            "file is damaged; name an earlier one"
        )
    return state


def check_overrides(text: str, state: dict[str, Any], sections: Iterable[str]) -> None:
    """text: of --model-overrides.  sections: of the checkpoint's configuration that it reaches."""
    try:
        overrides = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        overrides = None
    if not isinstance(overrides, dict):
        raise ValueError(
            f"--model-overrides must be a dict as {{'ltm_enabled': False}}, got {text!r}"
        )
    cfg = state.get("cfg") or {}
    known = {name for section in sections for name in cfg.get(section) or {}}
    check_names(overrides, known, "--model-overrides: ")


def check_names(given: Iterable[str], known: Collection[str], where: str = "") -> None:
    """Refuse a setting that the model does not have, which fairseq would pass over."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f", is it {near[0]}?" if near else ""
            raise ValueError(f"{where}{name} is not a setting of this model{hint}")
