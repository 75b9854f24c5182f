import argparse
import collections
import contextlib
import csv
import importlib
import io
import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import BASELINES, MODEL, ROOT, fairseq, finish, load, start_training, tool
from fairseq import options, tasks
from fairseq.data import Dictionary, data_utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from fairseq_inf.data import StreamDataset
from fairseq_inf.experiments.recall.data import (
    FILLER,
    RecallBatches,
    bin_edges,
    dictionary,
    distances_back,
    draw_keys,
    draw_questions,
    draw_ranks,
    draw_streams,
    find_keys,
    in_window,
    main,
)

K, V, T, L = 6, 5, 61, 8


def prepare(folder, *args):
    command = [tool("inf-recall"), "make", folder, *args]
    done = subprocess.run([*map(str, command)], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(folder, *args):
    """The same in this process, which saves its start.  -> the last line that it fails with"""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(sys, "argv", ["recall", *map(str, (folder, *args))])
        with pytest.raises(SystemExit) as stopped:
            main()
    assert stopped.value.code != 0
    return said.getvalue().strip().splitlines()[-1]


OPTIONS = ["--keys", K, "--values", V, "--length", T, "--fillers", 0.2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recall") / "bin"
    prepare(folder, *OPTIONS, "--sizes", 60, 13, 7)
    return folder


def documents(folder, split):
    """The lines of a split, in words."""
    words = Dictionary.load(str(folder / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(folder / split), words, "mmap")
    assert all(int(line[-1]) == words.eos() for line in lines)
    return [[words[int(i)] for i in line[:-1]] for line in lines]


# the data


def distances_by_hand(line):
    """One word after the other.  -> for each word how long ago the key before it stood, or 0"""
    last, found = {}, []
    for place in range(len(line)):
        before = line[place - 1] if place else FILLER
        found.append(0)
        if before[0] in "hk":
            if before in last:
                found[-1] = place - last[before]
            last[before] = place
    return found


def test_distances_are_those_found_one_word_after_the_other(data):
    words = Dictionary.load(str(data / "dict.txt"))
    for line in documents(data, "train") + [[FILLER] * 4, ["k1", "v0"], ["k0", "k0", "k0", "v1"]]:
        tokens = np.array([words.index(word) for word in line])
        assert distances_back(tokens, find_keys(words)).tolist() == distances_by_hand(line)


@pytest.mark.parametrize("fillers", [0, 0.2, 0.7])
def test_a_document_is_pairs_with_one_value_to_a_key_and_fillers_between(fillers):
    tokens = draw_streams(np.random.default_rng(0), 200, 60, K, V, fillers, "log-uniform")
    assert tokens.shape == (200, 60)
    share, places = 0, collections.Counter()
    for line in tokens.tolist():
        place, belongs, pairs = 0, {}, 0
        while place < 60:
            if line[place] == K + V:
                share, place = share + 1, place + 1
                continue
            key, value = line[place : place + 2]
            places[place] += 1
            assert key < K <= value < K + V
            assert belongs.setdefault(key, value) == value
            place, pairs = place + 2, pairs + 1
        assert pairs == int(60 * (1 - fillers)) // 2
    assert share / tokens.size == pytest.approx(fillers, abs=0.04)
    if fillers:  # they stand anywhere
        assert len(places) == 59


def test_the_next_key_is_the_one_that_as_many_others_have_stood_after():
    """A list for each document, from which a key is taken and put in front."""
    a = draw_keys(np.random.default_rng(5), 30, 40, K, "log-uniform")
    rng = np.random.default_rng(5)
    stacks = rng.permuted(np.tile(np.arange(K), (30, 1)), axis=1).tolist()
    ranks = draw_ranks(rng, (40, 30), K, "log-uniform")
    for row, stack in enumerate(stacks):
        for number in range(40):
            key = stack.pop(int(ranks[number, row]))
            stack.insert(0, key)
            assert a[row, number] == key


@pytest.mark.parametrize("distances", ["log-uniform", "uniform"])
def test_ranks_have_the_distribution_that_was_asked_for(distances):
    draws = 200_000
    counts = np.bincount(draw_ranks(np.random.default_rng(1), draws, 64, distances), minlength=64)
    rank = np.arange(64)
    share = np.log((rank + 2) / (rank + 1)) / math.log(65)
    expected = draws * (share if distances == "log-uniform" else np.full(64, 1 / 64))
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - 63) < 4 * math.sqrt(2 * 63)


def test_hot_keys_return_with_their_share_and_the_others_as_without_them():
    a = draw_keys(np.random.default_rng(3), 500, 40, K, "log-uniform", 2, 0.2)
    others = draw_keys(np.random.default_rng(3), 500, 40, K - 2, "log-uniform")
    assert ((a < 2).mean(), (a == 0).mean()) == pytest.approx((0.2, 0.1), abs=0.01)
    assert np.array_equal(a[a >= 2], others[a >= 2] + 2)


def test_values_are_drawn_anew_for_each_document():
    tokens = draw_streams(np.random.default_rng(2), 4000, 60, K, V, 0, "uniform")
    firsts = tokens[tokens[:, 0] == 0][:, 1]
    counts = np.bincount(firsts - K, minlength=V)
    assert ((counts - len(firsts) / V) ** 2 / (len(firsts) / V)).sum() < 4 + 4 * math.sqrt(8)


def test_in_the_mode_of_pairs_one_of_them_is_asked_after_a_gap():
    tokens = draw_questions(np.random.default_rng(0), 3000, 4, 7, K, V)
    asked = collections.Counter()
    for line in tokens.tolist():
        pairs = dict(zip(line[0:8:2], line[1:8:2], strict=True))
        assert len(pairs) == 4 and all(k < K <= v < K + V for k, v in pairs.items())
        assert line[8:15] == [K + V] * 7
        assert pairs[line[15]] == line[16] and len(line) == 17
        asked[line[0:8:2].index(line[15])] += 1
    assert all(abs(asked[i] - 750) < 4 * math.sqrt(3000 * 3 / 16) for i in range(4))


@pytest.mark.slow
def test_the_folder_holds_documents_of_the_length_and_says_how_they_were_made(data, tmp_path):
    for split, size in (("train", 60), ("valid", 13), ("test", 7)):
        lines = documents(data, split)
        assert [len(line) + 1 for line in lines] == [T] * size
        assert {word for line in lines for word in line} <= set(dictionary(K, V).symbols)
    assert documents(data, "train")[:7] != documents(data, "test")
    made = json.loads((data / "recall.json").read_text())
    assert made["keys"] == K and made["fillers"] == 0.2 and made["sizes"] == [60, 13, 7]
    printed = prepare(
        tmp_path / "pairs", "--mode", "pairs", "--pairs", 3, "--gap", 9, "--sizes", *"421"
    )
    assert "wrote 7 documents of 18 tokens to" in printed
    assert [len(line) for line in documents(tmp_path / "pairs", "train")] == [17] * 4


@pytest.mark.slow
def test_the_same_seed_gives_the_same_files_and_another_seed_others(data, tmp_path):
    prepare(tmp_path / "again", *OPTIONS, "--sizes", 60, 13, 7)
    prepare(tmp_path / "other", *OPTIONS, "--sizes", 60, 13, 7, "--seed", 2)
    for name in ("dict.txt", "train.bin", "train.idx", "valid.bin", "test.bin", "recall.json"):
        assert (tmp_path / "again" / name).read_bytes() == (data / name).read_bytes()
    for name in ("train.bin", "valid.bin", "test.bin"):
        assert (tmp_path / "other" / name).read_bytes() != (data / name).read_bytes()


def test_bad_options_are_refused_in_one_sentence(data, tmp_path):
    assert "is there already" in refused(data)
    for args, said in (
        (("--keys", 1), "--keys must be at least 2, got 1"),
        (("--length", 4), "--length must be at least 5, got 4"),
        (("--sizes", 1, 0, 1), "--sizes must be at least 1, got 0"),
        (("--fillers", 1), "--fillers must be from 0 to less than 1, got 1.0"),
        (("--hot", 7, "--keys", 8), "--hot must be from 0 to two less than --keys 8, got 7"),
        (("--hot-share", 1), "--hot-share must be strictly between 0 and 1, got 1.0"),
        (("--mode", "pairs", "--pairs", 9, "--keys", 8), "--pairs 9 wants as many --keys, got 8"),
    ):
        assert said in refused(tmp_path / "new", *args)
    assert not (tmp_path / "new").exists()


# the batches


def batches(data, rows, world=1, seed=None):
    """What each process gets of the validation split."""
    words = Dictionary.load(str(data / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(data / "valid"), words, "mmap")
    streams = StreamDataset(lines, words, "documents", words.eos(), "valid")
    spans = streams.spans(rows * world, L, seed)
    own = [slice(rows * r, rows * r + rows) for r in range(world)]
    return [RecallBatches(streams, spans, L, part) for part in own]


@pytest.mark.parametrize("rows,world,seed", [(1, 1, None), (4, 1, 3), (3, 2, None), (20, 1, None)])
def test_every_value_of_a_key_that_returns_is_asked_once_with_its_distance(data, rows, world, seed):
    words = dictionary(K, V)
    found = []
    for shard in batches(data, rows, world, seed):
        read = [[] for _ in range(rows)]
        for segment in (shard[i] for i in range(len(shard))):
            assert segment["edges"] == [8, 16, 32, 64]
            asked = segment["target"] != words.pad()
            assert segment["ntokens"] == asked.sum()
            assert torch.equal(asked, segment["distance"] > 0)
            for row, start in enumerate(segment["net_input"]["starts"]):
                if start and read[row]:
                    found.append(read[row])
                    read[row] = []
                size = int(segment["net_input"]["src_lengths"][row])
                columns = (
                    segment["net_input"]["src_tokens"],
                    segment["target"],
                    segment["distance"],
                )
                read[row] += zip(*(x[row, :size].tolist() for x in columns), strict=True)
        found += [row for row in read if row]
    lines = documents(data, "valid")
    assert len(found) == len(lines)
    expected = []
    for line in lines:
        distance = distances_by_hand([*line, "</s>"])
        target = [w if d else "<pad>" for w, d in zip([*line, "</s>"], distance, strict=True)]
        expected.append(list(zip(["</s>", *line], target, distance, strict=True)))
    own = [[(words[token], words[target], d) for token, target, d in row] for row in found]
    assert sorted(own) == sorted(expected)


@pytest.mark.parametrize("stm_length", [0, 3, 8, 19])
def test_a_window_knows_the_values_that_self_attention_sees(data, stm_length):
    """By reading: which of the inputs so far hold the value."""
    words = dictionary(K, V)
    for line in documents(data, "valid"):
        tokens = np.array([words.index(word) for word in line])
        distances = distances_back(tokens, find_keys(words))
        inputs, known = [None, *range(len(line))], []  # places of the words, as they are read
        for place in np.flatnonzero(distances):
            begin = max(place // L * L - stm_length, 0)
            known.append(place - distances[place] in inputs[begin : place + 1])
        assert in_window(distances, L, stm_length).tolist() == known


def test_bins_double_up_to_the_longest_distance():
    assert bin_edges(64, 1024) == [64, 128, 256, 512, 1024]
    assert bin_edges(64, 1025)[-1] == 2048 and bin_edges(64, 9) == [64]


# the task

TASK = ["--user-dir", "fairseq_inf", "--task", "recall", "--cpu", "--num-workers", "0"]
TRAIN = (
    f"--criterion cross_entropy_with_kl --report-accuracy --tokens-per-sample {L} --dropout 0 "
    "--optimizer adam --lr 0.01 --log-format json --log-interval 5"
).split()


def train(data, save_dir, *args, model=MODEL, ok=True):
    return fairseq("train", data, *TASK, *model, *TRAIN, "--save-dir", save_dir, *args, ok=ok)


@pytest.fixture(scope="module")
def recalled(tmp_path_factory):
    """An easy task, of which a small model learns the near past: two keys, and two values."""
    folder = tmp_path_factory.mktemp("recalled")
    data = folder / "bin"
    prepare(data, "--keys", 2, "--values", 2, "--length", 33, "--sizes", 600, 20, 30)
    printed = train(data, folder / "run", "--batch-size", 20, "--max-update", 150)
    return data, folder / "run", printed


@pytest.fixture(scope="module")
def hot(tmp_path_factory):
    """One of four keys returns again and again."""
    folder = tmp_path_factory.mktemp("hot")
    data = folder / "bin"
    options = "--keys 4 --hot 1 --hot-share 0.2 --values 2 --length 65 --sizes 40 9 30"
    prepare(data, *options.split())
    return data, folder / "run", train(data, folder / "run", "--batch-size", 5, "--max-update", 9)


def last(printed, name):
    return float(re.findall(rf'"(?:valid_|test_)?{name}": "([-\d.e]+)"', printed)[-1])


@pytest.mark.slow
def test_training_logs_accuracy_by_distance_and_learns(recalled):
    _, _, printed = recalled
    assert '"train_recall_8"' in printed and '"valid_recall_8"' in printed
    assert last(printed, "recall_8") > 70
    assert '"recall_64"' not in printed  # no distance there


def validate(data, run, *args):
    return fairseq(
        "validate", data, *TASK, "--path", run / "checkpoint_last.pt", "--valid-subset", "test",
        "--tokens-per-sample", L, "--log-format", "json", *args,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["recalled", "hot"])
def test_what_is_logged_is_what_the_decoder_says_document_by_document(trained, request):
    data, run, _ = request.getfixturevalue(trained)
    argv = [str(data), *TASK[2:], *MODEL, *TRAIN]
    parsed = options.parse_args_and_arch(options.get_training_parser(), argv)
    cfg = convert_namespace_to_omegaconf(parsed)
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    model.load_state_dict(load(run / "checkpoint_last.pt")["model"])
    model.eval()
    words = Dictionary.load(str(data / "dict.txt"))
    right, asked = collections.Counter(), collections.Counter()
    for line in documents(data, "test"):
        inputs = torch.tensor([[words.eos(), *map(words.index, line)]])
        state, outputs = model.decoder.initial_state(1), []
        with torch.no_grad():
            for part in inputs.split(L, dim=1):
                x, state, _ = model.decoder(part, state)
                outputs.append(x)
        best = torch.cat(outputs, dim=1)[0].argmax(dim=-1).tolist()
        back = zip(["", *line], line, best, distances_by_hand(line), strict=False)
        for key, word, guess, distance in back:
            if distance:
                edge = next(e for e in (8, 16, 32, 64) if distance < e)
                if key[0] == "h":
                    edge = "hot" if distance >= 2 * L else "near"
                asked[edge] += 1
                right[edge] += words[guess] == word
    near = asked.pop("near", 0)
    assert len(asked) > 1 and (near > 0) == ("hot" in asked) == (trained == "hot")
    for rows in (7, 30):
        printed = validate(data, run, "--batch-size", rows)
        for edge, count in asked.items():
            assert last(printed, f"recall_{edge}") == pytest.approx(
                100 * right[edge] / count, abs=0.01
            )
        total = 100 * sum(right.values()) / (sum(asked.values()) + near)
        assert last(printed, "accuracy") == pytest.approx(total, abs=0.01)


@pytest.mark.slow
def test_two_processes_equal_one_and_a_training_goes_on_as_if_nothing_had_happened(data, tmp_path):
    model = BASELINES["compressive_transformer_lm"]
    sgd = "--optimizer nag --momentum 0 --lr 0.05 --save-interval-updates 4 --max-update".split()

    def run(name, updates, world):
        args = [data, *TASK, *model, *TRAIN, "--save-dir", tmp_path / name, *sgd, updates]
        args += ["--batch-size-valid", 4 // world]
        printed = finish(start_training(args, world, rows=8))
        return load(tmp_path / name / "checkpoint_last.pt"), printed[0]

    (one, said), (two, other) = run("1", 10, 1), run("2", 10, 2)
    for edge in (8, 16, 32):
        assert last(said, f"recall_{edge}") == pytest.approx(last(other, f"recall_{edge}"), abs=1)
    run("3", 6, 1)
    three, _ = run("3", 10, 1)
    for name, x in one["model"].items():
        assert torch.allclose(x, two["model"][name], atol=1e-4), name
        assert torch.equal(x, three["model"][name]), name


@pytest.mark.slow
def test_what_is_not_for_recall_is_refused_in_one_sentence(recalled, data_bin, tmp_path):
    data, run, _ = recalled
    own = ["--path", run / "checkpoint_last.pt", "--tokens-per-sample", L]
    printed = fairseq("eval-lm", data, *TASK, *own, ok=False)
    assert "ValueError: fairseq-eval-lm is not for --task recall" in printed
    printed = train(data_bin, tmp_path, "--batch-size", 2, ok=False)
    assert re.search(r"ValueError: the dictionary of \S+ has no k0: make the data with", printed)


@pytest.mark.slow
def test_prepare_takes_the_options_of_the_generator(tmp_path):
    script = ["bash", "examples/recall/prepare.sh", str(tmp_path / "bin")]
    script += ["--length", "21", "--sizes", "3", "2", "1"]
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path}
    done = subprocess.run(script, cwd=ROOT, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert [len(line) for line in documents(tmp_path / "bin", "train")] == [20] * 3
    again = subprocess.run(script, cwd=ROOT, env=env, text=True, capture_output=True)
    assert again.returncode == 0 and "is there already" in again.stdout


# the experiment

CONFIGS = ROOT / "examples" / "recall" / "config" / "small"


@pytest.fixture
def experiment(monkeypatch, tmp_path, data):
    """-> scripts/recall.py as a module, and its arguments at a tiny scale"""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    module = importlib.import_module("recall")
    args = argparse.Namespace(
        seeds=[1, 2], jobs=1, threads=1, cpu=True, data=str(data), out=tmp_path / "out",
        overrides="""optimization.max_update=2 task.tokens_per_sample=8 model.decoder_embed_dim=16
            model.decoder_ffn_embed_dim=16 model.stm_length=8""".split(),
    )  # fmt: skip
    return module, args


@pytest.mark.slow
def test_one_run_is_trained_tested_and_not_run_again(experiment):
    module, args = experiment
    Row = importlib.import_module("runs").Row
    row = Row(CONFIGS / "transformer_xl.yaml", args.overrides, [])
    result = module.work(args, row, 1)
    assert {edge for edge, _ in result["recall"]} <= {8, 16, 32, 64}
    assert all(0 <= value <= 100 for _, value in result["recall"])
    assert result["floats"] == 2 * 8 * 16  # layers, vectors, width
    before = (args.out / "transformer_xl" / "seed1" / "train.log").read_text()
    assert module.work(args, row, 1) == result
    (args.out / "transformer_xl" / "seed1" / "result.json").unlink()
    assert module.work(args, row, 1) == result
    assert (args.out / "transformer_xl" / "seed1" / "train.log").read_text() == before
    row.overrides = args.overrides[:-1]
    with pytest.raises(SystemExit, match="has another overrides: choose another --out"):
        module.work(args, row, 1)


def test_the_figure_shows_every_config_with_chance_and_window(experiment):
    """The runs themselves are the test above: here each is its own made-up result."""
    module, args = experiment
    configs = [CONFIGS / "transformer_xl.yaml", CONFIGS / "infinite_former.yaml"]
    Row = importlib.import_module("runs").Row
    rows = [Row(config, args.overrides, []) for config in configs]
    wider = ["model.stm_length=16"]
    rows.append(Row(configs[0], args.overrides + wider, wider))
    results = [
        {
            "config": row.name, "seed": seed, "seconds": 60, "accuracy": 40.0, "floats": 1234,
            "recall": [[8, 50.0 + seed], [16, 30.0], [32, 20.0 + len(row.name)]],
        }
        for seed in (2, 1) for row in rows
    ]  # fmt: skip
    for result in results:
        if result["config"] == "infinite_former":
            result["off"] = [[8, 12.0]]
    args.out.mkdir()
    text = module.report(args, results, rows)
    assert "| infinite former, memory off | 12.00 ± 0.00 |  |  |  |  |  |" in text
    assert "| recalled, % | < 8 | 8–16 | 16–32 | 32–64 | floats | minutes |" in text
    assert (
        "| transformer xl | 51.50 ± 0.71 | 30.00 ± 0.00 | 34.00 ± 0.00 |  | 1,234 | 1.0 |" in text
    )
    assert "| transformer xl, stm_length=16 | 51.50 ± 0.71 |" in text
    assert (args.out / "table.md").read_text() == text + "\n"
    assert (args.out / "recall.png").read_bytes()[:4] == b"\x89PNG"
    with open(args.out / "recall.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len([r for r in rows if r["memory"] == "on"]) == 3 * 2 * 3
    assert len([r for r in rows if r["memory"] == "off"]) == 2
    known = {(r["config"], r["distance"]): float(r["accuracy"]) for r in rows if not r["seed"]}
    assert {name for name, _ in known} == {"chance", "window of 16", "window of 24"}
    assert known["chance", "8"] == 20 and known["window of 16", "8"] == 100
    assert known["window of 16", "8"] > known["window of 16", "16"] > known["window of 16", "32"]
    assert 20 <= known["window of 16", "32"] < 30


@pytest.mark.slow
def test_hot_keys_have_a_column_of_their_own(experiment, hot, tmp_path):
    module, args = experiment
    args.data = str(hot[0])
    accuracy, recall = module.test(args, hot[1] / "checkpoint_last.pt", tmp_path / "test.log")
    printed = (tmp_path / "test.log").read_text()
    assert recall[-1] == ["hot", last(printed, "recall_hot")] and accuracy > 0
    Row = importlib.import_module("runs").Row
    row = Row(CONFIGS / "transformer_xl.yaml", args.overrides, [])
    result = {"config": row.name, "seed": 1, "seconds": 60, "floats": 9, "recall": recall}
    args.out.mkdir()
    text = module.report(args, [result], [row])
    assert "| 16–32 | 32–64 | hot, ≥ 16 | floats |" in text
    assert f"| {recall[-1][1]:.2f} | 9 | 1.0 |" in text


def test_also_wants_a_config_that_is_there_and_what_is_changed(experiment, monkeypatch, capsys):
    module, args = experiment
    for also in (
        ["infinite_former", "model.ltm_basis=8"],
        ["transformer_xl"],
        ["transformer_xl", "8"],
    ):
        words = ["recall", CONFIGS / "transformer_xl.yaml", "--data", args.data, "--also", *also]
        monkeypatch.setattr(sys, "argv", [str(word) for word in words])
        with pytest.raises(SystemExit):
            module.main()
        assert "must be one of transformer_xl and what is changed, a=b" in capsys.readouterr().err
