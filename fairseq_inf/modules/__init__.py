from .decoder_layer import DecoderLayer
from .relative_attention import RelativeAttention, sinusoids

__all__ = ["DecoderLayer", "RelativeAttention", "sinusoids"]
