"""fairseq's epoch iterator over segments, which saves the memory with the place in the data."""

import atexit
import contextlib
import logging
import queue
import threading
from collections.abc import Mapping, Sized
from typing import Any

from fairseq.data.iterators import BackgroundConsumer, EpochBatchIterator

logger = logging.getLogger(__name__)


class StreamIterator(EpochBatchIterator):
    """Segments in their order; the memory of the training goes with the state of the iterator.

    memory: object with `save_memory() -> dict or None` and `restore_memory(dict or None, rows)`.
    layout: what the rows and the memory depend on; a saved memory fits only the same.
    rows: which of all rows, a slice, are this process's.
    """

    def __init__(
        self,
        batches: Sized,
        memory: Any,
        layout: dict[str, Any],
        rows: slice,
        epoch: int = 1,
        num_workers: int = 0,
        buffer_size: int = 0,
    ) -> None:
        super().__init__(
            dataset=batches,
            collate_fn=_only,
            batch_sampler=[[i] for i in range(len(batches))],
            epoch=epoch,
            num_workers=num_workers,
            buffer_size=buffer_size,
            disable_shuffling=True,
        )
        self.memory, self.layout, self.rows = memory, layout, rows

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["layout"], state["segments"] = self.layout, len(self)
        if state["iterations_in_epoch"] > 0:
            state["memory"] = self.memory.save_memory()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        state = dict(state)
        memory, layout = state.pop("memory", None), state.pop("layout", None)
        segments, done = state.pop("segments", None), state["iterations_in_epoch"]
        if done and layout != self.layout:
            changed = [
                f"{name} {(layout or {}).get(name)} -> {value}"
                for name, value in {**(layout or {}), **self.layout}.items()
                if (layout or {}).get(name) != value
            ]
            at = done
            if segments != len(self):
                at = min(len(self) - 1, round(done / (segments or len(self)) * len(self)))
            afresh = "the memory starts afresh, at segment" if memory else "it goes on at batch"
            logger.warning(
                f"the checkpoint was made with another memory or streams ({', '.join(changed)}): "
                f"{afresh} {at} of {len(self)} of epoch {state['epoch']}"
            )
            state["iterations_in_epoch"], memory = at, None
        elif done and memory is None:
            logger.warning("the checkpoint holds no memory of the training: it starts afresh")
        super().load_state_dict(state)
        self.memory.restore_memory(memory, self.rows)


@atexit.register
def _stop_reading() -> None:
    """End the threads that fill fairseq's buffers, whoever began them: one that is at work in torch
    when the interpreter goes aborts the process."""
    for reader in threading.enumerate():
        if isinstance(reader, BackgroundConsumer):
            reader._max_len = 0
            while reader.is_alive():
                with contextlib.suppress(queue.Empty):
                    reader._queue.get(timeout=0.1)  # it may wait for room


def _only(items: list[Any]) -> Any:
    (item,) = items
    return item
