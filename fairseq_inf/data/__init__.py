from .encoding import LineEncoding, load_encoding
from .iterator import StreamIterator
from .prompts import PromptDataset, check_words, without_end, without_pad
from .streams import SegmentBatches, SequenceBatches, StreamDataset

__all__ = [
    "LineEncoding",
    "PromptDataset",
    "SegmentBatches",
    "SequenceBatches",
    "StreamDataset",
    "StreamIterator",
    "check_words",
    "load_encoding",
    "without_end",
    "without_pad",
]
