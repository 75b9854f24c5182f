"""Language modelling over streams of any length, segment by segment."""

import hashlib
import logging
import os
from dataclasses import dataclass, field
from typing import Optional

import torch
from fairseq import utils
from fairseq.data import Dictionary, data_utils, indexed_dataset
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II

from fairseq_inf.criterions import cross_entropy_with_kl  # noqa: F401  (registers it)
from fairseq_inf.data import SegmentBatches, StreamDataset, StreamIterator

from .recovery import allow_broadcast, check_task_state, mend, resume_path

logger = logging.getLogger(__name__)


@dataclass
class LongSequenceLMConfig(FairseqDataclass):
    data: Optional[str] = field(
        default=None,
        metadata={"help": "data directory; several, with colons between, are read an epoch each"},
    )
    tokens_per_sample: int = field(default=256, metadata={"help": "tokens of a segment, L"})
    stream_layout: ChoiceEnum(["corpus", "documents"]) = field(
        default="corpus",
        metadata={
            "help": "corpus: one stream, cut into as many rows as the batch has; documents: "
            "a stream ends with its document, and each row reads whole documents"
        },
    )
    document_separator: str = field(
        default="</s>",
        metadata={"help": "token that ends a document (default: the end of a line)"},
    )
    seed: int = II("common.seed")
    dataset_impl: Optional[str] = II("dataset.dataset_impl")
    train_subset: str = II("dataset.train_subset")
    disable_validation: bool = II("dataset.disable_validation")
    max_update: int = II("optimization.max_update")
    save_dir: str = II("checkpoint.save_dir")
    save_interval_updates: int = II("checkpoint.save_interval_updates")
    restore_file: str = II("checkpoint.restore_file")


@register_task("long_sequence_lm", dataclass=LongSequenceLMConfig)
class LongSequenceLMTask(FairseqTask):
    """Segments go to the model in order; the batch says which rows begin a new stream."""

    def __init__(self, cfg, dictionary):
        super().__init__(cfg)
        if cfg.tokens_per_sample < 1:
            raise ValueError(f"--tokens-per-sample must be at least 1, got {cfg.tokens_per_sample}")
        self.dictionary = dictionary
        self.separator = dictionary.index(cfg.document_separator)
        if self.separator == dictionary.unk() and cfg.stream_layout == "documents":
            raise ValueError(
                f"--document-separator {cfg.document_separator} is not in the dictionary "
                f"of {cfg.data}"
            )
        self.model = None
        self._gathered = (None, None)

    @classmethod
    def setup_task(cls, cfg, **kwargs):
        if not cfg.data:
            raise ValueError("name a data directory that fairseq-preprocess wrote")
        path = os.path.join(utils.split_paths(cfg.data)[0], "dict.txt")
        if not os.path.isfile(path):
            raise FileNotFoundError(
                f"dictionary {path} does not exist: is {cfg.data} what fairseq-preprocess wrote?"
            )
        dictionary = Dictionary.load(path)
        logger.info(f"dictionary: {len(dictionary)} words")
        return cls(cfg, dictionary)

    @property
    def source_dictionary(self):
        return self.dictionary

    @property
    def target_dictionary(self):
        return self.dictionary

    def max_positions(self):
        return None

    # data

    def load_dataset(self, split, epoch=1, combine=False, **kwargs):
        paths = utils.split_paths(self.cfg.data)
        path = paths[(epoch - 1) % len(paths)] if split == self.cfg.train_subset else paths[0]
        prefix = os.path.join(path, split)
        binary = indexed_dataset.data_file_path(prefix)
        if os.path.isfile(binary) and os.path.getsize(binary) == 0:
            raise ValueError(f"split {split} of {path} holds no tokens: {binary} is empty")
        lines = data_utils.load_indexed_dataset(
            prefix, self.dictionary, self.cfg.dataset_impl, combine=combine
        )
        if lines is None:
            raise FileNotFoundError(
                f"split {split} is not in {path}: {prefix}.idx does not exist; "
                "make it with fairseq-preprocess, or name another subset"
            )
        self.datasets[split] = StreamDataset(
            lines, self.dictionary, self.cfg.stream_layout, self.separator, prefix
        )

    def get_batch_iterator(
        self,
        dataset,
        max_tokens=None,
        max_sentences=None,
        seed=1,
        num_shards=1,
        shard_id=0,
        num_workers=0,
        epoch=1,
        data_buffer_size=0,
        **kwargs,
    ):
        length = self.cfg.tokens_per_sample
        if not max_sentences and not max_tokens:
            raise ValueError("--batch-size is missing: say how many streams to read side by side")
        rows = max_sentences or max(1, max_tokens // length)
        if self.cfg.stream_layout == "documents" and rows * num_shards > len(dataset):
            logger.warning(
                f"{dataset.name} has {len(dataset)} documents for {rows * num_shards} rows: "
                "some rows stay empty, a smaller --batch-size does the same work in less time"
            )
        training = dataset is self.datasets.get(self.cfg.train_subset)
        batches = SegmentBatches(
            dataset,
            rows,
            length,
            num_shards,
            shard_id,
            shuffle_seed=seed + epoch if training else None,
        )
        layout = {
            "--tokens-per-sample": length,
            "--batch-size": rows,
            "processes": num_shards,
            "--stream-layout": str(self.cfg.stream_layout),
            "--seed": seed,
            "tokens of the split": dataset.num_tokens_total,
        }
        self._rows = slice(rows * shard_id, rows * (shard_id + 1))
        return StreamIterator(
            batches, self, layout, epoch, num_workers=num_workers, buffer_size=data_buffer_size
        )

    def eval_lm_dataloader(
        self, dataset, max_tokens=36000, batch_size=None, context_window=0, **kwargs
    ):
        if context_window:
            raise ValueError("--context-window is not for streams: the memory is their context")
        kwargs.pop("max_positions", None)
        return self.get_batch_iterator(
            dataset, max_tokens=max_tokens, max_sentences=batch_size, **kwargs
        ).next_epoch_itr(shuffle=False)

    # the memory as part of the training state

    def build_model(self, cfg, *args, **kwargs):
        self.model = super().build_model(cfg, *args, **kwargs)
        return self.model

    def build_criterion(self, cfg, *args, **kwargs):
        path = resume_path(self.cfg.save_dir, self.cfg.restore_file)
        if path is not None:
            if _world_size() == 1 or torch.distributed.get_rank() == 0:
                mend(path, self.cfg.save_dir)
            if _world_size() > 1:
                torch.distributed.barrier()
                allow_broadcast()
            check_task_state(path, self)
        return super().build_criterion(cfg, *args, **kwargs)

    def save_memory(self):
        """The memory of all rows of the training, by name; None if it is not at hand."""
        state = self.model.states[True]
        if state is None:
            return None
        if _world_size() == 1:
            return {name: x.cpu() for name, x in state.tensors().items()}
        gathered_from, tensors = self._gathered
        if gathered_from is not state:
            logger.warning("this checkpoint is saved without the memory of the other processes")
            return None
        return tensors

    def restore_memory(self, tensors):
        rows = self._rows
        state = self.model.decoder.initial_state(rows.stop - rows.start)
        if tensors is not None:
            device = next(self.model.parameters()).device
            state = state.with_tensors(tensors).rows(rows).to(device)
        self.model.states[True] = state

    def gather_memory(self):
        """Bring the memory of every process together, since only the first one saves."""
        state = self.model.states[True]
        if state is not None and _world_size() > 1:
            tensors = {name: _gather(x) for name, x in state.tensors().items()}
            self._gathered = (state, tensors)

    def begin_valid_epoch(self, epoch, model):
        super().begin_valid_epoch(epoch, model)
        self.gather_memory()

    def optimizer_step(self, optimizer, model, update_num):
        super().optimizer_step(optimizer, model, update_num)
        if self.cfg.disable_validation:  # then nothing else calls every process before a save
            done, every = update_num + 1, self.cfg.save_interval_updates
            if done == self.cfg.max_update or (every > 0 and done % every == 0):
                self.gather_memory()

    # what must not change between training and evaluation

    def state_dict(self):
        text = "\n".join(self.dictionary.symbols)
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        return {"dictionary": digest, "words": len(self.dictionary)}

    def load_state_dict(self, state_dict):
        own = self.state_dict()
        if state_dict.get("dictionary", own["dictionary"]) != own["dictionary"]:
            raise ValueError(
                f"the dictionary of {self.cfg.data} ({own['words']} words) is not the one that the "
                f"checkpoint was trained with ({state_dict['words']} words): binarize the data "
                "with that one (fairseq-preprocess --srcdict)"
            )


def _world_size():
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _gather(x):
    """The rows of all processes, in their order, on the CPU."""
    if x.numel() == 0:
        return torch.cat([x.cpu()] * _world_size())
    own = x.contiguous().view(torch.uint8)
    parts = [torch.empty_like(own) for _ in range(_world_size())]
    torch.distributed.all_gather(parts, own)
    return torch.cat([part.cpu() for part in parts]).view(x.dtype)
