import argparse
import collections
import csv
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from commands import enter, refused
from conftest import MODEL, ROOT, fairseq, load
from fairseq.data import Dictionary
from lines import TINY, TRAIN, L, build, last, likeliest, lines_of, streams

import fairseq_inf.tasks.guests  # noqa: F401  (registers it)
from fairseq_inf.errors import Failure
from fairseq_inf.experiments.recall import figure
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
from fairseq_inf.experiments.runs import Row

K, V, T = 6, 5, 61


def prepare(folder, *args):
    enter(main, "recall", folder, *args)


OPTIONS = ["--keys", K, "--values", V, "--length", T, "--fillers", 0.2]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recall") / "bin"
    prepare(folder, *OPTIONS, "--sizes", 60, 13, 7)
    return folder


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
    for line in lines_of(data, "train") + [[FILLER] * 4, ["k1", "v0"], ["k0", "k0", "k0", "v1"]]:
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


def test_the_folder_holds_documents_of_the_length_and_says_how_they_were_made(
    data, tmp_path, capsys
):
    for split, size in (("train", 60), ("valid", 13), ("test", 7)):
        lines = lines_of(data, split)
        assert [len(line) + 1 for line in lines] == [T] * size
        assert {word for line in lines for word in line} <= set(dictionary(K, V).symbols)
    assert lines_of(data, "train")[:7] != lines_of(data, "test")
    made = json.loads((data / "recall.json").read_text())
    assert made["keys"] == K and made["fillers"] == 0.2 and made["sizes"] == [60, 13, 7]
    prepare(tmp_path / "pairs", "--mode", "pairs", "--pairs", 3, "--gap", 9, "--sizes", *"421")
    assert "wrote 7 documents of 18 tokens to" in capsys.readouterr().out
    assert [len(line) for line in lines_of(tmp_path / "pairs", "train")] == [17] * 4


def test_the_same_seed_gives_the_same_files_and_another_seed_others(data, tmp_path):
    prepare(tmp_path / "again", *OPTIONS, "--sizes", 60, 13, 7)
    prepare(tmp_path / "other", *OPTIONS, "--sizes", 60, 13, 7, "--seed", 2)
    for name in ("dict.txt", "train.bin", "train.idx", "valid.bin", "test.bin", "recall.json"):
        assert (tmp_path / "again" / name).read_bytes() == (data / name).read_bytes()
    for name in ("train.bin", "valid.bin", "test.bin"):
        assert (tmp_path / "other" / name).read_bytes() != (data / name).read_bytes()


def test_bad_options_are_refused_in_one_sentence(data, tmp_path):
    assert "exists already" in refused(main, "recall", data)
    for args, said in (
        (("--keys", 1), "--keys must be at least 2, got 1"),
        (("--length", 4), "--length must be at least 5, got 4"),
        (("--sizes", 1, 0, 1), "--sizes must be at least 1, got 0"),
        (("--fillers", 1), "--fillers must be from 0 to less than 1, got 1.0"),
        (("--hot", 7, "--keys", 8), "--hot must be from 0 to two less than --keys 8, got 7"),
        (("--hot-share", 1), "--hot-share must be strictly between 0 and 1, got 1.0"),
        (("--mode", "pairs", "--pairs", 9, "--keys", 8), "--pairs 9 wants as many --keys, got 8"),
    ):
        assert said in refused(main, "recall", tmp_path / "new", *args)
    assert not (tmp_path / "new").exists()


# the batches


def batches(data, rows, world=1, seed=None):
    """What each process gets of the validation split."""
    dataset = streams(data)
    spans = dataset.spans(rows * world, L, seed)
    own = [slice(rows * r, rows * r + rows) for r in range(world)]
    return [RecallBatches(dataset, spans, L, part) for part in own]


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
    lines = lines_of(data, "valid")
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
    for line in lines_of(data, "valid"):
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


def train(data, run, *args):
    return fairseq("train", data, *TASK, *MODEL, *TRAIN, "--save-dir", run, *args)


@pytest.fixture(scope="module")
def recalled(tmp_path_factory):
    """An easy task, of which a small model learns the near past: two keys, and two values."""
    folder = tmp_path_factory.mktemp("recalled")
    data, run = folder / "bin", folder / "run"
    prepare(data, "--keys", 2, "--values", 2, "--length", 33, "--sizes", 600, 20, 30)
    return data, run, train(data, run, "--batch-size", 20, "--max-update", 150)


@pytest.fixture(scope="module")
def hot(tmp_path_factory):
    """One of four keys returns again and again."""
    folder = tmp_path_factory.mktemp("hot")
    data, run = folder / "bin", folder / "run"
    options = "--keys 4 --hot 1 --hot-share 0.2 --values 2 --length 65 --sizes 40 9 30"
    prepare(data, *options.split())
    return data, run, train(data, run, "--batch-size", 5, "--max-update", 9)


@pytest.mark.slow
def test_training_logs_accuracy_by_distance_and_learns(recalled):
    _, _, printed = recalled
    assert '"train_recall_8"' in printed and '"valid_recall_8"' in printed
    assert last(printed, "recall_8") > 70
    assert '"recall_64"' not in printed  # no distance there


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["recalled", "hot"])
def test_what_is_logged_is_what_the_decoder_says_document_by_document(trained, request):
    data, run, _ = request.getfixturevalue(trained)
    _, model, _ = build("recall", data)
    model.load_state_dict(load(run / "checkpoint_last.pt")["model"])
    model.eval()
    words = streams(data).dictionary
    right, asked = collections.Counter(), collections.Counter()
    for line in lines_of(data, "test"):
        best = likeliest(model, words, line)
        back = zip(["", *line], line, best, distances_by_hand(line), strict=False)
        for key, word, guess, distance in back:
            if distance:
                edge = next(e for e in (8, 16, 32, 64) if distance < e)
                if key[0] == "h":
                    edge = "hot" if distance >= 2 * L else "near"
                asked[edge] += 1
                right[edge] += guess == word
    near = asked.pop("near", 0)
    assert len(asked) > 1 and (near > 0) == ("hot" in asked) == (trained == "hot")
    printed = fairseq(
        "validate", data, *TASK, "--path", run / "checkpoint_last.pt", "--valid-subset", "test",
        "--tokens-per-sample", L, "--log-format", "json", "--batch-size", 7,
    )  # fmt: skip
    for edge, count in asked.items():
        assert last(printed, f"recall_{edge}") == pytest.approx(100 * right[edge] / count, abs=0.01)
    total = 100 * sum(right.values()) / (sum(asked.values()) + near)
    assert last(printed, "accuracy") == pytest.approx(total, abs=0.01)


def test_the_logs_of_two_processes_add_up_to_those_of_one(data):
    def logged(shard):
        task, model, criterion = build("recall", data)
        steps = [task.valid_step(shard[i], model.eval(), criterion) for i in range(len(shard))]
        return sum((collections.Counter(log) for _, _, log in steps), collections.Counter())

    (one,) = map(logged, batches(data, 4))
    two = sum(map(logged, batches(data, 2, world=2)), collections.Counter())
    names = [name for name in one if name.startswith(("asked_", "recalled_"))]
    assert {"asked_8", "asked_16", "asked_32"} <= set(names)
    assert all(one[name] == two[name] for name in names)


def test_what_is_not_for_recall_is_refused_in_one_sentence(data, data_bin):
    task, _, _ = build("recall", data)
    with pytest.raises(ValueError, match="^fairseq-eval-lm is not for --task recall"):
        task.eval_lm_dataloader(None)
    with pytest.raises(ValueError, match=r"has no k0: make the data with fairseq-inf-recall make"):
        build("recall", data_bin)


@pytest.mark.slow
def test_prepare_takes_the_options_of_the_generator(tmp_path):
    script = ["bash", "examples/recall/prepare.sh", str(tmp_path / "bin")]
    script += ["--length", "21", "--sizes", "3", "2", "1"]
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path}
    done = subprocess.run(script, cwd=ROOT, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert [len(line) for line in lines_of(tmp_path / "bin", "train")] == [20] * 3
    again = subprocess.run(script, cwd=ROOT, env=env, text=True, capture_output=True)
    assert again.returncode == 0 and "is there already" in again.stdout


# the experiment

CONFIGS = ROOT / "examples" / "recall" / "config" / "small"


@pytest.mark.slow
def test_one_run_is_trained_tested_and_not_run_again(data, tmp_path, forked, capsys):
    words = [CONFIGS / "transformer_xl.yaml", "--data", data, "--out", tmp_path]
    words += ["--seeds", 1, "--cpu", *TINY]
    folder = tmp_path / "transformer_xl" / "seed1"

    def run():
        enter(figure.run, "recall", *words)
        assert "| transformer xl |" in capsys.readouterr().out
        return json.loads((folder / "result.json").read_text())

    result = run()
    assert {edge for edge, _ in result["recall"]} <= {8, 16, 32, 64}
    assert all(0 <= value <= 100 for _, value in result["recall"])
    assert result["floats"] == 2 * 8 * 16  # layers, vectors, width
    before = (folder / "train.log").read_text()
    assert run() == result
    (folder / "result.json").unlink()  # broken off between training and test
    assert run() == result
    assert (folder / "train.log").read_text() == before
    said = "has another overrides: choose another --out"
    with pytest.raises(Failure, match=said):
        enter(figure.run, "recall", *words[:-1])


def experiment(data, out):
    out.mkdir()
    return argparse.Namespace(threads=1, cpu=True, data=str(data), out=out)


def test_the_figure_shows_every_config_with_chance_and_window(data, tmp_path):
    """The runs themselves are the test above: here each is its own made-up result."""
    args = experiment(data, tmp_path / "out")
    configs = [CONFIGS / "transformer_xl.yaml", CONFIGS / "infinite_former.yaml"]
    rows = [Row(config, TINY) for config in configs]
    wider = ["model.stm_length=16"]
    rows.append(Row(configs[0], TINY + wider, wider))
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
    text = figure.report(args, results, rows)
    for line in (
        "| recalled, % | < 8 | 8–16 | 16–32 | 32–64 | floats | minutes |",
        "| infinite former, memory off | 12.00 ± 0.00 |  |  |  |  |  |",
        "| transformer xl | 51.50 ± 0.71 | 30.00 ± 0.00 | 34.00 ± 0.00 |  | 1,234 | 1.0 |",
        "| transformer xl, stm_length=16 | 51.50 ± 0.71 |",
    ):
        assert line in text
    assert (args.out / "table.md").read_text() == text + "\n"
    assert (args.out / "recall.png").read_bytes()[:4] == b"\x89PNG"
    with open(args.out / "recall.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    counts = collections.Counter(row["memory"] for row in rows if row["seed"])
    assert counts == {"on": 3 * 2 * 3, "off": 2}
    known = {(r["config"], r["distance"]): float(r["accuracy"]) for r in rows if not r["seed"]}
    assert {name for name, _ in known} == {"chance", "window of 16", "window of 24"}
    assert known["chance", "8"] == 20 and known["window of 16", "8"] == 100
    assert known["window of 16", "8"] > known["window of 16", "16"] > known["window of 16", "32"]
    assert 20 <= known["window of 16", "32"] < 30


@pytest.mark.slow
def test_hot_keys_have_a_column_of_their_own(hot, tmp_path, forked):
    args = experiment(hot[0], tmp_path / "out")
    accuracy, recall = figure.test(args, hot[1] / "checkpoint_last.pt", tmp_path / "test.log")
    printed = (tmp_path / "test.log").read_text()
    assert recall[-1] == ("hot", last(printed, "recall_hot")) and accuracy > 0
    row = Row(CONFIGS / "transformer_xl.yaml", TINY)
    result = {"config": row.name, "seed": 1, "seconds": 60, "floats": 9, "recall": recall}
    text = figure.report(args, [result], [row])
    assert "| 16–32 | 32–64 | hot, ≥ 16 | floats |" in text
    assert f"| {recall[-1][1]:.2f} | 9 | 1.0 |" in text


def test_data_of_another_task_is_refused(data_bin):
    words = ["recall", CONFIGS / "transformer_xl.yaml", "--data", data_bin]
    assert "has no recall.json: make it with fairseq-inf-recall make" in refused(figure.run, *words)
