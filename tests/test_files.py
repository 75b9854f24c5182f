"""A file or folder is there whole, or not at all."""

import errno
import os
import signal
import subprocess
import time
from contextlib import contextmanager

import pytest
from conftest import ROOT, tool

from fairseq_inf import errors
from fairseq_inf.errors import Failure, plain_errors, sentence
from fairseq_inf.files import check_writable, whole_file, whole_folder


@contextmanager
def write_file(path):
    with whole_file(path) as partial:
        partial.write_text("new")
        yield partial


@contextmanager
def write_folder(path):
    with whole_folder(path, own=["inside", "old"]) as partial:
        (partial / "inside").write_text("new")
        yield partial


@pytest.fixture
def mask():
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.fixture
def deadly():
    """Signals that kill, as they do unless the tests run under nohup or in the background."""
    before = {kill: signal.signal(kill, signal.SIG_DFL) for kill in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for kill, handler in before.items():
        signal.signal(kill, handler)


@pytest.mark.parametrize("write,mode", [(write_file, 0o640), (write_folder, 0o750)])
def test_it_has_the_rights_of_any_new_one(tmp_path, mask, write, mode):
    with write(tmp_path / "one") as partial:
        partial.chmod(0o700)
    assert (tmp_path / "one").stat().st_mode & 0o777 == mode
    assert os.listdir(tmp_path) == ["one"]


@pytest.mark.parametrize("write", [write_file, write_folder])
@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGHUP, None])
def test_an_error_or_a_signal_leaves_what_was_there(tmp_path, deadly, write, kill):
    with write(tmp_path / "one"):
        pass
    before = (tmp_path / "one").stat().st_ino
    with pytest.raises(KeyboardInterrupt if kill else ZeroDivisionError):
        with write(tmp_path / "one"):
            os.kill(os.getpid(), kill) if kill else 1 / 0
    assert os.listdir(tmp_path) == ["one"] and (tmp_path / "one").stat().st_ino == before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_of_a_folder_that_is_there_only_own_files_are_replaced(tmp_path):
    with write_folder(tmp_path / "one") as partial:
        (partial / "inside").write_text("before")
        (partial / "old").write_text("before")
    (tmp_path / "one" / "letter").write_text("mine")
    with write_folder(tmp_path / "one"):
        pass
    assert sorted(os.listdir(tmp_path / "one")) == ["inside", "letter"]
    assert (tmp_path / "one" / "inside").read_text() == "new"
    assert os.listdir(tmp_path) == ["one"]


@pytest.mark.parametrize("write", [write_file, write_folder])
def test_a_full_disk_is_of_the_file_that_is_written(tmp_path, write):
    with pytest.raises(OSError) as found, write(tmp_path / "one"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert sentence(found.value) == f"{tmp_path / 'one'} cannot be used: No space left on device"


def test_a_full_disk_in_a_training_names_its_folder(capsys):
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as full:
            raise RuntimeError("unexpected pos 704 vs 598") from full  # as torch.save does
    except RuntimeError as error:
        errors._say("checkpoints/mine", RuntimeError, error, error.__traceback__)
    said = "OSError: checkpoints/mine cannot be used: No space left on device\n"
    assert capsys.readouterr().err == said


def test_a_name_that_is_empty_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="is empty"):
        check_writable("")


def test_a_folder_that_may_not_be_written_in_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root
    with pytest.raises(PermissionError, match="you may not write in"):
        check_writable(tmp_path / "one")


def test_a_signal_ends_a_command_with_its_own_code_and_one_line(deadly, tmp_path, capsys):
    for kill in (signal.SIGTERM, signal.SIGINT):
        with pytest.raises(SystemExit) as stopped, plain_errors("reading"):
            with whole_file(tmp_path / "one"):
                os.kill(os.getpid(), kill)
                time.sleep(1)
        assert stopped.value.code == 128 + kill
        assert capsys.readouterr().err == "reading: interrupted, nothing was written\n"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["read", "inspect", "import"])
def test_ctrl_c_in_the_middle_of_an_import_is_one_line(name, tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    words = [tool(f"inf-{name}"), __file__, "--path", "x", "--output", tmp_path / "out"]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT or done.returncode == 130
    assert done.stderr == f"fairseq-inf-{name}: interrupted, nothing was written\n"


def test_a_folder_with_something_in_it_is_kept(tmp_path):
    (tmp_path / "mine").mkdir()
    with whole_folder(tmp_path / "mine") as partial:
        (partial / "letter").write_text("mine")
    with pytest.raises(Failure, match="mine exists already: remove it, or name another output"):
        with whole_folder(tmp_path / "mine"):
            pass
    assert os.listdir(tmp_path / "mine") == ["letter"]
