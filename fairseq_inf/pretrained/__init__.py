"""Pretrained models as checkpoints of fairseq's, and back: a table for each family of them."""

from .gpt2 import GPT2
from .layout import Layout
from .llama import LLAMA

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (GPT2, LLAMA)}
