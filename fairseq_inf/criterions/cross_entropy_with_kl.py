"""Negative log-likelihood, and what the long-term memories learn beside it."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from fairseq import metrics, utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass
from torch import Tensor

from fairseq_inf.memory import Encounter


@dataclass
class CrossEntropyWithKLConfig(FairseqDataclass):
    kl_weight: float = field(default=1e-5, metadata={"help": "weight of the KL term"})
    kl_sigma: float = field(
        default=0.05, metadata={"help": "standard deviation that the densities are drawn to"}
    )
    reconstruction_weight: float = field(
        default=1.0, metadata={"help": "weight of the loss that a compressive memory learns from"}
    )
    report_accuracy: bool = field(
        default=False, metadata={"help": "log the share of targets that are the likeliest word"}
    )


Logs = dict[str, tuple[Tensor, Tensor]]


def remembered(
    extra: Any, targets: Tensor, settings: Mapping[str, float]
) -> tuple[dict[str, Tensor], Logs]:
    """extra: of a model; a language model of fairseq's own has nothing of memories in it.
    -> the losses and the logs of the memories of all layers, by name"""
    losses: dict[str, Tensor] = {}
    logs: Logs = {}
    met: list[Encounter | None] = extra.get("layers", []) if isinstance(extra, dict) else []
    for encounter in met:
        if encounter is None:
            continue
        encounter = encounter.of(targets, settings)
        for name, loss in encounter.memory.losses(encounter).items():
            losses[name] = losses[name] + loss if name in losses else loss
        for name, (total, of) in encounter.logs(targets).items():
            before = logs.get(name, (0, 0))
            logs[name] = (before[0] + total, before[1] + of)
    return losses, logs


@register_criterion("cross_entropy_with_kl", dataclass=CrossEntropyWithKLConfig)
class CrossEntropyWithKL(FairseqCriterion):
    """L = L_NLL + sum over the losses of the memories, by name, each with its weight.

    All are sums over tokens.  "kl": over layers, heads and tokens with a target that read a memory
    which is not empty, KL(N(mu, sigma^2) || N(mu, kl_sigma^2)).  "reconstruction": that of a
    compressive memory, in training.  A loss that has no weight here weighs 1.
    """

    def __init__(
        self,
        task: Any,
        kl_weight: float,
        kl_sigma: float,
        reconstruction_weight: float = 1.0,
        report_accuracy: bool = False,
    ) -> None:
        super().__init__(task)
        if not 0 <= kl_weight < math.inf:
            raise ValueError(f"--kl-weight must be a number from 0 on, got {kl_weight}")
        if not 0 < kl_sigma < math.inf:
            raise ValueError(f"--kl-sigma must be a positive number, got {kl_sigma}")
        if not 0 <= reconstruction_weight < math.inf:
            raise ValueError(
                f"--reconstruction-weight must be a number from 0 on, got {reconstruction_weight}"
            )
        self.weights = {"kl": kl_weight, "reconstruction": reconstruction_weight}
        self.settings = {"kl_sigma": kl_sigma}
        self.report_accuracy = report_accuracy

    def forward(
        self, model: Any, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        target, ntokens = sample["target"], sample["ntokens"]
        net_output = model(**sample["net_input"])
        nll = self.nll(model, net_output, target)
        losses, logs = remembered(net_output[1], target != self.padding_idx, self.settings)
        loss = nll
        for name, value in losses.items():
            loss = loss + self.weights.get(name, 1.0) * value
        # on a GPU, which would be waited for, fairseq looks at the norm of the gradient
        if loss.device.type == "cpu" and not math.isfinite(loss.item()):
            raise FloatingPointError(
                f"the loss is {loss.item()} in {'training' if model.training else 'validation'}: "
                "go on from the last checkpoint with a lower --lr or --clip-norm"
            )
        logs |= {name: (value.detach(), ntokens) for name, value in losses.items()}
        if self.report_accuracy:
            correct = self.correct(model, net_output, target)
            logs["accuracy"] = (100 * correct, ntokens)
        logging_output = {
            "loss": loss.detach(),
            "nll_loss": nll.detach(),
            "ntokens": ntokens,
            "nsentences": sample["nsentences"],
            "sample_size": ntokens,
        }
        for name, (total, of) in logs.items():
            logging_output[name], logging_output[f"{name}_of"] = total, of
        return loss, ntokens, logging_output

    def nll(self, model: Any, net_output: Any, target: Tensor) -> Tensor:
        softmax = getattr(model.decoder, "adaptive_softmax", None)
        if softmax is None:
            logits = net_output[0].float()
            return F.cross_entropy(
                logits.flatten(0, -2),
                target.flatten(),
                ignore_index=self.padding_idx,
                reduction="sum",
            )
        # padding goes to no band of the adaptive softmax
        real = target != self.padding_idx
        features, target = net_output[0][real], target[real]
        nll = 0 * features.float().sum()
        if not len(target):
            return nll
        bands, targets = softmax(features, target)
        for logits, band_target in zip(bands, targets, strict=True):
            if band_target is not None:
                nll = nll + F.cross_entropy(logits.float(), band_target, reduction="sum")
        return nll

    @torch.no_grad()
    def correct(self, model: Any, net_output: Any, target: Tensor) -> Tensor:
        """How many targets are the word that the model finds likeliest."""
        real = target != self.padding_idx
        softmax = getattr(model.decoder, "adaptive_softmax", None)
        if softmax is None:
            return ((net_output[0].argmax(dim=-1) == target) & real).sum()
        x, target = net_output[0][real], target[real]
        correct = torch.zeros_like(target[:0].sum())
        for part, wanted in zip(x.split(256), target.split(256), strict=True):
            if len(wanted):  # all words of many tokens at once would fill the memory
                best = softmax.get_log_prob(part[None], None)[0].argmax(dim=-1)
                correct = correct + (best == wanted).sum()
        return correct

    @staticmethod
    def reduce_metrics(logging_outputs: Iterable[dict[str, Any]]) -> None:
        logging_outputs = list(logging_outputs)

        def total(name: str) -> Any:
            return utils.item(sum(log.get(name, 0) for log in logging_outputs))

        ntokens = max(total("ntokens"), 1)
        for name in ("loss", "nll_loss"):
            metrics.log_scalar(name, total(name) / ntokens / math.log(2), ntokens, round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["nll_loss"].avg))
        names = {name.removesuffix("_of") for log in logging_outputs for name in log}
        for name in sorted(names):
            of = total(f"{name}_of")
            if of:
                metrics.log_scalar(name, total(name) / of, of, round=4)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
