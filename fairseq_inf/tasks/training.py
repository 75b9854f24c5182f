"""A training whose memory is part of its state, in one process or several."""

import logging
import os
from typing import IO, Any

import torch
from fairseq.data import Dictionary
from fairseq.logging.progress_bar import SummaryWriter
from fairseq.tasks import FairseqTask
from torch import Tensor

from fairseq_inf.data import dictionary_state

from .board import MemoryBoard
from .checkpoints import open_checkpoint
from .lock import lock
from .recovery import allow_broadcast, mend, resume_path

logger = logging.getLogger(__name__)

Step = tuple[Tensor, int, dict[str, Any]]  # loss, sample size, log


class MemoryTraining(FairseqTask):
    """What a task on streams does in a training.  A subclass has the `dictionary`, and sets `model`
    when it builds it."""

    dictionary: Dictionary

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self.model: Any = None
        self._evaluating = False
        self._has_criterion = False
        self._lock: IO[str] | None = None  # of --save-dir
        self._board: MemoryBoard | None = None
        # a state of the training, and all processes' rows of it
        self._gathered: tuple[Any, Any] = (None, None)
        self._update: int | None = None
        self._before: dict[Any, Any] = {}  # of this update, the state before each segment

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
            ours = {name: tensors[name][rows].to(*kind) for name, kind in kinds.items()}
            state = state.with_tensors(ours)
        self.model.states[True] = state

    def gather_memory(self) -> None:
        """Bring the memory of every process together, since only the first one saves."""
        state = self.model.states[True]
        if state is not None and _world_size() > 1:
            device = next(self.model.parameters()).device
            tensors = {name: _gather(x.to(device)) for name, x in state.tensors().items()}
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

    # what must not change between training and evaluation

    def state_dict(self) -> dict[str, Any]:
        return dictionary_state(self.dictionary)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._evaluating = True  # fairseq calls this for evaluation only
        self.check_dictionary(state_dict, "the checkpoint")

    def check_dictionary(self, state_dict: dict[str, Any], path: str) -> None:
        mine = self.state_dict()
        if state_dict.get("dictionary", mine["dictionary"]) != mine["dictionary"]:
            raise ValueError(
                f"the dictionary of {self.cfg.data} ({mine['words']} words) is not the one that "
                f"{path} was trained with ({state_dict['words']} words): binarize the data "
                "with that one (fairseq-preprocess --srcdict)"
            )


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _is_first() -> bool:
    """Of all processes."""
    return _world_size() == 1 or torch.distributed.get_rank() == 0


def _gather(x: Tensor) -> Tensor:
    """The rows of all processes, in their order, on the CPU."""
    if x.numel() == 0:
        return torch.cat([x.cpu()] * _world_size())
    data = x.contiguous().view(torch.uint8)
    parts = [torch.empty_like(data) for _ in range(_world_size())]
    torch.distributed.all_gather(parts, data)
    return torch.cat([part.cpu() for part in parts]).view(x.dtype)
