"""The memory of Infini-attention (Munkhdalai et al., 2024): associations, in one matrix a head."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fairseq_inf.errors import SettingError

from .contract import Encounter, HostAttention, LongTermMemory, Plan, silent
from .precision import in_full
from .state import COUNTER, Ranges, State

# B rows, T tokens, W vectors that have left the short-term memory, H heads, d head width, e = H d


@dataclass
class InfiniState(State):
    matrix: Tensor  # B x H x d x d, never in half precision: M / n
    normaliser: Tensor  # B x H x d, alike: z / n
    tokens: Tensor = field(
        metadata=COUNTER
    )  # B: n, how many vectors were stored; 0 is an empty memory

    def ranges(self) -> Ranges:
        written = self.normaliser.flatten(1).any(dim=1).long()
        yield "tokens", written, torch.iinfo(torch.long).max
        yield "normaliser", 0, torch.inf


@dataclass(kw_only=True)
class InfiniPlan(Plan):
    """Which vectors each row takes."""

    most: int  # the most that a row takes
    taken: Tensor | None  # B x `most`, bool: of the last `most`; None if all rows take them
    tokens: Tensor  # B: n afterwards


class InfiniMemory(LongTermMemory):
    """With sigma(x) = ELU(x) + 1, and keys K and values V by the attention's own maps:

    linear:  M <- M + sigma(K)^T V,                              z <- z + sum sigma(K)
    delta:   M <- M + sigma(K)^T (V - sigma(K) M / (sigma(K) z)),  z alike
    read:    A_mem = sigma(Q) M / (sigma(Q) z),  A = g A_mem + (1 - g) A_dot,  g = sigmoid(beta)

    Only the ratio of M and z counts, so that both are kept as means over the n vectors that were
    stored: no number grows with the stream.  The vectors and the carried M and z are constants for
    the gradient; the maps that make K and V of the vectors learn from the reads of this segment.
    """

    def __init__(self, dim: int, num_heads: int, update: str = "linear") -> None:
        super().__init__()
        if update not in ("linear", "delta"):
            raise SettingError(f"{{update}} must be linear or delta, got {update}")
        if dim % num_heads:
            raise SettingError(f"{dim} dimensions cannot be split evenly between {num_heads} heads")
        self.dim, self.num_heads, self.update = dim, num_heads, update
        self.beta = nn.Parameter(torch.zeros(num_heads))  # half of each at first

    def start_silent(self, layer: int, layers: int) -> None:
        self.output = silent(self.dim)

    def initial_state(self, rows: int, device: Any = None, dtype: Any = None) -> InfiniState:
        exact = torch.promote_types(dtype or self.beta.dtype, torch.float32)
        h, d = self.num_heads, self.dim // self.num_heads
        return InfiniState(
            matrix=torch.zeros(rows, h, d, d, dtype=exact, device=device),
            normaliser=torch.zeros(rows, h, d, dtype=exact, device=device),
            tokens=torch.zeros(rows, dtype=torch.long),
        )

    def plan_key(self) -> Hashable:
        return None  # the same whatever the settings

    def plan(self, counts: Sequence[int], state: InfiniState) -> InfiniPlan:
        most, taken = max(counts), None
        new = torch.tensor(counts)
        if min(counts) < most:
            taken = torch.arange(most) >= most - new[:, None]
        tokens = state.tokens + new
        return InfiniPlan(counts=counts, filled=tokens > 0, most=most, taken=taken, tokens=tokens)

    def write(
        self,
        vectors: Tensor,
        state: InfiniState,
        plan: InfiniPlan,
        attention: HostAttention | None = None,
        key: Tensor | None = None,
        marks: Tensor | None = None,
    ) -> tuple[InfiniState, None]:
        assert attention is not None, "keys and values are made by the attention's own maps"
        state = state.detach()
        if plan.most == 0:
            return state, None
        keys, values = (
            x.repeat_interleave(self.num_heads // x.size(1), dim=1)
            for x in attention.project(vectors.detach()[:, vectors.size(1) - plan.most :])
        )
        exact = state.matrix.dtype
        with in_full(vectors):
            features, values = _features(keys.to(exact)), values.to(exact)  # B x H x W x d
            if plan.taken is not None:
                features = features * plan.taken.to(features.device)[:, None, :, None]
            if self.update == "delta":
                values = values - _retrieve(features, state.matrix, state.normaliser)
            held = torch.stack([state.tokens, plan.tokens]).to(features.device, exact)
            total = held[1, :, None, None].clamp(min=1)
            carried = held[0, :, None, None] / total
            matrix = features.transpose(2, 3) @ values / total[..., None]
            normaliser = features.sum(dim=2) / total
            matrix = matrix + carried[..., None] * state.matrix
            normaliser = normaliser + carried * state.normaliser
        return InfiniState(matrix, normaliser, plan.tokens), None

    def contents(
        self, state: InfiniState, attention: Any, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """-> M and z, and g where there is anything to read, else 0: B x H x 1 x 1"""
        filled = (state.tokens > 0).to(self.beta.device)[:, None, None, None]
        gate = self.beta.to(state.matrix.dtype).sigmoid()[:, None, None]
        return state.matrix, state.normaliser, gate * filled

    def read(
        self, query: Tensor, attended: Tensor, contents: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, None]:
        """D = g (A_mem - A_dot)"""
        matrix, normaliser, gate = contents
        with in_full(query):
            retrieved = _retrieve(_features(query.to(matrix.dtype)), matrix, normaliser)
            return (gate * (retrieved - attended)).to(attended.dtype), None

    def logs(self, met: Encounter) -> dict[str, tuple[Tensor, Tensor]]:
        """The mean gate over the heads."""
        counted = met.counted.sum()
        return {"ltm_gate": (self.beta.float().sigmoid().mean() * counted, counted)}


def _features(x: Tensor) -> Tensor:
    return F.elu(x) + 1


def _retrieve(features: Tensor, matrix: Tensor, normaliser: Tensor) -> Tensor:
    """sigma M / (sigma z); 0 from an empty memory.  -> B x H x P x d"""
    return features @ matrix / (features @ normaliser[..., None]).clamp(min=1e-30)
