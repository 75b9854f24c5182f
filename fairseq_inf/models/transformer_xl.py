"""No long-term memory: Transformer-XL (Dai et al., 2019), and GPT-2 alone."""

from dataclasses import dataclass

from fairseq.models import register_model

from .memory_lm import GPT2_SIZES, MemoryLM, MemoryLMConfig, architecture


@dataclass
class TransformerXLConfig(MemoryLMConfig):
    pass


@register_model("transformer_xl_lm", dataclass=TransformerXLConfig)
class TransformerXLLM(MemoryLM):
    pass


architecture("transformer_xl_lm", "wt103")
architecture("transformer_xl_lm", "sorting", stm_length=2048)
for size in GPT2_SIZES:
    architecture("transformer_xl_lm", size, name=size.replace("gpt2", "gpt2_lm"))
