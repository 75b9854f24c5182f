"""The wheel: all of the package is in it, and its commands run without the checkout."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import commands
import pytest
import torch
from conftest import ROOT

import fairseq_inf
from fairseq_inf.commands import warn_of_bf16

PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # a build leaves traces
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fairseq_inf", source / "fairseq_inf", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder]
    subprocess.run([*PIP, "wheel", *options, source], check=True)
    [path] = folder.glob("*.whl")
    return path


def test_the_wheel_holds_the_whole_package_and_its_version(wheel):
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
        [metadata] = (name for name in names if name.endswith(".dist-info/METADATA"))
        found = message_from_string(files.read(metadata).decode())
    modules = {str(path.relative_to(ROOT)) for path in ROOT.glob("fairseq_inf/**/*.py")}
    assert modules | {"fairseq_inf/py.typed", "fairseq_inf/analysis/page.html"} == {
        n for n in names if ".dist-info/" not in n
    }
    assert found["Version"] == fairseq_inf.__version__
    needed = " ".join(x for x in found.get_all("Requires-Dist") if "extra" not in x)
    for optional in ("matplotlib", "sacrebleu", "tensorboardX", "transformers"):
        assert optional not in needed


@pytest.mark.slow
def test_its_commands_run_in_any_folder(wheel, tmp_path):
    place = tmp_path / "installed"
    subprocess.run([*PIP, "install", "--no-deps", "--target", place, wheel], check=True)
    commands = sorted(path for path in (place / "bin").iterdir() if path.is_file())
    assert {path.name for path in commands} >= {
        "fairseq-inf-import",
        "fairseq-inf-inspect",
        "fairseq-inf-prepare",
        "fairseq-inf-read",
    }
    environment = {**os.environ, "PYTHONPATH": str(place)}
    run = {"cwd": tmp_path, "env": environment, "text": True, "capture_output": True}
    where = subprocess.run([sys.executable, "-c", "import fairseq_inf as f; print(f)"], **run)
    assert str(place) in where.stdout
    for command in commands:
        done = subprocess.run([command, "--help"], **run)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"usage: {command.name}")


GUESTS = ("dialogue", "experiments")


def test_the_package_works_without_its_guests(data_bin, tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", *GUESTS)
    shutil.copytree(ROOT / "fairseq_inf", tmp_path / "fairseq_inf", ignore=ignored)
    code = """
import importlib, pkgutil, sys
sys.meta_path[:] = [x for x in sys.meta_path if "editable" not in str(x).lower()]
import fairseq_inf
for module in pkgutil.walk_packages(fairseq_inf.__path__, "fairseq_inf."):
    importlib.import_module(module.name)
from fairseq.tasks import TASK_REGISTRY
assert "long_sequence_lm" in TASK_REGISTRY and "dialogue" not in TASK_REGISTRY
from fairseq_cli.train import cli_main
cli_main()
"""
    words = (
        "--user-dir fairseq_inf --task long_sequence_lm --arch transformer_xl_lm --cpu --no-save "
        "--decoder-embed-dim 8 --decoder-layers 1 --optimizer adam --tokens-per-sample 8 "
        "--batch-size 2 --max-update 1 --num-workers 0 --disable-validation"
    ).split()
    run = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": "."}, "text": True}
    done = subprocess.run(
        [sys.executable, "-c", code, data_bin, *words], capture_output=True, **run
    )
    assert "done training" in done.stdout + done.stderr, done.stderr[-2000:]
    guest = re.compile(rf"(fairseq_inf|from \.*)\.({'|'.join(GUESTS)})\b")
    for path in (tmp_path / "fairseq_inf").glob("**/*.py"):
        assert not guest.search(path.read_text()), path


def test_half_precision_that_a_cpu_is_slow_in_is_told(monkeypatch, capsys):
    facts = "processor\t: 0\nflags\t\t: fpu avx2 {}\n"
    for more, told in (("", True), ("avx512_bf16", False)):
        monkeypatch.setattr(Path, "read_text", lambda *_, more=more: facts.format(more))
        warn_of_bf16(torch.device("cpu"))
        assert ("--bf16 is slower here" in capsys.readouterr().err) == told
    warn_of_bf16(torch.device("cuda"))
    assert not capsys.readouterr().err


def helped(name, *args, capsys):
    with pytest.raises(SystemExit):
        commands.enter(commands.command(name), name, *args, "--help")
    return capsys.readouterr().out


@pytest.mark.parametrize("name", ["import", "chat", "capacity", "read"])
def test_help_says_what_is_in_brackets(name, capsys):
    assert "brackets" in helped(f"fairseq-inf-{name}", capsys=capsys)


def test_an_import_shows_the_flags_that_it_takes(capsys):
    arch = ("--arch", "selective_memory_lm_llama")
    printed = helped("fairseq-inf-import", *arch, capsys=capsys)
    assert all(flag in printed for flag in ("--ltm-slots", "--stm-length", "--tokens-per-sample"))
