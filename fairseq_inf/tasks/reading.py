"""How streams are read: an evaluation does it as the training did, unless it is told otherwise."""

import logging
from typing import Any

logger = logging.getLogger(__name__)

# what a training does that is not told otherwise
DEFAULTS = {"tokens_per_sample": 256, "stream_layout": "corpus", "document_separator": "</s>"}


def settle(cfg: Any, trained: dict[str, Any]) -> None:
    """Fill in what was not given.  trained: the task's settings in the checkpoint, {} in a
    training.  Another value than the training's is told."""
    # fairseq-eval-lm has taken the context window off the tokens
    window = cfg.context_window if trained else 0
    cfg.tokens_per_sample += window
    for name, default in DEFAULTS.items():
        was, asked = trained.get(name) or default, getattr(cfg, name)
        if not asked:
            setattr(cfg, name, was)
        elif trained and str(asked) != str(was):
            logger.warning(
                f"--{name.replace('_', '-')} is {asked}, and was {was} in the training: what is "
                "read otherwise has other numbers"
            )
    cfg.tokens_per_sample -= window
