"""Language modelling over streams of any length, segment by segment."""

import glob
import logging
import os
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Any, Optional

from fairseq import utils
from fairseq.data import Dictionary, data_utils, indexed_dataset
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.tasks import register_task
from omegaconf import II
from torch import Tensor

from fairseq_inf.criterions import cross_entropy_with_kl  # noqa: F401  (registers it)
from fairseq_inf.data import PromptDataset, SegmentBatches, StreamDataset, StreamIterator
from fairseq_inf.errors import plain_errors_in_fairseq
from fairseq_inf.models.upgrade import upgrade

from .checkpoints import check_overrides, open_checkpoint
from .prompts import PromptTask, check_input
from .reading import settle
from .training import MemoryTraining, Step

__all__ = ["LongSequenceLMConfig", "LongSequenceLMTask", "Step"]

logger = logging.getLogger(__name__)


@dataclass
class LongSequenceLMConfig(FairseqDataclass):
    data: Optional[str] = field(
        default=None,
        metadata={"help": "data directory; several, with colons between, are read an epoch each"},
    )
    # these three: in an evaluation as in the training, unless they are given
    tokens_per_sample: int = field(
        default=0,
        metadata={"help": "tokens of a segment, L (0, the default: as in the training, or 256)"},
    )
    stream_layout: Optional[ChoiceEnum(["corpus", "documents"])] = field(
        default=None,
        metadata={
            "help": "corpus (default): one stream, cut into as many rows as the batch has; "
            "documents: a stream ends with its document, and each row reads whole documents"
        },
    )
    document_separator: Optional[str] = field(
        default=None,
        metadata={"help": "token that ends a document (default: the end of a line, </s>)"},
    )
    seed: int = II("common.seed")
    dataset_impl: Optional[str] = II("dataset.dataset_impl")
    train_subset: str = II("dataset.train_subset")
    disable_validation: bool = II("dataset.disable_validation")
    validate_after_updates: int = II("dataset.validate_after_updates")
    amp: bool = II("common.amp")
    fp16: bool = II("common.fp16")
    cpu: bool = II("common.cpu")
    tensorboard_logdir: Optional[str] = II("common.tensorboard_logdir")
    max_update: int = II("optimization.max_update")
    save_dir: str = II("checkpoint.save_dir")
    save_interval_updates: int = II("checkpoint.save_interval_updates")
    no_save: bool = II("checkpoint.no_save")
    restore_file: str = II("checkpoint.restore_file")
    finetune_from_model: Optional[str] = II("checkpoint.finetune_from_model")
    path: Optional[str] = II("common_eval.path")
    model_overrides: str = II("common_eval.model_overrides")
    context_window: int = II("eval_lm.context_window")
    input: str = II("interactive.input")


@register_task("long_sequence_lm", dataclass=LongSequenceLMConfig)
class LongSequenceLMTask(MemoryTraining, PromptTask):
    """Segments go to the model in order; the batch says which rows begin a new stream."""

    def __init__(self, cfg: Any, dictionary: Dictionary) -> None:
        super().__init__(cfg)
        if cfg.tokens_per_sample < 1:
            raise ValueError(
                "--tokens-per-sample (less --context-window, if there is one) must be at least 1, "
                f"got {cfg.tokens_per_sample}"
            )
        self.dictionary = dictionary
        self.separator = dictionary.index(cfg.document_separator)
        if self.separator == dictionary.unk() and cfg.stream_layout == "documents":
            raise ValueError(
                f"--document-separator {cfg.document_separator} is not in the dictionary "
                f"of {cfg.data}"
            )

    @classmethod
    def setup_task(
        cls, cfg: Any, from_checkpoint: bool = False, **kwargs: Any
    ) -> "LongSequenceLMTask":
        plain_errors_in_fairseq(cfg.save_dir)
        if not cfg.data:
            raise ValueError("name a data directory that fairseq-preprocess wrote")
        paths = utils.split_paths(cfg.data)
        for path in paths:
            if not os.path.isdir(path):
                raise FileNotFoundError(f"data directory {path} does not exist")
        trained = cls._check_checkpoints(cfg, from_checkpoint)
        settle(cfg, trained)
        if trained and not from_checkpoint:
            check_input(cfg.input)
        path = os.path.join(paths[0], "dict.txt")
        if not os.path.isfile(path):
            raise FileNotFoundError(
                f"dictionary {path} does not exist: is {cfg.data} what fairseq-preprocess wrote?"
            )
        dictionary = Dictionary.load(path)
        logger.info(f"dictionary: {len(dictionary)} words")
        task = cls(cfg, dictionary)
        task._evaluating = from_checkpoint
        return task

    @staticmethod
    def _check_checkpoints(cfg: Any, from_checkpoint: bool) -> dict[str, Any]:
        """Look at what is to be evaluated.  -> the settings of its task, {} in a training"""
        trained: dict[str, Any] = {}
        sections = ("model", "task") if from_checkpoint else ("model",)
        for path in reversed(utils.split_paths(cfg.path or "")):
            shards = glob.glob(glob.escape(path.removesuffix(".pt")) + "?*.pt")
            if os.path.exists(path) or (path and not shards):
                state = open_checkpoint(path)
                check_overrides(cfg.model_overrides, state, sections)
                trained = (state.get("cfg") or {}).get("task") or {}
        return trained

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary

    def max_positions(self) -> None:
        return None

    # data

    def load_dataset(
        self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any
    ) -> None:
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
                f"split {split} is not in {path}: {prefix}.idx and {prefix}.bin must be there; "
                "make them with fairseq-preprocess, or name another subset"
            )
        self.datasets[split] = StreamDataset(
            lines, self.dictionary, self.cfg.stream_layout, self.separator, prefix
        )

    def get_batch_iterator(
        self, dataset: StreamDataset | PromptDataset, **kwargs: Any
    ) -> EpochBatchIterator:
        """Segments of streams to train and validate on; prompts to go on with."""
        if isinstance(dataset, StreamDataset):
            # fairseq-eval-lm has a loader of its own, so that what has neither an epoch nor a
            # criterion is fairseq-generate
            if self._has_criterion or "epoch" in kwargs:
                return self._segments(dataset, **kwargs)
            prompts = self.prompts(dataset)
            dataset = PromptDataset([*prompts.values()], self.dictionary.pad(), [*prompts])
        names = ("max_tokens", "max_sentences", "num_shards", "shard_id")
        return dataset.batches(**{name: kwargs[name] for name in names if name in kwargs})

    def prompts(self, dataset: StreamDataset) -> dict[int, Tensor]:
        """-> number and tokens of each text to go on with: dict"""
        return dataset.prompts()

    def _segments(
        self,
        dataset: StreamDataset,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        seed: int = 1,
        num_shards: int = 1,
        shard_id: int = 0,
        num_workers: int = 0,
        epoch: int = 1,
        data_buffer_size: int = 0,
        shuffle: bool = True,
        context: int = 0,
        **kwargs: Any,
    ) -> StreamIterator:
        length = self.cfg.tokens_per_sample
        rows = max_sentences
        if rows is None and max_tokens is not None:
            rows = max_tokens // length
        if rows is None or rows < 1:
            raise ValueError(
                "--batch-size must be at least 1, or --max-tokens at least --tokens-per-sample: "
                "that many streams are read side by side, got "
                f"{max_tokens if max_sentences is None else max_sentences}"
            )
        if self.cfg.stream_layout == "documents" and rows * num_shards > len(dataset):
            logger.warning(
                f"{dataset.name} has {len(dataset)} documents for {rows * num_shards} rows: "
                "some rows stay empty, a smaller --batch-size does the same work in less time"
            )
        training = dataset is self.datasets.get(self.cfg.train_subset)
        shuffle_seed = seed + epoch if training and shuffle else None
        shard = slice(rows * shard_id, rows * (shard_id + 1))
        batches = self.build_batches(dataset, rows * num_shards, shard, shuffle_seed, context)
        layout = {
            "--tokens-per-sample": length,
            "--batch-size": rows,
            "processes": num_shards,
            "--train-subset": self.cfg.train_subset,
            "tokens of the split": dataset.num_tokens_total,
            "--stream-layout": str(self.cfg.stream_layout),
        }
        if self.cfg.stream_layout == "documents":
            layout["--document-separator"] = self.cfg.document_separator
            layout["--seed"] = seed
        return StreamIterator(
            batches,
            self,
            {**layout, **self.model.memory_flags},
            shard,
            epoch,
            num_workers=num_workers,
            buffer_size=data_buffer_size,
        )

    def build_batches(
        self,
        dataset: StreamDataset,
        rows: int,
        shard: slice,
        shuffle_seed: int | None,
        context: int = 0,
    ) -> Sized:
        """rows: of all processes.  shard: which of them are this one's, a slice."""
        length = self.cfg.tokens_per_sample
        spans = dataset.spans(rows, length, shuffle_seed)
        return SegmentBatches(dataset, spans, length, shard, context)

    def eval_lm_dataloader(
        self,
        dataset: StreamDataset,
        batch_size: int | None = None,
        context_window: int = 0,
        **kwargs: Any,
    ) -> Any:
        """Without --batch-size the split is one stream, not as many as fit --max-tokens."""
        # fairseq has taken the context window off --tokens-per-sample
        if context_window and not self.model.is_stateless:
            raise ValueError("--context-window is not for streams: the memory is their context")
        rows = 1 if batch_size is None else batch_size
        itr = self._segments(
            dataset, max_sentences=rows, shuffle=False, context=context_window, **kwargs
        )
        return itr.next_epoch_itr(shuffle=False)

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        if from_checkpoint:
            upgrade(cfg)
        self.model = super().build_model(cfg, from_checkpoint)
        return self.model
