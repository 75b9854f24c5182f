from .decoder_layer import DecoderLayer
from .gpt2_attention import GPT2Attention
from .relative_attention import RelativeAttention, sinusoids

__all__ = ["DecoderLayer", "GPT2Attention", "RelativeAttention", "sinusoids"]
