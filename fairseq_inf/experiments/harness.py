"""Models with memories in EleutherAI's lm-evaluation-harness, whose name here is fairseq_inf.

A context is read by segments into the memory, however long it is: nothing is cut off.  What several
contexts begin with, as the same examples or the same document, is read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from fairseq_inf.hub import open_hub
from fairseq_inf.models.generation import Continuation, Reading, new_reading, read
from fairseq_inf.models.memory_lm import check_numbers
from fairseq_inf.talk import choose

ROWS = 8  # if --batch_size does not say how many
Words = tuple[int, ...]  # of a text, by their numbers


def chances(decoder: Any, features: Tensor, target: Tensor) -> Tensor:
    """Of each target its log-probability, and whether it is the likeliest.  -> n x 2"""
    logs = decoder.get_normalized_probs((decoder.head(features[None]), {}), log_probs=True)[0]
    own = logs.gather(1, target[:, None])
    return torch.cat([own, own >= logs.amax(dim=1, keepdim=True)], dim=1).float()


def common(one: Words, other: Words) -> int:
    """How many words two texts begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@register_model("fairseq_inf")
class HarnessLM(TemplateLM):
    """--model_args path=CHECKPOINT,data=DATA_BIN and any override of the model, as
    ltm_policy=random"""

    def __init__(
        self,
        path: str,
        data: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.hub = open_hub(path, data, cpu=device == "cpu", **settings)
        if device not in (None, "cpu", "cuda"):
            self.hub.to(device)
        self._device = self.hub.device
        sized = batch_size is not None and str(batch_size).isdecimal()
        self.batch_size = int(batch_size) if sized else ROWS  # type: ignore[arg-type]

    @property
    def eot_token_id(self) -> int:
        return self.hub.dictionary.eos()

    @property
    def tokenizer_name(self) -> str:
        return self.hub.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        return self.hub.tokens_of(string).tolist()

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """requests: ((context, continuation), the words of both).  What stands before a text is
        eos in any case"""
        asked: dict[Words, list[int]] = {}
        for number, (_, context, _) in enumerate(requests):
            own = tuple(context)
            asked.setdefault(() if own == (self.eot_token_id,) else own, []).append(number)
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(requests), desc="loglikelihood", disable=disable_tqdm) as bar:
            for contexts, reading in self.readings(list(asked)):
                pairs = [(row, x) for row, own in enumerate(contexts) for x in asked[own]]
                for begin in range(0, len(pairs), self.batch_size):
                    some = pairs[begin : begin + self.batch_size]
                    rows = torch.tensor([row for row, _ in some], device=self.device)
                    texts = [requests[x][2] for _, x in some]
                    _, said = self.go_on(reading.rows(rows), texts, score=chances)
                    check_numbers(said)
                    for (_, number), text, own in zip(some, texts, said, strict=True):
                        logs, likeliest = own[: len(text)].reshape(-1, 2).unbind(dim=1)
                        found[number] = (float(logs.sum()), bool(likeliest.all()))
                    bar.update(len(some))
        results = [found[number] for number in range(len(requests))]
        for (args, _, _), result in zip(requests, results, strict=True):
            if args is not None:
                self.cache_hook.add_partial("loglikelihood", args, result)
        return results

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        texts = [self.tok_encode(*request.args) for request in requests]
        found = self._loglikelihood_tokens([(None, [], text) for text in texts], disable_tqdm)
        results = [logs for logs, _ in found]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        asked: dict[Words, list[int]] = {}
        for number, request in enumerate(requests):
            asked.setdefault(tuple(self.tok_encode(request.args[0])), []).append(number)
        found: dict[int, str] = {}
        with tqdm(total=len(requests), desc="generate_until", disable=disable_tqdm) as bar:
            for contexts, reading in self.readings(list(asked)):
                pairs = [(row, x) for row, own in enumerate(contexts) for x in asked[own]]
                for begin in range(0, len(pairs), self.batch_size):
                    some = pairs[begin : begin + self.batch_size]
                    rows = torch.tensor([row for row, _ in some], device=self.device)
                    settings = [requests[x].args[1] for _, x in some]
                    said = self.generate(reading.rows(rows), settings)
                    for (_, number), text in zip(some, said, strict=True):
                        found[number] = text
                        self.cache_hook.add_partial("generate_until", requests[number].args, text)
                    bar.update(len(some))
        return [found[number] for number in range(len(requests))]

    def readings(self, contexts: Sequence[Words]) -> Iterator[tuple[list[Words], Reading]]:
        """Yield contexts, some at a time, with a row of a reading for each."""
        decoder, length = self.hub.model.decoder, self.hub.length
        runs: list[list[Words]] = []  # of those that begin alike, for a segment at least
        for context in sorted(contexts):
            if runs and common(runs[-1][0], context) >= length:
                runs[-1].append(context)
            else:
                runs.append([context])
        groups = [(common(run[0], run[-1]), run) for run in runs if len(run) > 1]
        alone = sorted((run[0] for run in runs if len(run) == 1), key=len)
        for shared, group in [*groups, *([(0, alone)] if alone else [])]:
            start = self.go_on(new_reading(decoder, 1, length), [group[0][:shared]])
            for begin in range(0, len(group), self.batch_size):
                some = group[begin : begin + self.batch_size]
                rows = start.rows(torch.zeros(len(some), dtype=torch.long, device=self.device))
                yield some, self.go_on(rows, [context[shared:] for context in some])

    def go_on(self, reading: Reading, texts: Sequence[Sequence[int]], **score: Any) -> Any:
        """`read` for a text a row."""
        lengths = torch.tensor([len(text) for text in texts], device=self.device)
        tensors = [torch.tensor(text, dtype=torch.long) for text in texts]
        words = pad_sequence(tensors, batch_first=True, padding_value=self.hub.dictionary.pad())
        return read(self.hub.model.decoder, reading, words.to(self.device), lengths, **score)

    @torch.no_grad()
    def generate(self, reading: Reading, settings: Sequence[dict[str, Any]]) -> list[str]:
        """What follows in each row, up to the first of its `until`."""
        hub, decoder = self.hub, self.hub.model.decoder
        never = torch.tensor([hub.dictionary.pad(), hub.dictionary.bos(), hub.dictionary.unk()])
        going = Continuation(decoder, reading)
        words: list[list[int]] = [[] for _ in settings]
        texts, live = [""] * len(settings), list(range(len(settings)))
        while True:
            check_numbers(going.output)
            scores = decoder.get_normalized_probs((going.output, {}), log_probs=True)[:, -1].float()
            scores[:, never] = -torch.inf
            for row, own in zip(live, scores, strict=True):
                words[row].append(self.choose(own, settings[row]))
            left = []
            for place, row in enumerate(live):
                ended = words[row][-1] == hub.dictionary.eos()
                texts[row], stopped = cut(hub.text_of(torch.tensor(words[row])), settings[row])
                if not (
                    ended or stopped or len(words[row]) >= settings[row].get("max_gen_toks", 256)
                ):
                    left.append(place)
            if not left:
                return texts
            going.reorder(torch.tensor(left, device=self.device))
            live = [live[place] for place in left]
            going.feed(torch.tensor([words[row][-1] for row in live], device=self.device))

    def choose(self, scores: Tensor, settings: dict[str, Any]) -> int:
        """temperature and top_p are read if do_sample asks for a draw."""
        heat = float(settings.get("temperature", 1))
        if not settings.get("do_sample") or heat == 0:
            return choose(scores, None)
        return choose(scores / heat, float(settings.get("top_p", 1)))


def cut(text: str, settings: dict[str, Any]) -> tuple[str, bool]:
    """-> the text before the first of what it is to stop at, and whether there is one"""
    until = settings.get("until") or []
    ends = [text.find(end) for end in ([until] if isinstance(until, str) else until) if end]
    found = [end for end in ends if end >= 0]
    return (text[: min(found)], True) if found else (text, False)
