"""Read a whole sequence into the memory, then tell the tokens of it by falling frequency."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from fairseq import metrics, utils
from fairseq.data import Dictionary
from fairseq.tasks import register_task
from torch import Tensor

from fairseq_inf.data import StreamDataset
from fairseq_inf.models.generation import Continuation, new_reading, read
from fairseq_inf.tasks.lines import LinesConfig
from fairseq_inf.tasks.long_sequence_lm import Step
from fairseq_inf.tasks.sequences import SequencesTask

from .data import SEPARATOR, find_answer, find_question, kendall_tau


@dataclass
class SortingConfig(LinesConfig):
    eval_order: bool = field(
        default=False,
        metadata={
            "help": "in validation, generate the order greedily as well, and log the share that "
            "is right from end to end (exact_match) and Kendall's tau (kendall_tau)"
        },
    )


@register_task("sorting", dataclass=SortingConfig)
class SortingTask(SequencesTask):
    """Only what follows <sep> is a target."""

    name, needs = "sorting", SEPARATOR
    made_by = "fairseq-inf-sorting make"

    def __init__(self, cfg: Any, dictionary: Dictionary) -> None:
        super().__init__(cfg, dictionary)
        self.asks = dictionary.index(SEPARATOR)

    def asked(self, dataset: StreamDataset, document: int) -> np.ndarray:
        return find_answer(dataset, document)

    def prompts(self, dataset: StreamDataset) -> dict[int, Tensor]:
        """A sequence up to <sep>: what fairseq-generate goes on with is its order."""
        return {
            number: dataset[number][: find_question(dataset, number) + 1]
            for number in range(len(dataset))
        }

    def check_prompt(self, text: Tensor, name: str) -> None:
        super().check_prompt(text, name)
        if int(text[-1]) != self.asks:
            raise ValueError(f"{name} must end with {SEPARATOR}: what follows is the order")

    def valid_step(self, sample: dict[str, Any], model: Any, criterion: Any) -> Step:
        loss, size, log = super().valid_step(sample, model, criterion)
        if self.cfg.eval_order:
            log.update(self._generate(sample, model))
        return loss, size, log

    @torch.no_grad()
    def _generate(self, sample: dict[str, Any], model: Any) -> dict[str, Any]:
        """The order that the model gives greedily, against the right one."""
        tokens = torch.cat([s["net_input"]["src_tokens"] for s in sample["segments"]], dim=1)
        targets = torch.cat([s["target"] for s in sample["segments"]], dim=1)
        pad = self.dictionary.pad()
        count = (targets != pad).sum(dim=1)
        kept = count > 0
        tokens, targets, count = tokens[kept], targets[kept], count[kept]
        if not len(tokens):
            return {"orders": 0, "exact": 0, "tau": 0.0}
        # a stream is eos and then the text; the text up to <sep> is what is asked
        asks = (tokens == self.asks).int().argmax(dim=1)
        prompt = tokens[:, 1 : int(asks.max()) + 1]
        reading = new_reading(model.decoder, len(tokens), self.cfg.tokens_per_sample)
        continuation = Continuation(model.decoder, read(model.decoder, reading, prompt, asks))
        found: list[Tensor] = []
        for _ in range(int(count.max())):
            if found:
                continuation.feed(found[-1])
            logs = model.get_normalized_probs((continuation.output, None), log_probs=True)
            found.append(logs[:, -1].argmax(dim=-1))
        orders = torch.stack(found, dim=1).tolist()
        right = [row[row != pad].tolist() for row in targets]
        pairs = [(order, said[: len(order)]) for order, said in zip(right, orders, strict=True)]
        return {
            "orders": len(pairs),
            "exact": sum(order == said for order, said in pairs),
            "tau": sum(kendall_tau(order, said) for order, said in pairs),
        }

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        super().reduce_metrics(logging_outputs, criterion)
        total = {
            name: utils.item(sum(log.get(name, 0) for log in logging_outputs))
            for name in ("orders", "exact", "tau")
        }
        if total["orders"]:
            for name, key, unit in (("exact_match", "exact", 100), ("kendall_tau", "tau", 1)):
                mean = unit * total[key] / total["orders"]
                metrics.log_scalar(name, mean, total["orders"], round=4)
