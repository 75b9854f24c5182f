"""The data preparation, run as a user runs it."""

import filecmp
import http.server
import json
import os
import shlex
import signal
import subprocess
import sys
import sysconfig
import threading
import urllib.parse
from pathlib import Path

import commands
import pytest
import sentencepiece
from conftest import tool
from fairseq import options
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode, get_encoder
from fairseq.data.indexed_dataset import MMapIndexedDataset

from fairseq_inf.data import vocabulary

ROOT = Path(__file__).resolve().parent.parent
PREPARE = "fairseq-inf-prepare"
STDLIB = ROOT / "scripts" / "stdlib_corpus.py"
PG19 = ROOT / "examples" / "pg19" / "prepare.sh"
FOR_GPT2 = ROOT / "examples" / "gpt2" / "prepare.sh"
WIKI = "".join(
    f" {line} \n" if line else " \n"
    for line in (
        "", "= One =", "", "Text of = one .", "= Not a title =", "", "= = A section = =", "",
        "More of one .", "", "= Two =", "", "= Three =", "", "Text of three .",
    )
)  # fmt: skip
SENTENCE = "The memory keeps what the window has lost, line by line and page by page."
AWKWARD = [
    "def f(x):\n\treturn  x   # two blanks, three blanks\n\n\n",
    "  a blank in front, one behind \nand no line break at the end",
    "<s> </s> <pad> <unk> <n> <0x0A> \\n \u2581 \u2581x\u2581",
    "windows\r\nold mac\rno-break\u00a0space\u2028line\u0085next\x0c\x1d\ufeff",
    "λόγος 記憶 🧠 never seen in training é e\u0301",
    "one line " * 20_000,
]


def as_read(text):
    return text.replace("\r\n", "\n").replace("\r", "\n")


def run(*command, **options):
    command = [str(part) for part in command]
    if command[0].endswith(".py"):
        command = [sys.executable, *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **options)


def write(folder, texts):
    folder.mkdir(parents=True)
    for number, text in enumerate(texts):
        Path(folder, f"{number:02}.txt").write_bytes(text.encode())


def documents(folder):
    """The texts below a split's folder as the script is to read them."""
    texts = [path.read_text("utf-8") for path in sorted(folder.glob("*.txt"))]
    return [text for text in texts if text.strip()]


def decoder(data):
    """A function from a list of data-bin symbols to text."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(data / "spm.model"))
    return model.decode


def check(data, source, decode):
    """Every document of the source is one item of the data-bin, and nothing is lost in it."""
    dictionary = Dictionary.load(str(data / "dict.txt"))
    counts = json.loads(Path(data, "documents.json").read_text())
    folders = {"train": "train", "valid": "validation", "test": "test"}
    for split in [split for split in counts if split != "encoding"]:
        texts = documents(source / folders[split])
        dataset = MMapIndexedDataset(str(data / split))
        items = [dataset[i].tolist() for i in range(len(dataset))]
        assert [decode([dictionary[i] for i in item[:-1]]) for item in items] == texts
        assert [item.index(dictionary.eos()) for item in items] == [len(i) - 1 for i in items]
        assert not any({dictionary.unk(), dictionary.pad()} & set(item) for item in items)
        assert counts[split] == {
            "documents": len(texts),
            "words": sum(len(text.split()) for text in texts),
            "tokens": sum(map(len, items)),
            "bytes": sum(len(text.encode()) for text in texts),
        }
    return counts


def assert_same_files(one, other):
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    assert filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A small folder of documents and the data-bin made of it with three workers."""
    folder = tmp_path_factory.mktemp("corpus")
    source, data = folder / "documents", folder / "data-bin"
    write(source / "train", [f"{SENTENCE}\n    {i}\n" * 20 for i in range(7)] + ["", " \n\t\n"])
    write(source / "validation", AWKWARD)
    write(source / "test", [SENTENCE])
    Path(source, "metadata.csv").write_text("id,title\n")
    printed = commands.call(PREPARE, source, data, "--vocab-size", 330, "--workers", 3)
    return source, data, printed


def test_documents_stay_apart_and_decode_to_themselves(corpus):
    source, data, output = corpus
    counts = check(data, source, decoder(data))
    assert counts["encoding"] == "sentencepiece"
    assert [counts[split]["documents"] for split in ("train", "valid", "test")] == [7, 6, 1]
    assert len(Dictionary.load(str(data / "dict.txt"))) == 330
    assert "07.txt is empty" in output and "08.txt is empty" in output
    assert sorted(path.name for path in data.iterdir()) == [
        "dict.txt",
        "documents.json",
        "spm.model",
        *(f"{split}.{end}" for split in ("test", "train", "valid") for end in ("bin", "idx")),
    ]
    assert set(data.parent.iterdir()) == {source, data}


def test_the_next_command_is_whole_and_serves_in_any_folder(corpus, tmp_path, monkeypatch):
    _, data, output = corpus
    [line] = [line for line in output.splitlines() if line.startswith("Next: fairseq-train ")]
    words = shlex.split(line.removeprefix("Next: "))[1:]
    assert {"--save-dir", "--max-update", "--cpu"} <= {*words}  # there is no GPU here
    import fairseq_inf.hub  # noqa: F401  (registers the task)

    monkeypatch.chdir(tmp_path)
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    assert args.arch == "infinite_former_lm" and Path(args.data) == data
    assert Path(args.user_dir).is_absolute() and Path(args.user_dir, "tasks").is_dir()


def test_two_runs_give_the_same_bytes(corpus, tmp_path):
    source, data, _ = corpus
    commands.call(PREPARE, source, tmp_path / "again", "--vocab-size", 330, "--workers", 1)
    assert_same_files(data, tmp_path / "again")


@pytest.mark.parametrize("flag", ["--spm-model", "--encoding"])
def test_an_encoding_is_lent_without_a_train_split(corpus, tmp_path, flag):
    _, data, _ = corpus
    write(tmp_path / "in" / "validation", AWKWARD)
    lender = data if flag == "--encoding" else data / "spm.model"
    printed = commands.call(PREPARE, tmp_path / "in", tmp_path / "out", flag, lender)
    assert f"{tmp_path}/in/train has no documents" in printed
    assert f"{tmp_path}/in/test has no documents" in printed
    for name in ("spm.model", "dict.txt", "valid.bin", "valid.idx"):
        assert filecmp.cmp(data / name, tmp_path / "out" / name, shallow=False), name
    assert not Path(tmp_path, "out", "train.bin").exists()


@pytest.fixture
def gpt2(tmp_path):
    """Tables in GPT-2's form with the 256 bytes and two merges."""
    folder = tmp_path / "gpt2"
    folder.mkdir()
    symbols = [*bytes_to_unicode().values(), "th", "the"]
    Path(folder, "encoder.json").write_text(json.dumps({s: i for i, s in enumerate(symbols)}))
    Path(folder, "vocab.bpe").write_text("#version: 0.2\nt h\nth e\n")
    return folder


def gpt2_decoder(folder):
    bpe = get_encoder(folder / "encoder.json", folder / "vocab.bpe")
    return lambda symbols: bpe.decode([int(symbol) for symbol in symbols])


def test_gpt2_encoding(corpus, tmp_path, gpt2):
    source = corpus[0]
    data = tmp_path / "data-bin"
    commands.call(PREPARE, source, data, "--bpe", "gpt2", "--gpt2-bpe", gpt2, "--workers", 2)
    counts = check(data, source, gpt2_decoder(gpt2))
    bpe = get_encoder(gpt2 / "encoder.json", gpt2 / "vocab.bpe")
    assert counts["valid"]["tokens"] == sum(len(bpe.encode(as_read(text))) + 1 for text in AWKWARD)
    assert counts["encoding"] == "gpt2"
    assert not Path(data, "spm.model").exists()


def copy_books(pg19, target, **numbers):
    """Copy some of the smallest books of the named splits."""
    for split, number in numbers.items():
        books = sorted(pg19.glob(f"{split}/*.txt"), key=lambda book: book.stat().st_size)
        write(target / split, [book.read_bytes().decode() for book in books[:number]])


@pytest.mark.slow
def test_books_of_pg19(tmp_path, real_data):
    source, data = tmp_path / "pg19", tmp_path / "data-bin"
    copy_books(real_data / "pg19", source, train=1, validation=1, test=2)
    commands.call(PREPARE, source, data, "--vocab-size", 2000, "--workers", 2)
    counts = check(data, source, decoder(data))
    assert [counts[split]["documents"] for split in ("train", "valid", "test")] == [1, 1, 2]
    model = sentencepiece.SentencePieceProcessor(model_file=str(data / "spm.model"))
    direct = sum(len(model.encode(text)) + 1 for text in documents(source / "test"))
    assert counts["test"]["tokens"] == direct


@pytest.mark.slow
def test_book_of_pg19_with_the_tables_of_gpt2(tmp_path, real_data):
    source, data, tables = tmp_path / "pg19", tmp_path / "data-bin", real_data / "gpt2_bpe"
    copy_books(real_data / "pg19", source, test=1)
    commands.call(PREPARE, source, data, "--bpe", "gpt2", "--gpt2-bpe", tables)
    check(data, source, gpt2_decoder(tables))
    assert filecmp.cmp(data / "dict.txt", tables / "dict.txt", shallow=False)


def assert_refused(folder, named, *command, **options):
    """The command fails with one sentence that names the culprit, and writes nothing."""
    before = sorted(folder.rglob("*"))
    if command[0] == PREPARE:
        said = commands.refusal(*command)
    else:
        result = run(*command, **options)
        said = result.stderr.rstrip("\n")
        assert result.returncode and "\n" not in said, said
    assert str(named) in said
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    "options",
    [
        ["--workers", 0],
        ["--vocab-size", 100],
        ["--vocab-size", 9999],
        ["--spm-model", "missing.model"],
        ["--spm-model", __file__],
        ["--vocab-size", 500, "--spm-model", "spm.model"],
        ["--bpe", "gpt2"],
        ["--gpt2-bpe", "missing"],
        ["--gpt2-bpe", "missing", "--bpe", "gpt2"],
        ["--encoding", "missing"],
        ["--encoding", "missing", "--bpe", "gpt2"],
        ["--encoding", "missing", "--vocab-size", 500],
    ],
)
def test_bad_flag_is_named(corpus, tmp_path, options):
    assert_refused(tmp_path, options[0], PREPARE, corpus[0], tmp_path / "out", *options)


def test_tables_that_do_not_belong_together_are_named(corpus, tmp_path, gpt2):
    Path(gpt2, "vocab.bpe").write_text("#version: 0.2\nt h\nx y\n")
    options = ["--bpe", "gpt2", "--gpt2-bpe", gpt2]
    assert_refused(tmp_path, gpt2, PREPARE, corpus[0], tmp_path / "out", *options)


def test_bad_folder_is_named(corpus, tmp_path):
    out = tmp_path / "out"
    assert_refused(tmp_path, tmp_path / "missing", PREPARE, tmp_path / "missing", out)
    write(tmp_path / "empty" / "train", [])
    assert_refused(tmp_path, tmp_path / "empty" / "train", PREPARE, tmp_path / "empty", out)
    for name in ("valid", "validation"):
        write(tmp_path / "both" / name, [SENTENCE])
    assert_refused(tmp_path, tmp_path / "both", PREPARE, tmp_path / "both", out)
    write(tmp_path / "latin" / "train", [SENTENCE])
    latin = tmp_path / "latin" / "train" / "z.txt"
    latin.write_bytes("café".encode("latin-1"))
    assert_refused(tmp_path, latin, PREPARE, tmp_path / "latin", out)


def test_existing_output_is_kept(corpus, tmp_path):
    source, data, _ = corpus
    before = {path: path.read_bytes() for path in data.iterdir()}
    assert_refused(data.parent, data, PREPARE, source, data, "--vocab-size", 320)
    assert {path: path.read_bytes() for path in data.iterdir()} == before
    Path(tmp_path, "file").write_text("mine")
    assert_refused(tmp_path, tmp_path / "file", PREPARE, source, tmp_path / "file")
    assert Path(tmp_path, "file").read_text() == "mine"


@pytest.mark.slow
def test_interrupted_run_leaves_nothing(corpus, tmp_path):
    command = [tool("inf-prepare"), corpus[0], tmp_path / "out", "--vocab-size", "330"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        for line in process.stdout:
            if line.startswith("training"):
                process.send_signal(signal.SIGTERM)
        assert process.stderr.read() == "fairseq-inf-prepare: interrupted, nothing was written\n"
    assert process.returncode != 0
    assert list(tmp_path.iterdir()) == []


def test_sample_is_bounded_and_takes_of_every_document(tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary, "SAMPLE_BYTES", 50_000)
    write(tmp_path / "train", [f"é{i}\t{i}\n" * 5000 * (i + 1) for i in range(9)])
    found = [(path, path.stat().st_size) for path in sorted(tmp_path.glob("train/*"))]
    lines = list(vocabulary.sample(found))
    assert 45_000 < sum(len(line.encode()) + 1 for line in lines) <= 50_000 + len(found)
    assert {f"é{i} {i}" for i in range(9)} == set(lines) & {f"é{i} {i}" for i in range(9)}
    assert "\t" not in "".join(lines)
    assert lines == list(vocabulary.sample(found))
    share = [sum(line == f"é{i} {i}" for line in lines) for i in range(9)]
    assert share == sorted(share)


def test_standard_library_as_documents(tmp_path):
    result = run(STDLIB, tmp_path / "one")
    assert result.returncode == 0, result.stderr
    splits = ("train", "validation", "test")
    names = {split: [p.stem for p in Path(tmp_path, "one", split).iterdir()] for split in splits}
    every = sum(names.values(), [])
    assert len(every) == len(set(every)) > 400
    assert 0.85 < len(names["train"]) / len(every) < 0.95
    assert all(len(names[split]) / len(every) > 0.03 for split in splits)
    assert {"argparse", "json.decoder", "asyncio.__init__"} <= set(every)
    assert not any({"test", "tests", "site-packages"} & set(n.split(".")[:-1]) for n in every)
    (copy,) = tmp_path.glob("one/*/json.decoder.txt")
    module = Path(sysconfig.get_paths()["stdlib"], "json", "decoder.py")
    assert copy.read_bytes() == module.read_bytes()
    assert all(str(len(names[split])) in result.stdout for split in splits)

    assert run(STDLIB, tmp_path / "two").returncode == 0
    for split in splits:
        assert_same_files(tmp_path / "one" / split, tmp_path / "two" / split)
    assert_refused(tmp_path, tmp_path / "one", STDLIB, tmp_path / "one")


class Bucket(http.server.BaseHTTPRequestHandler):
    """PG-19's bucket, with two names on a page of its list."""

    files = {f"{s}/{i}.txt": f"{s} {i}" for s in ("train", "validation", "test") for i in range(5)}

    def do_GET(self):
        url = urllib.parse.urlparse(self.path)
        query = {"prefix": "", "marker": "", **dict(urllib.parse.parse_qsl(url.query))}
        name = url.path.removeprefix("/pg19").strip("/")
        names = [n for n in sorted(self.files) if n.startswith(query["prefix"])]
        keys = [f"<Key>{n}</Key>" for n in names if n > query["marker"]][:2]
        text = {**self.files, "metadata.csv": "0,title", "": "".join(keys)}.get(name)
        self.server.asked.append(name)
        self.send_response(200 if text is not None else 404)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write((text or "").encode())

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_pg19_download_resumes(tmp_path):
    source, out = tmp_path / "data" / "pg19", tmp_path / "out"
    write(source / "train", ["here already"])
    Path(source, "train", "00.txt").rename(source / "train" / "3.txt")
    write(out, ["in the way, so that nothing is prepared"])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bucket) as server:
        server.asked = []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environment = {**os.environ, "PG19_URL": f"http://127.0.0.1:{server.server_port}/pg19"}
        result = run("bash", PG19, "", out, cwd=tmp_path, env=environment)
        server.shutdown()
    assert f"{out} exists already" in result.stderr
    found = {str(p.relative_to(source)): p.read_text() for p in source.glob("*/*")}
    assert found == {**Bucket.files, "train/3.txt": "here already"}
    assert "train/2.txt" in server.asked and "train/3.txt" not in server.asked


def test_pg19_script_refuses(corpus, tmp_path):
    offline = {**os.environ, "PG19_URL": "http://127.0.0.1:9"}
    assert_refused(tmp_path, "PG19_DIR", "bash", PG19, cwd=tmp_path, env=offline)
    gpt2 = {**os.environ, "BPE": "gpt2"}
    assert_refused(tmp_path, "GPT2_BPE", "bash", PG19, corpus[0], cwd=tmp_path, env=gpt2)
    assert "usage:" in run("bash", PG19, "--help").stdout


@pytest.mark.slow
def test_the_first_books_of_pg19_are_prepared_for_gpt2(corpus, tmp_path, gpt2):
    environment = {**os.environ, "GPT2_BPE": str(gpt2), "BOOKS": "3"}
    result = run("bash", FOR_GPT2, "pg19", corpus[0], cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    data = tmp_path / "data-bin" / "gpt2-pg19"
    counts = json.loads(Path(data, "documents.json").read_text())
    assert counts["train"]["documents"] == 3 and counts["test"]["documents"] == 1
    train = MMapIndexedDataset(str(data / "train"))
    words = Dictionary.load(str(data / "dict.txt"))
    decoded = [gpt2_decoder(gpt2)([words[i] for i in item[:-1].tolist()]) for item in train]
    assert decoded == documents(corpus[0] / "train")[:3]
    again = run("bash", FOR_GPT2, "pg19", corpus[0], cwd=tmp_path, env=environment)
    assert "exists already" in again.stderr


@pytest.mark.slow
def test_wikitext_is_prepared_for_gpt2_article_by_article(tmp_path, gpt2):
    (tmp_path / "wiki").mkdir()
    for split in ("train", "valid", "test"):
        Path(tmp_path, "wiki", f"wiki.{split}.raw").write_text(WIKI)
    environment = {**os.environ, "GPT2_BPE": str(gpt2)}
    result = run("bash", FOR_GPT2, "wikitext-103", "wiki", cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    data = tmp_path / "data-bin" / "gpt2-wikitext-103"
    train = MMapIndexedDataset(str(data / "train"))
    words = Dictionary.load(str(data / "dict.txt"))
    decoded = [gpt2_decoder(gpt2)([words[i] for i in item[:-1].tolist()]) for item in train]
    assert "".join(decoded) == WIKI
    assert [text.split(" = ")[1] for text in decoded] == ["One", "Two", "Three"]


def test_wikitext_has_sixty_articles_to_test_with(tmp_path, real_data):
    script = ROOT / "examples" / "gpt2" / "split_wikitext.py"
    result = run(script, real_data / "wikitext-103", tmp_path / "out")
    assert "valid: 60 articles\ntest: 60 articles" in result.stdout
    text = b"".join(path.read_bytes() for path in sorted((tmp_path / "out" / "test").iterdir()))
    assert text == Path(real_data, "wikitext-103", "wiki.test.tokens").read_bytes()
    assert "exists already" in run(script, real_data / "wikitext-103", tmp_path / "out").stderr
    assert "has no wiki.train.raw" in run(script, tmp_path, tmp_path / "other").stderr


@pytest.mark.slow
def test_the_preparation_for_gpt2_says_what_is_missing_and_leaves_nothing(corpus, tmp_path, gpt2):
    def refused(said, *args, **environment):
        result = run("bash", FOR_GPT2, *args, cwd=tmp_path, env={**os.environ, **environment})
        assert result.returncode and said in result.stderr.strip().splitlines()[-1]
        assert {path.name for path in tmp_path.iterdir()} == {"gpt2"}

    refused("see --help")
    refused("GPT2_BPE", corpus[0], GPT2_BPE_URL="file:///none")
    refused("nowhere is no folder", "nowhere", GPT2_BPE=str(gpt2))
    refused("WIKITEXT_DIR", "wikitext-103", GPT2_BPE=str(gpt2), WIKITEXT_URL="file:///none")
    refused("only argument", corpus[0], "more", GPT2_BPE=str(gpt2))
    refused("BOOKS must be", "pg19", corpus[0], GPT2_BPE=str(gpt2), BOOKS="none")
    assert "usage:" in run("bash", FOR_GPT2, "--help").stdout
