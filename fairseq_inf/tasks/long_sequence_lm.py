"""Language modelling over streams of any length, segment by segment."""

import glob
import hashlib
import logging
import os
import sys
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import IO, Any, Optional

import torch
from fairseq import search, utils
from fairseq.data import Dictionary, data_utils, indexed_dataset
from fairseq.data.iterators import EpochBatchIterator
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging.progress_bar import SummaryWriter
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II
from torch import Tensor

from fairseq_inf.criterions import cross_entropy_with_kl  # noqa: F401  (registers it)
from fairseq_inf.data import (
    LineEncoding,
    PromptDataset,
    SegmentBatches,
    StreamDataset,
    StreamIterator,
    check_words,
    load_encoding,
    without_end,
    without_pad,
)
from fairseq_inf.errors import plain_errors_in_fairseq
from fairseq_inf.models.prompt_model import Nucleus, PromptModel
from fairseq_inf.models.upgrade import upgrade

from .board import MemoryBoard
from .checkpoints import check_overrides, open_checkpoint
from .lock import lock
from .reading import settle
from .recovery import allow_broadcast, mend, resume_path

logger = logging.getLogger(__name__)

LONGEST = 1_000_000  # tokens of a generated text; fairseq's generator makes room for all at once

Step = tuple[Tensor, int, dict[str, Any]]  # loss, sample size, log


@dataclass
class LongSequenceLMConfig(FairseqDataclass):
    data: Optional[str] = field(
        default=None,
        metadata={"help": "data directory; several, with colons between, are read an epoch each"},
    )
    # these three: in an evaluation as in the training, unless they are given
    tokens_per_sample: int = field(
        default=0, metadata={"help": "tokens of a segment, L (default: 256)"}
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
class LongSequenceLMTask(FairseqTask):
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
        self.model: Any = None
        self._evaluating = False
        self._lock: IO[str] | None = None  # of --save-dir
        self._board: MemoryBoard | None = None
        self._has_criterion = False
        self._prompts_seen = 0
        # a state of the training, and all processes' rows of it
        self._gathered: tuple[Any, Any] = (None, None)
        self._update: int | None = None
        self._before: dict[Any, Any] = {}  # of this update, the state before each segment

    @classmethod
    def setup_task(
        cls, cfg: Any, from_checkpoint: bool = False, **kwargs: Any
    ) -> "LongSequenceLMTask":
        plain_errors_in_fairseq()
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
        own = slice(rows * shard_id, rows * (shard_id + 1))
        batches = self.build_batches(dataset, rows * num_shards, own, shuffle_seed, context)
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
            own,
            epoch,
            num_workers=num_workers,
            buffer_size=data_buffer_size,
        )

    def build_batches(
        self,
        dataset: StreamDataset,
        rows: int,
        own: slice,
        shuffle_seed: int | None,
        context: int = 0,
    ) -> Sized:
        """rows: of all processes.  own: which of them are this one's, a slice."""
        length = self.cfg.tokens_per_sample
        spans = dataset.spans(rows, length, shuffle_seed)
        return SegmentBatches(dataset, spans, length, own, context)

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

    # the memory as part of the training state

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        if from_checkpoint:
            upgrade(cfg)
        self.model = super().build_model(cfg, from_checkpoint)
        return self.model

    def build_criterion(self, cfg: Any, *args: Any, **kwargs: Any) -> Any:
        self._has_criterion = True
        if not self._evaluating:
            self._before_resume()
        return super().build_criterion(cfg, *args, **kwargs)

    def _before_resume(self) -> None:
        """fairseq is about to load a checkpoint, if there is one: see that it can."""
        if self.cfg.fp16 and (self.cfg.cpu or not torch.cuda.is_available()):
            raise ValueError("--fp16 needs a GPU: leave it out, or train by common.bf16=true")
        path = resume_path(self.cfg.save_dir, self.cfg.restore_file)
        if _is_first():
            if not self.cfg.no_save and os.path.isdir(self.cfg.save_dir):
                self._lock = lock(self.cfg.save_dir)
            if path is not None:
                mend(path, self.cfg.save_dir)
        if _world_size() > 1:
            torch.distributed.barrier()
            allow_broadcast()
        path = path or self.cfg.finetune_from_model
        if path is not None and os.path.isfile(path):
            self.check_dictionary(open_checkpoint(path).get("task_state", {}), path)

    def save_memory(self) -> dict[str, Tensor] | None:
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

    def restore_memory(self, tensors: dict[str, Tensor] | None, rows: slice) -> None:
        """Go on with these rows of a saved memory, or with an empty one."""
        state = self.model.decoder.initial_state(rows.stop - rows.start)
        if tensors is not None and tensors.keys() != state.tensors().keys():
            logger.warning("the checkpoint's memory is of another version: it starts afresh")
            tensors = None
        if tensors is not None:
            kinds = {name: (x.device, x.dtype) for name, x in state.tensors().items()}
            own = {name: tensors[name][rows].to(*kind) for name, kind in kinds.items()}
            state = state.with_tensors(own)
        self.model.states[True] = state

    def gather_memory(self) -> None:
        """Bring the memory of every process together, since only the first one saves."""
        state = self.model.states[True]
        if state is not None and _world_size() > 1:
            tensors = {name: _gather(x) for name, x in state.tensors().items()}
            self._gathered = (state, tensors)

    def train_step(
        self,
        sample: dict[str, Any],
        model: Any,
        criterion: Any,
        optimizer: Any,
        update_num: int,
        ignore_grad: bool = False,
    ) -> Step:
        """After an overflow under --amp fairseq gives the same batches again: the memory goes
        back to where it was before them."""
        if self.cfg.amp:
            if self._update != update_num:
                self._update, self._before = update_num, {}
            states, segment = self.model.states, sample["segment"]
            states[True] = self._before.setdefault(segment, states[True])
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def begin_valid_epoch(self, epoch: int, model: Any) -> None:
        super().begin_valid_epoch(epoch, model)
        self.gather_memory()
        if self._board is None and self.cfg.tensorboard_logdir and _is_first():
            if SummaryWriter is not None and getattr(self.model, "has_memory", False):
                self._board = MemoryBoard(self.cfg.tensorboard_logdir, self.model)
        if self._board is not None:
            self._board.begin()

    def valid_step(self, sample: dict[str, Any], model: Any, criterion: Any) -> Step:
        step = super().valid_step(sample, model, criterion)
        if self._board is not None:
            targets = sample["target"] != self.dictionary.pad()
            self._board.follow(targets, getattr(criterion, "settings", {}))
        return step

    def post_validate(self, model: Any, stats: dict[str, Any], agg: Any) -> None:
        """Of each subset, of which the first is shown."""
        if self._board is not None:
            self._board.close(int(stats["num_updates"]))

    def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
        super().optimizer_step(optimizer, model, update_num)
        done, every = update_num + 1, self.cfg.save_interval_updates
        if self.cfg.disable_validation or done < self.cfg.validate_after_updates:
            # then no validation calls every process before a save
            if done == self.cfg.max_update or (every > 0 and done % every == 0):
                self.gather_memory()

    # generation

    def build_bpe(self, args: Any) -> Any:
        """The encoding that the data-bin came with; another one that is asked for is told."""
        asked = super().build_bpe(args)
        encoding = load_encoding(utils.split_paths(self.cfg.data)[0])
        if encoding is None:
            return asked
        own, first = LineEncoding(encoding), self.dictionary.nspecial
        if asked is None or own.agrees(asked, self.dictionary.symbols[first : first + 2000]):
            return own
        logger.warning(
            f"--bpe {args._name} does not encode as {self.cfg.data} does, which is of "
            f"{type(encoding).__name__}: leave it out to have that one"
        )
        return asked

    def get_interactive_tokens_and_lengths(self, lines: Sequence[str], encode_fn: Any) -> Any:
        kept = [line if _is_text(line) else "" for line in lines]
        for number, (line, text) in enumerate(zip(lines, kept, strict=True), self._prompts_seen):
            if line != text:
                logger.warning(f"prompt {number} is not UTF-8: convert it")
        return super().get_interactive_tokens_and_lengths(kept, encode_fn)

    def build_dataset_for_inference(
        self, src_tokens: Sequence[Tensor], src_lengths: Any, **kwargs: Any
    ) -> PromptDataset:
        """A prompt that cannot be read is told, and left out: the others have their answers."""
        eos, prompts = self.dictionary.eos(), {}
        for number, text in enumerate(src_tokens):
            text = without_pad(without_end(text, {eos}), self.dictionary)
            try:
                self.check_prompt(text, f"prompt {self._prompts_seen + number}")
                prompts[number] = text
            except ValueError as error:
                logger.warning(error)
        self._prompts_seen += len(src_tokens)
        return PromptDataset([*prompts.values()], self.dictionary.pad(), [*prompts])

    def check_prompt(self, text: Tensor, name: str) -> None:
        count = int((text == self.dictionary.unk()).sum())
        check_words(len(text), count, name, "is --bpe that of the data?")

    def build_generator(self, models: Sequence[Any], args: Any, *other: Any, **kwargs: Any) -> Any:
        """fairseq's own generator; a prompt is read as it reads a source sentence."""
        for name, instead in {
            "score_reference": "use fairseq-eval-lm",
            "prefix_size": "write the words at the end of the prompt",
            "max_len_a": "a continuation has up to --max-len-b tokens, whatever its prompt",
            "match_source_len": "a continuation has up to --max-len-b tokens",
            "constraints": "they are for translations",
            "print_alignment": "it is for translations",
        }.items():
            if getattr(args, name, None):
                raise ValueError(f"--{name.replace('_', '-')} is not for prompts: {instead}")
        if args.beam < 1:
            raise ValueError(f"--beam must be at least 1, got {args.beam}")
        if not max(args.min_len, 1) <= args.max_len_b <= LONGEST:
            raise ValueError(
                f"--max-len-b, the tokens to generate, must be from {max(args.min_len, 1)} "
                f"(--min-len) to {LONGEST:,}, got {args.max_len_b}"
            )
        length = self.cfg.tokens_per_sample
        models = [PromptModel(model, length) for model in models]
        generator = super().build_generator(models, args, *other, **kwargs)
        drawn = generator.search
        if type(drawn) is search.Sampling and drawn.sampling_topp > 0:
            generator.search = Nucleus(
                self.target_dictionary, drawn.sampling_topk, drawn.sampling_topp
            )
        return generator

    # what must not change between training and evaluation

    def state_dict(self) -> dict[str, Any]:
        return dictionary_state(self.dictionary)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._evaluating = True  # fairseq calls this for evaluation only
        self.check_dictionary(state_dict, "the checkpoint")

    def check_dictionary(self, state_dict: dict[str, Any], path: str) -> None:
        own = self.state_dict()
        if state_dict.get("dictionary", own["dictionary"]) != own["dictionary"]:
            raise ValueError(
                f"the dictionary of {self.cfg.data} ({own['words']} words) is not the one that "
                f"{path} was trained with ({state_dict['words']} words): binarize the data "
                "with that one (fairseq-preprocess --srcdict)"
            )


def check_input(path: str) -> None:
    """Of fairseq-interactive, which would end where a line is not UTF-8."""
    if path == "-" and hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    if not os.path.isfile(path):  # what can be read but once
        return
    try:
        with open(path, encoding="utf-8") as file:
            for _ in file:
                pass
    except UnicodeDecodeError:
        raise ValueError(f"--input {path} is not UTF-8: convert it") from None


def _is_text(line: str) -> bool:
    """Bytes that are not UTF-8 come from the standard input as lone surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in line)


def dictionary_state(dictionary: Dictionary) -> dict[str, Any]:
    """What tells a dictionary from others."""
    text = "\n".join(dictionary.symbols)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return {"dictionary": digest, "words": len(dictionary)}


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _is_first() -> bool:
    """Of all processes."""
    return _world_size() == 1 or torch.distributed.get_rank() == 0


def _gather(x: Tensor) -> Tensor:
    """The rows of all processes, in their order, on the CPU."""
    if x.numel() == 0:
        return torch.cat([x.cpu()] * _world_size())
    own = x.contiguous().view(torch.uint8)
    parts = [torch.empty_like(own) for _ in range(_world_size())]
    torch.distributed.all_gather(parts, own)
    return torch.cat([part.cpu() for part in parts]).view(x.dtype)
