"""Settings as the command line knows them: what they are, who reads them, what they may be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field, fields
from enum import Enum
from typing import Any

from fairseq_inf.errors import SettingError


def setting(
    default: Any,
    text: str,
    *,
    least: float = -math.inf,
    below: float = math.inf,
    read_with: dict[str, str] | None = None,
    otherwise: Any = None,
    kept: bool = True,
) -> Any:
    """A field of a configuration, with what it means.

    least, below: what a number must be.  read_with: the setting, and its values with commas between
    them, without which this one is not read; it has the default None then, and is `otherwise` if it
    is not given.  kept: whether the numbers of a saved memory depend on it."""
    facts = {"least": least, "below": below, "with": read_with or {}, "otherwise": otherwise}
    return field(default=default, metadata={"help": text, "kept": kept, **facts})


def resolve(cfg: Any, config: type) -> None:
    """Check the settings of a model, refuse what it does not read, and fill in what depends on
    others.  config: the dataclass of the model"""
    for one in fields(config):
        value, facts = getattr(cfg, one.name), one.metadata
        if "with" not in facts:
            continue
        blamed = next(_blamed(cfg, one), None)
        if blamed and value is not None:
            wanted = facts["with"][blamed].replace(",", " or ")
            raise ValueError(
                f"{flag(one.name)} is not read with {flag(blamed)} {getattr(cfg, blamed)}, only "
                f"with {wanted}: leave it out"
            )
        if not blamed and value is None and facts["otherwise"] is not None:
            value = facts["otherwise"]
            setattr(cfg, one.name, value)
        if isinstance(one.type, type) and issubclass(one.type, Enum):
            choices = [str(choice) for choice in one.type]
            if str(value) not in choices:
                wanted = " or ".join([", ".join(choices[:-1]), choices[-1]])
                raise ValueError(f"{flag(one.name)} must be {wanted}, got {value}")
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            if not facts["least"] <= value < facts["below"]:
                bounds = [f"at least {facts['least']}"] * (facts["least"] > -math.inf)
                bounds += [f"below {facts['below']}"] * (facts["below"] < math.inf)
                wanted = " and ".join(bounds) or "a finite number"
                raise ValueError(f"{flag(one.name)} must be {wanted}, got {value}")


def idle(cfg: Any, config: type) -> list[str]:
    """The settings that others keep from being read."""
    return [one.name for one in fields(config) if any(_blamed(cfg, one))]


def _blamed(cfg: Any, one: Any) -> Iterator[str]:
    """The settings that keep one from being read."""
    for name, wanted in one.metadata.get("with", {}).items():
        if str(getattr(cfg, name, None)) not in wanted.split(","):
            yield name


def kept_settings(cfg: Any, config: type) -> dict[str, Any]:
    """What the numbers of a memory depend on beside the weights, by flags."""
    found = {}
    for one in fields(config):
        if one.metadata.get("kept"):
            value = getattr(cfg, one.name)
            found[flag(one.name)] = str(value) if isinstance(value, Enum) else value
    return found


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def numbers(text: Any, flag: str, kind: Any) -> list:
    """'a,b,c' as a list of numbers."""
    try:
        return [kind(part) for part in str(text).split(",")]
    except ValueError:
        raise ValueError(f"{flag} takes numbers with commas between them, got {text!r}") from None


@contextmanager
def told_by_flags(**names: str) -> Iterator[None]:
    """Errors that speak of arguments speak of flags.  names: of an argument, its field of the
    configuration."""
    try:
        yield
    except SettingError as error:
        flags = {argument: flag(name) for argument, name in names.items()}
        raise ValueError(error.told(flags)) from None
