"""Attention, feed-forward net and the layer.  Needs torch only."""

from .attention import Attention, Place, SlotLine
from .decoder_layer import DecoderLayer, LayerCache, LayerPlan, LayerState, Segment
from .gpt2_attention import GPT2Attention, slot_bias
from .packed_linear import BITS, PackedLinear, pack
from .relative_attention import RelativeAttention, sinusoids
from .rms_norm import RMSNorm
from .roles import Roles
from .rotary_attention import RotaryAttention, rotations

__all__ = [
    "BITS",
    "Attention",
    "DecoderLayer",
    "GPT2Attention",
    "LayerCache",
    "LayerPlan",
    "LayerState",
    "PackedLinear",
    "Place",
    "RMSNorm",
    "RelativeAttention",
    "Roles",
    "RotaryAttention",
    "Segment",
    "SlotLine",
    "pack",
    "rotations",
    "sinusoids",
    "slot_bias",
]
