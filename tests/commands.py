"""fairseq's commands and ours: in a process of their own that has fairseq imported already, or for
what needs none, as a refusal or a conversion, in this one."""

import atexit
import contextlib
import faulthandler
import importlib.metadata
import io
import logging
import multiprocessing
import os
import pathlib
import resource
import sys
import tempfile
from unittest import mock

# forked from a process that has done nothing else: half of a command's time is the import
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["fairseq.tasks", "fairseq.models", "fairseq.criterions"])


def command(name):
    [entry] = importlib.metadata.entry_points(group="console_scripts", name=name)
    return entry.load()


def enter(main, *words):
    """The main function of a command in this process.  words: of sys.argv"""
    disabled = logging.root.manager.disable
    with mock.patch("sys.argv", [str(word) for word in words]):
        logging.disable(logging.NOTSET)
        try:
            main()
        finally:
            logging.disable(disabled)  # some commands turn logs off


def refused(main, *words):
    """-> the one sentence that it ends in"""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            enter(main, *words)
    except SystemExit as stopped:
        said = stopped.code if isinstance(stopped.code, str) else errors.getvalue().splitlines()[-1]
        assert stopped.code and "\n" not in said, said
        return said
    except (ValueError, OSError, FloatingPointError) as error:  # shown by a hook in fairseq's
        return str(error)
    raise AssertionError(f"{words} was not refused")


def call(name, *args):
    """A command by its name.  -> what it printed"""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        enter(command(name), argv0(name), *args)
    return printed.getvalue()


def refusal(name, *args):
    with contextlib.redirect_stdout(io.StringIO()):
        return refused(command(name), argv0(name), *args)


def argv0(name):
    """By another name fairseq's commands leave the hook for errors as it is."""
    return name.removeprefix("fairseq-")


@contextlib.contextmanager
def room_for(size):
    """Inside, a file may have that many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _run(name, args, env, folder, printed, errors, typed):
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.stdin = open(typed, encoding="utf-8")
    for stream, path in ((1, printed), (2, errors)):
        with open(path, "a") as file:
            os.dup2(file.fileno(), stream)
    faulthandler.enable()  # says what an abort was at
    # as in a process that was started for the command alone
    multiprocessing.set_start_method(None, force=True)
    logging.root.handlers.clear()
    sys.argv = [name, *args]
    try:
        sys.exit(command(name)())
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


class Started:
    """A command that runs in a process of its own."""

    def __init__(self, name, args, folder):
        self.printed = tempfile.NamedTemporaryFile("r")
        self.process = _process(name, args, folder, self.printed.name, self.printed.name)

    @property
    def pid(self):
        return self.process.pid

    def kill(self):
        self.process.kill()
        self.process.join()

    def finish(self):
        """Wait for it.  -> exit code, what it printed"""
        self.process.join()
        return self.process.exitcode, self.printed.read()


def run(name, args, folder):
    """-> exit code, what it printed"""
    return Started(name, args, folder).finish()


def run_apart(name, args, folder, typed=b""):
    """typed: on the standard input.  -> exit code, what it printed, what it complained of"""
    printed, errors, keys = (tempfile.NamedTemporaryFile("r") for _ in range(3))
    with printed, errors, keys:
        pathlib.Path(keys.name).write_bytes(typed)
        code = start(name, args, folder, printed.name, errors.name, keys.name)
        return code, printed.read(), errors.read()


def start(name, args, folder, printed, errors, typed=os.devnull):
    """-> exit code"""
    process = _process(name, args, folder, printed, errors, typed)
    process.join()
    return process.exitcode


def _process(name, args, folder, printed, errors, typed=os.devnull):
    words = [str(word) for word in args]
    given = (name, words, dict(os.environ), str(folder), printed, errors, typed)
    process = context.Process(target=_run, args=given)
    process.start()
    return process
