"""What tasks on whole documents share: a batch is some of them from beginning to end, and only some
of their tokens are asked."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_inf.data import SequenceBatches, StreamDataset

from .lines import LinesTask
from .long_sequence_lm import Step


class SequencesTask(LinesTask):
    """A batch is whole documents.  Its segments go to the model in order, from an empty memory;
    only those from the first target on have a gradient."""

    def asked(self, dataset: StreamDataset, document: int) -> np.ndarray:
        """-> of each token of a document whether it is a target, at least one: bool"""
        raise NotImplementedError

    def build_batches(
        self,
        dataset: StreamDataset,
        rows: int,
        shard: slice,
        shuffle_seed: int | None,
        context: int = 0,
    ) -> SequenceBatches:
        length = self.cfg.tokens_per_sample
        return SequenceBatches(dataset, rows, length, shard, self.asked, shuffle_seed)

    # every batch begins with an empty memory, so that there is none to save

    def save_memory(self) -> dict[str, Tensor]:
        return {}

    def restore_memory(self, tensors: dict[str, Tensor] | None, rows: slice) -> None:
        pass

    def gather_memory(self) -> None:
        pass

    def train_step(
        self,
        sample: dict[str, Any],
        model: Any,
        criterion: Any,
        optimizer: Any,
        update_num: int,
        ignore_grad: bool = False,
    ) -> Step:
        model.train()
        step = super().train_step

        def learn(segment: dict[str, Any]) -> Step:
            return step(segment, model, criterion, optimizer, update_num, ignore_grad)

        return self._read(sample, model, learn, sample["first"])

    def valid_step(self, sample: dict[str, Any], model: Any, criterion: Any) -> Step:
        model.eval()
        step = super().valid_step
        return self._read(
            sample, model, lambda segment: step(segment, model, criterion), sample["first"]
        )

    def _read(
        self, sample: dict[str, Any], model: Any, step: Callable[[dict[str, Any]], Step], first: int
    ) -> Step:
        """All segments in order, those from `first` on by `step`.  -> loss, sample size, log"""
        loss: Any = 0
        size, total = 0, Counter[str]()
        for number, segment in enumerate(sample["segments"]):
            if number < first:
                with torch.no_grad():
                    model(**segment["net_input"], project=False)
                continue
            part, count, log = step(segment)
            loss, size = loss + part.detach(), size + count
            total.update(log)
        return loss, size, {**total, "nsentences": sample["nsentences"]}
