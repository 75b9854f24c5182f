"""A talk with a model after a memory: a question goes into the memory, and its answer comes word by
word."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairseq_inf.models.generation import Continuation, Opened, OpenSegment
from fairseq_inf.models.memory_lm import check_numbers

if TYPE_CHECKING:
    from fairseq_inf.hub import Memory, MemoryHub

STEPS = 8  # tokens of a segment that can be read at once in the time of one alone


class Talk:
    """memory: what the talk is about, and then also what was said"""

    def __init__(self, hub: MemoryHub, memory: Memory) -> None:
        self.hub, self.turns, self.memory = hub, hub.turns, memory
        hub.reading_of(memory)  # of this model
        self.before = self.turns.first
        self.opened: Opened | None = None
        never = {hub.dictionary.pad(), hub.dictionary.bos(), hub.dictionary.unk()}
        self.never = torch.tensor(sorted((self.turns.special | never) - self.turns.ends))
        self.asked = self.answered = torch.zeros(0, dtype=torch.long)  # of the last turn
        self.past = memory  # what was known before the last answer

    def get_ready(self) -> None:
        """Do what can be done before the question is known."""
        if self.opened is None:
            self.opened = OpenSegment(self.hub.model.decoder, self.memory.reading).end()

    def ask(
        self, question: str, max_tokens: int = 256, topp: float | None = None
    ) -> Generator[str, None, None]:
        """Yield the answer as it comes.  If the generator is closed, what has come is the answer.
        topp: draw from the likeliest tokens that have so much together (None: the likeliest)"""
        hub, decoder = self.hub, self.hub.model.decoder
        asked = hub.tokens_of_pieces(*self.before, question, *self.turns.answer)
        self.asked, self.answered, found = asked[:0], asked[:0], list[int]()
        running = self._start(asked)
        self.past, self.asked = hub.read_tokens(asked, self.memory), asked
        told = ""
        try:
            while len(found) < max_tokens:
                check_numbers(running.output)
                scores = decoder.get_normalized_probs((running.output, {}), True, None)[0, -1]
                token = choose(scores.index_fill(0, self.never.to(scores.device), -torch.inf), topp)
                found.append(token)
                if token in self.turns.ends:
                    break
                text = hub.text_of(torch.tensor(found))
                text = (text if told else text.lstrip()).rstrip("\ufffd")
                if len(text) > len(told):
                    yield text[len(told) :]
                    told = text
                if len(found) < max_tokens:
                    running.feed(torch.tensor([token], device=hub.device))
        finally:
            self.answered = torch.tensor(found, dtype=torch.long)
            self.memory, self.opened = hub.read_tokens(self.answered, self.past), None
            ended = bool(found) and found[-1] in self.turns.ends
            self.before = self.turns.next[1:] if ended else self.turns.next

    def _start(self, asked: Tensor) -> Continuation:
        """Behind a question."""
        decoder, reading = self.hub.model.decoder, self.memory.reading
        opened, self.opened = self.opened, None
        at_once = int(reading.count) + len(asked)
        if opened is None or STEPS * len(asked) > at_once:
            return Continuation(decoder, self.hub.read_tokens(asked, self.memory).reading)
        running = Continuation(decoder, opened)
        for token in asked.to(self.hub.device):
            running.feed(token[None])
        return running


def choose(scores: Tensor, topp: float | None) -> int:
    """The likeliest token, or one that is drawn.  scores: log-probabilities, V"""
    if topp is None:
        return int(scores.argmax())
    chances, order = scores.softmax(dim=0).sort(descending=True)
    kept = chances.cumsum(dim=0) - chances < topp
    return int(order[kept][torch.multinomial(chances[kept], 1)])
