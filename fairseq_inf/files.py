"""Files and folders that are there whole, or not at all."""

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from .errors import Failure, Stopped

NO_RIGHT = "you may not write in {}"


def open_text(path: str | os.PathLike[str]) -> TextIO:
    """A text as all commands read one: UTF-8, without a byte-order mark, and each line ends in a
    line feed whether the file has CRLF, CR or LF."""
    return open(path, encoding="utf-8-sig", newline=None)


def read_text(path: str | os.PathLike[str]) -> str:
    try:
        with open_text(path) as file:
            return file.read()
    except UnicodeDecodeError:
        raise Failure(f"{path} is not UTF-8: convert it") from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise an error if a file cannot be written there.  A link is followed."""
    if not os.fspath(path):
        raise FileNotFoundError("the name of a file to write is empty: name one")
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"{path} cannot be written: {folder} does not exist")
    if os.path.isdir(path):
        raise IsADirectoryError(f"{path} cannot be written: it is a folder")
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(f"{path} cannot be written: there is something that is no file")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{path} cannot be written: {NO_RIGHT.format(folder)}")


@contextmanager
def whole_file(path: str | os.PathLike[str], private: bool = False) -> Iterator[Path]:
    """A place beside `path` to write to, which becomes `path` if all goes well.  A link is
    followed.  private: leave it the mode that it was made with."""
    check_writable(path)
    real = Path(os.path.realpath(path))
    partial = real.with_name(f"{real.name}.partial")
    with ended_by_signals(), named(path):
        try:
            yield partial
            if not private:
                partial.chmod(0o666 & ~umask())
            partial.replace(real)
        finally:
            partial.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    with whole_file(path) as partial:
        partial.write_text(text, "utf-8")


@contextmanager
def whole_folder(path: Path, own: Collection[str] = ()) -> Iterator[Path]:
    """The same for a folder, made with those above it.  own: the names in it that are replaced if
    it is there already; nothing else in it is touched"""
    path = path.absolute()
    there = path.is_dir() and any(path.iterdir())
    if (there and not own) or (path.exists() and not path.is_dir()):
        raise Failure(f"{path} exists already: remove it, or name another output")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise Failure(f"{path} cannot be written: {error.strerror}") from None
    with ended_by_signals(), named(path):
        try:
            yield partial
            partial.chmod(0o777 & ~umask())
            if not there:
                partial.rename(path)  # over an empty one
                return
            for name in own:
                if not (partial / name).exists():
                    _remove(path / name)
            for new in sorted(partial.rglob("*")):
                at = path / new.relative_to(partial)
                if new.is_dir():
                    at.mkdir(exist_ok=True)
                else:
                    new.replace(at)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _remove(path: Path) -> None:
    if path.is_file() or path.is_symlink():
        path.unlink()


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Inside, what would kill the process ends it as Ctrl-C does, and leaves nothing half done."""
    kills: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        both = (signal.SIGTERM, signal.SIGHUP)
        kills = [kill for kill in both if signal.getsignal(kill) is signal.SIG_DFL]
    for kill in kills:
        signal.signal(kill, _stop)
    try:
        yield
    finally:
        for kill in kills:
            signal.signal(kill, signal.SIG_DFL)


def _stop(number: int, frame: Any) -> None:
    raise Stopped(number)


@contextmanager
def named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, an error of the system that names no file, as that of a full disk, is of this one."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
