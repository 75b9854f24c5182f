"""Tell the value of a key that returns, and how well, by the time since it last stood."""

from typing import Any

import torch
from fairseq import metrics, utils
from fairseq.tasks import register_task
from torch import Tensor, nn

from fairseq_inf.data import StreamDataset
from fairseq_inf.tasks.lines import LinesConfig, LinesTask
from fairseq_inf.tasks.long_sequence_lm import Step

from .data import RecallBatches


@register_task("recall", dataclass=LinesConfig)
class RecallTask(LinesTask):
    """Rows read document after document, a segment a batch; targets are the values of keys that
    have stood before.  Logs recall_L, recall_2L, ..: accuracy at distances below L, below 2L, ..;
    hot keys, where there are any, are not in these, but in recall_hot, from 2L on."""

    name, needs = "recall", "k0"
    made_by = "fairseq-inf-recall make"

    def build_batches(
        self,
        dataset: StreamDataset,
        rows: int,
        shard: slice,
        shuffle_seed: int | None,
        context: int = 0,
    ) -> RecallBatches:
        length = self.cfg.tokens_per_sample
        spans = dataset.spans(rows, length, shuffle_seed)
        return RecallBatches(dataset, spans, length, shard)

    def train_step(self, sample: dict[str, Any], *args: Any, **kwargs: Any) -> Step:
        with _Outputs(self.model) as outputs:
            loss, size, log = super().train_step(sample, *args, **kwargs)
        return loss, size, {**log, **self._by_distance(sample, outputs)}

    def valid_step(self, sample: dict[str, Any], model: Any, criterion: Any) -> Step:
        with _Outputs(self.model) as outputs:
            loss, size, log = super().valid_step(sample, model, criterion)
        return loss, size, {**log, **self._by_distance(sample, outputs)}

    @torch.no_grad()
    def _by_distance(self, sample: dict[str, Any], outputs: "_Outputs") -> dict[str, Tensor]:
        """How many targets of each bin there are, and how many are the likeliest word."""
        distance, bins = sample["distance"], sample["edges"]
        asked = distance > 0
        logits = self.model.get_normalized_probs((outputs.last[0][asked], None), log_probs=True)
        right = logits.argmax(dim=-1) == sample["target"][asked]
        edges = torch.tensor(bins, device=distance.device)
        number = torch.bucketize(distance[asked], edges, right=True)
        found = {}
        if "hot" in sample:
            hot = sample["hot"][asked]
            far = hot & (number > 1)
            found = {"asked_hot": far.sum(), "recalled_hot": (far & right).sum()}
            number, right = number[~hot], right[~hot]
        counts = torch.bincount(number, minlength=len(edges))
        rights = torch.bincount(number[right], minlength=len(edges))
        for i, edge in enumerate(bins):
            found.update({f"asked_{edge}": counts[i], f"recalled_{edge}": rights[i]})
        return found

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        super().reduce_metrics(logging_outputs, criterion)
        for name in logging_outputs[0]:
            if not name.startswith("asked_"):
                continue
            edge = name.removeprefix("asked_")
            asked, right = (
                utils.item(sum(log.get(key, 0) for log in logging_outputs))
                for key in (name, f"recalled_{edge}")
            )
            if asked:
                metrics.log_scalar(f"recall_{edge}", 100 * right / asked, asked, round=2)


class _Outputs:
    """What a model has put out last, inside a `with`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.last: Any = None

    def __enter__(self) -> "_Outputs":
        self.hook = self.model.register_forward_hook(self._keep)
        return self

    def _keep(self, model: nn.Module, args: Any, output: Any) -> None:
        self.last = output

    def __exit__(self, *error: object) -> None:
        self.hook.remove()
