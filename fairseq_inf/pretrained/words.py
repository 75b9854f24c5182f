"""The dictionary of a pretrained model: its words are the numbers of the model's tokens.

</s> is the token that ends a text, which may be in the dictionary once more and is not used there.
Words such as <speaker1>, which data may have beside the model's tokens, are new ones to learn.
"""

from pathlib import Path

import torch
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_inf.errors import Failure

ABSENT, NEW = -1, -2  # in the place of a token: the model does not have the word; it shall learn it


def is_token(word: str) -> bool:
    return word.isascii() and word.isdecimal() and str(int(word)) == word


def write_dictionary(path: Path, words: int, end: int) -> None:
    path.write_text("".join(f"{i} 1\n" for i in range(words) if i != end))


def load_dictionary(path: Path) -> Dictionary:
    if not path.is_file():
        raise Failure(f"--dict {path} does not exist: name the dict.txt of the data")
    try:
        return Dictionary.load(str(path))
    except Exception:  # fairseq raises that very class
        raise Failure(f"--dict {path} is not a dictionary of fairseq's") from None


def token_ids(dictionary: Dictionary, words: int, end: int, path: Path) -> Tensor:
    """The token of each word of a dictionary, or ABSENT, or NEW.  path: the dictionary's"""
    ids = torch.full((len(dictionary),), ABSENT)
    for index, word in enumerate(dictionary.symbols):
        if is_token(word) and int(word) != end:
            ids[index] = int(word)
        elif index >= dictionary.nspecial and word.startswith("<") and word.endswith(">"):
            ids[index] = NEW
    ids[dictionary.eos()] = end
    missing = set(range(words)) - set(ids.tolist())
    if missing or int(ids.max()) >= words:
        example = min(missing) if missing else int(ids.max())
        raise Failure(
            f"{path} is of another vocabulary than the model's {words} tokens: token "
            f"{example} is not in both; leave --dict out, and binarize the data with the "
            "dict.txt that is written"
        )
    return ids


def token_rows(dictionary: Dictionary, absent: Tensor, end: int, path: Path) -> tuple[Tensor, int]:
    """The place of each token in a dictionary, and the token that </s> is.

    absent: not 0 for words that the model does not have.  end: what that token is where the
    dictionary lists as many as there are, but not which, as for a model trained from scratch."""
    listed = {int(w): i for i, w in enumerate(dictionary.symbols) if is_token(w)}
    unused = [token for token, i in listed.items() if absent[i] != 0]
    gaps = (token for token in range(len(listed)) if token not in listed)
    last = end if len(listed) == end + 1 else len(listed)
    eos = unused[0] if unused else next(gaps, last)
    listed[eos] = dictionary.eos()
    if sorted(listed) != list(range(len(listed))):
        raise Failure(f"--dict {path} is not of a model's tokens: its words must be 0, 1, 2, …")
    return torch.tensor([listed[token] for token in range(len(listed))]), eos
