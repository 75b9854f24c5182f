import os
import pathlib
import random
import re
import socket
import subprocess
import sys
from types import SimpleNamespace

import commands
import pytest
import torch

ROOT = pathlib.Path(__file__).parent.parent

# the models of the tests are so small that a second thread only costs
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

TASK = ["--user-dir", "fairseq_inf", "--task", "long_sequence_lm", "--cpu", "--num-workers", "0"]
MODEL = (
    "--arch infinite_former_lm --decoder-layers 2 --decoder-embed-dim 16 "
    "--decoder-ffn-embed-dim 32 --decoder-attention-heads 2 --stm-length 12 "
    "--ltm-basis 10 --ltm-widths 0.05,0.2 --ltm-sticky "
    "--ltm-schedule constant --ltm-density gaussian"
).split()
BASELINES = {  # the same sizes with the other memories
    name: ["--arch", name, *MODEL[2 : MODEL.index("--ltm-basis")], *own]
    for name, own in {
        "compressive_transformer_lm": ["--cmem-length", "8", "--compression-rate", "5"],
        "infini_attention_lm": ["--infini-update", "linear"],
        "transformer_xl_lm": [],
    }.items()
}
TRAIN = (
    "--criterion cross_entropy_with_kl --optimizer adam --lr 0.01 --tokens-per-sample 12 "
    "--batch-size 4 --log-format json --log-interval 5"
).split()


def tool(name):
    return os.path.join(os.path.dirname(sys.executable), f"fairseq-{name}")


def fairseq(name, *args, ok=True):
    """Run one of fairseq's commands in the checkout.  -> what it printed"""
    code, printed = commands.run(f"fairseq-{name}", args, ROOT)
    assert (code == 0) == ok, printed[-4000:]
    assert not re.search(r"fairseq_inf/\S+: \w*Warning", printed), "our own code must not warn"
    return printed


def train(data, save_dir, *args, model=MODEL, ok=True):
    return fairseq("train", data, *TASK, *model, *TRAIN, "--save-dir", save_dir, *args, ok=ok)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def start_training(args, world, rows):
    """fairseq-train as `world` processes, which share the rows.  -> the processes"""
    args = [*args, "--batch-size", rows // world]
    if world > 1:
        args += [
            "--distributed-world-size", world, "--distributed-no-spawn",
            "--distributed-backend", "gloo",
            "--distributed-init-method", f"tcp://127.0.0.1:{free_port()}",
            "--ddp-backend", "legacy_ddp",
        ]  # fmt: skip
    ranks = [["--distributed-rank", rank] if world > 1 else [] for rank in range(world)]
    return [commands.Started("fairseq-train", [*args, *rank], ROOT) for rank in ranks]


def finish(processes):
    """Wait for all of them.  -> what each has printed"""
    ended = [process.finish() for process in processes]
    for code, text in ended:
        assert code == 0, text[-3000:]
    return [text for _, text in ended]


def evaluate(data, checkpoint, *args, ok=True):
    return fairseq("eval-lm", data, *TASK, "--path", checkpoint, *args, ok=ok)


def result(printed):
    """-> tokens, perplexity"""
    tokens = int(re.search(r"Evaluated ([\d,]+) tokens", printed)[1].replace(",", ""))
    return tokens, float(re.search(r"Perplexity: ([\d.]+)", printed)[1])


def load(path):
    return torch.load(path, weights_only=True)


@pytest.fixture
def forked(monkeypatch):
    """What the runner of the experiments starts has fairseq imported already."""
    from fairseq_inf.experiments import runs

    def start(command, env, stdout, stderr):
        name, *args = command
        code = commands.start(os.path.basename(name), args, ROOT, stdout.name, stdout.name)
        return subprocess.CompletedProcess(command, code)

    instead = SimpleNamespace(run=start, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(runs, "subprocess", instead)


@pytest.fixture(scope="session")
def data_bin(tmp_path_factory):
    """A small corpus of 24 documents, a line each, in which names of the first words return."""
    folder = tmp_path_factory.mktemp("data")
    draw = random.Random(0)
    words = [f"word{i}" for i in range(60)]
    for split, documents in (("train", 24), ("valid", 6), ("test", 5)):
        with open(folder / f"{split}.txt", "w") as file:
            for _ in range(documents):
                names = draw.sample(words, 8)
                file.write(" ".join(draw.choices(names, k=draw.randint(20, 200))) + "\n")
    out = folder / "bin"
    prefixes = [x for s in ("train", "valid", "test") for x in (f"--{s}pref", folder / f"{s}.txt")]
    fairseq("preprocess", "--only-source", *prefixes, "--destdir", out)
    return out


@pytest.fixture(scope="session")
def trained(data_bin, tmp_path_factory):
    """-> a folder with a trained model, and what the training printed"""
    save_dir = tmp_path_factory.mktemp("trained")
    logs = ["--tensorboard-logdir", save_dir / "tb"]
    return save_dir, train(data_bin, save_dir, "--max-update", 200, "--seed", 2, *logs)


@pytest.fixture(scope="session")
def real_data():
    """The folder with the real data sets that some tests read."""
    folder = os.environ.get("FAIRSEQ_INF_DATA")
    if not folder:
        pytest.skip("set FAIRSEQ_INF_DATA to a folder with wikitext-103/, pg19/ and gpt2_bpe/")
    return pathlib.Path(folder)
