"""Attention, feed-forward net and the layer.  Needs torch only."""

from .attention import Attention, Place
from .decoder_layer import DecoderLayer, LayerCache, LayerPlan, Segment
from .gpt2_attention import GPT2Attention, slot_bias
from .relative_attention import RelativeAttention, sinusoids

__all__ = [
    "Attention",
    "DecoderLayer",
    "GPT2Attention",
    "LayerCache",
    "LayerPlan",
    "Place",
    "RelativeAttention",
    "Segment",
    "sinusoids",
    "slot_bias",
]
