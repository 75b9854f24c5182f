"""The ∞-former on fairseq.

fairseq's `--user-dir` imports `tasks` and `models` of this package; `fairseq_inf.memory` stands
on torch alone.
"""

from typing import Any

from .errors import quiet_interrupts

__version__ = "0.4.0"

quiet_interrupts()


def from_pretrained(folder: str, checkpoint: str, data: str, **settings: Any) -> Any:
    """-> MemoryHub of a trained model, to read, score and generate with"""
    from fairseq_inf.hub import from_pretrained

    return from_pretrained(folder, checkpoint, data, **settings)
