"""The short-term memory: the last S vectors of a layer, and those that have just left it.

One tensor `recent` (B x W x e, W >= S) holds both.  The vectors of a row stand at its right end,
`filled` of them: the last S are the short-term memory, the older ones wait to be written to the
long-term memory by the next segment.
"""

import torch


def split_recent(recent, length):
    """-> (vectors that have left: B x W-S x e, short-term memory: B x S x e)"""
    border = recent.size(1) - length
    return recent[:, :border], recent[:, border:]


def push(short_term, new, lengths=None):
    """Append a segment.  lengths: B, the real vectors at the left of each row; None if all are.

    -> B x S+T x e, the vectors of each row at its right end
    """
    recent = torch.cat([short_term, new], dim=1)
    if lengths is None:
        return recent
    width = recent.size(1)
    shift = (new.size(1) - lengths)[:, None]  # how far each row moves to the right
    source = torch.arange(width, device=new.device) - shift  # B x W
    moved = recent.gather(1, source.clamp(min=0)[..., None].expand(-1, -1, recent.size(2)))
    return moved.masked_fill((source < 0)[..., None], 0)
