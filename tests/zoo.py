"""Every memory and every host, small: what is in these two tables has all the laws to keep."""

from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY

import fairseq_inf.models  # noqa: F401  (registers them)
from fairseq_inf.memory import Goals

WORDS = 30
SIZES = {
    "decoder_layers": 2,
    "decoder_embed_dim": 16,
    "decoder_ffn_embed_dim": 32,
    "decoder_attention_heads": 2,
    "dropout": 0.0,
    "stm_length": 6,
}
# name -> registered model, settings of its memory
MEMORIES = {
    "infinite_former": (
        "infinite_former_lm",
        {
            "ltm_basis": 8,
            "ltm_widths": "0.05,0.2",
            "ltm_sticky": True,
            "ltm_schedule": "constant",
            "ltm_density": "gaussian",
        },
    ),
    "gibbs": ("infinite_former_lm", {"ltm_basis": 8}),
    "slots_of_signal": (
        "infinite_former_lm",
        {"ltm_basis": 8, "ltm_density": "host", "ltm_schedule": "logarithmic", "ltm_oldest": 99},
    ),
    "compressive_transformer": (
        "compressive_transformer_lm",
        {"cmem_length": 5, "compression_rate": 3},
    ),
    "picked": (
        "compressive_transformer_lm",
        {
            "cmem_length": 7,
            "compression_rate": 1,
            "compression": "mean",
            "ltm_pick": 2,
            "ltm_rank": 3,
        },
    ),
    "infini_attention": ("infini_attention_lm", {"infini_update": "delta"}),
    "transformer_xl": ("transformer_xl_lm", {}),
}
# name -> settings
HOSTS = {
    "transformer_xl": {},
    "gpt2": {
        "decoder_positions": 40,
        "activation_fn": "gelu_accurate",
        "stm_length": 0,
    },
    "llama": {"decoder_key_heads": 1, "sink_tokens": 2, "slot_spacing": 1.5},
}


def make_model(name="infinite_former", words=None, sharp=True, host="transformer_xl", **kwargs):
    """sharp: with weights that make the memory matter."""
    torch.manual_seed(0)
    dictionary = words or Dictionary()
    for i in range(WORDS - len(dictionary)):
        dictionary.add_symbol(f"w{i}")
    arch, own = MEMORIES[name]
    model = ARCH_MODEL_REGISTRY[arch]
    cfg = model.config(**{**SIZES, **own, **HOSTS[host], "decoder_host": host, **kwargs})
    cfg.seed = 1
    model = model.build_model(cfg, SimpleNamespace(source_dictionary=dictionary))
    with torch.no_grad():
        if sharp and model.decoder.pretrained:
            for x in model.parameters():
                torch.nn.init.normal_(x, std=0.3)
        for layer in model.decoder.layers:
            if sharp and hasattr(layer.memory, "locate"):
                layer.memory.locate.weight.mul_(30)
            if sharp and hasattr(layer.memory, "gain"):
                layer.memory.gain.fill_(1)
            output = getattr(layer.memory, "output", None)
            if sharp and output is not None and not output.weight.any():
                torch.nn.init.xavier_uniform_(output.weight)
    return model.eval()


def text(rows, length, seed=3):
    return torch.randint(4, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def goals(tokens):
    """All tokens count."""
    return Goals(torch.ones_like(tokens, dtype=torch.bool), {"kl_sigma": 0.1})


def learn(model, tokens, first):
    """A segment in training.  -> output, losses of the memory by name"""
    out, extra = model(tokens, None, torch.full((len(tokens),), first), goals=goals(tokens))
    return out, extra["losses"]


def stream(decoder, tokens, segment, state=None):
    """Read the tokens segment by segment.  -> outputs, state"""
    state = decoder.initial_state(len(tokens)) if state is None else state
    outs = []
    with torch.no_grad():
        for part in tokens.split(segment, dim=1):
            out, state, _ = decoder(part, state)
            outs.append(out)
    return torch.cat(outs, dim=1), state


def assert_same(a, b, atol=1e-6):
    for name, x in a.tensors().items():
        assert torch.allclose(x, b.tensors()[name], atol=atol), name
