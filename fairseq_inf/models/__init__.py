from .compressive_transformer import CompressiveTransformerLM
from .infini_attention import InfiniAttentionLM
from .infinite_former import InfiniteFormerLM
from .selective_memory import SelectiveMemoryLM
from .transformer_xl import TransformerXLLM

__all__ = [
    "CompressiveTransformerLM",
    "InfiniAttentionLM",
    "InfiniteFormerLM",
    "SelectiveMemoryLM",
    "TransformerXLLM",
]
