"""What the memories of each layer do in a validation, for --tensorboard-logdir."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from fairseq.logging import progress_bar
from torch import Tensor

from fairseq_inf.memory import Places
from fairseq_inf.models.watch import Watch

BINS = 64
EVERY = 8  # segments, of which one's reads are counted


class MemoryBoard:
    """Under LOGDIR/memory: where on [0, 1] a layer has read, what space its words hold, of that
    which each would have if all had the same, and its own part of the losses and logs.

    The first row is followed through the validation; nothing is done in between."""

    def __init__(self, folder: str, model: Any) -> None:
        self.watch = Watch(model.decoder)
        self.writer = progress_bar.SummaryWriter(os.path.join(folder, "memory"))
        self.hook: Any = None

    def begin(self) -> None:
        """Of a validation."""
        self.end()
        self.places: dict[int, Places] = {}
        self.reads: dict[int, Tensor] = {}
        self.sums: dict[str, tuple[float, float]] = {}
        self.segments = 0
        self.watch.__enter__()
        self.hook = self.watch.decoder.register_forward_hook(self._segment)

    def end(self) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.watch.__exit__()
            self.hook = None

    @torch.no_grad()
    def follow(self, targets: Tensor, settings: Mapping[str, float]) -> None:
        """What the memories have learned and logged of the last segment.  targets: B x T, bool:
        tokens with a target.  settings: the criterion's"""
        for number, met in enumerate(self.watch.met):
            if met is None:
                continue
            met, of = met.of(targets, settings), targets.sum()
            losses = {name: (loss, of) for name, loss in met.memory.losses(met).items()}
            for name, (total, count) in {**met.logs(targets), **losses}.items():
                tag = f"{name}/layer{number}"
                before = self.sums.get(tag, (0.0, 0.0))
                self.sums[tag] = (before[0] + float(total), before[1] + float(count))

    @torch.no_grad()
    def _segment(self, *decoder: Any) -> None:
        for number, written in self.watch.layers.items():
            if written.moves is None:
                continue
            self.places.setdefault(number, Places()).follow(written.moves[0])
            if written.seen is not None and self.segments % EVERY == 0:
                seen = written.seen
                first = replace(seen, **{x: y[:1] for x, y in vars(seen).items()})
                edges = torch.linspace(0, 1, BINS + 1, device=written.vectors.device)
                counts = first.mass(edges).sum(dim=(0, 1, 2)).cpu()
                self.reads[number] = self.reads.get(number, 0) + counts
        self.segments += 1

    def close(self, step: int) -> None:
        """Write down what was seen since `begin`."""
        if self.hook is None:
            return
        self.end()
        for tag, (total, count) in self.sums.items():
            if count:
                self.writer.add_scalar(tag, total / count, step)
        edges = torch.linspace(0, 1, BINS + 1)
        middles = (edges[1:] + edges[:-1]) / 2
        for number, reads in self.reads.items():
            counts = reads.double()
            self.writer.add_histogram_raw(
                f"attention/layer{number}",
                min=0.0,
                max=1.0,
                num=float(counts.sum()),
                sum=float(counts @ middles.double()),
                sum_squares=float(counts @ middles.double().square()),
                bucket_limits=edges[1:].tolist(),
                bucket_counts=counts.tolist(),
                global_step=step,
            )
        for number, places in self.places.items():
            if len(places.t):
                even = (1 - places.begin) / len(places.t)
                shares = (places.spaces() / max(even, 1e-300)).numpy()
                self.writer.add_histogram(f"space/layer{number}", shares, step)
        self.writer.flush()
