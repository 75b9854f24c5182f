"""The file that a memory is kept in: its tensors, whose they are, and a checksum of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fairseq_inf.files import whole_file

from .state import Own, State

SCHEMA = "fairseq_inf memory 4"
LARGEST = 1e9  # no value of a memory comes near it


def save_state(state: State, path: str | os.PathLike[str], fingerprint: str) -> None:
    """Write a state and the fingerprint of the model that made it; never leaves half a file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors = {name: x.detach().cpu().clone().contiguous() for name, x in state.tensors().items()}
    metadata = {"schema": SCHEMA, "fingerprint": fingerprint, "checksum": checksum(tensors)}
    with whole_file(path, private=True) as partial:
        try:
            save_file(tensors, partial, metadata=metadata)
        except (SafetensorError, OSError) as error:
            raise OSError(f"{path} cannot be written: {error}") from None


def not_finite(tensors: Mapping[str, Any], may_be: str = "") -> str | None:
    """-> the name of the first tensor with NaN or infinity in it.  may_be: the end of the names of
    those that may have some"""
    for name, x in tensors.items():
        if (
            not isinstance(x, Tensor)
            or not x.is_floating_point()
            or (may_be and name.endswith(may_be))
        ):
            continue
        # a sum is quick, and finite where all of it is, unless it overflows
        if not bool(x.sum().isfinite()) and not bool(x.isfinite().all()):
            return name
    return None


def checksum(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)} ".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def load_state(path: str | os.PathLike[str], template: Own, fingerprint: str) -> Own:
    """Read what `save_state` wrote into the structure of `template` (a state of one row)."""
    from safetensors import SafetensorError, safe_open

    if not os.path.exists(path):
        raise FileNotFoundError(f"memory file {path} does not exist")
    if not os.path.isfile(path):
        raise ValueError(f"memory file {path} is not a file: name one")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError, RuntimeError, ValueError, TypeError) as error:
        raise ValueError(
            f"memory file {path} is damaged or not a memory file ({error}): write it again"
        ) from None
    schema = metadata.get("schema")
    if schema != SCHEMA:
        raise ValueError(
            f"memory file {path} has schema {schema!r}, expected {SCHEMA!r}: "
            "write it again with this version"
        )
    if metadata.get("fingerprint") != fingerprint:
        raise ValueError(
            f"memory file {path} was written by another model, or with other settings: "
            "use the checkpoint, overrides, --weights and --tokens-per-sample that wrote it"
        )
    _check_shapes(path, found, template.tensors())
    if metadata.get("checksum") != checksum(found):
        raise ValueError(f"memory file {path} is damaged (its checksum is wrong): write it again")
    for name, x in found.items():
        if x.is_floating_point() and not bool((x.abs() <= LARGEST).all()):
            raise ValueError(
                f"memory file {path} holds NaN, infinity or more than {LARGEST:g} in {name}: "
                "write it again"
            )
    state = template.with_tensors(found)
    try:
        state.check_ranges()
    except ValueError as error:
        raise ValueError(f"memory file {path} cannot be a memory: {error}") from None
    return state


def _check_shapes(
    path: str | os.PathLike[str], found: dict[str, Tensor], wanted: dict[str, Tensor]
) -> None:
    if found.keys() != wanted.keys():
        names = sorted(found.keys() ^ wanted.keys())
        raise ValueError(f"memory file {path} does not fit this model: {names[0]} is not in both")
    rows = {x.shape[:1] for x in found.values()}
    for name, x in found.items():
        like = wanted[name]
        whole = len(rows) == 1 and x.dim() > 0 and len(x) > 0
        if x.dtype != like.dtype or x.shape[1:] != like.shape[1:] or not whole:
            raise ValueError(
                f"memory file {path} does not fit this model: {name} is "
                f"{x.dtype} {tuple(x.shape)}, expected {like.dtype} {('rows', *like.shape[1:])}"
            )
