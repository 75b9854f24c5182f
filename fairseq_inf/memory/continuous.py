"""The continuous memory: a store, which says how the past is kept and forgotten, and a reader of
it, which says through what density each head looks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from fairseq_inf.errors import SettingError

from .basis import GaussianBasis
from .contract import Encounter, LongTermMemory, Move, side_by_side
from .gaussian import GaussianReader
from .reader import Reader
from .signal import ContinuousState, Signal, WritePlan

# B rows, T tokens, H heads, d head width, e = H d


class ContinuousMemory(LongTermMemory):
    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_basis: int,
        widths: Sequence[float] = (0.01, 0.05),
        reader: Reader | None = None,
        **store: Any,
    ) -> None:
        """reader: the paper's Gaussian unless given.  store: of the Signal, as `sticky=True`."""
        super().__init__()
        if dim % num_heads:
            raise SettingError(f"{dim} dimensions cannot be split evenly between {num_heads} heads")
        self.store = Signal(dim, GaussianBasis(num_basis, widths), **store)
        self.reader = reader or GaussianReader(dim, num_heads, self.store.basis)
        self.observes = self.store.sticky

    @property
    def output(self) -> Any:
        return self.reader.output

    def start_silent(self, layer: int, layers: int) -> None:
        self.reader.start_silent(layer, layers)

    def initial_state(self, rows: int, device: Any = None, dtype: Any = None) -> ContinuousState:
        return self.store.initial_state(rows, device, dtype or self.reader.key.weight.dtype)

    def plan_key(self) -> Hashable:
        return self.store.plan_key()

    def plan(self, counts: Sequence[int], state: ContinuousState) -> WritePlan:
        return self.store.plan(counts, state)

    def forward(
        self,
        query: Tensor,
        vectors: Tensor,
        state: ContinuousState,
        plan: WritePlan | None = None,
        mask: Tensor | None = None,
        key: Tensor | None = None,
    ) -> tuple[Tensor, Any, ContinuousState]:
        """Write, then read, for a decoder of one's own.

        query: B x H x T x d.  vectors: B x W x e, of which a row takes the last as its plan says
        (all without a plan).  mask: B x T, true for real tokens.  key: B, for sticky sampling.
        -> B x T x e, the density of B x H x T, ContinuousState"""
        self._check(query, vectors, state)
        if plan is None:
            plan = self.plan([vectors.size(1)] * vectors.size(0), state)
        state, _ = self.write(vectors, state, plan, key=key)
        heads, density = self.reader.read(query, self.contents(state, None, query.dtype))
        return self.output(side_by_side(heads)), density, self.observe(state, density, mask)

    def _check(self, query: Tensor, vectors: Tensor, state: ContinuousState) -> None:
        """Say of a tensor of another shape what it must be."""
        heads, dim, rows = self.reader.num_heads, self.store.dim, state.num_rows
        for name, x, wanted in (
            ("query", query, (rows, heads, None, dim // heads)),
            ("vectors", vectors, (rows, None, dim)),
        ):
            fits = x.dim() == len(wanted) and all(
                size in (None, own) for size, own in zip(wanted, x.shape, strict=True)
            )
            if not fits:
                shape = " x ".join("T" if size is None else str(size) for size in wanted)
                raise ValueError(
                    f"{name} must be {shape} for a state of {rows} rows, "
                    f"got {' x '.join(map(str, x.shape))}"
                )

    def write(
        self,
        vectors: Tensor,
        state: ContinuousState,
        plan: WritePlan,
        attention: Any = None,
        key: Tensor | None = None,
        marks: Tensor | None = None,
    ) -> tuple[ContinuousState, None]:
        return self.store.write(vectors, state, plan, key), None

    def contents(self, state: ContinuousState, attention: Any, dtype: torch.dtype) -> Any:
        return self.reader.contents(self.store, state, dtype)

    def read(self, query: Tensor, attended: Tensor | None, contents: Any) -> tuple[Tensor, Any]:
        """D, whatever the host's attention finds."""
        return self.reader.read(query, contents)

    def look(self, query: Tensor, state: ContinuousState) -> Any:
        return self.reader.look(query, self.store, state)

    def observe(self, state: ContinuousState, seen: Any, mask: Tensor | None) -> ContinuousState:
        if not self.store.sticky:
            return state
        with torch.no_grad():
            return self.store.observe(state, self.reader.mass(seen, self.store.bins, mask))

    def moves(
        self, before: ContinuousState, after: Any, plan: WritePlan, key: Tensor | None
    ) -> list[Move]:
        return self.store.moves(before, plan, key)

    def stored(self, vectors: Tensor) -> Tensor:
        return self.store.stored(vectors)

    def at(self, state: ContinuousState, places: Tensor) -> Tensor:
        return self.store.at(state, places)

    def losses(self, met: Encounter) -> dict[str, Tensor]:
        return self.reader.losses(met)

    def logs(self, met: Encounter) -> dict[str, tuple[Tensor, Tensor]]:
        return self.reader.logs(met)
