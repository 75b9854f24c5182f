"""Conversations about a document that was read once: the paper's third experiment.

A guest: nothing outside imports it, and the package works without this folder."""

from . import task  # noqa: F401  (registers it)
