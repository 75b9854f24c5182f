"""How a talk about a document is written: a model's own words before, between and behind what is
said.

An instruction-tuned model has a chat template, which an import keeps in chat.json beside the
encoding; a model of --task dialogue has the markers of its conversations.
"""

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq.data import Dictionary

from fairseq_inf.errors import Failure

from .encoding import Tokenizers

CHAT = "chat.json"
ABOUT = "Here is a text. Answer questions about it, in its own words.\n\n"  # said before a document
MARKERS = ("<doc>", "<speaker1>", "<speaker2>")
Piece = str | int  # text, or the number of a token that no text has


@dataclass(frozen=True)
class Turns:
    opening: tuple[Piece, ...]  # before the document
    first: tuple[Piece, ...]  # from the document to the first question
    answer: tuple[Piece, ...]  # from a question to its answer
    next: tuple[Piece, ...]  # from an answer to the next question
    eos: int

    @property
    def special(self) -> set[int]:
        """The tokens that stand for a border."""
        pieces = (*self.opening, *self.first, *self.answer, *self.next)
        return {self.eos, *(x for x in pieces if isinstance(x, int))}

    @property
    def ends(self) -> set[int]:
        """Those that end an answer: the model's own end, and what its turns end with."""
        return {self.eos, *(x for x in self.next[:1] if isinstance(x, int))}


def load_turns(folder: str | Path, encoding: Any, dictionary: Dictionary) -> Turns:
    """folder: of the data"""
    path = Path(folder) / CHAT
    if all(word in dictionary for word in MARKERS):
        document, you, me = map(dictionary.index, MARKERS)
        eos = dictionary.eos()
        return Turns((document,), (you, " "), (eos, me), (eos, you, " "), eos)
    if not path.is_file() or not isinstance(encoding, Tokenizers):
        raise Failure(
            f"{folder} does not say how a talk with this model is written: import an "
            f"instruction-tuned model, whose chat template fairseq-inf-import keeps in {CHAT}, or "
            "name a model of --task dialogue"
        )
    try:
        chat = json.loads(path.read_text("utf-8"))
        return turns_of(chat, encoding.special(), dictionary)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Failure(f"{path} is damaged: import the model again") from None
    except Failure as failure:
        raise Failure(f"{path}: {failure}") from None


def turns_of(chat: dict[str, Any], special: dict[str, int], dictionary: Dictionary) -> Turns:
    """chat: of chat.json.  special: the numbers of the tokens that no text has, at the model"""
    words = [secrets.token_hex(8) for _ in range(4)]  # no template has them
    document, question, answer, other = words
    talk = [("user", question), ("assistant", answer), ("user", other)]
    try:
        text = render(chat, [("system", ABOUT + document), *talk])
        if not _in_order(text, words):
            raise Failure("it has no place for a text before the questions")
    except Failure:  # no system's turn: the document is in the user's first
        text = render(chat, [("user", f"{ABOUT}{document}\n\n{question}"), *talk[1:]])
        if not _in_order(text, words):
            raise Failure("the chat template does not say what it is given") from None
    parts, rest = [], text
    for word in words:
        part, rest = rest.split(word)
        parts.append(part)
    numbers = {
        token: dictionary.eos() if number == chat["end"] else dictionary.index(str(number))
        for token, number in special.items()
    }
    opening, first, reply, following = (tuple(_pieces(part, numbers)) for part in parts)
    return Turns(opening, first, reply, following, dictionary.eos())


def _in_order(text: str, words: list[str]) -> bool:
    places = [text.find(word) for word in words]
    return -1 not in places and places == sorted(places) and all(text.count(x) == 1 for x in words)


def _pieces(text: str, special: dict[str, int]) -> Iterator[Piece]:
    """A text cut at its special tokens, the longest where there are several."""
    while text:
        found = [(text.find(token), -len(token), token) for token in special if token in text]
        at, _, token = min(found, default=(len(text), 0, ""))
        if text[:at]:
            yield text[:at]
        if token:
            yield special[token]
        text = text[at + len(token) :]


def render(chat: dict[str, Any], talk: list[tuple[str, str]]) -> str:
    """By the template, in a sandbox: it comes with the model.  talk: (role, what it says)"""
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise Failure("a chat template needs pip install jinja2") from None
    room = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(reason: str) -> None:
        raise jinja2.TemplateError(reason)

    def today(form: str) -> str:
        """One day for all, so that a memory file can be read another day."""
        return "1 January 2025"

    room.globals |= {"raise_exception": refuse, "strftime_now": today}
    room.filters["tojson"] = lambda x, **_: json.dumps(x, ensure_ascii=False)
    messages = [{"role": role, "content": content} for role, content in talk]
    template = chat["template"]
    if not isinstance(template, str):
        raise TypeError
    names = {"bos_token": "", "eos_token": "", **chat.get("tokens", {})}
    try:
        return room.from_string(template).render(
            messages=messages, add_generation_prompt=False, tools=None, **names
        )
    except jinja2.TemplateError as error:
        raise Failure(f"the chat template cannot be used: {error}") from None
    except (TypeError, ValueError, KeyError, OverflowError, RecursionError, ZeroDivisionError):
        raise Failure("the chat template cannot be used") from None
