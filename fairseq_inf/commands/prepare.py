"""fairseq-inf-prepare: turn a folder of documents into a data-bin that keeps them apart.

FOLDER holds train/, validation/ (or valid/) and test/, each with any number of *.txt files in
UTF-8, one document each: PG-19's own layout. A document becomes one line of tokens, which ends in
</s>, as fairseq-preprocess would write it; decoded, they give the very text, with its white space,
but that each line ends in a line feed, as in all commands, and a byte-order mark is left out.
DATA_BIN gets {train,valid,test}.{bin,idx}, dict.txt, the files of the encoding and documents.json
with its name and every split's documents, words, tokens (</s> included) and bytes.
"""

import argparse
import json
import os
import shlex
from pathlib import Path
from typing import Any

import torch

from fairseq_inf.commands import check_least, command_line
from fairseq_inf.data.documents import encode_split, find_documents
from fairseq_inf.data.encoding import GPT2, Encoding, SentencePiece, load_encoding
from fairseq_inf.data.vocabulary import train_sentencepiece
from fairseq_inf.errors import PACKAGE, Failure, plain_errors
from fairseq_inf.files import whole_folder

TRAINING = (
    "--task long_sequence_lm --stream-layout documents --arch infinite_former_lm "
    "--criterion cross_entropy_with_kl --optimizer adam --lr 0.00025 --clip-norm 0.25 "
    "--tokens-per-sample 512 --batch-size 4 --max-update 10000 --save-interval-updates 1000"
)


def training(data: Path) -> str:
    """A command that trains a first model on the data, in any folder."""
    save_dir = data.absolute().parent / "checkpoints" / data.absolute().name
    where = {"--user-dir": PACKAGE, "--save-dir": save_dir}
    words = [data.absolute(), *(x for pair in where.items() for x in pair)]
    cpu = "" if torch.cuda.is_available() else " --cpu"
    quoted = " ".join(shlex.quote(str(word)) for word in words)
    return f"fairseq-train {quoted} {TRAINING}{cpu}"


def add_encoding_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--encoding", type=Path, metavar="DIR", help="encode as the import or data-bin there does"
    )
    parser.add_argument("--bpe", choices=["sentencepiece", "gpt2"], help="(sentencepiece)")
    parser.add_argument("--vocab-size", type=int, help="of a new SentencePiece model (8000)")
    parser.add_argument("--spm-model", type=Path, help="use this model instead of a new one")
    parser.add_argument("--gpt2-bpe", type=Path, help="folder with encoder.json and vocab.bpe")


def find_encoding(args: argparse.Namespace) -> Encoding | None:
    """The encoding that the flags name, or None for a new one."""
    given = {"--vocab-size": args.vocab_size, "--spm-model": args.spm_model}
    given |= {"--gpt2-bpe": args.gpt2_bpe, "--encoding": args.encoding}
    named = [flag for flag, value in given.items() if value is not None]
    if len(named) > 1:
        raise Failure(f"{' and '.join(named)} exclude each other: give one.")
    if args.encoding and args.bpe:
        raise Failure("--encoding and --bpe exclude each other: give one.")
    if (args.bpe == "gpt2") != bool(args.gpt2_bpe):
        raise Failure("--bpe gpt2 and --gpt2-bpe DIR belong together: give both or neither.")
    if args.vocab_size is not None and args.vocab_size <= 260:
        raise Failure("--vocab-size must be above 260, the bytes and special symbols it holds.")
    if args.encoding:
        found = load_encoding(args.encoding)
        if found is None:
            raise Failure(
                f"--encoding {args.encoding} has no documents.json: name what fairseq-inf-import "
                "or fairseq-inf-prepare has left."
            )
        return found
    if args.gpt2_bpe:
        return GPT2(args.gpt2_bpe)
    return SentencePiece(args.spm_model) if args.spm_model else None


def write_summary(folder: Path, encoding: Encoding, counts: dict[str, Any]) -> None:
    """documents.json"""
    summary = json.dumps({"encoding": encoding.name, **counts}, indent=2)
    (folder / "documents.json").write_text(summary + "\n")


def prepare(args: argparse.Namespace) -> None:
    check_least(args, workers=1, train_documents=1)
    encoding = find_encoding(args)
    if encoding is not None:
        encoding.dictionary()  # fails now rather than later
    if not args.input.is_dir():
        raise Failure(f"{args.input} is no folder: it must hold train/, validation/ and test/.")
    counts = {}
    with whole_folder(args.output) as data:
        documents = find_documents(args.input, args.workers, args.train_documents)
        if encoding is None and "train" not in documents:
            raise Failure(f"{args.input}/train has no documents: add some or give --spm-model.")
        if not documents:
            raise Failure(f"{args.input} has no documents in train/, validation/ or test/.")
        if encoding is None:
            print("training a SentencePiece model ...", flush=True)
            model = data / "spm.model"
            train_sentencepiece(documents["train"], args.vocab_size or 8000, model)
            encoding = SentencePiece(model)
        else:
            encoding.save(data)
        (data / "dict.txt").write_text(encoding.dictionary(), "utf-8")
        for split, found in documents.items():
            counts[split] = encode_split(found, data, split, args.workers, encoding)
        write_summary(data, encoding, counts)

    print(f"{'split':6}{'documents':>10}{'words':>15}{'tokens':>15}")
    for split, count in counts.items():
        print(f"{split:6}{count['documents']:10,}{count['words']:15,}{count['tokens']:15,}")
    print(f"Next: {training(args.output)}")
    print("(with another --arch, its flags are shown by --help at the end; docs/flags.md has all)")


def main() -> None:
    parser = command_line("fairseq-inf-prepare", __doc__)
    parser.add_argument(
        "input", type=Path, metavar="FOLDER", help="with train/, validation/ and test/"
    )
    parser.add_argument("output", type=Path, metavar="DATA_BIN", help="to write, new or empty")
    add_encoding_flags(parser)
    parser.add_argument(
        "--train-documents", type=int, help="take the first that many of train/, by name (all)"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    args = parser.parse_args()
    with plain_errors(parser.prog):
        prepare(args)


if __name__ == "__main__":
    main()
