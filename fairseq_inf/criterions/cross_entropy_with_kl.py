"""Negative log-likelihood plus a KL term that keeps the long-term memory's densities narrow."""

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from fairseq import metrics, utils
from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.dataclass import FairseqDataclass


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


@register_criterion("cross_entropy_with_kl", dataclass=CrossEntropyWithKLConfig)
class CrossEntropyWithKL(FairseqCriterion):
    """L = L_NLL + kl_weight * L_KL + reconstruction_weight * L_R, summed over the real tokens.

    L_KL = sum over layers, heads and tokens of KL(N(mu, sigma^2) || N(mu, kl_sigma^2)); tokens
    without a target or that read an empty memory, and models without one, have none.  L_R is
    what the model has under "reconstruction": a compressive memory's in training, and nothing
    otherwise.
    """

    def __init__(self, task, kl_weight, kl_sigma, reconstruction_weight=1.0, report_accuracy=False):
        super().__init__(task)
        if not 0 <= kl_weight < math.inf:
            raise ValueError(f"--kl-weight must be a number from 0 on, got {kl_weight}")
        if not 0 < kl_sigma < math.inf:
            raise ValueError(f"--kl-sigma must be a positive number, got {kl_sigma}")
        if not 0 <= reconstruction_weight < math.inf:
            raise ValueError(
                f"--reconstruction-weight must be a number from 0 on, got {reconstruction_weight}"
            )
        self.kl_weight, self.kl_sigma = kl_weight, kl_sigma
        self.reconstruction_weight = reconstruction_weight
        self.report_accuracy = report_accuracy

    def forward(self, model, sample, reduce=True):
        net_output = model(**sample["net_input"])
        extra = net_output[1] if len(net_output) > 1 and isinstance(net_output[1], dict) else {}
        nll = self.nll(model, net_output, sample["target"])
        kl, reads, sigma = self.kl(extra, nll, sample["target"] != self.padding_idx)
        loss = nll + self.kl_weight * kl
        reconstruction = extra.get("reconstruction")
        if reconstruction is not None:
            loss = loss + self.reconstruction_weight * reconstruction
        if not math.isfinite(loss.item()):
            raise FloatingPointError(
                f"the loss is {loss.item()} in {'training' if model.training else 'validation'}: "
                "go on from the last checkpoint with a lower --lr or --clip-norm"
            )
        ntokens = sample["ntokens"]
        logging_output = {
            "loss": loss.detach(),
            "nll_loss": nll.detach(),
            "kl": kl.detach(),
            "ltm_sigma": sigma,
            "ltm_reads": reads,
            "ltm_tokens": ntokens if extra.get("densities") else 0,
            "ltm_share": extra.get("ltm_share", torch.zeros_like(nll)).detach() * ntokens,
            "reconstruction": torch.zeros_like(nll)
            if reconstruction is None
            else reconstruction.detach(),
            "cmem_tokens": 0 if reconstruction is None else ntokens,
            "ntokens": ntokens,
            "nsentences": sample["nsentences"],
            "sample_size": ntokens,
        }
        if self.report_accuracy:
            logging_output["correct"] = self.correct(model, net_output, sample["target"])
            logging_output["accuracy_of"] = ntokens
        return loss, ntokens, logging_output

    def nll(self, model, net_output, target):
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
        bands, targets = softmax(net_output[0][real], target[real])
        nll = net_output[0].new_zeros((), dtype=torch.float)
        for logits, band_target in zip(bands, targets, strict=True):
            if band_target is not None:
                nll = nll + F.cross_entropy(logits.float(), band_target, reduction="sum")
        return nll

    @torch.no_grad()
    def correct(self, model, net_output, target):
        """How many targets are the word that the model finds likeliest."""
        real = target != self.padding_idx
        x, target = net_output[0][real], target[real]
        softmax = getattr(model.decoder, "adaptive_softmax", None)
        if softmax is None:
            return (x.argmax(dim=-1) == target).sum()
        correct = torch.zeros_like(target[:0].sum())
        for part, own in zip(x.split(256), target.split(256), strict=True):
            if len(own):  # all words of many tokens at once would fill the memory
                best = softmax.get_log_prob(part[None], None)[0].argmax(dim=-1)
                correct = correct + (best == own).sum()
        return correct

    def kl(self, extra, like, counted):
        """counted: B x T, true for tokens with a target.
        -> KL summed over layers, heads and tokens; how many densities that were; sum of sigma"""
        densities = extra.get("densities") or []
        if not densities:
            zero = torch.zeros_like(like)
            return zero, zero, zero
        mask = (extra["ltm_mask"] & counted)[:, None, :]  # B x 1 x T
        kl = sum((density.kl(self.kl_sigma) * mask).sum() for density in densities)
        with torch.no_grad():
            sigma = sum((density.var.sqrt() * mask).sum() for density in densities)
            reads = mask.sum() * densities[0].mu.size(1) * len(densities)
        return kl, reads, sigma

    @staticmethod
    def reduce_metrics(logging_outputs):
        def total(name):
            return utils.item(sum(log.get(name, 0) for log in logging_outputs))

        ntokens = max(total("ntokens"), 1)
        for name in ("loss", "nll_loss"):
            metrics.log_scalar(name, total(name) / ntokens / math.log(2), ntokens, round=3)
        metrics.log_derived("ppl", lambda meters: utils.get_perplexity(meters["nll_loss"].avg))
        if total("accuracy_of"):
            accuracy = 100 * total("correct") / total("accuracy_of")
            metrics.log_scalar("accuracy", accuracy, total("accuracy_of"), round=2)
        if total("ltm_tokens"):
            metrics.log_scalar("kl", total("kl") / ntokens, ntokens, round=3)
            metrics.log_scalar("ltm_share", total("ltm_share") / ntokens, ntokens, round=3)
        if total("cmem_tokens"):
            mean = total("reconstruction") / ntokens
            metrics.log_scalar("reconstruction", mean, ntokens, round=4)
        reads = total("ltm_reads")
        if reads:
            metrics.log_scalar("ltm_sigma", total("ltm_sigma") / reads, reads, round=4)

    @staticmethod
    def logging_outputs_can_be_summed():
        return True
