"""A new SentencePiece model of a sample of the documents."""

import io
import random
import re
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

from fairseq_inf.errors import Failure

SAMPLE_BYTES = 50_000_000  # text that a model is trained on, at most
SMALLEST_EXTRACT = 1_000  # bytes of a document in that sample, at least


def sample(documents: list[tuple[Path, int]]) -> Iterator[str]:
    """Yield the lines of an extract of every document, at most SAMPLE_BYTES together.
    documents: with their sizes in bytes"""
    chance = random.Random(0)
    share = SAMPLE_BYTES / sum(size for _, size in documents)
    left = SAMPLE_BYTES
    for path, size in chance.sample(documents, len(documents)):
        length = min(size, left, max(int(size * share), SMALLEST_EXTRACT))
        left -= length
        with open(path, "rb") as file:
            file.seek(chance.randint(0, size - length))
            text = file.read(length).decode("utf-8", "ignore")
        for line in text.split("\n"):
            line = re.sub(r"[^\S ]", " ", line)  # fairseq would drop a tab in a piece
            yield from (line[i : i + 1000] for i in range(0, len(line), 1000))


def train_sentencepiece(documents: list[tuple[Path, int]], vocab_size: int, path: Path) -> None:
    """Write a model that gives every text back, with its white space."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([*sample(documents)]),  # in whose C++ no Ctrl-C may arise
            model_writer=model,
            model_type="bpe",  # as short as unigram here, and ten times as quick to train
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            pad_id=3,  # no piece may look like one of fairseq's four special symbols
            minloglevel=3,
        )
    except RuntimeError as error:
        limit = re.search(r"(?P<most><=)? (\d+)\D*$", str(error).split("Increase")[0])
        if not limit:
            raise
        range_end = "allows at most" if limit["most"] else "needs at least"
        raise Failure(f"--vocab-size {vocab_size}: this text {range_end} {limit[2]}.") from None
    path.write_bytes(model.getvalue())
