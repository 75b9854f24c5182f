"""A conversation as a stream: `<doc>` and the document, then for each turn `<speaker1>` or
`<speaker2>`, its words and </s>."""

from dataclasses import dataclass

import numpy as np
from fairseq.data import Dictionary

from fairseq_inf.data import StreamDataset

DOCUMENT = "<doc>"
SPEAKERS = ("<speaker1>", "<speaker2>")
MARKERS = (DOCUMENT, *SPEAKERS)
END = "</s>"  # of a turn


@dataclass(frozen=True)
class Turn:
    """One turn in the tokens of a stream."""

    begin: int  # of its marker
    end: int  # of its </s>


def find_turns(tokens: np.ndarray, dictionary: Dictionary, name: str) -> list[Turn]:
    """tokens: of a stream.  name: of it, for errors"""
    begins = np.flatnonzero(np.isin(tokens, [dictionary.index(word) for word in SPEAKERS]))
    ends = np.flatnonzero(tokens == dictionary.eos())
    if not len(begins) or len(begins) != len(ends) or not (begins < ends).all():
        raise ValueError(
            f"{name} is no conversation: each turn begins with {' or '.join(SPEAKERS)} and ends "
            f"with {END}; make the data with examples/dialogue/prepare.sh"
        )
    return [Turn(*both) for both in zip(begins.tolist(), ends.tolist(), strict=True)]


def find_said(dataset: StreamDataset, number: int, with_document: bool = False) -> np.ndarray:
    """-> of each token of a stream whether it is a word of a turn or its end; with_document: or a
    word of the document"""
    tokens, dictionary = dataset[number].numpy(), dataset.dictionary
    turns = find_turns(tokens, dictionary, f"line {number + 1} of {dataset.name}")
    said = ~np.isin(tokens, [dictionary.index(word) for word in MARKERS])
    if not with_document:
        said[: turns[0].begin] = False
    return said
