from .encoding import LineEncoding, load_encoding
from .iterator import StreamIterator
from .prompts import PromptDataset
from .streams import SegmentBatches, SequenceBatches, StreamDataset
from .words import check_words, dictionary_state, without_end, without_pad

__all__ = [
    "LineEncoding",
    "PromptDataset",
    "SegmentBatches",
    "SequenceBatches",
    "StreamDataset",
    "StreamIterator",
    "check_words",
    "dictionary_state",
    "load_encoding",
    "without_end",
    "without_pad",
]
