"""Turn a folder of documents into a fairseq data-bin that keeps the documents apart.

INPUT holds train/, validation/ (or valid/) and test/, each with any number of *.txt files in
UTF-8, one document each: PG-19's own layout. A document becomes one line of tokens, which
fairseq-preprocess ends in </s>; decoded, the tokens give the very text, with its white space.
OUTPUT gets {train,valid,test}.{bin,idx}, dict.txt, spm.model (or encoder.json and vocab.bpe) and
documents.json with the encoding and every split's documents, words, tokens (</s> included) and
bytes.
"""

import argparse
import io
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from array import array
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import sentencepiece
from tqdm import tqdm

from fairseq_inf.data.encoding import GPT2, Failure, SentencePiece

SPLITS = {"train": ["train"], "valid": ["validation", "valid"], "test": ["test"]}
SAMPLE_BYTES = 50_000_000  # text that a SentencePiece model is trained on, at most
SMALLEST_EXTRACT = 1_000  # bytes of a document in that sample, at least
TRAINING = (
    "--user-dir fairseq_inf --task long_sequence_lm --stream-layout documents "
    "--arch infinite_former_lm --criterion cross_entropy_with_kl --optimizer adam --lr 0.00025 "
    "--tokens-per-sample 512 --batch-size 4"
)


def read(path):
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise Failure(f"{path} is not UTF-8: convert it or take it away.") from None


def check_document(path):
    """The path with the document's size in bytes, 0 for one without words."""
    return path, path.stat().st_size if read(path).strip() else 0


def encode_document(path):
    """The document's line of tokens and its counts."""
    text = read(path)
    line = " ".join(" ".join(part) for part in encoding.encode(text) if part)
    tokens = line.count(" ") + 2  # and </s>
    counts = {"documents": 1, "words": len(text.split()), "tokens": tokens}
    return line, counts | {"bytes": path.stat().st_size}


def start_worker(load=None, *arguments):
    global encoding
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the work
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    encoding = load and load(*arguments)


def in_parallel(function, items, workers, *start):
    """Yield the function's results in order, with few of them in memory at any time."""
    with ProcessPoolExecutor(workers, initializer=start_worker, initargs=start) as pool:
        running = deque()
        for item in items:
            running.append(pool.submit(function, item))
            if len(running) > 2 * workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()


def find_documents(folder, workers, most=None):
    """The paths and sizes of every split's documents, each of them read once to check it.
    most: how many of train/ to take."""
    if all((folder / name).is_dir() for name in SPLITS["valid"]):
        raise Failure(f"{folder} has both validation/ and valid/: keep one of them.")
    documents = {}
    for split, names in SPLITS.items():
        paths = sorted(path for name in names for path in (folder / name).glob("*.txt"))
        if split == "train":
            paths = paths[:most]
        checked = in_parallel(check_document, paths, workers)
        checked = list(tqdm(checked, f"checking {split}", len(paths), unit="doc", disable=None))
        for path, size in checked:
            if not size:
                print(f"{path} is empty and left out.")
        documents[split] = [(path, size) for path, size in checked if size]
        if not documents[split]:
            print(f"{folder / names[0]} has no documents (*.txt): there will be no {split} split.")
    return {split: found for split, found in documents.items() if found}


def sample(documents):
    """Yield the lines of an extract of every document, at most SAMPLE_BYTES together."""
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


def train_model(documents, vocab_size, path):
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=sample(documents),
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


def encode_split(documents, output, workers, *load):
    """Write a line of tokens for every document and return the split's counts."""
    counts, size = Counter(), sum(size for _, size in documents)
    bar = tqdm(None, f"encoding {output.name}", size, unit="B", unit_scale=True, disable=None)
    with bar, open(output, "w", encoding="utf-8", newline="\n") as file:
        paths = [path for path, _ in documents]
        for line, document in in_parallel(encode_document, paths, workers, *load):
            file.write(line + "\n")
            counts.update(document)
            bar.update(document["bytes"])
    return dict(counts)


def binarize(counts, folder, data, workers):
    """Run fairseq-preprocess on the folder's text and check that all of it arrived."""
    print("binarizing with fairseq-preprocess ...", flush=True)
    command = [sys.executable, "-m", "fairseq_cli.preprocess", "--only-source"]
    command += ["--srcdict", folder / "dict.txt", "--destdir", data, "--workers", str(workers)]
    for split in counts:
        command += [f"--{split}pref", folder / split]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode:
        reason = (run.stdout.strip().splitlines() or ["no message"])[-1]
        raise Failure(f"fairseq-preprocess failed with code {run.returncode}: {reason}")
    Path(data, "preprocess.log").unlink()
    for split, count in counts.items():
        with open(data / f"{split}.idx", "rb") as index:
            index.seek(18)  # behind the format's name, its version and the type of the tokens
            sizes = array("i")
            sizes.fromfile(index, int.from_bytes(index.read(8), "little"))
        if (len(sizes), sum(sizes)) != (count["documents"], count["tokens"]):
            raise Failure(f"fairseq-preprocess did not keep all text of {split}: use --workers 1.")


def prepare(args):
    new_model = args.bpe == "sentencepiece" and not args.spm_model
    for flag, value in (("--workers", args.workers), ("--train-documents", args.train_documents)):
        if value is not None and value < 1:
            raise Failure(f"{flag} must be at least 1.")
    if (args.bpe == "gpt2") != bool(args.gpt2_bpe):
        raise Failure("--bpe gpt2 and --gpt2-bpe DIR belong together: give both or neither.")
    if [args.vocab_size, args.spm_model, args.gpt2_bpe].count(None) < 2:
        raise Failure("--vocab-size, --spm-model and --gpt2-bpe exclude each other: give one.")
    if args.vocab_size is not None and args.vocab_size <= 260:
        raise Failure("--vocab-size must be above 260, the bytes and special symbols it holds.")
    output = args.output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise Failure(f"{output} exists already: remove it or choose another output.")
    load = (GPT2, args.gpt2_bpe) if args.gpt2_bpe else (SentencePiece, args.spm_model)
    if not new_model:
        load[0](load[1]).dictionary()  # fails now rather than later
    if not args.input.is_dir():
        raise Failure(f"{args.input} is no folder: it must hold train/, validation/ and test/.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.")
    except OSError as error:
        raise Failure(f"{output} cannot be written: {error.strerror}.") from None
    with scratch as folder:
        documents = find_documents(args.input, args.workers, args.train_documents)
        if new_model and "train" not in documents:
            raise Failure(f"{args.input}/train has no documents: add some or give --spm-model.")
        if not documents:
            raise Failure(f"{args.input} has no documents in train/, validation/ or test/.")
        folder = Path(folder)
        data = folder / "data"
        data.mkdir()
        if new_model:
            print("training a SentencePiece model ...", flush=True)
            train_model(documents["train"], args.vocab_size or 8000, data / "spm.model")
            load = (SentencePiece, data / "spm.model")
        else:
            load[0](load[1]).save(data)
        Path(folder, "dict.txt").write_text(load[0](load[1]).dictionary(), "utf-8")
        counts = {}
        for split, found in documents.items():
            counts[split] = encode_split(found, folder / split, args.workers, *load)
        binarize(counts, folder, data, args.workers)
        summary = json.dumps({"encoding": args.bpe, **counts}, indent=2)
        Path(data, "documents.json").write_text(summary + "\n")
        data.replace(output)

    print(f"{'split':6}{'documents':>10}{'words':>15}{'tokens':>15}")
    for split, count in counts.items():
        print(f"{split:6}{count['documents']:10,}{count['words']:15,}{count['tokens']:15,}")
    print(f"Next: fairseq-train {output} {TRAINING}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("input", type=Path, help="folder with train/, validation/ and test/")
    parser.add_argument("output", type=Path, help="data-bin to write, new or empty")
    parser.add_argument("--bpe", choices=["sentencepiece", "gpt2"], default="sentencepiece")
    parser.add_argument("--vocab-size", type=int, help="of a new SentencePiece model (8000)")
    parser.add_argument("--spm-model", type=Path, help="use this model instead of a new one")
    parser.add_argument("--gpt2-bpe", type=Path, help="folder with encoder.json and vocab.bpe")
    parser.add_argument(
        "--train-documents", type=int, help="take the first that many of train/, by name (all)"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        prepare(parser.parse_args())
    except Failure as failure:
        sys.exit(str(failure))
    except KeyboardInterrupt:
        sys.exit("Interrupted: nothing was written.")
    except BrokenProcessPool:
        sys.exit("A worker was killed, most likely for lack of memory: use fewer --workers.")
    except OSError as error:
        sys.exit(f"{error.filename or 'The output'} cannot be used: {error.strerror}.")


if __name__ == "__main__":
    main()
