"""fairseq-inf-prepare-dialogue: turn CMU-DoG into a data-bin of conversations.

CMU_DOG_DIR is the data set as it is published, with Conversations/ and WikiData/.  A conversation
becomes one stream: `<doc>` and all four sections of its document, then its turns, each of them
`<speaker1>` or `<speaker2>`, its words and </s>.  Conversations that stand in train are taken out
of valid and test.  DATA_BIN gets {train,valid,test}.{bin,idx}, dict.txt, the files of the encoding
and documents.json with its name and every split's documents, responses, words of turns and tokens.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from fairseq.data import Dictionary
from tqdm import tqdm

from fairseq_inf.commands import check_least, command_line
from fairseq_inf.commands.prepare import add_encoding_flags, find_encoding, write_summary
from fairseq_inf.data.binary import binarize, numbers_of
from fairseq_inf.data.encoding import Encoding, SentencePiece
from fairseq_inf.data.vocabulary import train_sentencepiece
from fairseq_inf.errors import plain_errors
from fairseq_inf.files import whole_folder

from .cmu_dog import Conversation, check_published, load_conversations, load_films
from .turns import DOCUMENT, END, MARKERS, SPEAKERS


def new_encoding(
    conversations: list[Conversation], films: dict[int, str], size: int, folder: Path
) -> Encoding:
    """A SentencePiece model of the films and of the conversations, left in a folder."""
    print("training a SentencePiece model ...", flush=True)
    texts = [*films.values()]
    texts += ["\n".join(f" {text}" for _, text in c.turns) for c in conversations]
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch, str(number)) for number in range(len(texts))]
        sizes = [x.write_bytes(text.encode()) for x, text in zip(files, texts, strict=True)]
        train_sentencepiece([*zip(files, sizes, strict=True)], size, folder / "spm.model")
    return SentencePiece(folder / "spm.model")


class Streams:
    """Conversations to the numbers of their tokens, the document first."""

    def __init__(
        self, encoding: Encoding, dictionary: Dictionary, films: dict[int, str], document: bool
    ) -> None:
        """document: False to leave it out."""
        self.encoding, self.dictionary = encoding, dictionary
        texts = films if document else {}
        self.documents = {film: [DOCUMENT, *self._words(text)] for film, text in texts.items()}

    def _words(self, text: str) -> list[str]:
        return [word for part in self.encoding.encode(text) for word in part]

    def encode(self, conversation: Conversation) -> np.ndarray:
        words = self.documents.get(conversation.film, []).copy()
        for speaker, text in conversation.turns:
            words += [SPEAKERS[speaker], *self._words(f" {text}" if text else ""), END]
        return numbers_of(words, self.dictionary)


def prepare(args: argparse.Namespace) -> dict[str, dict[str, int]]:
    """-> what documents.json says of each split"""
    check_least(args, train_conversations=1)
    encoding = find_encoding(args)
    with whole_folder(args.output) as folder:
        films = load_films(args.input)
        conversations = load_conversations(args.input, films)
        if not args.part:
            check_published(conversations, args.input)
        conversations["train"] = conversations["train"][: args.train_conversations]
        if encoding is None:
            size = args.vocab_size or 8000
            encoding = new_encoding(conversations["train"], films, size, folder)
        else:
            encoding.save(folder)
        text = encoding.dictionary()
        known = {line.split(" ")[0] for line in text.split("\n")}
        text += "".join(f"{marker} 1\n" for marker in MARKERS if marker not in known)
        (folder / "dict.txt").write_text(text, "utf-8")
        dictionary = Dictionary.load(str(folder / "dict.txt"))
        streams = Streams(encoding, dictionary, films, not args.without_document)
        counts = {}
        for split, some in conversations.items():
            bar = tqdm(some, f"encoding {split}", unit=" conversations", disable=None)
            lines = [streams.encode(conversation) for conversation in bar]
            binarize(str(folder), split, lines, dictionary)
            counts[split] = {
                "documents": len(some),
                "responses": sum(conversation.responses for conversation in some),
                "words": sum(len(text.split()) for c in some for _, text in c.turns),
                "tokens": sum(map(len, lines)),
            }
        write_summary(folder, encoding, counts)
    return counts


def main() -> None:
    parser = command_line("fairseq-inf-prepare-dialogue", __doc__)
    add = parser.add_argument
    add("input", type=Path, metavar="CMU_DOG_DIR", help="with Conversations/ and WikiData/")
    add("output", type=Path, metavar="DATA_BIN", help="to write")
    add_encoding_flags(parser)
    add("--without-document", action="store_true", help="begin each stream with its first turn")
    add("--train-conversations", type=int, help="take the first that many of train, by name (all)")
    add("--part", action="store_true", help="take what is not the whole CMU-DoG")
    args = parser.parse_args()
    with plain_errors(parser.prog):
        counts = prepare(args)
    print(f"{'split':6}{'conversations':>14}{'responses':>11}{'words':>11}{'tokens':>12}")
    for split, count in counts.items():
        print(
            f"{split:6}{{documents:14,}}{{responses:11,}}{{words:11,}}{{tokens:12,}}".format(
                **count
            )
        )
    if not args.part:
        print(
            "The responses are those of CMU-DoG without what stands in train and again elsewhere."
        )


if __name__ == "__main__":
    main()
