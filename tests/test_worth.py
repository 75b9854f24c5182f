"""What a memory is worth to a pretrained model, by the commands."""

import subprocess

import commands
import pytest
from commands import enter, refused
from conftest import ROOT
from test_pretrained import KINDS, convert, hugging_face

from fairseq_inf.experiments import looks, worth


@pytest.mark.slow
def test_the_worth_of_an_untrained_memory_and_what_is_looked_at_are_measured(tmp_path, capsys):
    hugging_face(tmp_path / "hf", **KINDS[0])
    flags = "--arch selective_memory_lm_llama --ltm-slots 8 --ltm-pick 2 --stm-length 8 "
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

    first = measure("{}", "{'stm_length': 0, 'ltm_pick': 1}")
    second = measure("{}")  # from the file, but for the memory
    names = ["2", "alone", "with", "short", "memory", "memory", "short", "memory", "memory"]
    assert [row[0] for row in first] == names and "share" in first[4]
    assert first[5][:4] == "memory of another document".split()
    assert first[5][4] != first[4][2], "the books differ"
    assert first[:4] == second[:4] and first[4][:6] == second[4][:6]

    enter(looks.main, "looks", *own, "--tokens", 55, "--context", 40)
    *layers, every = capsys.readouterr().out.splitlines()[2:]
    assert len(layers) == 2 and every.startswith("| all |")
    for row in (*layers, every):
        sinks, window, beyond, near, picked, returned, best = map(float, row.split("|")[2:-1])
        assert abs(sinks + window + beyond - 100) < 0.2
        assert all(0 < x <= best < 100.1 for x in (near, picked, returned))
    for said, words in (
        ("ltm_pik is not a setting of this model, is it ltm_pick", ["--memory", "{'ltm_pik': 1}"]),
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
