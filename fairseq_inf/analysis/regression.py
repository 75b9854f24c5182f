"""How much of what was stored comes back from the signal."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fairseq_inf.memory import ContinuousMemory


@torch.no_grad()
def regression_error(decoder: Any, tokens: Tensor, length: int) -> list[float]:
    """|X^ - X| / |X| over all vectors that the continuous memories hold after reading the tokens.

    tokens: B x n, read as segments of `length`.  X are the vectors as they were stored, after the
    gate; X^ is the signal at the places that they have been contracted to.  Sticky memories have no
    such places.  -> the relative error of each layer that has a memory: list of float
    """
    memories = [layer.memory for layer in decoder.layers if layer.memory is not None]
    if not all(isinstance(memory, ContinuousMemory) and not memory.sticky for memory in memories):
        raise ValueError(
            "only in a continuous memory that is not sticky can be told where a vector is"
        )
    stored: list[list[Tensor]] = [[] for _ in memories]
    places = [torch.zeros(0, dtype=torch.float64) for _ in memories]

    def follow(number: int) -> Callable[[Any, Any], None]:
        def hook(memory: Any, args: Any) -> None:
            _, vectors, state, plan, *_ = args
            (_, count, first) = plan.groups[0]
            if count == 0:
                return
            step = torch.arange(1, count + 1, dtype=torch.float64) / count
            tau = 0 if first else memory.tau
            if first:
                stored[number], places[number] = [], places[number][:0]
            stored[number].append(memory._gated(vectors[:, vectors.size(1) - count :]))
            places[number] = torch.cat([tau * places[number], tau + (1 - tau) * step])

        return hook

    hooks = [m.register_forward_pre_hook(follow(i)) for i, m in enumerate(memories)]
    state = decoder.initial_state(len(tokens))
    try:
        for part in tokens.split(length, dim=1):
            _, state, _ = decoder(part, state)
    finally:
        for hook in hooks:
            hook.remove()
    if not all(stored):
        raise ValueError(
            f"nothing of {tokens.size(1)} tokens in segments of {length} has left the short-term "
            f"memory of {decoder.stm_length}: read more"
        )
    errors = []
    for memory, own, place, after in zip(memories, stored, places, state.memories, strict=True):
        x = torch.cat(own, dim=1).to(after.coefficients.dtype)
        found = memory.basis.evaluate(place.to(x)) @ after.coefficients
        errors.append(float((found - x).norm() / x.norm()))
    return errors
