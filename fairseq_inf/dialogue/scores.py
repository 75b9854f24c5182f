"""How near answers are to what was really said, how sure that is, and whether two systems differ.

Every measure is a function of sums of statistics over the responses: a bootstrap draws whole
conversations with replacement, since the responses of one depend on each other, and adds theirs up.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fairseq_inf.errors import Failure

INSTALL = "pip install 'fairseq_inf[dialogue]'"
DRAWS = 1000
# R responses, C conversations, K statistics of a measure, D draws


@dataclass(frozen=True)
class Measure:
    title: str
    value: Callable[[np.ndarray], float]  # of the sums of its statistics: K
    better: int = 1  # the sign of a gain


def ratio(total: np.ndarray) -> float:
    """Of a mean in percent: the sum of the values, and how many they are."""
    return float(100 * total[0] / max(total[1], 1))


def perplexity(total: np.ndarray) -> float:
    """Of a negative log-likelihood, and of how many tokens."""
    return math.exp(total[0] / max(total[1], 1))


def _sacrebleu(name: str) -> Any:
    try:
        from sacrebleu import metrics
    except ImportError:
        raise Failure(f"BLEU and chrF need sacrebleu: {INSTALL}.") from None
    return getattr(metrics, name)()


def _corpus(name: str) -> Callable[[np.ndarray], float]:
    return lambda total: float(_sacrebleu(name)._compute_score_from_stats(total.tolist()).score)


MEASURES = {
    "ppl": Measure("perplexity", perplexity, -1),
    "f1": Measure("F1", ratio),
    "rouge1": Measure("ROUGE-1", ratio),
    "rougeL": Measure("ROUGE-L", ratio),
    "rouge1_recall": Measure("ROUGE-1 recall", ratio),
    "rougeL_recall": Measure("ROUGE-L recall", ratio),
    "meteor": Measure("METEOR", ratio),
    "bleu": Measure("BLEU", _corpus("BLEU")),
    "chrf": Measure("chrF", _corpus("CHRF")),
}


def normalize(text: str) -> list[str]:
    """Words in small letters, without punctuation and articles."""
    text = "".join(" " if letter in string.punctuation else letter for letter in text.lower())
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def f1(answer: str, reference: str) -> float:
    """2PR / (P + R) of the normalised words that both have, as often as both have them; 0 if there
    is none."""
    words, wanted = Counter(normalize(answer)), Counter(normalize(reference))
    common = sum((words & wanted).values())
    return 2 * common / (words.total() + wanted.total()) if common else 0.0


def rouge(answers: Sequence[str], references: Sequence[str]) -> dict[str, np.ndarray]:
    """F-measure and recall of ROUGE-1 and ROUGE-L.  -> R each"""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise Failure(f"ROUGE needs rouge-score: {INSTALL}.") from None
    scorer = RougeScorer(["rouge1", "rougeL"])
    found = [scorer.score(*pair) for pair in zip(references, answers, strict=True)]
    return {
        f"{name}{suffix}": np.array([getattr(score[name], kind) for score in found])
        for name in ("rouge1", "rougeL")
        for suffix, kind in (("", "fmeasure"), ("_recall", "recall"))
    }


def load_meteor() -> Callable[[str, str], float]:
    """METEOR of an answer and a reference; fails at once if WordNet is not there."""
    try:
        from nltk.corpus import wordnet
        from nltk.tokenize import wordpunct_tokenize
        from nltk.translate.meteor_score import single_meteor_score
    except ImportError:
        raise Failure(f"METEOR needs nltk: {INSTALL}.") from None
    try:
        wordnet.ensure_loaded()
    except LookupError:
        raise Failure(
            "METEOR needs WordNet, and corpora/wordnet is not there: set NLTK_DATA to a folder "
            "that has it, or fetch it with python -m nltk.downloader wordnet."
        ) from None

    def meteor(answer: str, reference: str) -> float:
        return single_meteor_score(wordpunct_tokenize(reference), wordpunct_tokenize(answer))

    return meteor


def statistics(answers: Sequence[str], references: Sequence[str]) -> dict[str, np.ndarray]:
    """Of all measures but the perplexity, whose statistics are a negative log-likelihood and its
    tokens.  -> of each R x K"""
    meteor = load_meteor()
    pairs = list(zip(answers, references, strict=True))
    means = {
        "f1": np.array([f1(*pair) for pair in pairs]),
        **rouge(answers, references),
        "meteor": np.array([meteor(*pair) for pair in pairs]),
    }
    found = {name: np.stack([x, np.ones(len(x))], axis=1) for name, x in means.items()}
    for name, kind in (("bleu", "BLEU"), ("chrf", "CHRF")):
        of = _sacrebleu(kind)._extract_corpus_statistics(list(answers), [list(references)])
        found[name] = np.array(of, dtype=float)
    return found


def by_conversation(each: np.ndarray, numbers: Sequence[int]) -> np.ndarray:
    """each: R x K.  numbers: the conversation of each response, from 0 on.  -> C x K"""
    total = np.zeros((max(numbers) + 1, each.shape[1]))
    np.add.at(total, np.asarray(numbers), each)
    return total


def bootstrap(found: dict[str, np.ndarray], draws: int = DRAWS, seed: int = 1) -> dict[str, Any]:
    """found: of each measure C x K.  -> of each its value, and where 95 % of the draws lie"""
    result = {}
    for name, each in found.items():
        value, count = MEASURES[name].value, len(each)
        draw = np.random.default_rng(seed)
        drawn = draw.multinomial(count, np.full(count, 1 / count), size=draws)
        values = [value(total) for total in drawn @ each]
        low, high = np.quantile(values, [0.025, 0.975])
        result[name] = {"value": value(each.sum(axis=0)), "low": float(low), "high": float(high)}
    return result


def compare(
    one: dict[str, np.ndarray], other: dict[str, np.ndarray], draws: int = DRAWS, seed: int = 1
) -> dict[str, Any]:
    """Approximate randomization (Noreen, 1989): how often two systems whose answers are exchanged
    at random, conversation by conversation, differ as much as these do.
    one, other: of each measure C x K.  -> of each `one` - `other`, and p"""
    result = {}
    for name in one:
        value = MEASURES[name].value
        swapped = np.random.default_rng(seed).integers(2, size=(draws, len(one[name])))
        mine, theirs = one[name].sum(axis=0), other[name].sum(axis=0)
        moved = swapped @ (one[name] - other[name])
        difference = value(mine) - value(theirs)
        found = [value(mine - x) - value(theirs + x) for x in moved]
        as_much = int((np.abs(found) >= abs(difference) - 1e-12).sum())
        result[name] = {"difference": difference, "p": (as_much + 1) / (draws + 1)}
    return result
