"""What the user can mend is said in one sentence.  FAIRSEQ_INF_TRACEBACK=1 shows where it arose."""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType

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


MENDABLE = (Failure, OSError, ValueError, MemoryError)


def wants_traceback() -> bool:
    return bool(os.environ.get("FAIRSEQ_INF_TRACEBACK"))


@contextlib.contextmanager
def plain_errors(command: str) -> Iterator[None]:
    """Inside, such an error ends the command with its sentence alone."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"{command}: interrupted, nothing was written", file=sys.stderr)
        sys.exit(130)
    except MENDABLE as error:
        if wants_traceback():
            raise
        said = str(error)
        if isinstance(error, OSError) and error.strerror:
            said = f"{error.filename or 'a file'} cannot be used: {error.strerror}"
        if isinstance(error, MemoryError):
            said = "out of memory"
        sys.exit(f"{command}: {said}")


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
        print(f"{kind.__name__}: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
