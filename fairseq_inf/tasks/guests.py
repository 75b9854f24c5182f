"""Registers the tasks of the experiments; the package works without them."""

from importlib import import_module
from importlib.util import find_spec

for room in ("dialogue", "experiments"):
    if find_spec(f"fairseq_inf.{room}") is not None:
        import_module(f"fairseq_inf.{room}")
