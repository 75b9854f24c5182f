"""How much of what was stored comes back from a memory."""

from __future__ import annotations

import torch
from torch import Tensor

from fairseq_inf.memory import Places
from fairseq_inf.models.decoder import MemoryDecoder
from fairseq_inf.models.watch import Watch


@torch.no_grad()
def regression_error(decoder: MemoryDecoder, tokens: Tensor, length: int) -> list[float]:
    """|X^ - X| / |X| over all vectors that the memories hold after reading the tokens.

    tokens: B x n, read as segments of `length`.  X are the vectors as they were stored, after the
    gate; X^ is the signal at the places that they have been contracted to.  Sticky memories have no
    such places.  -> the relative error of each layer that has a memory
    """
    memories = [layer.memory for layer in decoder.layers if layer.memory is not None]
    stored: list[list[Tensor]] = [[] for _ in memories]
    places = [Places() for _ in memories]
    state = decoder.initial_state(len(tokens))
    with Watch(decoder) as watch:
        for part in tokens.split(length, dim=1):
            _, state, _ = decoder(part, state)
            for number, written in enumerate(watch.layers.values()):
                memory, moves = written.memory, written.moves
                if moves is None or memory.observes or memory.num_slots:
                    raise ValueError(
                        "only in a continuous memory that is not sticky can be told where a vector "
                        "is"
                    )
                if moves[0].forgets:
                    stored[number] = []
                come = torch.stack([written.row(row)[1] for row in range(len(tokens))])
                if come.size(1):
                    stored[number].append(memory.stored(come))
                places[number].follow(moves[0])
    if not all(stored):
        raise ValueError(
            f"nothing of {tokens.size(1)} tokens in segments of {length} has left the short-term "
            f"memory of {decoder.stm_length}: read more"
        )
    errors = []
    states = [x for x in decoder.memory_states(state) if x is not None]
    for memory, vectors, place, after in zip(memories, stored, places, states, strict=True):
        x = torch.cat(vectors, dim=1)
        back = memory.at(after, place.t).to(x.dtype)
        errors.append(float((back - x).norm() / x.norm()))
    return errors
