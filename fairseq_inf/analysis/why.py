"""Which words of the past an answer has looked at in the memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_inf.errors import Failure
from fairseq_inf.hub import MemoryHub
from fairseq_inf.memory import Places

from .inspection import Pieces, Reader, segments
from .sample import phrases


@torch.no_grad()
def attended(hub: MemoryHub, tokens: Tensor, first: int) -> Tensor:
    """How the attention that the tokens from `first` on have paid to words in long-term memories is
    shared out among the tokens of a stream, over those tokens, the heads and the layers.  What is
    still in the short-term memory is not in it.  tokens: n.  -> n, of a sum of 1, or all 0"""
    decoder = hub.model.decoder
    reader = Reader(decoder, decoder.ltm_enabled)
    # the vector of a token stands where the token is an input: one later than as a target
    found = torch.zeros(1 + len(tokens), dtype=torch.float64)
    places: dict[int, Places] = {}
    come: dict[int, list[int]] = {}  # of each layer, the vectors that its memory has been given
    for number, (inputs, targets) in enumerate(segments(hub, [tokens])):
        begin = number * hub.length
        _, layers = reader.read(inputs, targets)
        asked = slice(max(first - begin, 0), None)  # of the targets
        for layer, written in layers.items():
            if written.moves is None:
                continue
            place = places.setdefault(layer, Places())
            place.follow(written.moves[0])
            come.setdefault(layer, []).extend(written.row()[0].tolist())
            if written.seen is None or not len(place.t) or begin + len(inputs) <= first:
                continue
            masses = written.seen.mass(place.edges().to(hub.device).float())  # 1 x H x T x K
            masses = masses[0, :, asked].double().cpu()
            vectors = torch.tensor(come[layer][place.first : place.after])
            found.index_add_(0, vectors, masses.sum(dim=(0, 1)))
    if not places:
        raise Failure("this model has no memory in which words have a place")
    return found[1:] / found[1:].sum().clamp(min=1e-12)


def excerpts(
    hub: MemoryHub, tokens: Tensor, weights: Tensor, width: int = 8, most: int = 3
) -> list[tuple[str, float]]:
    """The parts of a text that have the most weight, and how much.  -> text, weight"""
    spell = Pieces(hub)
    pieces: Sequence[str] = [spell(token) for token in tokens.tolist()]
    return [
        (" ".join("".join(pieces[begin:end]).split()), float(weights[begin:end].sum()))
        for begin, end in phrases(weights.tolist(), width, most)
    ]
