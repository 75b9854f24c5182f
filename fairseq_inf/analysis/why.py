"""Which words of a document an answer has looked at, in sight and in the memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fairseq_inf.errors import Failure
from fairseq_inf.hub import Memory, MemoryHub
from fairseq_inf.memory import Places
from fairseq_inf.models.decoder import MemoryDecoder
from fairseq_inf.models.watch import Watch

from .inspection import Pieces, Reader, segments
from .sample import phrases

USUAL = (  # what any text may be asked, and an answer that says nothing of it
    ("What is this?", "This is a text that you have given me."),
    ("Tell me something about it.", "I can tell you something about it, if you like."),
)
SAME = re.compile(r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)(?<=[.!?;:])\s+|\n+")
LONGEST = 90  # letters of a phrase that is shown


@dataclass
class Looks:
    """What some tokens of a stream looked at while they were predicted, one by one of the tokens
    since its beginning: n of them."""

    weights: Tensor  # n: the attention that each got, over queries, heads and layers
    window: Tensor  # n, bool: in sight of the last query
    kept: Tensor | None  # n, bool: in the long-term memory of some layer; None where a memory does
    # not keep tokens one by one


@torch.no_grad()
def looks(hub: MemoryHub, before: Memory, tokens: Tensor) -> Looks:
    """Read tokens behind a memory once more, and see where they look.  tokens: T"""
    decoder, reading = hub.model.decoder, before.reading
    opened = reading.tokens[0, : int(reading.count)]
    inputs = torch.cat([opened, tokens.to(hub.device)])[:-1]
    state, begin = reading.memory, int(reading.memory.position)
    # the vector of a token stands where the token is an input: one later than as a target
    weights = torch.zeros(begin + len(inputs), dtype=torch.float64)
    window, kept = (torch.zeros(len(weights), dtype=torch.bool) for _ in range(2))
    length, one_by_one = decoder.short_term.length, decoder.ltm_enabled
    for at in range(0, len(inputs), hub.length):
        part, position, asked = inputs[at : at + hub.length], begin + at, len(opened) - 1 - at
        found: dict[int, Tensor] = {}
        with Watch(decoder) as watch, seen_by(decoder, found):
            _, state, _ = decoder(part[None], state, head=False)
        kept[:] = False
        for number, own in found.items():  # 1 x H x T x P
            written = watch.layers.get(number)
            shown, held = own.size(3) - len(part), None
            if written is not None and written.memory.num_slots:
                shown -= written.plan.slots
                held = written.memory.kept(0, written.after)
            numbers = torch.arange(position - min(shown, length), position + len(part))
            if shown > length:
                numbers = torch.cat([torch.arange(shown - length), numbers])
            if held is not None and written is not None:
                held = held.cpu() + written.sinks
                kept[held] = True
                numbers = torch.cat([held, numbers])
            elif decoder.layers[number].memory is not None:
                one_by_one = False
            each = own[0, :, max(asked, 0) :].sum(dim=1).mean(dim=0).double().cpu()  # P
            each, real = each[len(each) - len(numbers) :], numbers >= 0
            weights.index_add_(0, numbers[real], each[real] / len(found))
        window[:] = False
        window[: decoder.short_term.sinks] = True
        window[max(position - length, 0) : position + len(part)] = True
    weights, window, kept = weights[1:] / len(tokens), window[1:], kept[1:]
    return Looks(weights, window, kept if one_by_one else None)


@contextmanager
def seen_by(decoder: MemoryDecoder, found: dict[int, Tensor]) -> Iterator[None]:
    """Inside, each layer's attention, [slots; sinks; short-term memory; segment], goes to
    `found` by its number: B x H x T x P."""

    def watch(number: int, attention: Any) -> None:
        attend, apart = attention.attend, attention.apart

        def attended(query: Tensor, key: Tensor, value: Tensor, positions: Any) -> Tensor:
            found[number] = attention.weights(query, key, positions).float()
            return attend(query, key, value, positions)

        def parted(weights: Tensor, values: Tensor, slots: int) -> Any:
            found[number] = weights.float()
            return apart(weights, values, slots)

        attention.attend, attention.apart = attended, parted

    attentions = [layer.attention for layer in decoder.layers]
    before = [
        {x: vars(own)[x] for x in ("attend", "apart") if x in vars(own)} for own in attentions
    ]
    try:
        for number, attention in enumerate(attentions):
            watch(number, attention)
        yield
    finally:
        for attention, own in zip(attentions, before, strict=True):
            for name in ("attend", "apart"):
                delattr(attention, name)
            vars(attention).update(own)


def usual(hub: MemoryHub, memory: Memory) -> Tensor:
    """What answers look at that say nothing of the text.  -> n, of all that was read"""
    size, turns, found = memory.tokens, hub.turns, []
    for question, answer in USUAL:
        asked = hub.tokens_of_pieces(*turns.first, question, *turns.answer)
        own = looks(hub, hub.read_tokens(asked, memory), hub.tokens_of(answer))
        found.append(own.weights[:size])
    return torch.stack(found).mean(dim=0)


def parts(text: str) -> list[tuple[int, int]]:
    """Whole phrases: (first letter, behind the last)."""
    found, begin = [], 0
    ends = [(match.start(), match.end()) for match in SAME.finditer(text)]
    for end, after in [*ends, (len(text), len(text))]:
        while end - begin > LONGEST:
            cut = max(text.rfind(", ", begin, begin + LONGEST), -1) + 1
            cut = cut or text.rfind(" ", begin, begin + LONGEST)
            cut = cut if cut > begin else begin + LONGEST
            found.append((begin, cut))
            begin = cut + (text[cut : cut + 1] == " ")
        if text[begin:end].strip():
            found.append((begin, end))
        begin = after
    return found


def explained(
    hub: MemoryHub, own: Looks, usually: Tensor, first: int, tokens: Tensor, most: int = 3
) -> str:
    """own: of an answer.  usually: what others look at.  tokens: of the document, which begins
    with token `first` of the stream.  -> what to say"""
    here = slice(first, first + len(tokens))
    weights, usually = own.weights[here], usually[here]
    more = (weights - usually).clamp(min=0)
    spell = Pieces(hub)
    ends = torch.tensor([len(piece) for piece in map(spell, tokens.tolist())]).cumsum(dim=0)
    spell = Pieces(hub)
    text = "".join(map(spell, tokens.tolist()))
    rated = []
    for begin, end in parts(text):
        # the tokens that end in the phrase
        inside = (ends > begin) & (ends <= end)
        rated.append((float(more[inside].sum()), float(usually[inside].sum()), begin, end))
    rated = sorted((x for x in rated if x[0] > x[1] / 2 and x[0] > 1e-4), reverse=True)[:most]
    share = f"{100 * float(weights.sum()):.0f} % of what this answer looked at is in the document"
    lines = [f"{share}; it looked at nothing there more than other answers do"]
    if rated:
        lines = [f"{share}; more than other answers do, it looked at"]
    for _, _, begin, end in rated:
        line = text.count("\n", 0, begin) + 1
        place = f"line {line}, {100 * begin / max(len(text), 1):.0f} % of the way"
        lines.append(f"  “{text[begin:end].strip()}”  ({place})")
    return "\n".join([*lines, standing(own, here)])


def standing(own: Looks, here: slice) -> str:
    """Where the document is now, in one sentence."""
    window = own.window[here]
    total, sight = len(window), int(window.sum())
    if sight == total:
        return f"All {total:,} tokens of the document are in sight."
    said = f"Of the document's {total:,} tokens {sight:,} are in sight"
    if own.kept is None:
        return f"{said}, and {total - sight:,} in the long-term memory only."
    kept = int((own.kept[here] & ~window).sum())
    return f"{said}, {kept:,} of the others are kept, and {total - sight - kept:,} are gone."


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
