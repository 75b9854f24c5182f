"""Errors that name a setting as the reader knows it: an argument, or a flag."""

from __future__ import annotations

import re
from collections.abc import Mapping


class SettingError(ValueError):
    """A setting that cannot be.  {name} in the text stands for the argument of that name."""

    def told(self, names: Mapping[str, str]) -> str:
        """The text with other names for the arguments."""
        text = str(self.args[0])
        return re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], found[1]), text)

    def __str__(self) -> str:
        return self.told({})
