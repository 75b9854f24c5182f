"""How a signal is read: through a density over time, one for each head of each query."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .contract import Encounter
from .signal import ContinuousState, Signal

# B rows, T tokens, H heads, d head width, e = H d


class Reader(nn.Module):
    """D = E_p[V X(t)] under the density p of a query's head, with keys and values of the signal by
    maps of its own; W^M is its `output`."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)  # no bias: an empty memory adds nothing
        for linear in (self.key, self.value, self.output):
            nn.init.xavier_uniform_(linear.weight)

    def start_silent(self, layer: int, layers: int) -> None:
        nn.init.zeros_(self.output.weight)

    def contents(self, store: Signal, state: ContinuousState, dtype: torch.dtype) -> Any:
        """What `read` needs, whatever the query."""
        raise NotImplementedError

    def read(self, query: Tensor, contents: Any) -> tuple[Tensor, Any]:
        """-> D: B x H x T x d, and the densities"""
        raise NotImplementedError

    def look(self, query: Tensor, store: Signal, state: ContinuousState) -> Any:
        """-> the densities alone"""
        raise NotImplementedError

    def mass(self, seen: Any, bins: int, mask: Tensor | None) -> Tensor:
        """Of the densities in each of D bins, over heads and real tokens.  -> B x D"""
        raise NotImplementedError

    def losses(self, met: Encounter) -> dict[str, Tensor]:
        return {}

    def logs(self, met: Encounter) -> dict[str, tuple[Tensor, Tensor]]:
        return {}
