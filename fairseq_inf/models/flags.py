"""Settings as the command line knows them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from typing import Any

from fairseq_inf.memory import SettingError


def setting(default: Any, text: str, **before: Any) -> Any:
    """A field of a configuration, with what it means.  before=value: what models had that
    were trained when there was no such setting yet, so that these still load."""
    return field(default=default, metadata={"help": text, **before})


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def numbers(text: Any, flag: str, kind: Any) -> list:
    """'a,b,c' as a list of numbers."""
    try:
        return [kind(part) for part in str(text).split(",")]
    except ValueError:
        raise ValueError(f"{flag} takes numbers with commas between them, got {text!r}") from None


def refuse(cfg: Any, host: str, *names: str) -> None:
    """Settings that a host does not have."""
    for name in names:
        if getattr(cfg, name):
            raise ValueError(f"{flag(name)} is not for {host}: leave it out")


@contextmanager
def told_by_flags(**fields: str) -> Iterator[None]:
    """Errors that speak of arguments speak of flags.  fields: of an argument, its field of the
    configuration."""
    try:
        yield
    except SettingError as error:
        names = {argument: flag(name) for argument, name in fields.items()}
        raise ValueError(error.told(names)) from None
