import collections
import contextlib
import csv
import functools
import itertools
import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from commands import enter, refused
from conftest import MODEL, ROOT, fairseq, finish, load, start_training, tool
from fairseq.data import indexed_dataset
from lines import TINY, TRAIN, L, build, last, likeliest, lines_of, streams

import fairseq_inf.tasks.guests  # noqa: F401  (registers it)
from fairseq_inf.data import SequenceBatches
from fairseq_inf.errors import Failure
from fairseq_inf.experiments.sorting import figures
from fairseq_inf.experiments.sorting.data import (
    SEPARATOR,
    chance_accuracy,
    dictionary,
    draw,
    find_answer,
    kendall_tau,
    main,
    oracle_accuracy,
    sort,
)
from fairseq_inf.models import InfiniteFormerLM

V, T = 5, 30


def prepare(folder, *args):
    enter(main, "sorting", folder, *args)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sorting") / "bin"
    prepare(folder, "--length", T, "--vocabulary", V, "--sizes", 60, 13, 7)
    return folder


# the data


def sorted_by_hand(tokens, vocabulary):
    """Selection, one token at a time, in the words of the paper's task."""
    left, order = list(range(vocabulary)), []
    while left:
        best = None
        for token in left:
            count, first = tokens.count(token), None
            if count:
                first = tokens.index(token)
            if best is None:
                best = (token, count, first)
            elif count > best[1] or (count == best[1] > 0 and first < best[2]):
                best = (token, count, first)
        left.remove(best[0])
        order.append(best[0])
    return order


def test_every_small_sequence_is_sorted_as_by_hand():
    for length, vocabulary in ((1, 2), (3, 3), (4, 4), (6, 3), (7, 2)):
        for tokens in itertools.product(range(vocabulary), repeat=length):
            assert sort(np.array(tokens), vocabulary).tolist() == sorted_by_hand(
                list(tokens), vocabulary
            )


def test_draws_follow_the_mixture_that_drifts():
    """100,000 draws of one sequence: in each fifth of it the counts are those of p, by chi
    square.  p0 and p1 are what the generator's own first numbers say."""
    vocabulary, length, parts = 20, 100_000, 5
    tokens = draw(np.random.default_rng(7), vocabulary, length)
    p0, p1 = np.random.default_rng(7).integers(1, 10, size=(2, vocabulary))
    p0, p1 = p0 / p0.sum(), p1 / p1.sum()
    alpha = np.arange(length) / (length - 1)
    assert alpha[0] == 0 and alpha[-1] == 1
    for part in np.split(np.arange(length), parts):
        expected = alpha[part].sum() * p0 + (1 - alpha[part]).sum() * p1
        counts = np.bincount(tokens[part], minlength=vocabulary)
        chi = ((counts - expected) ** 2 / expected).sum()
        freedom = vocabulary - 1
        assert abs(chi - freedom) < 4 * math.sqrt(2 * freedom)
    # the drift is there: the ends do not fit one another's distribution
    last = np.bincount(tokens[-20_000:], minlength=vocabulary)
    assert ((last - 20_000 * p1) ** 2 / (20_000 * p1)).sum() > 1000


def test_each_sequence_has_distributions_of_its_own_from_one_to_nine():
    """The first token comes from p1 alone: over many sequences each integer is as likely."""
    rng, first = np.random.default_rng(3), collections.Counter()
    draws = 20_000
    for _ in range(draws):
        first[int(draw(rng, 4, 2)[0])] += 1
    for token in range(4):
        assert abs(first[token] - draws / 4) < 4 * math.sqrt(draws * 0.25 * 0.75)
    # P(both tokens alike) of sequences that stay with one distribution would be 1/4 if it were
    # uniform; integers 1..9 make it larger: E[sum p^2] by enumeration
    alike = np.mean(
        [(p := np.array(c) / sum(c)) @ p for c in itertools.product(range(1, 10), repeat=4)]
    )
    same = sum(
        float(len(set(draw(rng, 4, 200)[:2].tolist())) == 1) for _ in range(draws)
    )  # alpha of the second token is 1/199
    assert abs(same - draws * alike) < 4 * math.sqrt(draws * alike) + draws / 199


def test_a_line_is_the_sequence_the_separator_and_the_answer(data):
    for split, size in (("train", 60), ("valid", 13), ("test", 7)):
        lines = lines_of(data, split)
        assert len(lines) == size
        for line in lines:
            assert len(line) == T + 1 + V and line[T] == SEPARATOR
            tokens = [int(word) for word in line[:T]]
            assert [int(word) for word in line[T + 1 :]] == sorted_by_hand(tokens, V)
    assert lines_of(data, "train")[:7] != lines_of(data, "test")


def test_the_binarizer_writes_what_fairseq_preprocess_writes(data, tmp_path):
    text = tmp_path / "test.txt"
    text.write_text("".join(" ".join(line) + "\n" for line in lines_of(data, "test")))
    fairseq(
        "preprocess", "--only-source", "--srcdict", data / "dict.txt", "--testpref", text,
        "--destdir", tmp_path / "bin",
    )  # fmt: skip
    assert lines_of(tmp_path / "bin", "test") == lines_of(data, "test")
    assert (tmp_path / "bin" / "dict.txt").read_text() == (data / "dict.txt").read_text()


def test_the_same_seed_gives_the_same_files_and_another_seed_others(data, tmp_path):
    sizes = ["--length", T, "--vocabulary", V, "--sizes", 60, 13, 7]
    prepare(tmp_path / "again", *sizes)
    prepare(tmp_path / "other", *sizes, "--seed", 2)
    for name in ("dict.txt", "train.bin", "train.idx", "valid.bin", "test.bin", "test.idx"):
        assert (tmp_path / "again" / name).read_bytes() == (data / name).read_bytes()
    for name in ("train.bin", "valid.bin", "test.bin"):
        assert (tmp_path / "other" / name).read_bytes() != (data / name).read_bytes()


def test_bad_sizes_and_folders_are_refused_in_one_sentence(data, tmp_path):
    before = {path.name: path.read_bytes() for path in data.iterdir()}
    assert "exists already" in refused(main, "sorting", data, "--length", 9)
    assert {path.name: path.read_bytes() for path in data.iterdir()} == before
    for args, said in (
        (("--length", 0), "--length must be at least 1, got 0"),
        (("--vocabulary", 1), "--vocabulary must be at least 2, got 1"),
        (("--sizes", 5, 0, 5), "--sizes must be at least 1, got 0"),
        (("--seed", -1), "--seed must be at least 0, got -1"),
    ):
        assert said in refused(main, "sorting", tmp_path / "new", *args)
    (tmp_path / "file").write_text("")
    said = refused(main, "sorting", tmp_path / "file" / "new", "--sizes", 1, 1, 1)
    assert said.startswith(f"cannot write {tmp_path}/file/new: ")
    said = refused(main, "sorting", tmp_path / "new", "--length", 10**13)
    assert said == f"cannot write {tmp_path}/new: out of memory"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


# what a number means


def test_chance_is_a_guess_among_the_tokens_not_named_yet():
    rng = np.random.default_rng(0)
    told = [draw(rng, V, T) for _ in range(20_000)]
    assert chance_accuracy(2) == 0.75  # one of two, and then the other
    assert abs(oracle_accuracy(told, V, window=0) - chance_accuracy(V)) < 0.005


def test_an_oracle_that_counts_everything_errs_only_in_ties():
    rng = np.random.default_rng(0)
    told = [draw(rng, V, T) for _ in range(300)]
    without = [t for t in told if len(set(np.bincount(t, minlength=V).tolist())) == V]
    assert 20 < len(without) < 300
    assert oracle_accuracy(without, V) == 1
    assert oracle_accuracy(told, V) < 1
    # two tokens, once each: the first of two is right half of the time, the last one always
    ties = [np.array([0, 1])] * 4000
    assert abs(oracle_accuracy(ties, 2) - 0.75) < 0.03


def test_kendall_tau_counts_the_pairs_that_stand_in_order():
    assert kendall_tau([3, 1, 2], [3, 1, 2]) == 1
    assert kendall_tau([3, 1, 2], [2, 1, 3]) == -1
    assert kendall_tau([0, 1, 2, 3], [1, 0, 2, 3]) == pytest.approx(4 / 6)
    # a token twice stands where it first stood; 1 and 2 are missing and neither is first
    assert kendall_tau([0, 1, 2], [0, 0, 9]) == pytest.approx(2 / 3)


# the task

TASK = ["--user-dir", "fairseq_inf", "--task", "sorting", "--cpu", "--num-workers", "0"]


def batches(data, rows, world=1, seed=None):
    """What each process gets of the validation split: a list of batches each."""
    own = [slice(rows * r, rows * r + rows) for r in range(world)]
    return [SequenceBatches(streams(data), rows * world, L, x, find_answer, seed) for x in own]


def told(batch, words):
    """-> for each row of a batch the words that it reads, and its targets"""
    rows = batch["segments"][0]["target"].size(0)
    read, targets = [[] for _ in range(rows)], [[] for _ in range(rows)]
    for segment in batch["segments"]:
        for row in range(rows):
            size = int(segment["net_input"]["src_lengths"][row])
            read[row] += segment["net_input"]["src_tokens"][row, :size].tolist()
            targets[row] += [t for t in segment["target"][row].tolist() if t != words.pad()]
    return list(zip(read, targets, strict=True))


@pytest.mark.parametrize("rows,world", [(1, 1), (4, 1), (2, 2), (3, 2), (20, 1)])
def test_every_sequence_is_read_whole_and_only_its_answer_is_asked(data, rows, world):
    words = dictionary(V)
    lines = lines_of(data, "valid")
    shards = batches(data, rows, world)
    assert len({len(shard) for shard in shards}) == 1
    seen = []
    for i in range(len(shards[0])):
        parts = [shard[i] for shard in shards]
        # processes take the same steps
        assert len({(len(part["segments"]), part["first"]) for part in parts}) == 1
        for part in parts:
            starts = [s["net_input"]["starts"] for s in part["segments"]]
            assert all(starts[0]) and not any(map(any, starts[1:]))
            for segment in part["segments"][: part["first"]]:
                assert segment["ntokens"] == 0
            assert part["ntokens"] == sum(s["ntokens"] for s in part["segments"])
            seen += told(part, words)
    seen = [(read, target) for read, target in seen if read]
    assert len(seen) == len(lines)
    for (read, target), line in zip(seen, lines, strict=True):
        assert [words[i] for i in read] == ["</s>", *line]
        assert [words[i] for i in target] == line[T + 1 :]


def test_sequences_are_shuffled_by_seed(data):
    a, b, c = (told(batches(data, 20, seed=s)[0][0], dictionary(V)) for s in (1, 1, 2))
    assert a == b != c
    assert sorted(a) == sorted(c)


@pytest.mark.parametrize("line", [[4, 5, 4, 5], [4, 5, 9], [4, 9, 5, 9, 4]], ids=str)
def test_a_line_without_one_separator_and_an_answer_is_refused(tmp_path, line):
    words = dictionary(V)
    assert words.index(SEPARATOR) == 9
    words.save(str(tmp_path / "dict.txt"))
    builder = indexed_dataset.make_builder(str(tmp_path / "valid.bin"), "mmap", len(words))
    for tokens in ([4, 5, 9, 4, 5], line):
        builder.add_item(torch.tensor([*tokens, words.eos()]))
    builder.finalize(str(tmp_path / "valid.idx"))
    with pytest.raises(ValueError, match="line 2 of valid must have <sep> once, between a seq"):
        batches(tmp_path, 2)


class Backward:
    """What the task's step uses of an optimizer."""

    def backward(self, loss):
        loss.backward()


@contextlib.contextmanager
def graph():
    """-> numbers that are saved for the backward pass"""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.numel()) or x, lambda x: x
    ):
        yield saved


def test_segments_without_targets_keep_no_graph(data):
    """One loop by hand over all segments gives the same loss and gradients."""
    sample = batches(data, 4)[0][0]
    task, model, criterion = build("sorting", data)
    with graph() as few:
        loss, size, _ = task.train_step(sample, model, criterion, Backward(), 0)
    assert model.training and size == 4 * V
    task, other, criterion = build("sorting", data)
    other.train()
    with graph() as all_:
        parts = [criterion(other, segment)[0] for segment in sample["segments"]]
    expected = sum(p for p, s in zip(parts, sample["segments"], strict=True) if s["ntokens"])
    expected.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-6) and 2 * sum(few) < sum(all_)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def sorted_run(tmp_path_factory):
    """An easy task, which a small model learns: the more frequent of two tokens."""
    folder = tmp_path_factory.mktemp("sorted")
    data, run = folder / "bin", folder / "run"
    prepare(data, "--length", 15, "--vocabulary", 2, "--sizes", 2000, 40, 60)
    args = ["--save-dir", run, "--batch-size", 20, "--max-update", 150, "--eval-order"]
    printed = fairseq("train", data, *TASK, *MODEL, *TRAIN, *args)
    return data, ["--path", run / "checkpoint_last.pt", "--tokens-per-sample", L], printed


@pytest.fixture(scope="module")
def measured(sorted_run):
    """-> what is measured on the test split by name, with batches of a size"""

    @functools.cache
    def measure(rows):
        data, own, _ = sorted_run
        printed = fairseq(
            "validate", data, *TASK, *own, "--valid-subset", "test", "--log-format", "json",
            "--batch-size", rows, "--eval-order",
        )  # fmt: skip
        names = ("accuracy", "exact_match", "kendall_tau", "nll_loss")
        return {name: last(printed, name) for name in names}

    return measure


@pytest.mark.slow
def test_training_logs_accuracy_and_learns(sorted_run):
    _, _, printed = sorted_run
    assert last(printed, "accuracy") > 80
    assert 0 < last(printed, "exact_match") <= 100
    assert -1 <= last(printed, "kendall_tau") <= 1


@pytest.mark.slow
def test_a_greedy_order_is_exact_where_every_teacher_forced_token_is_right(sorted_run, measured):
    """With two tokens the order is right if the first one is, and then the second one follows."""
    data, own, _ = sorted_run
    _, model, _ = build("sorting", data)
    model.load_state_dict(load(own[1])["model"])
    model.eval()
    right = exact = 0
    for line in lines_of(data, "test"):
        best = likeliest(model, dictionary(2), line)
        hits = [a == b for a, b in zip(best[16:18], line[16:], strict=True)]
        right, exact = right + sum(hits), exact + all(hits)
    assert measured(7)["accuracy"] == pytest.approx(100 * right / 120, abs=0.01)
    assert measured(7)["exact_match"] == pytest.approx(100 * exact / 60, abs=0.01)


@pytest.mark.slow
def test_the_batch_size_does_not_change_the_result(measured):
    assert measured(7) == measured(60)


@pytest.mark.slow
def test_two_processes_equal_one_and_a_training_goes_on_as_if_nothing_had_happened(data, tmp_path):
    """Batches of 8: the last one of the 60 to train on, and of the 13 to validate with, leaves
    rows empty, and the last of the 4 at a time in validation the second process."""
    sgd = "--optimizer nag --momentum 0 --lr 0.05 --save-interval-updates 4 --max-update".split()

    def args(name, updates, rows):
        own = ["--save-dir", tmp_path / name, *sgd, updates, "--eval-order"]
        return [data, *TASK, *MODEL, *TRAIN, *own, "--batch-size-valid", rows]

    def run(name, updates):
        fairseq("train", *args(name, updates, 4), "--batch-size", 8)
        return load(tmp_path / name / "checkpoint_last.pt")

    both = start_training(args("2", 10, 2), 2, rows=8)
    one = run("1", 10)
    run("3", 6)
    three = run("3", 10)
    finish(both)
    two = load(tmp_path / "2" / "checkpoint_last.pt")
    assert one["extra_state"]["val_loss"] == pytest.approx(two["extra_state"]["val_loss"], rel=1e-4)
    for name, x in one["model"].items():
        assert torch.allclose(x, two["model"][name], atol=1e-4), name
        assert torch.equal(x, three["model"][name]), name


@pytest.mark.slow
def test_fairseq_generate_goes_on_after_the_separator(sorted_run, measured):
    data, own, _ = sorted_run
    printed = fairseq(
        "generate", data, *TASK, *own, "--gen-subset", "test", "--beam", 1, "--max-len-b", 2,
        "--batch-size", 16,
    )  # fmt: skip
    orders = {
        int(n): text.split() for n, text in re.findall(r"^D-(\d+)\t\S+\t(.*)$", printed, re.M)
    }
    assert sorted(orders) == list(range(60))
    exact = sum(orders[i] == line[16:] for i, line in enumerate(lines_of(data, "test")))
    assert measured(7)["exact_match"] == pytest.approx(100 * exact / 60, abs=0.01)


@pytest.mark.slow
def test_what_is_not_for_sorting_is_refused_in_one_sentence(data, data_bin, sorted_run):
    task, _, _ = build("sorting", data)
    with pytest.raises(ValueError, match="^fairseq-eval-lm is not for --task sorting"):
        task.eval_lm_dataloader(None)
    with pytest.raises(ValueError, match="^--document-separator 0 is not for sorting"):
        build("sorting", data, "--document-separator", "0")
    with pytest.raises(ValueError, match="has no <sep>: make the data with fairseq-inf-sorting"):
        build("sorting", data_bin)
    data, own, _ = sorted_run
    command = [tool("interactive"), data, *TASK, *own, "--beam", 1, "--max-len-b", 2]
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, text=True, capture_output=True, input="0 1 1\n0 1 1 <sep>\n"
    )
    assert "prompt 0 must end with <sep>" in done.stderr
    assert "D-1" in done.stdout and "D-0" not in done.stdout


@pytest.mark.slow
def test_the_hub_takes_a_model_that_sorts(sorted_run):
    data, own, _ = sorted_run
    hub = InfiniteFormerLM.from_pretrained(str(own[1].parent), own[1].name, str(data))
    assert hub.generate("1 0 1 1 0 1 1 1 1 1 1 1 1 0 1 <sep>", max_tokens=2).split()[0] == "1"


@pytest.mark.slow
def test_prepare_makes_a_folder_for_each_length(tmp_path):
    env = {"DATA": tmp_path / "bin", "SIZES": "3 2 1", "VOCABULARY": "4", "SEED": "5"}
    script = ["bash", "examples/sorting/prepare.sh", "6", "9"]
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, **{k: str(v) for k, v in env.items()}}
    done = subprocess.run(script, cwd=ROOT, env=env, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    for length in (6, 9):
        folder = tmp_path / "bin" / f"sorting-{length}"
        assert [len(line) for line in lines_of(folder, "train")] == [length + 1 + 4] * 3
    again = subprocess.run(script, cwd=ROOT, env=env, text=True, capture_output=True)
    assert again.returncode == 0 and again.stdout.count("is there already") == 2


# the experiment


@pytest.fixture
def experiment(monkeypatch, tmp_path):
    """-> how the figures are run, at a tiny scale"""
    tiny = {
        "segment": 8, "lengths": (17, 25, 33), "rates": (2, 6, 12), "sizes": (20, 4, 9),
        "basis": (4, 8),
    }  # fmt: skip
    monkeypatch.setitem(figures.SCALES, "small", tiny)
    monkeypatch.chdir(ROOT)
    folders = ["--data", tmp_path / "data", "--out", tmp_path / "out"]

    def run(figure, *words):
        enter(lambda: figures.run(figure), figure, *TINY, *folders, "--cpu", *words)

    return run


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_one_run_is_trained_tested_and_not_run_again(experiment, tmp_path, forked, capsys):
    def run(*words):
        experiment("lengths", "--models", "infinite_former", "--lengths", 25, "--seeds", 1, *words)
        assert "| ∞-former |" in capsys.readouterr().out
        return json.loads((folder / "result.json").read_text())

    folder = tmp_path / "out" / "small" / "infinite_former-25" / "seed1"
    few = ["--jobs", 1, "--cpu", "model.ltm_basis=4", "model.ltm_widths=auto"]
    result = run(*few)
    assert 0 <= result["accuracy"] <= 100 and -1 <= result["kendall_tau"] <= 1
    assert 0 < result["regression_error"] < 1.5
    before = (folder / "train.log").read_text()
    assert run(*few) == result
    # broken off between training and test: the training is not touched
    (folder / "result.json").unlink()
    assert run(*few) == result
    assert (folder / "train.log").read_text() == before
    # what was begun with other settings is not gone on with, finished or not
    for _ in range(2):
        with pytest.raises(Failure, match="has another overrides: choose another --out"):
            run("--cpu", "model.ltm_basis=8")
        (folder / "result.json").unlink(missing_ok=True)


def test_other_data_in_the_place_of_the_experiments_is_refused(experiment, tmp_path):
    prepare(tmp_path / "data" / "sorting-small-25", "--length", 9, "--sizes", 1, 1, 1)
    with pytest.raises(Failure, match="sorting-small-25 is not data of {'length': 25"):
        experiment("lengths", "--lengths", 25)


@pytest.mark.parametrize(
    "words,said",
    [
        ("lengths --lengths 77", "--lengths 77 must be one of 17, 25, 33"),
        ("basis --lengths 25", "unrecognized arguments: --lengths"),
        ("basis --models transformer_xl", "--models transformer_xl: --configs"),
        ("lengths 25", "25 is not a hydra override: it must be name=value"),
        ("lengths --configs none", "none has no such config in small"),
    ],
)
def test_a_part_that_is_not_there_is_refused(experiment, words, said):
    figure, *more = words.split()
    assert said in refused(lambda: figures.run(figure), figure, *more)


def test_the_figures_show_every_run_with_chance_and_oracle(
    experiment, tmp_path, monkeypatch, capsys
):
    """The runs themselves are the test above: here each is its own made-up result."""
    asked = []

    def made_up(args, rows, measure, score, out):
        found = []
        for row in rows:
            for seed in args.seeds:
                own = row.overrides[: -len(TINY)]
                asked.append((row.name, seed, tuple(own)))
                model, length = row.config.stem, int(row.name.split("-")[1])
                found.append({
                    "config": row.name, "seed": seed, "seconds": 60, "nll_loss": 2.0,
                    "accuracy": 20.0 + 10 * len(model) / length + seed, "exact_match": 1.0,
                    "kendall_tau": 0.5, "regression_error": 0.25 * seed,
                })  # fmt: skip
        return found

    monkeypatch.setattr(figures, "run_rows", made_up)
    out = tmp_path / "out" / "small"
    out.mkdir(parents=True)
    experiment("lengths", "--seeds", 1, 2)
    assert len(set(asked)) == len(asked) == 6 * 3 * 2
    rates = {(n, o) for n, _, o in asked if n.startswith("compressive")}
    assert rates == {
        (f"compressive_transformer-{n}", (f"model.compression_rate={c}",))
        for n, c in ((17, 2), (25, 6), (33, 12))
    }
    rows = rows_of(out / "lengths.csv")
    assert len(rows) == 6 * 3 * 2 + 3 * 3
    told = {(r["model"], r["length"]): float(r["accuracy"]) for r in rows if not r["seed"]}
    for length in ("17", "25", "33"):
        seen = told["counts what Transformer-XL sees", length]
        assert told["chance", length] == 17.99 < seen <= told["counts everything", length]
    printed = capsys.readouterr().out
    for name in ("Transformer-XL", "∞-former, uniform and Gibbs", "chance", "counts everything"):
        assert f"| {name} |" in printed
    assert (out / "lengths.png").read_bytes()[:4] == b"\x89PNG"

    asked.clear()
    both = ("transformer_xl", "infinite_former_gibbs")
    experiment("lengths", "--seeds", 1, "--lengths", 33, 25, "--models", *reversed(both))
    assert asked == [(f"{model}-{length}", 1, ()) for length in (25, 33) for model in both]
    head = "| accuracy, % | length 25 | length 33 | from first to last |"
    assert head in capsys.readouterr().out

    asked.clear()
    experiment("basis", "--seeds", 1, 2)
    # N = L with the paper's widths is the run of the first figure
    assert ("infinite_former-25", 1, ()) in asked and len(set(asked)) == 3 * 2 * 2
    assert ("infinite_former_gibbs-25", 1, ()) in asked
    rows = rows_of(out / "basis.csv")
    assert {(r["memory"], r["basis"], r["seed"]) for r in rows} == set(
        itertools.product(figures.MEMORIES, "48", "12")
    )
    line = "| widths auto | regression error | 0.38 ± 0.18 | 0.38 ± 0.18 |"
    assert line in capsys.readouterr().out
    assert (out / "basis.png").read_bytes()[:4] == b"\x89PNG"
