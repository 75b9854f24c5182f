"""A memory as a value: tensors with a leading batch dimension, and the file it is kept in."""

import os
from dataclasses import dataclass, fields, is_dataclass

import torch

SCHEMA = "fairseq_inf memory 1"


def _map(value, fn):
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, tuple):
        return tuple(_map(item, fn) for item in value)
    assert is_dataclass(value), f"a state holds tensors, tuples and states, not {type(value)}"
    return type(value)(**{f.name: _map(getattr(value, f.name), fn) for f in fields(value)})


def _flatten(value, name):
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _flatten(item, f"{name}.{i}")
    else:
        for field in fields(value):
            yield from _flatten(getattr(value, field.name), f"{name}.{field.name}".lstrip("."))


@dataclass
class State:
    """Base of every memory's state: a @dataclass of tensors, states and tuples of them.  Each
    tensor, at any depth, has the rows first."""

    def map(self, fn):
        """The same state with fn applied to every tensor."""
        return _map(self, fn)

    def tensors(self):
        """Every tensor by its dotted name."""
        return dict(_flatten(self, ""))

    def with_tensors(self, tensors):
        """The same structure, filled from what `tensors()` gave."""
        values = iter([tensors[name] for name in self.tensors()])
        return self.map(lambda _: next(values))

    def detach(self):
        return self.map(torch.Tensor.detach)

    def to(self, device):
        return self.map(lambda x: x.to(device))

    def rows(self, index):
        """The rows in `index` (a tensor of row numbers, or a slice), in that order."""
        return self.map(lambda x: x[index])

    def reset(self, starts):
        """Rows where `starts` (B, bool) is true become as new."""
        return self.map(lambda x: x.masked_fill(starts.view(-1, *[1] * (x.dim() - 1)), 0))

    @property
    def num_rows(self):
        return next(iter(self.tensors().values())).size(0)


def save_state(state, path, fingerprint):
    """Write a state and the fingerprint of the model that made it; never leaves half a file."""
    from safetensors.torch import save_file

    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"memory file {path} cannot be written: {folder} does not exist")
    if os.path.isdir(path):
        raise IsADirectoryError(f"memory file {path} cannot be written: it is a folder")
    tensors = {name: x.detach().cpu().clone().contiguous() for name, x in state.tensors().items()}
    partial = f"{path}.partial"
    try:
        save_file(tensors, partial, metadata={"schema": SCHEMA, "fingerprint": fingerprint})
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.remove(partial)


def load_state(path, template, fingerprint):
    """Read what `save_state` wrote into the structure of `template` (a state of one row)."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()}
    except FileNotFoundError:
        raise FileNotFoundError(f"memory file {path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"memory file {path} is damaged or not a memory file ({error}): write it again"
        ) from None
    if metadata.get("schema") != SCHEMA:
        raise ValueError(
            f"memory file {path} has schema {metadata.get('schema')!r}, expected {SCHEMA!r}: "
            "write it again with this version"
        )
    if metadata.get("fingerprint") != fingerprint:
        raise ValueError(
            f"memory file {path} was written by another model, or with other settings: "
            "use the checkpoint, overrides and --tokens-per-sample that wrote it"
        )
    wanted = template.tensors()
    if found.keys() != wanted.keys():
        names = sorted(found.keys() ^ wanted.keys())
        raise ValueError(f"memory file {path} does not fit this model: {names[0]} is not in both")
    rows = {x.shape[:1] for x in found.values()}
    for name, x in found.items():
        like = wanted[name]
        if x.dtype != like.dtype or x.shape[1:] != like.shape[1:] or len(rows) != 1:
            raise ValueError(
                f"memory file {path} does not fit this model: {name} is "
                f"{x.dtype} {tuple(x.shape)}, expected {like.dtype} {('rows', *like.shape[1:])}"
            )
        if x.is_floating_point() and not torch.isfinite(x).all():
            raise ValueError(f"memory file {path} holds NaN or infinity in {name}")
    return template.with_tensors(found)
