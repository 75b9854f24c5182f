"""The hosts, by their names."""

from fairseq_inf.models.decoder import MemoryDecoder

from .gpt2 import GPT2Decoder
from .llama import LlamaDecoder
from .transformer_xl import TransformerXLDecoder

HOSTS: dict[str, type[MemoryDecoder]] = {
    host.name: host for host in (TransformerXLDecoder, GPT2Decoder, LlamaDecoder)
}
