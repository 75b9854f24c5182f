"""Conversations about a document, as streams: the document, then the turns of two speakers.

A stream is `<doc>` and the document, then for each turn `<speaker1>` or `<speaker2>`, its words and
</s>.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fairseq.data import Dictionary

from fairseq_inf.errors import Failure

from .encoding import Encoding
from .streams import StreamDataset

DOCUMENT = "<doc>"
SPEAKERS = ("<speaker1>", "<speaker2>")
MARKERS = (DOCUMENT, *SPEAKERS)
END = "</s>"  # of a turn
SPLITS = ("train", "valid", "test")
# conversations and responses of CMU-DoG, those that stand in train taken out of the other two
PUBLISHED = {"train": (3373, 72922), "valid": (184, 3626), "test": (556, 11577)}
FACTS = {
    "movieName": "Film",
    "year": "Year",
    "director": "Director",
    "genre": "Genre",
    "cast": "Cast",
    "rating": "Rating",
    "introduction": "Introduction",
    "critical_response": "Critical response",
}


@dataclass(frozen=True)
class Conversation:
    film: int
    turns: tuple[tuple[int, str], ...]  # speaker, 0 or 1, and what is said

    @property
    def responses(self) -> int:
        return len(self.turns) - 1  # the first turn answers nothing


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError):
        raise Failure(f"{path} is broken JSON: fetch it again.") from None
    if not isinstance(found, dict):
        raise Failure(f"{path} must hold a JSON object, got a {type(found).__name__}.")
    return found


def film_text(film: dict[str, Any], path: Path) -> str:
    """All four sections of a document of CMU-DoG, the facts of the first with their names."""
    sections = []
    for name in "0123":
        section = film.get(name)
        if isinstance(section, dict):
            lines = [f"{label}: {_flat(section.get(fact, ''))}" for fact, label in FACTS.items()]
            section = "\n".join(line for line in lines if not line.endswith(": "))
        else:
            section = _flat(section or "")
        if not section:
            raise Failure(f"{path}: section {name} of the document is empty.")
        sections.append(_encodable(section, path))
    return "\n".join(sections) + "\n"


def _flat(value: Any) -> str:
    """A text, or a list of them, on one line."""
    texts = value if isinstance(value, list) else [value]
    return "; ".join(" ".join(str(text).split()) for text in texts)


def load_films(folder: Path) -> dict[int, str]:
    """The text of each document of CMU-DoG by its number."""
    films = {}
    for path in _files(folder / "WikiData"):
        film = read_json(path)
        number = film.get("wikiDocumentIdx")
        if not isinstance(number, int) or number in films:
            raise Failure(f"{path}: wikiDocumentIdx {number!r} must be a number of its own.")
        films[number] = film_text(film, path)
    return films


def load_conversations(folder: Path, films: dict[int, str]) -> dict[str, list[Conversation]]:
    """The conversations of each split of CMU-DoG in the order of their files' names; in valid and
    test none that stands in train."""
    found: dict[str, list[Conversation]] = {}
    trained: set[str] = set()
    for split in SPLITS:
        paths = _files(folder / "Conversations" / split)
        found[split] = [_conversation(path, films) for path in paths if path.name not in trained]
        if split == "train":
            trained = {path.name for path in paths}
    return found


def _files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.json"))
    if not found:
        raise Failure(f"{folder} has no *.json: name the folder of CMU-DoG that holds it.")
    return found


def _conversation(path: Path, films: dict[int, str]) -> Conversation:
    """Messages of one speaker that follow each other are one turn."""
    content = read_json(path)
    film, history = content.get("wikiDocumentIdx"), content.get("history")
    if not isinstance(film, int) or film not in films:
        raise Failure(f"{path}: its film, wikiDocumentIdx {film!r}, is not in WikiData.")
    turns: list[tuple[int, str]] = []
    for message in history if isinstance(history, list) else ():
        message = message if isinstance(message, dict) else {}
        speaker = {"user1": 0, "user2": 1}.get(str(message.get("uid")))
        if speaker is None or not isinstance(message.get("text"), str):
            raise Failure(f"{path}: a message must have a text, and user1 or user2 as its uid.")
        text = " ".join(_encodable(message["text"], path).split())
        if turns and turns[-1][0] == speaker:
            turns[-1] = (speaker, f"{turns[-1][1]} {text}".strip())
        else:
            turns.append((speaker, text))
    if len(turns) < 2:
        raise Failure(f"{path}: a conversation must have two turns at least, it has {len(turns)}.")
    return Conversation(film, tuple(turns))


def _encodable(text: str, path: Path) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Failure(f"{path}: a text holds half a character, which UTF-8 has not.") from None
    return text


def check_published(conversations: dict[str, list[Conversation]], folder: Path) -> None:
    for split, (wanted, responses) in PUBLISHED.items():
        own = conversations[split]
        counted = sum(conversation.responses for conversation in own)
        if (len(own), counted) != (wanted, responses):
            raise Failure(
                f"{folder}: {split} has {len(own):,} conversations with {counted:,} responses, "
                f"CMU-DoG has {wanted:,} with {responses:,}: fetch it whole, or say --part."
            )


class Streams:
    """Conversations to tokens, the words of a dictionary."""

    def __init__(self, encoding: Encoding, films: dict[int, str], document: bool = True) -> None:
        """document: False to leave it out."""
        self.encoding = encoding
        self.documents = {film: self.encode_document(text) for film, text in films.items()}
        self.document = document

    def encode_document(self, text: str) -> list[str]:
        return [DOCUMENT, *self._encode(text)]

    def encode_turn(self, speaker: int, text: str) -> list[str]:
        return [SPEAKERS[speaker], *self._encode(f" {text}" if text else ""), END]

    def _encode(self, text: str) -> list[str]:
        return [token for part in self.encoding.encode(text) for token in part]

    def encode(self, conversation: Conversation) -> list[str]:
        document = self.documents[conversation.film] if self.document else []
        turns = (self.encode_turn(*turn) for turn in conversation.turns)
        return [*document, *(token for turn in turns for token in turn)]


def dictionary_text(encoding: Encoding) -> str:
    """dict.txt of an encoding, with the words that begin a part, if it has them not."""
    text = encoding.dictionary()
    words = {line.split(" ")[0] for line in text.split("\n")}
    return text + "".join(f"{marker} 1\n" for marker in MARKERS if marker not in words)


@dataclass(frozen=True)
class Turn:
    """One turn in the tokens of a stream."""

    begin: int  # of its marker
    end: int  # of its </s>


def find_turns(tokens: np.ndarray, dictionary: Dictionary, name: str) -> list[Turn]:
    """tokens: of a stream.  name: of it, for errors"""
    speakers = [dictionary.index(word) for word in SPEAKERS]
    begins = np.flatnonzero(np.isin(tokens, speakers))
    ends = np.flatnonzero(tokens == dictionary.eos())
    if not len(begins) or len(begins) != len(ends) or not (begins < ends).all():
        raise ValueError(
            f"{name} is no conversation: each turn begins with {' or '.join(SPEAKERS)} and ends "
            f"with {END}; make the data with examples/dialogue/prepare.sh"
        )
    return [Turn(int(begin), int(end)) for begin, end in zip(begins, ends, strict=True)]


def find_said(dataset: StreamDataset, document: int, with_document: bool = False) -> np.ndarray:
    """-> of each token of a stream whether it is a word of a turn or its end; with_document: or a
    word of the document"""
    tokens = dataset[document].numpy()
    turns = find_turns(tokens, dataset.dictionary, f"line {document + 1} of {dataset.name}")
    markers = [dataset.dictionary.index(word) for word in MARKERS]
    said = ~np.isin(tokens, markers)
    if not with_document:
        said[: turns[0].begin] = False
    return said


def numbers_of(words: Sequence[str], dictionary: Dictionary) -> np.ndarray:
    found = np.array([dictionary.index(word) for word in words])
    if (found == dictionary.unk()).any():
        word = words[int((found == dictionary.unk()).argmax())]
        raise Failure(f"the encoding has {word}, its dictionary has not: prepare it again.")
    return found
