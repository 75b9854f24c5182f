"""What the user can mend is said in one sentence.  FAIRSEQ_INF_TRACEBACK=1 shows where it arose."""

import contextlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType

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


def plain_errors_in_fairseq() -> None:
    """The same in a command of fairseq, for errors that this package raises; a program that uses
    it as a library is left as it is."""
    folder, command = os.path.split(os.path.abspath(sys.argv[0]))
    if command.startswith("fairseq-") or os.path.basename(folder) == "fairseq_cli":
        if not wants_traceback():
            sys.excepthook = _say


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    raised_in = traceback.extract_tb(trace)[-1].filename if trace else ""
    if issubclass(kind, MENDABLE) and raised_in.startswith(PACKAGE + os.sep):
        sys.stdout.flush()
        print(f"{kind.__name__}: {sentence(error)}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
