"""What the user can mend is said in one sentence.  FAIRSEQ_INF_TRACEBACK=1 shows where it arose."""

import contextlib
import os
import sys
import traceback

PACKAGE = os.path.dirname(os.path.abspath(__file__))


class Failure(Exception):
    """Something the user has to change; the message says what."""


MENDABLE = (Failure, OSError, ValueError)


def wants_traceback():
    return bool(os.environ.get("FAIRSEQ_INF_TRACEBACK"))


@contextlib.contextmanager
def plain_errors(command):
    """Inside, such an error ends the command with its sentence alone."""
    try:
        yield
    except MENDABLE as error:
        if wants_traceback():
            raise
        sys.exit(f"{command}: {error}")


def plain_errors_in_fairseq():
    """The same in a command of fairseq, for errors that this package raises; a program that uses
    it as a library is left as it is."""
    folder, command = os.path.split(os.path.abspath(sys.argv[0]))
    if command.startswith("fairseq-") or os.path.basename(folder) == "fairseq_cli":
        if not wants_traceback():
            sys.excepthook = _say


def _say(kind, error, trace):
    raised_in = traceback.extract_tb(trace)[-1].filename if trace else ""
    if issubclass(kind, MENDABLE) and raised_in.startswith(PACKAGE + os.sep):
        sys.stdout.flush()
        print(f"{kind.__name__}: {error}", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)
