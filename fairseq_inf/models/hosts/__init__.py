"""The hosts, by the name that --decoder-host has for them."""

from fairseq_inf.models.decoder import MemoryDecoder

from .gpt2 import GPT2Decoder
from .llama import LlamaDecoder
from .transformer_xl import TransformerXLDecoder

HOSTS: dict[str, type[MemoryDecoder]] = {
    "transformer_xl": TransformerXLDecoder,
    "gpt2": GPT2Decoder,
    "llama": LlamaDecoder,
}
