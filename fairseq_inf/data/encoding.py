"""Text to tokens and back: whole documents, with their line breaks and white space."""

import contextlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import sentencepiece

from fairseq_inf.errors import Failure


class Encoding(Protocol):
    name: ClassVar[str]  # in documents.json
    files: ClassVar[tuple[str, ...]]  # that `save` leaves in a folder
    path: Path  # what it was made of: a class and this path are an encoding in another process

    def __init__(self, path: Path) -> None: ...

    def dictionary(self) -> str:
        """-> dict.txt"""
        ...

    def encode(self, text: str) -> Iterator[list[str]]:
        """Yield the tokens of the whole text in parts."""
        ...

    def border(self, text: str, start: int) -> int:
        """The last place from `start` on where a text can be cut and encoded in parts, or -1."""
        ...

    def decode(self, tokens: list[str]) -> str: ...

    def save(self, folder: Path) -> None: ...


class SentencePiece:
    """Tokens are the pieces of a SentencePiece model."""

    name: ClassVar[str] = "sentencepiece"
    files: ClassVar[tuple[str, ...]] = ("spm.model",)
    # Bytes in any case: a line break, and the character that means a space inside a piece.
    AS_BYTES = {"\n": ["<0x0A>"], "\u2581": ["<0xE2>", "<0x96>", "<0x81>"]}

    def __init__(self, path: Path) -> None:
        try:
            self.model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError):
            raise Failure(f"--spm-model {path} is no SentencePiece model.") from None
        self.path = path
        ids = range(self.model.vocab_size())
        special = {i for i in ids if self.model.is_control(i) or self.model.is_unknown(i)}
        self.symbols = [self.model.id_to_piece(i) for i in ids if i not in special]
        if "<0x0A>" not in self.symbols or any(map(re.compile(r"\s").search, self.symbols)):
            raise Failure(
                f"--spm-model {path} cannot encode every text: train it with byte_fallback, and "
                "without tabs and the like in its pieces."
            )

    def dictionary(self) -> str:
        return "".join(f"{symbol} 1\n" for symbol in self.symbols)

    def encode(self, text: str) -> Iterator[list[str]]:
        for part in re.split("([\n\u2581])", text):
            yield self.AS_BYTES.get(part) or self.model.encode(part, out_type=str)

    def border(self, text: str, start: int) -> int:
        return text.rfind("\n", start)

    def decode(self, tokens: list[str]) -> str:
        return self.model.decode(tokens)

    def save(self, folder: Path) -> None:
        shutil.copyfile(self.path, folder / "spm.model")


class GPT2:
    """Tokens are the ids of GPT-2's byte pair encoding, in digits."""

    name: ClassVar[str] = "gpt2"
    files: ClassVar[tuple[str, ...]] = ("encoder.json", "vocab.bpe")

    def __init__(self, path: Path) -> None:
        """path: of a folder with encoder.json and vocab.bpe"""
        for file in (path / "encoder.json", path / "vocab.bpe"):
            if not file.is_file():
                raise Failure(f"--gpt2-bpe: {file} does not exist.")
        from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

        self.path = path
        try:
            self.bpe = get_encoder(path / "encoder.json", path / "vocab.bpe")
            symbols = {*self.bpe.byte_encoder.values(), *(a + b for a, b in self.bpe.bpe_ranks)}
            if not symbols <= set(self.bpe.encoder):
                raise ValueError
        except (AttributeError, ValueError):
            raise Failure(
                f"--gpt2-bpe: {path}/encoder.json and vocab.bpe do not belong together or are "
                "damaged, fetch both again."
            ) from None

    def dictionary(self) -> str:
        """The folder's own dictionary where there is one, as pretrained models need it.  It may
        lack <|endoftext|>, which no text has, and </s> stands for."""
        symbols = [str(i) for i in sorted(self.bpe.encoder.values())]
        path = self.path / "dict.txt"
        text = (
            path.read_text("utf-8")
            if path.exists()
            else "".join(f"{symbol} 1\n" for symbol in symbols)
        )
        needed = {*symbols} - {str(self.bpe.encoder.get("<|endoftext|>"))}
        if not {line.split(" ")[0] for line in text.splitlines()} >= needed:
            raise Failure(f"--gpt2-bpe: {path} lacks ids of encoder.json, remove it.")
        return text

    def encode(self, text: str) -> Iterator[list[str]]:
        for part in re.split(r"(?<=[\w!-~])(?=\n)", text):  # no token reaches over such a place
            yield [str(i) for i in self.bpe.encode(part)]
        if len(self.bpe.cache) > 500_000:
            self.bpe.cache.clear()

    def border(self, text: str, start: int) -> int:
        for at in range(len(text) - 1, max(start, 1) - 1, -1):
            if text[at].isspace() and not text[at - 1].isspace():
                return at
        return -1

    def decode(self, tokens: list[str]) -> str:
        return self.bpe.decode([int(token) for token in tokens if token.isdigit()])

    def save(self, folder: Path) -> None:
        for name in self.files:
            shutil.copyfile(self.path / name, folder / name)


class Tokenizers:
    """Tokens are the ids of a tokenizer.json of Hugging Face's, in digits.

    No blank is put in front of a text, and no text is a special token.  Where \u2581 means a
    blank, as in Llama 2's, a text's own \u2581 comes back as one.
    """

    name: ClassVar[str] = "tokenizers"
    files: ClassVar[tuple[str, ...]] = ("tokenizer.json",)
    PROBE = "The  end?\n\n\tOn 1,024 <pages>, it's\u00a0'né' 🧠 \r\n  x \n"

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise Failure(f"{path} needs pip install 'fairseq_inf[pretrained]'.") from None
        self.path = path
        try:
            settings = json.loads(path.read_text("utf-8"))
            for name in ("normalizer", "pre_tokenizer", "decoder"):
                settings[name] = _without_prefix(settings.get(name))
            self.model = Tokenizer.from_str(json.dumps(settings))
        except Exception:  # tokenizers raises that very class
            raise Failure(f"{path} is damaged, or of newer tokenizers than are here.") from None
        self.model.encode_special_tokens = True  # as the text that they are
        self.model.no_truncation()
        self.model.no_padding()
        [whole] = self.encode(self.PROBE)
        at = self.border(self.PROBE, 1)
        parts = [*self.encode(self.PROBE[:at]), *self.encode(self.PROBE[at:])]
        if self.decode(whole) != self.PROBE or sum(parts, []) != whole:
            raise Failure(f"{path} does not give a text back as it was: it cannot be used.")

    def dictionary(self) -> str:
        """The folder's own dictionary where there is one, as pretrained models need it.  It may
        lack special tokens, one of which </s> stands for."""
        tokens = set(self.model.get_vocab().values())
        special = {i for i, x in self.model.get_added_tokens_decoder().items() if x.special}
        path = self.path.with_name("dict.txt")
        text = (
            path.read_text("utf-8")
            if path.exists()
            else "".join(f"{i} 1\n" for i in sorted(tokens))
        )
        if not {line.split(" ")[0] for line in text.splitlines()} >= {
            str(i) for i in tokens - special
        }:
            raise Failure(f"{path} lacks tokens of {self.path}: they do not belong together.")
        return text

    def special(self) -> dict[str, int]:
        """The tokens that no text has, and their numbers at the model."""
        added = self.model.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    def encode(self, text: str) -> Iterator[list[str]]:
        yield [str(i) for i in self.model.encode(text, add_special_tokens=False).ids]

    def border(self, text: str, start: int) -> int:
        """Behind a letter or digit: what stands before a line break may be one token with it."""
        for at in range(len(text) - 1, max(start, 1) - 1, -1):
            if text[at].isspace() and text[at - 1].isalnum():
                return at
        return -1

    def decode(self, tokens: list[str]) -> str:
        ids = [int(token) for token in tokens if token.isdigit()]
        return self.model.decode(ids, skip_special_tokens=False)

    def save(self, folder: Path) -> None:
        for name in ("tokenizer.json", "chat.json"):  # the latter, if there is one
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(self.path.with_name(name), folder / name)


def _without_prefix(step: Any) -> Any:
    """A step of a tokenizer.json without what puts a blank in front of a text, or takes it away."""
    if isinstance(step, list):
        return [part for x in step if (part := _without_prefix(x)) is not None]
    if not isinstance(step, dict):
        return step
    if step.get("type") in ("Prepend", "Strip"):
        return None
    never = {"prepend_scheme": "never", "add_prefix_space": False}
    return {name: never.get(name, _without_prefix(x)) for name, x in step.items()}


ENCODINGS: dict[str, type[Encoding]] = {x.name: x for x in (SentencePiece, GPT2, Tokenizers)}


def load_encoding(folder: str | Path) -> Encoding | None:
    """The encoding that `fairseq-inf-prepare` or `fairseq-inf-import` left in a folder, or None."""
    folder = Path(folder)
    summary = folder / "documents.json"
    if not summary.is_file():
        return None
    try:
        kind = ENCODINGS[json.loads(summary.read_text())["encoding"]]
    except (ValueError, KeyError, TypeError):
        raise Failure(f"{summary} is damaged: prepare the data again.") from None
    for file in kind.files:
        if not Path(folder, file).is_file():
            raise Failure(f"{Path(folder, file)} is missing: prepare the data again.")
    return kind(folder if len(kind.files) > 1 else folder / kind.files[0])


class LineEncoding:
    """The encoding of a data-bin as fairseq's --bpe: a line of words with spaces between.  What is
    decoded has its line breaks."""

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding

    def encode(self, text: str) -> str:
        return " ".join(token for part in self.encoding.encode(text) for token in part)

    def decode(self, text: str) -> str:
        return self.encoding.decode(text.split())

    def agrees(self, bpe: Any, words: Sequence[str]) -> bool:
        """Whether one of fairseq's encodes as this one does a text that is made of these words."""
        text = " ".join(self.decode(" ".join(words)).split())
        return bpe.encode(text).split() == self.encode(text).split()
