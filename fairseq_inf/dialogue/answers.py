"""What a model answers at every turn of true conversations, and how likely it finds what was said.

A document is read once, a conversation once; at each of its turns a copy goes on from there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from fairseq_inf.data import StreamDataset
from fairseq_inf.hub import MemoryHub
from fairseq_inf.models.generation import OpenSegment, Reading, new_reading, read

from .turns import MARKERS, find_turns

# B conversations side by side, L tokens of a segment


@dataclass
class Said:
    """A turn; the first of a conversation is not answered by the model."""

    conversation: int
    turn: int
    text: str
    answer: str = ""  # the model's
    nll: float = 0.0  # of the words of the text and its end
    tokens: int = 0


@dataclass
class Stream:
    """A conversation behind its document."""

    document: int  # of those that were read
    tokens: Tensor
    turn: Tensor  # of each token, the number of the turn that it is in


def pad(texts: Sequence[Tensor], value: int) -> tuple[Tensor, Tensor]:
    """-> B x n, lengths: B"""
    lengths = torch.tensor([len(text) for text in texts])
    most = int(lengths.max())
    padded = [F.pad(text, (0, most - len(text)), value=value) for text in texts]
    return torch.stack(padded), lengths


class Answers:
    """Goes through the conversations of a split."""

    def __init__(
        self, hub: MemoryHub, dataset: StreamDataset, conversations: int | None = None
    ) -> None:
        """conversations: the first that many."""
        self.hub, words = hub, dataset.dictionary
        self.pad, self.markers = words.pad(), torch.tensor([words.index(x) for x in MARKERS])
        documents: dict[tuple[int, ...], int] = {}
        self.turns: list[Said] = []
        self.streams: list[Stream] = []
        for number in range(min(conversations or len(dataset), len(dataset))):
            tokens = dataset[number]
            turns = find_turns(tokens.numpy(), words, f"line {number + 1} of {dataset.name}")
            begin, ends = turns[0].begin, [turn.end for turn in turns]
            document = documents.setdefault(tuple(tokens[:begin].tolist()), len(documents))
            turn_of = np.searchsorted(ends, np.arange(begin, len(tokens))) + len(self.turns)
            self.streams.append(Stream(document, tokens[begin:], torch.from_numpy(turn_of)))
            for place, turn in enumerate(turns):
                text = hub.text_of(tokens[turn.begin + 1 : turn.end]).strip()
                self.turns.append(Said(number, place, text))
        self.documents = [torch.tensor(document, dtype=torch.long) for document in documents]
        self.nll = torch.zeros(len(self.turns), dtype=torch.double)
        self.tokens = torch.zeros(len(self.turns), dtype=torch.long)

    @cached_property
    def after_documents(self) -> Reading:
        """A row a document, which has been read."""
        hub, decoder = self.hub, self.hub.model.decoder
        texts, lengths = pad(self.documents, self.pad)
        reading = new_reading(decoder, len(texts), hub.length)
        return read(decoder, reading, texts.to(hub.device), lengths.to(hub.device))

    def run(
        self,
        answered: int | None = None,
        rows: int = 16,
        branches: int = 64,
        seed: int = 1,
        progress: bool = False,
        **settings: Any,
    ) -> list[Said]:
        """answered: how many conversations are, the first ones (all); likelihoods are of all.
        rows: conversations side by side.  branches: answers side by side.
        settings: of `hub.go_on`"""
        answered = len(self.streams) if answered is None else answered
        # side by side are those that are answered, and of these those of about the same length
        order = [
            stream
            for part in (self.streams[:answered], self.streams[answered:])
            for stream in sorted(part, key=lambda stream: len(stream.tokens))
        ]
        torch.manual_seed(seed)
        with tqdm(total=len(self.streams), unit=" conversations", disable=not progress) as bar:
            for first in range(0, len(order), rows):
                some = order[first : first + rows]
                for segment, turn in self._segments(some):
                    starts = self._starts(segment, turn, answered)
                    for part in starts.split(branches) if len(starts) else ():
                        self._answer(segment, turn, part, settings)
                bar.update(len(some))
        for number, said in enumerate(self.turns):
            said.nll, said.tokens = float(self.nll[number]), int(self.tokens[number])
        return self.turns

    def _segments(self, streams: list[Stream]) -> Iterator[tuple[OpenSegment, Tensor]]:
        """Read some conversations to their ends; count what is likely.  -> each segment, and the
        turn of each of its tokens, -1 for those of the document: B x T"""
        hub, length = self.hub, self.hub.length
        chosen = torch.tensor([stream.document for stream in streams], device=hub.device)
        reading = self.after_documents.rows(chosen)
        # from the last border of segments before the first turn
        before = [x[:n].cpu() for x, n in zip(reading.tokens, reading.count, strict=True)]
        texts = [torch.cat([x, s.tokens]) for x, s in zip(before, streams, strict=True)]
        turns = [F.pad(s.turn, (len(x), 0), value=-1) for x, s in zip(before, streams, strict=True)]
        (inputs, lengths), (turn, _) = pad(texts, self.pad), pad(turns, -1)
        segments = -(-inputs.size(1) // length)
        more = segments * length + 1 - inputs.size(1)  # a token behind the last segment
        inputs, turn = F.pad(inputs, (0, more), value=self.pad), F.pad(turn, (0, more), value=-1)
        state = reading.memory
        for begin in range(0, segments * length, length):
            active = lengths > begin
            inputs, turn, lengths = inputs[active], turn[active], lengths[active]
            if begin:
                state = state.rows(active.to(hub.device))
            sizes = (lengths - begin).clamp(max=length).to(hub.device)
            part = inputs[:, begin : begin + length].to(hub.device)
            segment = OpenSegment(hub.model.decoder, Reading(state, part, sizes))
            behind = slice(begin + 1, begin + 1 + segment.longest)
            self._score(segment, inputs[:, behind], turn[:, behind])
            yield segment, turn[:, begin : begin + segment.longest]
            state = segment.after

    def _score(self, segment: OpenSegment, follows: Tensor, turn: Tensor) -> None:
        """follows, turn: of the token behind each of the segment's"""
        said = (turn >= 0) & ~torch.isin(follows, self.markers)
        targets = follows.masked_fill(~said, self.pad).to(self.hub.device)
        self.nll.index_add_(0, turn[said], -segment.score(targets).double().cpu())
        self.tokens += torch.bincount(turn[said], minlength=len(self.tokens))

    def _starts(self, segment: OpenSegment, turn: Tensor, answered: int) -> Tensor:
        """-> row and column of each marker that an answer follows: n x 2"""
        tokens = segment.cache.reading.tokens[:, : segment.longest].cpu()
        markers = (torch.isin(tokens, self.markers) & (turn >= 0)).nonzero()
        said = [self.turns[int(turn[tuple(at)])] for at in markers]
        wanted = [i for i, x in enumerate(said) if x.turn > 0 and x.conversation < answered]
        return markers[wanted]

    def _answer(
        self, segment: OpenSegment, turn: Tensor, starts: Tensor, settings: dict[str, Any]
    ) -> None:
        rows, columns = starts.to(self.hub.device).unbind(1)
        answers = self.hub.go_on(segment.branch(rows, columns + 1), without=MARKERS, **settings)
        for at, answer in zip(starts, answers, strict=True):
            self.turns[int(turn[tuple(at)])].answer = self.hub.text_of(answer).strip()
