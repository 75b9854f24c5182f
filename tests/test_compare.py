"""The table that fairseq-inf-compare makes."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = pytest.mark.slow

CONFIGS = ROOT / "examples" / "wikitext103" / "config"


def compare(data, out, *args):
    command = [
        sys.executable,
        "-m",
        "fairseq_inf.experiments.compare",
        "--data",
        data,
        "--out",
        out,
        *args,
    ]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, text=True, capture_output=True)
    return done.returncode, done.stdout, done.stderr


def test_compare_trains_evaluates_and_prints_a_table(data_bin, tmp_path):
    configs = [CONFIGS / "small" / f"{row}.yaml" for row in ("infinite_former", "transformer_xl")]
    overrides = (
        "optimization.max_update=6 dataset.batch_size=4 model.decoder_embed_dim=16 "
        "model.decoder_ffn_embed_dim=16 model.decoder_layers=1"
    ).split()
    options = [*configs, *overrides, "--cpu", "--jobs", 2, "--eval-rows", 1, "--seeds", 1]
    code, printed, errors = compare(data_bin, tmp_path, *options)
    assert code == 0, errors
    rows = re.findall(r"^\| (transformer xl|infinite former) \| ([\d.]+) \|", printed, re.M)
    assert [name for name, _ in rows] == ["transformer xl", "infinite former"]
    assert all(1 < float(ppl) < 200 for _, ppl in rows)
    assert "24.52" in printed and "24.29" in printed
    assert "infinite_former against transformer_xl" in printed
    (tmp_path / "infinite_former" / "seed1" / "checkpoint_last.pt").unlink()
    code, _, errors = compare(data_bin, tmp_path, *options, "--split", "valid")
    assert code != 0 and "has another --split" in errors
    again = compare(data_bin, tmp_path, *options)  # nothing is run twice
    assert again[0] == 0 and again[1].split("\n\n")[1:] == printed.split("\n\n")[1:]


def test_compare_names_what_is_wrong(data_bin, tmp_path):
    for args, said in (
        ((data_bin, tmp_path, tmp_path), "no hydra configs"),
        ((tmp_path, tmp_path, CONFIGS / "small"), "has no dict.txt"),
        ((data_bin, tmp_path, CONFIGS / "small", "--jobs", 0), "--jobs"),
        ((data_bin, tmp_path, CONFIGS / "small", CONFIGS / "paper"), "would share a folder"),
        (
            (
                data_bin,
                tmp_path,
                CONFIGS / "small",
                "--context-window",
                9,
                "task.tokens_per_sample=9",
            ),
            "--context-window 9 must be from 1 to 8",
        ),
    ):
        code, _, errors = compare(*args)
        assert code != 0 and said in errors.strip().splitlines()[-1]
    bad = [CONFIGS / "small" / "transformer_xl.yaml", "model.stm_length=-1", "--seeds", 1, "--cpu"]
    code, _, errors = compare(data_bin, tmp_path / "out", *bad)
    assert code != 0 and "train.log" in errors and "--stm-length" in errors
