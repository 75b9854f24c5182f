"""Read a whole sequence into the memory, then tell the tokens of it by falling frequency."""

from collections import Counter
from dataclasses import dataclass, field

import torch
from fairseq import metrics, utils
from fairseq.tasks import register_task

from fairseq_inf.data import SequenceBatches, find_question
from fairseq_inf.data.sorting import SEPARATOR, kendall_tau
from fairseq_inf.models.generation import Continuation, new_reading, read

from .lines import LinesConfig, LinesTask


@dataclass
class SortingConfig(LinesConfig):
    learn_from_all: bool = field(
        default=False,
        metadata={
            "help": "keep the gradient of segments without targets: a compressive memory learns "
            "from their reconstruction loss, too"
        },
    )
    eval_order: bool = field(
        default=False,
        metadata={
            "help": "in validation, generate the order greedily as well, and log the share that "
            "is right from end to end (exact_match) and Kendall's tau (kendall_tau)"
        },
    )


@register_task("sorting", dataclass=SortingConfig)
class SortingTask(LinesTask):
    """A batch is whole sequences.  Its segments go to the model in order, from an empty memory;
    only what follows <sep> is a target, and only those segments have a gradient."""

    name, needs = "sorting", SEPARATOR

    def __init__(self, cfg, dictionary):
        super().__init__(cfg, dictionary)
        self.asks = dictionary.index(SEPARATOR)

    def build_batches(self, dataset, rows, own, shuffle_seed, context=0):
        length = self.cfg.tokens_per_sample
        return SequenceBatches(dataset, rows, length, own, self.asks, shuffle_seed)

    def prompts(self, dataset):
        """A sequence up to <sep>: what fairseq-generate goes on with is its order."""
        return {
            number: dataset[number][: find_question(dataset, number, self.asks) + 1]
            for number in range(len(dataset))
        }

    def check_prompt(self, text, name):
        super().check_prompt(text, name)
        if int(text[-1]) != self.asks:
            raise ValueError(f"{name} must end with {SEPARATOR}: what follows is the order")

    # every batch begins with an empty memory, so that there is none to save

    def save_memory(self):
        return {}

    def restore_memory(self, tensors, rows):
        pass

    def gather_memory(self):
        pass

    def train_step(self, sample, model, criterion, optimizer, update_num, ignore_grad=False):
        model.train()
        step = super().train_step

        def learn(segment):
            return step(segment, model, criterion, optimizer, update_num, ignore_grad)

        return self._read(sample, model, learn, 0 if self.cfg.learn_from_all else sample["first"])

    def valid_step(self, sample, model, criterion):
        model.eval()
        step = super().valid_step
        loss, size, log = self._read(
            sample, model, lambda segment: step(segment, model, criterion), sample["first"]
        )
        if self.cfg.eval_order:
            log.update(self._generate(sample, model))
        return loss, size, log

    def _read(self, sample, model, step, first):
        """All segments in order, those from `first` on by `step`.  -> loss, sample size, log"""
        loss, size, total = 0, 0, Counter()
        for number, segment in enumerate(sample["segments"]):
            if number < first:
                with torch.no_grad():
                    model(**segment["net_input"], project=False)
                continue
            part, count, log = step(segment)
            loss, size = loss + part.detach(), size + count
            total.update(log)
        return loss, size, {**total, "nsentences": sample["nsentences"]}

    @torch.no_grad()
    def _generate(self, sample, model):
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
        found = []
        for _ in range(int(count.max())):
            if found:
                continuation.feed(found[-1])
            logs = model.get_normalized_probs((continuation.output, None), log_probs=True)
            found.append(logs[:, -1].argmax(dim=-1))
        found = torch.stack(found, dim=1).tolist()
        right = [row[row != pad].tolist() for row in targets]
        pairs = [(order, own[: len(order)]) for order, own in zip(right, found, strict=True)]
        return {
            "orders": len(pairs),
            "exact": sum(order == own for order, own in pairs),
            "tau": sum(kendall_tau(order, own) for order, own in pairs),
        }

    def reduce_metrics(self, logging_outputs, criterion):
        super().reduce_metrics(logging_outputs, criterion)
        total = {
            name: utils.item(sum(log.get(name, 0) for log in logging_outputs))
            for name in ("orders", "exact", "tau")
        }
        if total["orders"]:
            for name, key, unit in (("exact_match", "exact", 100), ("kendall_tau", "tau", 1)):
                mean = unit * total[key] / total["orders"]
                metrics.log_scalar(name, mean, total["orders"], round=4)
