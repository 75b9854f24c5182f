"""A file or folder is there whole, or not at all."""

import os
import signal
from contextlib import contextmanager

import pytest

from fairseq_inf.errors import Failure
from fairseq_inf.files import whole_file, whole_folder


@contextmanager
def write_file(path):
    with whole_file(path) as partial:
        partial.write_text("new")
        yield partial


@contextmanager
def write_folder(path):
    with whole_folder(path, replace=True) as partial:
        (partial / "inside").write_text("new")
        yield partial


@pytest.fixture
def mask():
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.fixture
def deadly():
    """Signals that kill, as they do unless the tests run under nohup."""
    before = {kill: signal.signal(kill, signal.SIG_DFL) for kill in (signal.SIGTERM, signal.SIGHUP)}
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


def test_a_folder_with_something_in_it_is_kept(tmp_path):
    (tmp_path / "mine").mkdir()
    with whole_folder(tmp_path / "mine") as partial:
        (partial / "letter").write_text("mine")
    with pytest.raises(Failure, match="mine exists already: remove it, or name another output"):
        with whole_folder(tmp_path / "mine"):
            pass
    assert os.listdir(tmp_path / "mine") == ["letter"]
