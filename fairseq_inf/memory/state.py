"""A memory as a value: tensors with a leading batch dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

Own = TypeVar("Own", bound="State")
Ranges = Iterable[tuple[str, Any, Any]]  # name of a tensor, its least and its most


# of a field whose tensors are the CPU's, wherever the others are: how many vectors of what kind a
# row has, so that a plan of what comes next waits for no GPU
COUNTER = {"counter": True}


def _map(value: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, tuple):
        return tuple(_map(item, fn) for item in value)
    assert isinstance(value, State), f"a state holds tensors, tuples and states, not {type(value)}"
    return type(value)(**{f.name: _map(getattr(value, f.name), fn) for f in fields(value)})


def _flatten(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
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
    tensor, at any depth, has the rows first.  What a plan goes by is a COUNTER.  Whole numbers
    in that of a memory count vectors, from 0 to the tokens that were read."""

    def map(self: Own, fn: Callable[[Tensor], Tensor]) -> Own:
        """The same state with fn applied to every tensor."""
        return _map(self, fn)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by its dotted name."""
        return dict(_flatten(self, ""))

    def with_tensors(self: Own, tensors: dict[str, Tensor]) -> Own:
        """The same structure, filled from what `tensors()` gave."""
        values = iter([tensors[name] for name in self.tensors()])
        return self.map(lambda _: next(values))

    def detach(self: Own) -> Own:
        return self.map(torch.Tensor.detach)

    def to(self: Own, device: Any) -> Own:
        """On that device, but for counters."""

        def moved(value: Any) -> Any:
            return tuple(map(moved, value)) if isinstance(value, tuple) else value.to(device)

        others = (f.name for f in fields(self) if not f.metadata.get("counter"))
        return replace(self, **{name: moved(getattr(self, name)) for name in others})

    def rows(self: Own, index: Any) -> Own:
        """The rows in `index`, in that order: a list, a slice, or a tensor of row numbers, of the
        CPU if the device shall not be waited for."""
        if isinstance(index, slice):
            return self.map(lambda x: x[index])
        index = torch.as_tensor(index)
        return self.map(lambda x: x[index.to(x.device)])

    def reset(self: Own, starts: Any) -> Own:
        """Rows where `starts` (B, bool, alike, or a list) is true become as new."""
        starts = torch.as_tensor(starts)

        def cleared(x: Tensor) -> Tensor:
            return x.masked_fill(starts.to(x.device).view(-1, *[1] * (x.dim() - 1)), 0)

        return self.map(cleared)

    def ranges(self) -> Ranges:
        """What a state that comes from a file must keep to: numbers, or tensors that broadcast to
        the one that is named."""
        return []

    def check_ranges(self, name: str = "") -> None:
        """Raise a ValueError at the first value, at any depth, that is out of its range."""
        tensors = self.tensors()
        for own, least, most in self.ranges():
            x = tensors[own]
            if bool((x < least).any() | (x > most).any()):
                raise ValueError(f"{name}{own} is out of its range")
        for field in fields(self):
            value = getattr(self, field.name)
            parts = value if isinstance(value, tuple) else (value,)
            for number, part in enumerate(parts):
                if isinstance(part, State):
                    at = f"{field.name}.{number}" if isinstance(value, tuple) else field.name
                    part.check_ranges(f"{name}{at}.")

    @property
    def num_rows(self) -> int:
        return next(iter(self.tensors().values())).size(0)
