from .compressive_transformer import CompressiveTransformerLM
from .infinite_former import InfiniteFormerLM
from .transformer_xl import TransformerXLLM

__all__ = ["CompressiveTransformerLM", "InfiniteFormerLM", "TransformerXLLM"]
