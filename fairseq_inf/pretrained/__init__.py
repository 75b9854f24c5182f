"""Pretrained models of Hugging Face's, as checkpoints of fairseq's, and back."""

from .gpt2 import GPT2
from .layout import Layout

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (GPT2,)}
