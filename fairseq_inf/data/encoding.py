"""Text to tokens and back: whole documents, with their line breaks and white space."""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import sentencepiece

from fairseq_inf.errors import Failure


class Encoding(Protocol):
    name: str  # in documents.json
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

    name = "sentencepiece"
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

    name = "gpt2"

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
        for name in ("encoder.json", "vocab.bpe"):
            shutil.copyfile(self.path / name, folder / name)


def load_encoding(folder: str | Path) -> Encoding | None:
    """The encoding that `fairseq-inf-prepare` or `fairseq-inf-import` left in a folder, or None."""
    folder = Path(folder)
    summary = folder / "documents.json"
    if not summary.is_file():
        return None
    try:
        name = json.loads(summary.read_text())["encoding"]
    except (ValueError, KeyError):
        raise Failure(f"{summary} is damaged: prepare the data again.") from None
    for file in ("encoder.json", "vocab.bpe") if name == "gpt2" else ("spm.model",):
        if not Path(folder, file).is_file():
            raise Failure(f"{Path(folder, file)} is missing: prepare the data again.")
    return GPT2(folder) if name == "gpt2" else SentencePiece(folder / "spm.model")


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
