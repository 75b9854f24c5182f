from .iterator import StreamIterator
from .streams import SegmentBatches, StreamDataset

__all__ = ["SegmentBatches", "StreamDataset", "StreamIterator"]
