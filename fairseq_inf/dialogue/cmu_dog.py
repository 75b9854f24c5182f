"""CMU-DoG (Zhou et al., 2018) as it is published: films, and conversations about them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_inf.errors import Failure

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


def load_films(folder: Path) -> dict[int, str]:
    """The text of each document by its number."""
    films: dict[int, str] = {}
    for path in _files(folder / "WikiData"):
        film = _read(path)
        number = film.get("wikiDocumentIdx")
        if not isinstance(number, int) or number in films:
            raise Failure(f"{path}: wikiDocumentIdx {number!r} must be a number of its own.")
        films[number] = film_text(film, path)
    return films


def film_text(film: dict[str, Any], path: Path) -> str:
    """All four sections of a document, the facts of the first with their names."""
    sections = []
    for name in "0123":
        section = film.get(name) or ""
        if isinstance(section, dict):
            lines = [f"{label}: {_flat(section.get(fact, ''))}" for fact, label in FACTS.items()]
            sections.append("\n".join(line for line in lines if not line.endswith(": ")))
        else:
            sections.append(_flat(section))
        if not sections[-1]:
            raise Failure(f"{path}: section {name} of the document is empty.")
    return "\n".join(sections) + "\n"


def _flat(value: Any) -> str:
    """A text, or a list of them, on one line."""
    texts = value if isinstance(value, list) else [value]
    return "; ".join(" ".join(str(text).split()) for text in texts)


def load_conversations(folder: Path, films: dict[int, str]) -> dict[str, list[Conversation]]:
    """The conversations of each split in the order of their files' names; in valid and test none
    that stands in train."""
    paths = {split: _files(folder / "Conversations" / split) for split in PUBLISHED}
    train = {path.name for path in paths["train"]}
    return {
        split: [_conversation(x, films) for x in files if split == "train" or x.name not in train]
        for split, files in paths.items()
    }


def _conversation(path: Path, films: dict[int, str]) -> Conversation:
    """Messages of one speaker that follow each other are one turn."""
    content = _read(path)
    film, history = content.get("wikiDocumentIdx"), content.get("history")
    if not isinstance(film, int) or film not in films:
        raise Failure(f"{path}: its film, wikiDocumentIdx {film!r}, is not in WikiData.")
    turns: list[tuple[int, str]] = []
    for message in history if isinstance(history, list) else ():
        message = message if isinstance(message, dict) else {}
        speaker = {"user1": 0, "user2": 1}.get(str(message.get("uid")))
        if speaker is None or not isinstance(message.get("text"), str):
            raise Failure(f"{path}: a message must have a text, and user1 or user2 as its uid.")
        text = " ".join(message["text"].split())
        if turns and turns[-1][0] == speaker:
            text = f"{turns.pop()[1]} {text}".strip()
        turns.append((speaker, text))
    if len(turns) < 2:
        raise Failure(f"{path}: a conversation must have two turns at least, it has {len(turns)}.")
    return Conversation(film, tuple(turns))


def check_published(conversations: dict[str, list[Conversation]], folder: Path) -> None:
    for split, (wanted, responses) in PUBLISHED.items():
        count = len(conversations[split])
        answered = sum(conversation.responses for conversation in conversations[split])
        if (count, answered) != (wanted, responses):
            raise Failure(
                f"{folder}: {split} has {count:,} conversations with {answered:,} responses, "
                f"CMU-DoG has {wanted:,} with {responses:,}: fetch it whole, or say --part."
            )


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise Failure(f"{folder} has no *.json: name the folder of CMU-DoG that holds it.")
    return files


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise Failure(f"{path}: a text holds half a character, which UTF-8 has not.") from None
    except (ValueError, RecursionError):
        raise Failure(f"{path} is broken JSON: fetch it again.") from None
    if not isinstance(content, dict):
        raise Failure(f"{path} must hold a JSON object, got a {type(content).__name__}.")
    return content
