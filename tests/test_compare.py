"""The runner of the experiments, and the table that fairseq-inf-compare makes."""

import functools
import re
import time

import pytest
from commands import enter, refused
from conftest import ROOT

from fairseq_inf.experiments import compare
from fairseq_inf.experiments.runs import side_by_side

CONFIGS = ROOT / "examples" / "wikitext103" / "config"
SMALL, ROW = CONFIGS / "small", CONFIGS / "small" / "transformer_xl.yaml"


@pytest.mark.slow
def test_compare_trains_evaluates_and_prints_a_table(data_bin, tmp_path, forked, capsys):
    options = ["compare", SMALL / "infinite_former.yaml", ROW, "--data", data_bin]
    options += (
        """optimization.max_update=6 dataset.batch_size=4 model.decoder_embed_dim=16
        model.decoder_ffn_embed_dim=16 model.decoder_layers=1 --cpu --jobs 2 --eval-rows 1
        --seeds 1 --out""".split()
        + [tmp_path]
    )
    enter(compare.main, *options)
    printed = capsys.readouterr().out
    rows = re.findall(r"^\| (transformer xl|infinite former) \| ([\d.]+) \|", printed, re.M)
    assert [name for name, _ in rows] == ["transformer xl", "infinite former"]
    assert all(1 < float(ppl) < 200 for _, ppl in rows)
    assert "24.52" in printed and "24.29" in printed
    assert "infinite_former against transformer_xl" in printed
    (tmp_path / "infinite_former" / "seed1" / "checkpoint_last.pt").unlink()
    assert "has another --split" in refused(compare.main, *options, "--split", "valid")
    enter(compare.main, *options)  # nothing is run twice
    assert capsys.readouterr().out.split("\n\n")[1:] == printed.split("\n\n")[1:]


@pytest.mark.parametrize(
    "said,words",
    [
        ("no hydra configs", ["tests"]),
        ("has no dict.txt", [SMALL, "--data", "tests"]),
        ("--jobs must be at least 1, got 0", [SMALL, "--jobs", 0]),
        ("--eval-rows must be at least 1, got 0", [SMALL, "--eval-rows", 0]),
        ("a seed twice would share a folder", [SMALL, "--seeds", 1, 1]),
        ("would share a folder", [SMALL, CONFIGS / "paper"]),
        (
            "--context-window 9 must be from 1 to 8: windows of transformer_xl.yaml have "
            "task.tokens_per_sample=9 tokens",
            [SMALL, "--context-window", 9, "task.tokens_per_sample=9"],
        ),
        *(
            ("must be one of transformer_xl and what is changed, a=b", [ROW, "--also", *also])
            for also in (["infinite_former", "a=8"], ["transformer_xl"], ["transformer_xl", "8"])
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_in_one_sentence(data_bin, tmp_path, said, words):
    assert said in refused(compare.main, "compare", "--data", data_bin, *words)


@pytest.mark.slow
def test_a_failure_of_a_training_names_its_log_and_why(data_bin, tmp_path, forked):
    words = [ROW, "model.stm_length=-1", "--seeds", 1, "--cpu", "--out", tmp_path]
    said = refused(compare.main, "compare", "--data", data_bin, *words)
    assert "transformer_xl/seed1/train.log" in said and "--stm-length" in said


def test_a_failure_of_one_run_ends_the_others():
    begun = []

    def run(number):
        begun.append(number)
        time.sleep(0.01)
        if number == 1:
            raise KeyError("broken")
        return number

    with pytest.raises(KeyError):
        side_by_side(1, [functools.partial(run, n) for n in range(200)], str)
    assert len(begun) < 200
