"""Experiments: their data, tasks and figures, and the runner under all of them.

Importing this registers the tasks `recall` and `sorting`; nothing else in the package needs it."""

from .recall import task as _recall  # noqa: F401
from .sorting import task as _sorting  # noqa: F401
