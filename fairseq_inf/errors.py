"""What the user can mend is said in one sentence.  FAIRSEQ_INF_TRACEBACK=1 shows where it arose."""

import contextlib
import errno
import functools
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
INTERRUPTED = "interrupted, nothing was written"
PACKAGE = os.path.dirname(os.path.abspath(__file__))


class Failure(Exception):
    """Something the user has to change; the message says what."""


class SettingError(ValueError):
    """A setting that cannot be.  {name} in the text stands for the argument of that name."""

    def told(self, names: Mapping[str, str]) -> str:
        """The text with other names for the arguments."""
        text = str(self.args[0])
        return re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], match[1]), text)

    def __str__(self) -> str:
        return self.told({})


class Stopped(KeyboardInterrupt):
    """A signal that kills, as Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


MENDABLE = (Failure, OSError, ValueError, MemoryError, FloatingPointError)


def wants_traceback() -> bool:
    return bool(os.environ.get("FAIRSEQ_INF_TRACEBACK"))


@contextlib.contextmanager
def plain_errors(command: str) -> Iterator[None]:
    """Inside, such an error ends the command with its sentence alone."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        print(f"{command}: {INTERRUPTED}", file=sys.stderr)
        sys.exit(128 + getattr(stopped, "number", signal.SIGINT))
    except MENDABLE as error:
        if wants_traceback():
            raise
        sys.exit(f"{command}: {sentence(error)}")


def sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'a file'} cannot be used: {error.strerror}"
    return "out of memory" if isinstance(error, MemoryError) else str(error)


def quiet_interrupts() -> None:
    """Ctrl-C while one of our commands is still importing ends it in one line, too; a program that
    uses this package as a library is left as it is."""
    names = [os.path.basename(word) for word in sys.orig_argv[1:3]]
    ours = [name for name in names if name.startswith(("fairseq-inf-", "fairseq_inf."))]
    if not ours or wants_traceback():
        return

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):  # python then ends itself by the signal
            print(f"{ours[0]}: {INTERRUPTED}", file=sys.stderr)
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = say


def plain_errors_in_fairseq(save_dir: str = "") -> None:
    """The same in a command of fairseq, for errors that this package raises, and for a full disk;
    a program that uses it as a library is left as it is."""
    folder, command = os.path.split(os.path.abspath(sys.argv[0]))
    if command.startswith("fairseq-") or os.path.basename(folder) == "fairseq_cli":
        if not wants_traceback():
            sys.excepthook = functools.partial(_say, save_dir)


def _full_disk(error: BaseException | None) -> OSError | None:
    """What a failure comes from, as torch.save has it, if it is a full disk."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return error
        error = error.__cause__ or error.__context__
    return None


def _say(
    save_dir: str, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    raised_in = traceback.extract_tb(trace)[-1].filename if trace else ""
    full = _full_disk(error)
    if full is not None:
        full.filename = full.filename or save_dir or None
        print(f"OSError: {sentence(full)}", file=sys.stderr)
    elif issubclass(kind, MENDABLE) and raised_in.startswith(PACKAGE + os.sep):
        sys.stdout.flush()
        print(f"{kind.__name__}: {sentence(error)}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
