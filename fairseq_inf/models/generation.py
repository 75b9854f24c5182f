"""Reading a text into the memory, and going on from it token by token.

Both follow the borders of an evaluation: a stream is eos and then the text, cut every L tokens,
and a segment enters the memory when it is full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fairseq_inf.memory import COUNTER, State
from fairseq_inf.memory.state import Ranges
from fairseq_inf.modules import LayerCache, Place, SlotLine

from .decoder import DecoderState, MemoryDecoder, score_features

# B rows, L tokens of a segment, C slots of a memory, K sinks, S short-term length,
# P = C + K + S + L keys of a cache


# of the decoder, what its head takes, n x e, and the targets, n  -> n, or n x k
Scorer = Callable[[MemoryDecoder, Tensor, Tensor], Tensor]


@dataclass
class Reading(State):
    """A text that has been read so far; the next token follows its last one."""

    memory: DecoderState  # at the last border of segments
    tokens: Tensor  # B x L: what came since
    count: Tensor = field(metadata=COUNTER)  # B: how many of them are real, from 1 to L

    def ranges(self) -> Ranges:
        yield "tokens", 0, torch.iinfo(torch.long).max
        yield "count", 1, self.tokens.size(1)


@dataclass
class Cache(State):
    """What the next token needs of a reading, worked out once."""

    reading: Reading
    layers: tuple[LayerCache, ...]
    # of each kind of layers
    hidden: tuple[Tensor, ...]  # B x 1 or H x C+K+S: added to the scores, -inf for no key
    hides: tuple[Tensor, ...] = field(metadata=COUNTER)  # B, bool: whether it is anything but 0


def new_reading(decoder: MemoryDecoder, rows: int, length: int) -> Reading:
    """Nothing but eos."""
    decoder.check_length(length)
    memory = decoder.initial_state(rows)
    layers = tuple(
        replace(layer, window=decoder.short_term.widen(layer.window, length))
        for layer in memory.layers
    )
    surprise = tuple(x.widen(length, decoder.stm_length) for x in memory.surprise)
    memory = replace(memory, layers=layers, surprise=surprise)
    device = memory.key.device
    tokens = torch.full((rows, length), decoder.dictionary.pad(), device=device)
    tokens[:, 0] = decoder.dictionary.eos()
    return Reading(memory, tokens, torch.ones(rows, dtype=torch.long))


def _put(state: Any, rows: Tensor, new: Any) -> Any:
    """The state with some of its rows replaced."""
    if len(rows) == state.num_rows:
        return new
    news = iter(new.tensors().values())
    return state.map(lambda x: x.index_copy(0, rows.to(x.device), next(news)))


@torch.no_grad()
def read(
    decoder: MemoryDecoder,
    reading: Reading,
    text: Tensor,
    lengths: Tensor,
    score: bool | Scorer = False,
) -> Any:
    """Go on reading.  text: B x n, padded on the right to the lengths (B, of the CPU if a GPU
    shall not be waited for).
    -> Reading, and with `score` the log-probability of each token, B x n, 0 for padding; or what
    another function than `score_features` says of each"""
    width = reading.tokens.size(1)
    rows, n = text.shape
    lengths, device = lengths.cpu(), text.device
    total = reading.count + lengths
    before = reading.count.to(device)[:, None]
    place = torch.arange(int(total.max()), device=device)
    inputs = F.pad(reading.tokens, (0, max(0, len(place) - width)))[:, : len(place)]
    if n:
        behind = (place - before).clamp(min=0, max=n - 1)
        inputs = torch.where(place < before, inputs, text.gather(1, behind))

    state, closed = reading.memory, (total - 1) // width
    scores, judge = torch.zeros(0, device=device), score_features if score is True else score
    segments = -(-(int(total.max()) - 1) // width) if score else int(closed.max())
    for i in range(segments):
        # without a score only full segments are read; with one, all that predicts a token
        sizes = (total - 1 - i * width).clamp(max=width) if score else (closed - i) * width
        active = (sizes > 0).nonzero().squeeze(1)
        sizes = sizes[active].clamp(max=width)
        where = active.to(device)
        part = inputs[where, i * width : i * width + int(sizes.max())]
        x, new, _ = decoder(part, state.rows(active), sizes, project=bool(score), head=False)
        full = (sizes == width).nonzero().squeeze(1)
        if len(full):
            state = _put(state, active[full], new.rows(full))
        if judge:
            target = inputs[where, i * width + 1 : i * width + 1 + part.size(1)]
            at = torch.arange(target.size(1)) + i * width + 1
            column = at - reading.count[active][:, None]  # of the text
            kept = (column >= 0) & (column < lengths[active][:, None])
            row = active[:, None].expand_as(column)
            own = judge(decoder, x[:, : target.size(1)][kept], target[kept])
            if not len(scores):
                scores = own.new_zeros(rows, n, *own.shape[1:])
            scores[row[kept], column[kept]] = own
    rest = total - closed * width
    place = torch.arange(width)
    index = (closed[:, None] * width + place).clamp(max=inputs.size(1) - 1)
    tokens = inputs.gather(1, index.to(device))
    behind = (place >= rest[:, None]).to(device)
    tokens = tokens.masked_fill(behind, decoder.dictionary.pad())
    reading = Reading(state, tokens, rest)
    if not len(scores):
        scores = scores.new_zeros(rows, n)
    return (reading, scores) if score else reading


Kind = tuple[Any, SlotLine]  # of a layer: whose plans it has, and its slots


def _kinds(decoder: MemoryDecoder) -> list[Kind]:
    """Layers of the same kind have the same slots at the same positions."""

    def kind(memory: Any) -> Kind:
        if memory is None or not decoder.ltm_enabled or not memory.num_slots:
            return None, SlotLine()
        line = SlotLine(memory.num_slots, memory.num_slots, memory.spacing)
        return decoder.plan_key(memory), line

    return [kind(layer.memory) for layer in decoder.layers]


@dataclass
class Opened(State):
    """A reading that can be gone on with; that changes its tensors, which are its own."""

    output: Tensor  # B x 1 x V: what the model makes of the last token (logits or features)
    cache: Cache


class OpenSegment:
    """The segment of a reading, read once: what follows any of its tokens."""

    @torch.no_grad()
    def __init__(self, decoder: MemoryDecoder, reading: Reading) -> None:
        self.decoder, self.longest = decoder, int(reading.count.max())
        width, longest = reading.tokens.size(1), self.longest
        # of each token what the head takes: B x T x e.  after: the state behind the segment
        self.features, self.after, _ = decoder(
            reading.tokens[:, :longest], reading.memory, reading.count, head=False
        )
        layers: list[LayerCache] = []
        hidden: dict[Any, Tensor] = {}
        hides: list[Tensor] = []
        memory, short_term = reading.memory, decoder.short_term
        absent = short_term.absent(memory.filled, memory.position, short_term.size)
        count = reading.count.to(reading.tokens.device)
        for layer, state, kind in zip(
            decoder.layers, self.after.layers, _kinds(decoder), strict=True
        ):
            _, line = kind
            slots = line.shown
            window = state.window.map(lambda x: short_term.line_up(x, count, longest))
            positions = decoder.cache_positions(line, width)
            stored: Any = state.memory if decoder.ltm_enabled else None
            layers.append(
                layer.open_cache(window, stored, stored not in (None, ()), positions,
                                 width - longest)
            )  # fmt: skip
            if kind not in hidden:
                missing = absent
                if slots:
                    empty = torch.arange(slots) < slots - stored.held[:, None]
                    missing = torch.cat([empty, absent], dim=1)
                scores = window.vectors.new_zeros(missing.shape)
                scores = scores.masked_fill(missing.to(scores.device), -torch.inf)[:, None, None]
                hidden[kind] = decoder.with_slot_bias(scores, slots).squeeze(2)
                hides.append(missing.any(dim=1) | (hidden[kind].size(1) > 1))
        self.cache = Cache(reading, tuple(layers), tuple(hidden.values()), tuple(hides))

    @torch.no_grad()
    def score(self, targets: Tensor) -> Tensor:
        """targets: B x T, the token that follows each, pad for none.
        -> log-probabilities of those that are not pad, in their order"""
        asked = targets != self.decoder.dictionary.pad()
        return score_features(self.decoder, self.features[asked], targets[asked])

    def end(self) -> Opened:
        """To go on behind the last token of each row."""
        row = torch.arange(self.cache.num_rows)
        return self._opened(row, self.cache.map(torch.clone))

    def branch(self, rows: Tensor, counts: Tensor) -> Opened:
        """To go on, in row i, behind the first counts[i] tokens of the segment's row rows[i], as if
        it ended there: of the tokens behind them nothing is left."""
        cache, counts = self.cache.rows(rows), counts.cpu()
        place = torch.arange(cache.reading.tokens.size(1))
        behind = (place >= counts[:, None]).to(cache.reading.tokens.device)
        tokens = cache.reading.tokens.masked_fill(behind, self.decoder.dictionary.pad())

        def clear(x: Tensor) -> Tensor:
            return x[:, :, x.size(2) - len(place) :].masked_fill_(behind[:, None, :, None], 0)

        for layer in cache.layers:
            clear(layer.keys), clear(layer.values)
        reading = Reading(cache.reading.memory, tokens, counts.clone())
        return self._opened(rows, replace(cache, reading=reading))

    @torch.no_grad()
    def _opened(self, rows: Tensor, cache: Cache) -> Opened:
        last = self.features[rows, (cache.reading.count - 1).to(rows.device)]
        return Opened(self.decoder.head(last[:, None]), cache)


def copies_parts(like: Tensor) -> bool:
    """Whether products of a part of a tensor cost more than those of twice as much, all of it: in
    half precision a CPU copies the part first."""
    return like.device.type == "cpu" and like.dtype in (torch.bfloat16, torch.half)


class Continuation:
    """The tokens after a reading, one a row at a time, at a cost that does not depend on its
    length.  A row whose segment is full closes it first, as an evaluation would."""

    def __init__(self, decoder: MemoryDecoder, start: Reading | Opened) -> None:
        """start: an opened one is used up."""
        opened = OpenSegment(decoder, start).end() if isinstance(start, Reading) else start
        self.decoder, self.output, self.cache = decoder, opened.output, opened.cache
        length, each = self.cache.reading.tokens.size(1), _kinds(decoder)
        kinds = list(dict.fromkeys(each))
        self.kinds = [kinds.index(kind) for kind in each]  # of each layer
        self.slots = [line.shown for _, line in kinds]
        positions = [decoder.cache_positions(line, length) for _, line in kinds]
        self.tables = [
            layer.attention.table(positions[kind])
            for layer, kind in zip(decoder.layers, self.kinds, strict=True)
        ]
        self._look()
        self.live = torch.arange(len(self.counts))  # rows of the cache

    def _look(self) -> None:
        """What the steps up to the next border have in common."""
        self.counts = self.cache.reading.count.tolist()
        self.hides = [bool(hides.any()) for hides in self.cache.hides]

    def reorder(self, order: Tensor) -> None:
        """Row i becomes what row order[i] was.  The cache, which is large, is only copied if rows
        are doubled, or half of them are gone."""
        self.live, self.output = self.live[order.cpu()], self.output[order]
        doubled = len(self.live.unique()) < len(self.live)
        if doubled or 2 * len(self.live) <= len(self.counts):
            self.cache = self.cache.rows(self.live)
            self.live = torch.arange(len(self.live))
            self._look()

    @torch.no_grad()
    def feed(self, tokens: Tensor) -> Tensor:
        """tokens: B, which follow.  -> `output`: B x 1 x V, what the model makes of them"""
        length = self.cache.reading.tokens.size(1)
        full = [row for row in self.live.tolist() if self.counts[row] == length]
        # rows that are gone read anything
        every = tokens.new_full((len(self.counts),), self.decoder.dictionary.eos())
        live = self.live.to(tokens.device)
        every = every.index_copy(0, live, tokens)
        if not full:
            output = self._step(every)
        else:
            output = self._cross(every, torch.tensor(full))
            self._look()
        self.output = output[live]
        return self.output

    def _cross(self, tokens: Tensor, full: Tensor) -> Tensor:
        """Rows of full segments begin a new one with their token; the others go on."""
        reading = self.cache.reading.rows(full)
        where = full.to(tokens.device)
        reading = read(self.decoder, reading, tokens[where, None], torch.ones_like(reading.count))
        opened = OpenSegment(self.decoder, reading).end()
        if len(full) == len(self.counts):
            self.cache = opened.cache.rows(full.argsort())
            return opened.output[where.argsort()]
        output = self._step(tokens)
        news = iter(opened.cache.tensors().values())
        self.cache.map(lambda x: x.index_copy_(0, full.to(x.device), next(news)))
        return output.index_copy(0, where, opened.output)

    @torch.inference_mode()  # a small model's token is a fifth faster than without a gradient
    def _step(self, tokens: Tensor) -> Tensor:
        """One token in the middle of a segment; updates the cache in place.  A row whose segment
        is full comes to nothing, and has to be replaced."""
        decoder, reading = self.decoder, self.cache.reading
        last = reading.tokens.size(1) - 1
        counts = [min(n, last) for n in self.counts]
        count = torch.tensor(counts).to(tokens.device)
        places = [self._place(kind, count, counts) for kind in range(len(self.cache.hidden))]
        row = torch.arange(len(counts), device=tokens.device)
        reading.tokens[row, count] = tokens
        roles = None
        if decoder.roles is not None:
            roles = decoder.roles.of(reading.tokens, *reading.memory.role)[row, count]
        before = None
        if decoder.token_shift is not None:
            before = reading.tokens[row, (count - 1).clamp(min=0)]
            before = torch.where(count > 0, before, *reading.memory.last)
        each = (
            (cache, places[kind], table)
            for cache, kind, table in zip(self.cache.layers, self.kinds, self.tables, strict=True)
        )
        output = decoder.step(tokens, count, roles, before, each)
        reading.count += 1
        self.counts = [n + 1 for n in self.counts]
        return output

    def _place(self, kind: int, count: Tensor, counts: list[int]) -> Place:
        hidden, slots = self.cache.hidden[kind], self.slots[kind]
        past, most = hidden.size(2), max(counts)
        last = past + most + 1
        width = past + self.cache.reading.tokens.size(1)
        if 2 * last < width or not copies_parts(hidden):
            width = last
        if min(counts) == most:
            shown = None
            if self.hides[kind] or last < width:
                shown = hidden if self.hides[kind] else hidden[:1]
                shown = F.pad(F.pad(shown, (0, most + 1)), (0, width - last), value=-torch.inf)
            return Place(slots, past, most, width, last - 1, count, shown, None)
        column = count + past
        place = torch.arange(width, device=hidden.device)
        places = (place[:last] + most - count[:, None]).clamp(max=last - 1)
        late = place > column[:, None]
        shown = F.pad(hidden, (0, width - past)).masked_fill(late[:, None], -torch.inf)
        return Place(slots, past, most, width, column, count, shown, places)
