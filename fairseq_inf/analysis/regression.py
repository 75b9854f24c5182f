"""How much of what was stored comes back from the signal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fairseq_inf.memory import SignalMemory
from fairseq_inf.models.decoder import MemoryDecoder


@torch.no_grad()
def regression_error(decoder: MemoryDecoder, tokens: Tensor, length: int) -> list[float]:
    """|X^ - X| / |X| over all vectors that the continuous memories hold after reading the tokens.

    tokens: B x n, read as segments of `length`.  X are the vectors as they were stored, after the
    gate; X^ is the signal at the places that they have been contracted to.  Sticky memories have no
    such places.  -> the relative error of each layer that has a memory
    """
    memories: list[Any] = [layer.memory for layer in decoder.layers if layer.memory is not None]
    if not all(isinstance(memory, SignalMemory) and not memory.sticky for memory in memories):
        raise ValueError(
            "only in a continuous memory that is not sticky can be told where a vector is"
        )
    stored: list[list[Tensor]] = [[] for _ in memories]
    places = [torch.zeros(0, dtype=torch.float64) for _ in memories]

    def follow(number: int) -> None:
        memory = memories[number]

        def write(vectors: Tensor, state: Any, plan: Any, *args: Any) -> Any:
            group, schedule = plan.groups[0], memory.schedule
            if group.count:
                if group.first:
                    stored[number], places[number] = [], places[number][:0]
                stored[number].append(memory._gated(vectors[:, vectors.size(1) - group.count :]))
                old = schedule.move(places[number], group.step, group.count)
                new = schedule.places(group.step, group.count, 1).new
                places[number] = torch.cat([old, new])
            return type(memory).write(memory, vectors, state, plan, *args)

        memory.write = write

    state = decoder.initial_state(len(tokens))
    try:
        for number in range(len(memories)):
            follow(number)
        for part in tokens.split(length, dim=1):
            _, state, _ = decoder(part, state)
    finally:
        for memory in memories:
            memory.__dict__.pop("write", None)
    if not all(stored):
        raise ValueError(
            f"nothing of {tokens.size(1)} tokens in segments of {length} has left the short-term "
            f"memory of {decoder.stm_length}: read more"
        )
    errors = []
    states: Any = state.memories
    for memory, own, place, after in zip(memories, stored, places, states, strict=True):
        x = torch.cat(own, dim=1).to(after.coefficients.dtype)
        found = memory.basis.evaluate(place.to(x)) @ after.coefficients
        errors.append(float((found - x).norm() / x.norm()))
    return errors
