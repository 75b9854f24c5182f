"""Text to tokens and back: whole documents, with their line breaks and white space."""

import json
import re
import shutil
from pathlib import Path

import sentencepiece

from fairseq_inf.errors import Failure


class SentencePiece:
    """Tokens are the pieces of a SentencePiece model."""

    # Bytes in any case: a line break, and the character that means a space inside a piece.
    AS_BYTES = {"\n": ["<0x0A>"], "\u2581": ["<0xE2>", "<0x96>", "<0x81>"]}

    def __init__(self, path):
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

    def dictionary(self):
        return "".join(f"{symbol} 1\n" for symbol in self.symbols)

    def encode(self, text):
        """Yield the tokens line by line."""
        for part in re.split("([\n\u2581])", text):
            yield self.AS_BYTES.get(part) or self.model.encode(part, out_type=str)

    def border(self, text, start):
        """The last place from `start` on where a text can be cut and encoded in parts, or -1."""
        return text.rfind("\n", start)

    def decode(self, tokens):
        return self.model.decode(tokens)

    def save(self, folder):
        shutil.copyfile(self.path, folder / "spm.model")


class GPT2:
    """Tokens are the ids of GPT-2's byte pair encoding, in digits."""

    def __init__(self, folder):
        for path in (folder / "encoder.json", folder / "vocab.bpe"):
            if not path.is_file():
                raise Failure(f"--gpt2-bpe: {path} does not exist.")
        from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

        self.folder = folder
        try:
            self.bpe = get_encoder(folder / "encoder.json", folder / "vocab.bpe")
            symbols = {*self.bpe.byte_encoder.values(), *(a + b for a, b in self.bpe.bpe_ranks)}
            if not symbols <= set(self.bpe.encoder):
                raise ValueError
        except (AttributeError, ValueError):
            raise Failure(
                f"--gpt2-bpe: {folder}/encoder.json and vocab.bpe do not belong together or are "
                "damaged, fetch both again."
            ) from None

    def dictionary(self):
        """The folder's own dictionary where there is one, as pretrained models need it.  It may
        lack <|endoftext|>, which no text has, and </s> stands for."""
        symbols = [str(i) for i in sorted(self.bpe.encoder.values())]
        path = self.folder / "dict.txt"
        text = (
            path.read_text("utf-8")
            if path.exists()
            else "".join(f"{symbol} 1\n" for symbol in symbols)
        )
        needed = {*symbols} - {str(self.bpe.encoder.get("<|endoftext|>"))}
        if not {line.split(" ")[0] for line in text.splitlines()} >= needed:
            raise Failure(f"--gpt2-bpe: {path} lacks ids of encoder.json, remove it.")
        return text

    def encode(self, text):
        """Yield the tokens of the whole text in parts."""
        for part in re.split(r"(?<=[\w!-~])(?=\n)", text):  # no token reaches over such a place
            yield [str(i) for i in self.bpe.encode(part)]
        if len(self.bpe.cache) > 500_000:
            self.bpe.cache.clear()

    def border(self, text, start):
        """The last place from `start` on where a text can be cut and encoded in parts, or -1."""
        for at in range(len(text) - 1, max(start, 1) - 1, -1):
            if text[at].isspace() and not text[at - 1].isspace():
                return at
        return -1

    def decode(self, tokens):
        return self.bpe.decode([int(token) for token in tokens if token.isdigit()])

    def save(self, folder):
        for name in ("encoder.json", "vocab.bpe"):
            shutil.copyfile(self.folder / name, folder / name)


def load_encoding(folder):
    """The encoding that a data-bin of `scripts/prepare_documents.py` was made with, else None."""
    summary = Path(folder, "documents.json")
    if not summary.is_file():
        return None
    try:
        name = json.loads(summary.read_text())["encoding"]
    except (ValueError, KeyError):
        raise Failure(f"{summary} is damaged: prepare the data again.") from None
    for file in ("encoder.json", "vocab.bpe") if name == "gpt2" else ("spm.model",):
        if not Path(folder, file).is_file():
            raise Failure(f"{Path(folder, file)} is missing: prepare the data again.")
    return GPT2(Path(folder)) if name == "gpt2" else SentencePiece(Path(folder, "spm.model"))


class LineEncoding:
    """The encoding of a data-bin as fairseq's --bpe: a line of words with spaces between.  What is
    decoded has its line breaks."""

    def __init__(self, encoding):
        self.encoding = encoding

    def encode(self, text):
        return " ".join(token for part in self.encoding.encode(text) for token in part)

    def decode(self, text):
        return self.encoding.decode(text.split())

    def agrees(self, bpe, words):
        """Whether one of fairseq's encodes as this one does a text that is made of these words."""
        text = " ".join(self.decode(" ".join(words)).split())
        return bpe.encode(text).split() == self.encode(text).split()
