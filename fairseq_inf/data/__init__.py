from .encoding import load_encoding
from .iterator import StreamIterator
from .prompts import PromptDataset, check_words, without_end
from .streams import SegmentBatches, SequenceBatches, StreamDataset

__all__ = [
    "PromptDataset",
    "SegmentBatches",
    "SequenceBatches",
    "StreamDataset",
    "StreamIterator",
    "check_words",
    "load_encoding",
    "without_end",
]
