"""fairseq's commands and ours, each in a process of its own that has fairseq imported already."""

import atexit
import importlib.metadata
import logging
import multiprocessing
import os
import sys
import tempfile

# forked from a process that has done nothing else: half of a command's time is the import
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["fairseq.tasks", "fairseq.models", "fairseq.criterions"])


def _run(name, args, env, folder, printed, errors):
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    for stream, path in ((1, printed), (2, errors)):
        with open(path, "a") as file:
            os.dup2(file.fileno(), stream)
    # as in a process that was started for the command alone
    multiprocessing.set_start_method(None, force=True)
    logging.root.handlers.clear()
    sys.argv = [name, *args]
    [entry] = importlib.metadata.entry_points(group="console_scripts", name=name)
    try:
        sys.exit(entry.load()())
    except Exception:
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


def run(name, args, folder):
    """-> exit code, what it printed"""
    with tempfile.NamedTemporaryFile("r") as printed:
        return start(name, args, folder, printed.name, printed.name), printed.read()


def run_apart(name, args, folder):
    """-> exit code, what it printed, what it complained of"""
    with tempfile.NamedTemporaryFile("r") as printed, tempfile.NamedTemporaryFile("r") as errors:
        code = start(name, args, folder, printed.name, errors.name)
        return code, printed.read(), errors.read()


def start(name, args, folder, printed, errors):
    words = [str(word) for word in args]
    process = context.Process(
        target=_run, args=(name, words, dict(os.environ), str(folder), printed, errors)
    )
    process.start()
    process.join()
    return process.exitcode
