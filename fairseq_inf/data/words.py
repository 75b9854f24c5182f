"""Words of a dictionary, and which dictionary it is."""

import hashlib
import logging
from collections.abc import Collection
from typing import Any

from fairseq.data import Dictionary
from torch import Tensor

logger = logging.getLogger(__name__)


def dictionary_state(dictionary: Dictionary) -> dict[str, Any]:
    """What tells a dictionary from others."""
    text = "\n".join(dictionary.symbols)
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    return {"dictionary": digest, "words": len(dictionary)}


def check_words(total: int, unknown: int, name: str, advice: str) -> None:
    """Refuse a text of no words, or of none that the dictionary has; tell of some."""
    if not total:
        raise ValueError(f"{name} is empty: there must be something to read")
    if unknown == total:
        raise ValueError(f"no word of {name} is in the dictionary: {advice}")
    if unknown:
        logger.warning(
            f"{unknown:,} of the {total:,} words of {name} are not in the dictionary and are read "
            "as <unk>"
        )


def without_pad(tokens: Tensor, dictionary: Any) -> Tensor:
    """The word <pad> in a text is an unknown one, since its number stands for nothing at all."""
    return tokens.masked_fill(tokens == dictionary.pad(), dictionary.unk())


def without_end(text: Tensor, ends: Collection[int]) -> Tensor:
    """The tokens without those of `ends` that they end with."""
    size = len(text)
    while size and int(text[size - 1]) in ends:
        size -= 1
    return text[:size]
