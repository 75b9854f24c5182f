"""Texts to go on with, for fairseq-generate and fairseq-interactive."""

from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset, data_utils, iterators
from torch import Tensor


class PromptDataset(FairseqDataset):
    """One prompt an item.  ids: their numbers, if it is not a count from 0."""

    def __init__(self, texts: list[Tensor], pad: int, ids: list[int] | None = None) -> None:
        self.texts, self.pad, self.ids = texts, pad, ids or list(range(len(texts)))
        self.sizes = np.array([len(text) for text in self.texts])

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": self.ids[index], "tokens": self.texts[index]}

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        if not samples:
            return {}
        texts = [sample["tokens"] for sample in samples]
        return {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": sum(map(len, texts)),
            "net_input": {
                "src_tokens": data_utils.collate_tokens(texts, self.pad),
                "src_lengths": torch.tensor([len(text) for text in texts]),
            },
            "target": None,
        }

    def batches(
        self,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        num_shards: int = 1,
        shard_id: int = 0,
    ) -> iterators.EpochBatchIterator:
        """fairseq's iterator over batches of prompts of like length.  A prompt of any length
        goes in; one that is longer than max_tokens has a batch of its own."""
        batches: list[list[int]] = []
        for index in np.argsort(self.sizes, kind="stable").tolist():
            size = len(batches[-1]) if batches else 0
            room = size and (max_sentences is None or size < max_sentences)
            if room and (max_tokens is None or (size + 1) * self.sizes[index] <= max_tokens):
                batches[-1].append(index)
            else:
                batches.append([index])
        return iterators.EpochBatchIterator(
            dataset=self,
            collate_fn=self.collater,
            batch_sampler=batches,
            num_shards=num_shards,
            shard_id=shard_id,
            disable_shuffling=True,
        )
