"""No long-term memory: Transformer-XL (Dai et al., 2019), and each host alone."""

from .memory_lm import MemoryLM, register


@register("transformer_xl_lm", wt103={}, sorting={"stm_length": 2048})
class TransformerXLLM(MemoryLM):
    pass
