"""The compressive memory (Rae et al., 2019): old vectors, c of them to a slot."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .short_term import push
from .state import State

# B rows, C slots, c vectors to a slot, W vectors that have left the short-term memory, e width


@dataclass
class CompressiveState(State):
    slots: torch.Tensor  # B x C x e, the newest at the right end
    pending: torch.Tensor  # B x c-1 x e: too few for a slot yet, at the right end
    held: torch.Tensor  # B: how many slots are real
    waiting: torch.Tensor  # B: how many of `pending` are real

    def ranges(self):
        yield "held", 0, self.slots.size(1)
        yield "waiting", 0, self.pending.size(1)


@dataclass
class CompressionPlan:
    """Which vectors become slots.  The same for every layer, so it is made once a segment."""

    counts: list  # of each row: vectors that come
    groups: torch.Tensor  # B: slots that they make together with the pending ones
    held: torch.Tensor  # B: slots afterwards
    waiting: torch.Tensor  # B: pending vectors afterwards
    most: int  # the most slots that a row makes
    longest: int  # the most slots that a row holds afterwards


class CompressiveMemory(nn.Module):
    """(vectors, state) -> (slots, state, vectors that were compressed, what became of them).

    First in, first out: the oldest slots are lost when there are more than C.  The slots are
    constants for the model's own loss; the compression learns from the last two results only.
    A convolution starts as the mean of its c vectors.
    """

    def __init__(self, dim, length, rate=4, compression="conv"):
        super().__init__()
        for flag, value, least in (("--cmem-length", length, 0), ("--compression-rate", rate, 1)):
            if value < least:
                raise ValueError(f"{flag} must be at least {least}, got {value}")
        self.dim, self.length, self.rate, self.compression = dim, length, rate, compression
        if compression == "conv":
            self.convolution = nn.Conv1d(dim, dim, kernel_size=rate, stride=rate)
            with torch.no_grad():
                self.convolution.weight.mul_(0.1).add_(torch.eye(dim)[..., None] / rate)
                self.convolution.bias.zero_()

    needs_queries = False

    def initial_state(self, rows, device=None, dtype=torch.float):
        def zeros(*shape, dtype=dtype):
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        return CompressiveState(
            slots=zeros(self.length, self.dim),
            pending=zeros(self.rate - 1, self.dim),
            held=zeros(dtype=torch.long),
            waiting=zeros(dtype=torch.long),
        )

    def plan(self, counts, state):
        """counts: how many vectors each row takes."""
        totals = [
            count + waiting for count, waiting in zip(counts, state.waiting.tolist(), strict=True)
        ]
        groups = [total // self.rate for total in totals]
        held = [
            min(old + new, self.length)
            for old, new in zip(state.held.tolist(), groups, strict=True)
        ]
        waiting = [total % self.rate for total in totals]
        tensors = (torch.tensor(x, device=state.held.device) for x in (groups, held, waiting))
        return CompressionPlan(counts, *tensors, max(groups), max(held))

    def forward(self, vectors, state, plan=None):
        """vectors: B x W x e, of which a row takes the last as its plan says (all without one).
        -> slots: B x `plan.longest` x e, CompressiveState, old: B x `plan.most` c x e and
        new: B x `plan.most` x e, of which the first `plan.groups` of a row are real"""
        if plan is None:
            plan = self.plan([vectors.size(1)] * vectors.size(0), state)
        state, vectors = state.detach(), vectors.detach()
        # each row's vectors without gaps at the right end, the pending ones first
        if min(plan.counts) < vectors.size(1):
            kept = vectors.size(1) - torch.tensor(plan.counts, device=vectors.device)[:, None]
            column = torch.arange(vectors.size(1) + self.rate - 1, device=vectors.device)
            behind = column - kept  # B x c-1+W: where a pending vector moves from
            waits = behind < self.rate - 1
            source = torch.where(waits, behind.clamp(min=0), column)
            lined = _pick(torch.cat([state.pending, vectors], dim=1), source)
        else:
            lined = torch.cat([state.pending, vectors], dim=1)
        total = plan.groups * self.rate + plan.waiting
        begin = (lined.size(1) - total)[:, None]
        step = torch.arange(plan.most * self.rate, device=vectors.device)
        old = _pick(lined, (begin + step).clamp(max=lined.size(1) - 1))
        new = self.compress(old)
        slots = push(state.slots, new.detach(), plan.groups)[:, plan.most :]
        pending = lined[:, lined.size(1) - self.rate + 1 :]
        place = torch.arange(self.rate - 1, device=vectors.device)
        absent = place < self.rate - 1 - plan.waiting[:, None]
        pending = pending.masked_fill(absent[..., None], 0)
        state = CompressiveState(slots, pending, plan.held, plan.waiting)
        return slots[:, self.length - plan.longest :], state, old, new

    def compress(self, vectors):
        """B x k c x e -> B x k x e"""
        b, width, e = vectors.shape
        groups = vectors.reshape(b, width // self.rate, self.rate, e)
        if self.compression == "mean":
            return groups.mean(dim=2)
        if self.compression == "max":
            return groups.amax(dim=2)
        weight = self.convolution.weight.permute(0, 2, 1).reshape(e, self.rate * e)
        return F.linear(groups.flatten(2), weight, self.convolution.bias)


def _pick(x, index):
    """x: B x W x e, index: B x k.  -> B x k x e"""
    return x.gather(1, index[..., None].expand(-1, -1, x.size(2)))
