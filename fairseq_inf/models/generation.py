"""Reading a text into the memory, and going on from it token by token.

Both follow the borders of an evaluation: a stream is eos and then the text, cut every L tokens,
and a segment enters the memory when it is full.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from fairseq.models import FairseqIncrementalDecoder
from torch import nn

from fairseq_inf.memory import CompressiveMemory, ContinuousMemory, State

from .decoder import DecoderState

# B rows, L tokens of a segment, C slots (0 unless compressive), S short-term length,
# P = C + S + L keys of a cache


@dataclass
class Reading(State):
    """A text that has been read so far; the next token follows its last one."""

    memory: DecoderState  # at the last border of segments
    tokens: torch.Tensor  # B x L: what came since
    count: torch.Tensor  # B: how many of them are real, from 1 to L

    def ranges(self):
        yield "tokens", 0, torch.iinfo(torch.long).max
        yield "count", 1, self.tokens.size(1)


@dataclass
class Cache(State):
    """What the next token needs of a reading, worked out once."""

    reading: Reading
    keys: tuple  # a layer: B x H x P x d, for [slots; short-term memory; segment]
    values: tuple
    reads: tuple  # a layer with a continuous memory: its probes and values
    hidden: torch.Tensor  # B x 1 or H x C+S: -inf where there is no slot or short-term memory yet


def new_reading(decoder, rows, length):
    """Nothing but eos."""
    decoder.check_length(length)
    memory = _widen(decoder.initial_state(rows), decoder.stm_length + length)
    device = memory.filled.device
    tokens = torch.full((rows, length), decoder.dictionary.pad(), device=device)
    tokens[:, 0] = decoder.dictionary.eos()
    return Reading(memory, tokens, torch.ones(rows, dtype=torch.long, device=device))


def _widen(state, width):
    """The same state with `width` vectors in `recent`; there is room at the left."""
    recent = tuple(F.pad(x, (0, 0, width - x.size(1), 0)) for x in state.recent)
    return DecoderState(recent, state.memories, state.filled, state.position, state.key)


def _put(state, rows, new):
    """The state with some of its rows replaced."""
    if len(rows) == state.num_rows:
        return new
    news = iter(new.tensors().values())
    return state.map(lambda x: x.index_copy(0, rows, next(news)))


@torch.no_grad()
def read(decoder, reading, text, lengths, score=False, report=None):
    """Go on reading.  text: B x n, padded on the right to the lengths (B).
    report: called with the number of tokens after each segment.
    -> Reading, and with `score` the log-probability of each token, B x n, 0 for padding"""
    width = reading.tokens.size(1)
    rows, n = text.shape
    total = reading.count + lengths
    place = torch.arange(int(total.max()), device=text.device)
    inputs = F.pad(reading.tokens, (0, max(0, len(place) - width)))[:, : len(place)]
    if n:
        behind = (place - reading.count[:, None]).clamp(min=0, max=n - 1)
        inputs = torch.where(place < reading.count[:, None], inputs, text.gather(1, behind))

    state, closed = reading.memory, (total - 1) // width
    scores = torch.zeros(rows, n, device=text.device)
    segments = -(-(int(total.max()) - 1) // width) if score else int(closed.max())
    for i in range(segments):
        # without a score only full segments are read; with one, all that predicts a token
        sizes = (total - 1 - i * width).clamp(max=width) if score else (closed - i) * width
        active = (sizes > 0).nonzero().squeeze(1)
        sizes = sizes[active].clamp(max=width)
        part = inputs[active, i * width : i * width + int(sizes.max())]
        x, new, extra = decoder(part, state.rows(active), sizes, project=score)
        full = sizes == width
        if full.any():
            state = _put(state, active[full], new.rows(full))
        if score:
            target = inputs[active, i * width + 1 : i * width + 1 + part.size(1)]
            target = F.pad(target, (0, part.size(1) - target.size(1)))
            sample = {"target": target}
            logs = decoder.get_normalized_probs((x, extra), log_probs=True, sample=sample)
            logs = logs.gather(2, target[..., None]).squeeze(2).float()
            at = torch.arange(part.size(1), device=text.device) + i * width + 1
            column = at - reading.count[active][:, None]  # of the text
            kept = (column >= 0) & (column < lengths[active][:, None])
            row = active[:, None].expand_as(column)
            scores[row[kept], column[kept]] = logs[kept]
        if report is not None:
            report(int(sizes.sum()))
    rest = total - closed * width
    place = torch.arange(width, device=text.device)
    index = (closed[:, None] * width + place).clamp(max=inputs.size(1) - 1)
    tokens = inputs.gather(1, index)
    tokens = tokens.masked_fill(place >= rest[:, None], decoder.dictionary.pad())
    reading = Reading(state, tokens, rest)
    return (reading, scores) if score else reading


@torch.no_grad()
def open_cache(decoder, reading):
    """-> what the model makes of the last token (logits or features): B x 1 x V, Cache"""
    width, stm = reading.tokens.size(1), decoder.stm_length
    # the cache is updated in place, the reading of the caller is not
    reading = Reading(reading.memory, reading.tokens.clone(), reading.count.clone())
    longest = int(reading.count.max())
    x, after, _ = decoder(reading.tokens[:, :longest], reading.memory, reading.count)
    x = x[torch.arange(x.size(0), device=x.device), reading.count - 1][:, None]

    # `recent` is [short-term memory; segment] at the right end; in the cache the segment begins
    # at the same column in every row
    place = torch.arange(stm + longest, device=x.device)
    index = (longest - reading.count[:, None] + place).clamp(max=stm + longest - 1)
    past = torch.arange(stm, device=x.device)
    absent = [past < stm - reading.memory.filled.clamp(max=stm)[:, None]]
    keys, values, reads = [], [], []
    memories = iter(after.memories)
    for layer, recent in zip(decoder.layers, after.recent, strict=True):
        vectors = recent.gather(1, index[..., None].expand(-1, -1, recent.size(2)))
        memory = None if layer.memory is None else next(memories)
        if isinstance(layer.memory, CompressiveMemory) and decoder.ltm_enabled:
            vectors = torch.cat([memory.slots, vectors], dim=1)
            if len(absent) == 1:
                slots = torch.arange(layer.memory.length, device=x.device)
                absent.insert(0, slots < layer.memory.length - memory.held[:, None])
        key, value = layer.attention.project(vectors)
        keys.append(F.pad(key, (0, 0, 0, width - longest)))
        values.append(F.pad(value, (0, 0, 0, width - longest)))
        if isinstance(layer.memory, ContinuousMemory) and decoder.ltm_enabled:
            reads.append(layer.memory.probes_and_values(memory.coefficients, recent.dtype))
    slots = absent[0].size(1) if len(absent) > 1 else 0
    absent = torch.cat(absent, dim=1)
    hidden = torch.zeros_like(absent, dtype=x.dtype).masked_fill(absent, -torch.inf)
    hidden = decoder.bias_slots(hidden[:, None, None], slots).squeeze(2)
    return x, Cache(reading, tuple(keys), tuple(values), tuple(reads), hidden)


class Continuation:
    """The tokens after a reading, one a row at a time, at a cost that does not depend on its
    length.  A row whose segment is full closes it first, as an evaluation would."""

    def __init__(self, decoder, reading):
        self.decoder = decoder
        self.output, self.cache = open_cache(decoder, reading)
        distances = decoder.distances(self.cache.keys[0].size(2) - 1, 0)
        self.tables = None
        if distances is not None:
            self.tables = [layer.attention.table(distances) for layer in decoder.layers]
        self._look()

    def _look(self):
        """What the steps up to the next border have in common."""
        self.counts = self.cache.reading.count.tolist()
        self.hides = bool((self.cache.hidden != 0).any())

    def reorder(self, order):
        """Row i becomes what row order[i] was."""
        if not torch.equal(order, torch.arange(len(self.counts), device=order.device)):
            self.cache = self.cache.rows(order)
            self.output = self.output[order]
            self._look()

    @torch.no_grad()
    def feed(self, tokens):
        """tokens: B, which follow.  -> `output`: B x 1 x V, what the model makes of them"""
        length = self.cache.reading.tokens.size(1)
        full = [row for row, count in enumerate(self.counts) if count == length]
        if not full:
            self.output = self._step(self.cache, tokens, self.counts)
            self.counts = [count + 1 for count in self.counts]
        else:
            self._cross(tokens, full)
            self._look()
        return self.output

    def _cross(self, tokens, full):
        """Rows of full segments begin a new one with their token; the others go on."""
        rows = torch.tensor(full, device=tokens.device)
        reading = self.cache.reading.rows(rows)
        lengths = torch.ones_like(reading.count)
        opened = read(self.decoder, reading, tokens[rows, None], lengths)
        output, cache = open_cache(self.decoder, opened)
        if len(full) == len(self.counts):
            self.output, self.cache = output, cache
            return
        others = [row for row in range(len(self.counts)) if row not in set(full)]
        index = torch.tensor(others, device=tokens.device)
        rest = self.cache.rows(index)
        stepped = self._step(rest, tokens[index], [self.counts[row] for row in others])
        self.output = self.output.index_copy(0, rows, output).index_copy(0, index, stepped)
        self.cache = _put(_put(self.cache, rows, cache), index, rest)

    def _step(self, cache, tokens, counts):
        """One token in the middle of a segment; updates the cache in place."""
        decoder, reading = self.decoder, cache.reading
        past, length = cache.hidden.size(2), reading.tokens.size(1)
        most, ragged = max(counts), min(counts) < max(counts)
        first = length - 1 - most  # column of the table for the farthest key of the newest row
        places = hidden = None
        column = past + most
        if ragged:
            column = reading.count + past
            place = torch.arange(past + most + 1, device=tokens.device)
            behind = most - reading.count[:, None]
            places = (place + behind).clamp(max=past + most)
            late = place > column[:, None]
            hidden = F.pad(cache.hidden, (0, most + 1)).masked_fill(late[:, None], -torch.inf)
        elif self.hides:
            hidden = F.pad(cache.hidden, (0, most + 1))
        row = torch.arange(len(counts), device=tokens.device)
        reading.tokens[row, reading.count] = tokens
        x = decoder.embed(tokens[:, None], reading.count[:, None])
        reading.count += 1

        reads = iter(cache.reads)
        for i, layer in enumerate(decoder.layers):
            source = layer.source(x)
            table = None if self.tables is None else self.tables[i][..., first:]
            keys, values = (x[:, :, : past + most + 1] for x in (cache.keys[i], cache.values[i]))
            found, query = layer.attention.step(
                source, keys, values, column, past, hidden, table, places
            )
            if isinstance(layer.memory, ContinuousMemory) and decoder.ltm_enabled:
                found = found + layer.memory.read(query, *next(reads))[0]
            x = layer.finish(x, found)
        return decoder.head(x)


class PromptReader(nn.Module):
    """The part of an encoder in fairseq's generator: reads the prompts into the memory."""

    def __init__(self, decoder, length):
        super().__init__()
        self.decoder, self.length = decoder, length

    def forward_torchscript(self, net_input):
        """net_input: src_tokens, src_lengths and, if there is one, the `memory` to go on from, a
        Reading of one row or of as many as the prompts.  -> {"reading": Reading}"""
        tokens, lengths = net_input["src_tokens"], net_input["src_lengths"]
        reading = net_input.get("memory")
        if reading is None:
            reading = new_reading(self.decoder, len(tokens), self.length)
        elif reading.num_rows != len(tokens):
            reading = reading.rows(torch.zeros_like(lengths))
        return {"reading": read(self.decoder, reading, tokens, lengths)}

    def reorder_encoder_out(self, encoder_out, order):
        return {name: reading.rows(order) for name, reading in encoder_out.items()}


class PromptContinuer(FairseqIncrementalDecoder):
    """The part of a decoder in fairseq's generator: the first output is that of the prompt's last
    token, whatever the generator's own first token is; each later one follows the last token."""

    def __init__(self, decoder):
        super().__init__(decoder.dictionary)
        self.decoder = decoder

    def forward(self, prev_output_tokens, encoder_out=None, incremental_state=None):
        if prev_output_tokens.size(1) == 1:
            # one reading a hypothesis from here on
            reading = encoder_out.pop("reading")
            incremental_state["continuation"] = Continuation(self.decoder, reading)
            return incremental_state["continuation"].output.clone(), None
        return incremental_state["continuation"].feed(prev_output_tokens[:, -1]).clone(), None

    def reorder_incremental_state(self, incremental_state, new_order):
        incremental_state["continuation"].reorder(new_order)


class PromptModel(nn.Module):
    """A language model as fairseq's generator takes one: encoder and decoder."""

    def __init__(self, model, length):
        super().__init__()
        self.encoder = PromptReader(model.decoder, length)
        self.decoder = PromptContinuer(model.decoder)
        self.get_normalized_probs = model.get_normalized_probs

    def max_decoder_positions(self):
        return self.decoder.decoder.max_positions()
