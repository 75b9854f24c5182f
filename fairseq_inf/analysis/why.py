"""Which words of the past an answer has looked at in the memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fairseq_inf.errors import Failure
from fairseq_inf.hub import MemoryHub
from fairseq_inf.memory import Places

from .answers import Answers, Said
from .inspection import Pieces, Reader
from .sample import phrases


@torch.no_grad()
def attended(hub: MemoryHub, tokens: Tensor, first: int) -> Tensor:
    """How the attention that the tokens from `first` on have paid to words in long-term memories is
    shared out among the tokens of a stream, over those tokens, the heads and the layers.  What is
    still in the short-term memory is not in it.  tokens: n.  -> n, of a sum of 1, or all 0"""
    decoder = hub.model.decoder
    reader = Reader(decoder, decoder.ltm_enabled)
    stream = torch.cat([torch.tensor([decoder.dictionary.eos()]), tokens])
    # the vector of a token stands where the token is an input: one later than as a target
    found = torch.zeros(len(stream), dtype=torch.float64)
    places: dict[int, Places] = {}
    come: dict[int, list[int]] = {}  # of each layer, the vectors that its memory has been given
    for begin in range(0, len(tokens), hub.length):
        part = stream[begin : begin + hub.length + 1].to(hub.device)
        _, layers = reader.read(part[:-1], part[1:])
        asked = slice(max(first - begin, 0), None)  # of the targets
        for number, written in layers.items():
            if written.moves is None:
                continue
            place = places.setdefault(number, Places())
            place.follow(written.moves[0])
            come.setdefault(number, []).extend(written.row()[0].tolist())
            if written.seen is None or not len(place.t) or begin + len(part) - 1 <= first:
                continue
            masses = written.seen.mass(place.edges().to(hub.device).float())  # 1 x H x T x K
            masses = masses[0, :, asked].double().cpu()
            vectors = torch.tensor(come[number][place.first : place.after])
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


def explain(answers: Answers, answered: int, count: int = 3, each: int = 3) -> str:
    """The first responses, `each`, of conversations that are evenly spaced over the first ones,
    `answered`, with what the model said and looked at.  -> Markdown"""
    lines = []
    for number in range(0, answered, -(-answered // count)):
        base = int(answers.streams[number].turn[0])
        first, *own = answers.turns[base : base + each + 1]
        lines += [f"Conversation {number + 1}", "", f"- {first.text}"]
        for said in own:
            answer = " ".join(said.answer.split())
            lines += [f"- {said.text}", f"  - model: {answer or '(nothing)'}"]
            looks = _looks(answers, said)
            lines += [f"  - looked at {looks}"] if looks else []
        lines.append("")
    return "\n".join(lines)


def _looks(answers: Answers, said: Said) -> str:
    """What an answer looked at in the document, nothing where words have no place."""
    hub, stream = answers.hub, answers.streams[said.conversation]
    document = answers.documents[stream.document]
    before = stream.tokens[stream.turn < int(stream.turn[0]) + said.turn]
    marker = stream.tokens[len(before)][None]
    answer = hub.tokens_of(f" {said.answer}")
    tokens = torch.cat([document, before, marker, answer])
    try:
        weights = attended(hub, tokens, len(tokens) - len(answer))[: len(document)]
    except Failure:
        return ""
    found = [(text, weight) for text, weight in excerpts(hub, document, weights) if weight > 0]
    return ", ".join(f"“{text}” {100 * weight:.1f} %" for text, weight in found)
