"""What must not be worked out in half precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def in_full(like: Tensor) -> AbstractContextManager[None]:
    """Operations in it have the precision of what they are given, also under autocast."""
    kind = like.device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, enabled=False)
