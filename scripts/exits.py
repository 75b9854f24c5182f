"""Trainings that stop in the middle of an epoch must end with exit code 0: small ones, many of
them, over both tasks, workers, flags and hydra, small batches and large ones.

    python scripts/exits.py --count 100
"""

import argparse
import itertools
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from runs import ROOT, tool

TASKS = ("long_sequence_lm", "sorting")
ROWS = (8, 400)  # a large batch takes long to make, so that its reader is at work at the end


def make_data(folder):
    """A data-bin for each task, by its name."""
    draw = random.Random(0)
    for split, lines in (("train", 400), ("valid", 10)):
        with open(folder / split, "w") as file:
            for _ in range(lines):
                file.write(" ".join(str(draw.randrange(50)) for _ in range(2000)) + "\n")
    text = ["--only-source", "--trainpref", "train", "--validpref", "valid", "--destdir", TASKS[0]]
    numbers = [TASKS[1], "--length", "300", "--vocabulary", "8", "--sizes", "4000", "10", "1"]
    for command in (
        [tool("fairseq-preprocess"), *text],
        [sys.executable, "-m", "fairseq_inf.data.sorting", *numbers],
    ):
        subprocess.run(command, cwd=folder, env=environment(), check=True, capture_output=True)


def environment():
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def settings(task, workers, rows, data, save_dir):
    """The configuration of a training of two updates, by sections."""
    return {
        "common": {"user_dir": str(ROOT / "fairseq_inf"), "cpu": True, "log_format": "simple"},
        "task": {"_name": task, "data": str(data), "tokens_per_sample": 32},
        "model": {
            "_name": "infinite_former_lm",
            "decoder_layers": 1,
            "decoder_embed_dim": 8,
            "decoder_ffn_embed_dim": 8,
            "decoder_attention_heads": 1,
            "stm_length": 8,
            "ltm_basis": 8,
        },
        "criterion": {"_name": "cross_entropy_with_kl"},
        "optimizer": {"_name": "adam"},
        "lr_scheduler": {"_name": "fixed"},
        "optimization": {"lr": [0.001], "max_update": 2},
        "dataset": {"num_workers": workers, "batch_size": rows, "disable_validation": True},
        "checkpoint": {"save_dir": str(save_dir), "no_save": True},
    }


def by_hydra(config, folder):
    (folder / "exits.yaml").write_text("# @package _group_\n" + yaml.safe_dump(config))
    names = ["--config-dir", str(folder), "--config-name", "exits", f"hydra.run.dir={folder}"]
    return [tool("fairseq-hydra-train"), *names]


def by_flags(config, folder):
    words = [tool("fairseq-train"), config["task"].pop("data")]
    for section, values in config.items():
        for name, value in values.items():
            value = value[0] if isinstance(value, list) else value
            flag = {"_name": "arch" if section == "model" else section}.get(name, name)
            words += [f"--{flag.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


CASES = list(itertools.product(TASKS, (0, 1, 4), ROWS, (by_flags, by_hydra)))


def main():
    parser = argparse.ArgumentParser(description="Count the exit codes of many short trainings.")
    parser.add_argument("--count", type=int, default=100, help="how many trainings")
    args = parser.parse_args()
    failed, begin = 0, time.time()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder)
        for number, case in enumerate(itertools.islice(itertools.cycle(CASES), args.count)):
            task, workers, rows, front = case
            own = folder / str(number)
            own.mkdir()
            command = front(settings(task, workers, rows, folder / task, own), own)
            done = subprocess.run(
                command, cwd=own, env=environment(), text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
            whole = done.returncode == 0 and "done training in" in done.stdout
            failed += not whole
            what = f"{task}, {workers} workers, {rows} rows, {front.__name__[3:]}"
            print(f"{number + 1}: exit code {done.returncode}, {what}", flush=True)
            if not whole:
                print(done.stdout[-2000:], flush=True)
    print(f"{failed} of {args.count} failed, after {time.time() - begin:.0f} seconds")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
