"""What a memory is worth to a pretrained model, by the commands."""

import subprocess

import commands
import pytest
from commands import enter, refused
from conftest import ROOT
from test_pretrained import KINDS, convert, hugging_face

from fairseq_inf.experiments import worth


@pytest.mark.slow
def test_the_worth_of_an_untrained_memory_is_measured(tmp_path, capsys):
    hugging_face(tmp_path / "hf", **KINDS[0])
    flags = "--arch selective_memory_lm_llama --ltm-slots 8 --stm-length 8 "
    flags += "--sink-tokens 2 --tokens-per-sample 8"
    convert(tmp_path / "hf", tmp_path / "model", *flags.split())
    (tmp_path / "in" / "valid").mkdir(parents=True)
    for book in ("one", "two"):
        (tmp_path / "in" / "valid" / f"{book}.txt").write_text(f"the {book} is 12 {book}. " * 9)
    args = [tmp_path / "in", tmp_path / "bin", "--encoding", tmp_path / "model", "--workers", 1]
    code, printed = commands.run("fairseq-inf-prepare", args, ROOT)
    assert code == 0, printed
    own = [tmp_path / "bin", "--path", tmp_path / "model" / "checkpoint.pt"]
    capsys.readouterr()

    def measure(*rows):
        words = [word for row in rows for word in ("--memory", row)]
        enter(worth.main, "worth", *own, "--tokens", 70, "--context", 16, *words)
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    first = measure("{}", "{'stm_length': 0, 'ltm_slots': 4}")
    second = measure("{}")  # from the file, but for the memory
    names = ["2", "alone", "with", "short", "memory", "memory", "short", "memory", "memory"]
    assert [row[0] for row in first] == names and "share" in first[4]
    assert first[5][:4] == "memory of another document".split()
    assert first[5][4] != first[4][2], "the books differ"
    assert first[:4] == second[:4] and first[4][:6] == second[4][:6]
    for said, words in (
        (
            "ltm_slot is not a setting of this model, is it ltm_slots",
            ["--memory", "{'ltm_slot': 1}"],
        ),
        ("--memory must be a dict", ["--memory", "8"]),
        ("has no split none", ["--split", "none"]),
        ("has fewer than --tokens 999", ["--tokens", 999]),
    ):
        assert said in refused(worth.main, "worth", *own, "--tokens", 70, "--context", 16, *words)


def test_a_book_that_is_not_there_is_named(tmp_path):
    command = ["bash", str(ROOT / "scripts" / "read_a_book.sh")]
    run = {"cwd": tmp_path, "text": True, "capture_output": True}
    done = subprocess.run([*command, "no.txt"], **run)
    assert done.returncode and done.stderr == (
        "read_a_book: no.txt does not exist or is not a file\n"
    )
    assert not list(tmp_path.iterdir())
    assert "usage:" in subprocess.run([*command, "--help"], **run).stdout
