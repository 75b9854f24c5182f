"""python -m fairseq_inf.commands.prepare_dialogue: turn CMU-DoG into a data-bin of conversations.

CMU_DOG is the data set as it is published, with Conversations/ and WikiData/.  A conversation
becomes one stream: `<doc>` and all four sections of its document, then its turns, each of them
`<speaker1>` or `<speaker2>`, its words and </s>.  Conversations that stand in train are taken out
of valid and test.  DATA_BIN gets {train,valid,test}.{bin,idx}, dict.txt, the files of the encoding
and documents.json with its name and every split's documents, responses, words of turns and tokens.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from fairseq.data import Dictionary
from tqdm import tqdm

from fairseq_inf.data.dialogue import (
    Conversation,
    Streams,
    check_published,
    dictionary_text,
    load_conversations,
    load_films,
    numbers_of,
)
from fairseq_inf.data.encoding import Encoding, Failure, SentencePiece
from fairseq_inf.data.synthetic import binarize
from fairseq_inf.data.vocabulary import train_sentencepiece

from .import_model import new_folder
from .prepare import add_encoding_flags, find_encoding


def new_encoding(
    conversations: list[Conversation], films: dict[int, str], size: int, folder: Path
) -> Encoding:
    """A SentencePiece model of the films and of the conversations, left in a folder."""
    print("training a SentencePiece model ...", flush=True)
    model = folder / "spm.model"
    with tempfile.TemporaryDirectory() as scratch:
        texts = [*films.values()]
        texts += ["\n".join(f" {text}" for _, text in c.turns) for c in conversations]
        files = []
        for number, text in enumerate(texts):
            file = Path(scratch, f"{number}.txt")
            files.append((file, file.write_bytes(text.encode())))
        train_sentencepiece(files, size, model)
    return SentencePiece(model)


def prepare(args: argparse.Namespace) -> dict[str, dict[str, int]]:
    if args.train_conversations is not None and args.train_conversations < 1:
        raise Failure("--train-conversations must be at least 1.")
    encoding = find_encoding(args)
    counts = {}
    with new_folder(args.output) as folder:
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
        (folder / "dict.txt").write_text(dictionary_text(encoding), "utf-8")
        dictionary = Dictionary.load(str(folder / "dict.txt"))
        streams = Streams(encoding, films, not args.without_document)
        for split, own in conversations.items():
            bar = tqdm(own, f"encoding {split}", unit=" conversations", disable=None)
            lines = [numbers_of(streams.encode(conversation), dictionary) for conversation in bar]
            binarize(str(folder), split, lines, dictionary)
            counts[split] = {
                "documents": len(own),
                "responses": sum(conversation.responses for conversation in own),
                "words": sum(len(text.split()) for c in own for _, text in c.turns),
                "tokens": sum(map(len, lines)),
            }
        summary = json.dumps({"encoding": encoding.name, **counts}, indent=2)
        (folder / "documents.json").write_text(summary + "\n")
    return counts


def main() -> None:
    head = __doc__.splitlines()[0].split(": ")
    parser = argparse.ArgumentParser(prog=head[0], description=head[1])
    parser.add_argument(
        "input", type=Path, metavar="CMU_DOG", help="with Conversations/ and WikiData/"
    )
    parser.add_argument("output", type=Path, metavar="DATA_BIN", help="to write")
    add_encoding_flags(parser)
    parser.add_argument(
        "--without-document", action="store_true", help="begin each stream with its first turn"
    )
    parser.add_argument(
        "--train-conversations", type=int, help="take the first that many of train, by name (all)"
    )
    parser.add_argument("--part", action="store_true", help="take what is not the whole CMU-DoG")
    args = parser.parse_args()
    try:
        counts = prepare(args)
    except Failure as failure:
        sys.exit(str(failure))
    except KeyboardInterrupt:
        sys.exit("Interrupted: nothing was written.")
    except OSError as error:
        sys.exit(f"{error.filename or args.output} cannot be used: {error.strerror}.")
    print(f"{'split':6}{'conversations':>14}{'responses':>11}{'words':>11}{'tokens':>12}")
    for split, count in counts.items():
        print(
            f"{split:6}{count['documents']:14,}{count['responses']:11,}{count['words']:11,}"
            f"{count['tokens']:12,}"
        )
    if not args.part:
        print(
            "The responses are those of CMU-DoG without what stands in train and again elsewhere."
        )


if __name__ == "__main__":
    main()
