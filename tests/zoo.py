"""Every memory and every host, small: what is in these two tables has all the laws to keep."""

from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY

import fairseq_inf.models  # noqa: F401  (registers them)
from fairseq_inf.criterions.cross_entropy_with_kl import remembered
from fairseq_inf.memory import (
    SCHEDULES,
    ContinuousMemory,
    GaussianBasis,
    GibbsReader,
)

WORDS = 30
SIZES = {
    "decoder_layers": 2,
    "decoder_embed_dim": 16,
    "decoder_ffn_embed_dim": 32,
    "decoder_attention_heads": 2,
    "dropout": 0.0,
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
    "logarithmic": (
        "infinite_former_lm",
        {"ltm_basis": 8, "ltm_schedule": "logarithmic", "ltm_oldest": 99},
    ),
    "compressive_transformer": (
        "compressive_transformer_lm",
        {"cmem_length": 5, "compression_rate": 3},
    ),
    "selective": ("selective_memory_lm", {"ltm_slots": 7, "ltm_rank": 3, "ltm_precision": "full"}),
    "infini_attention": ("infini_attention_lm", {"infini_update": "delta"}),
    "transformer_xl": ("transformer_xl_lm", {}),
}
# name -> settings
HOSTS = {
    "transformer_xl": {"stm_length": 6, "token_shift": 0.5},
    "gpt2": {"decoder_positions": 40, "attention_dropout": 0.0},
    "llama": {"stm_length": 6, "decoder_key_heads": 1, "sink_tokens": 2},
}


def arch_of(name, host):
    """The architecture of a memory in a host."""
    arch = MEMORIES[name][0]
    if host == "transformer_xl":
        return arch
    return f"{host}_lm" if arch == "transformer_xl_lm" else f"{arch}_{host}"


def make_model(name="infinite_former", words=None, sharp=True, host="transformer_xl", **kwargs):
    """sharp: with weights that make the memory matter."""
    torch.manual_seed(0)
    dictionary = words or Dictionary()
    for i in range(WORDS - len(dictionary)):
        dictionary.add_symbol(f"w{i}")
    model = ARCH_MODEL_REGISTRY[arch_of(name, host)]
    cfg = model.config(**{**SIZES, **MEMORIES[name][1], **HOSTS[host], **kwargs})
    cfg.seed = 1
    model = model.build_model(cfg, SimpleNamespace(source_dictionary=dictionary))
    with torch.no_grad():
        if sharp and model.decoder.pretrained:
            for x in model.parameters():
                torch.nn.init.normal_(x, std=0.3)
        for layer in model.decoder.layers:
            reader = getattr(layer.memory, "reader", None)
            if sharp and hasattr(reader, "locate"):
                reader.locate.weight.mul_(30)
            if sharp and hasattr(reader, "gain"):
                reader.gain.fill_(1)
            output = getattr(layer.memory, "output", None)
            if sharp and output is not None and not output.weight.any():
                torch.nn.init.xavier_uniform_(output.weight)
    return model.eval()


def continuous(
    dim, heads, basis, widths, density="gaussian", schedule="constant", tau=None, oldest=None,
    **store,
):  # fmt: skip
    """A continuous memory, its parts by their names."""
    given = {"oldest": oldest} if schedule == "logarithmic" else {"tau": tau}
    given = {name: value for name, value in given.items() if value is not None}
    store["schedule"] = SCHEDULES[schedule](**given)
    if density == "gibbs":
        reader = GibbsReader(dim, heads, GaussianBasis(basis, widths))
        store = {"reader": reader, "gated": False, "bins": basis, **store}
    return ContinuousMemory(dim, heads, basis, widths, **store)


def text(rows, length, seed=3):
    return torch.randint(4, WORDS, (rows, length), generator=torch.Generator().manual_seed(seed))


def losses_and_logs(extra, tokens):
    """All tokens count."""
    return remembered(extra, torch.ones_like(tokens, dtype=torch.bool), {"kl_sigma": 0.1})


def learn(model, tokens, first):
    """A segment in training.  -> output, losses of the memory by name"""
    out, extra = model(tokens, None, torch.full((len(tokens),), first))
    return out, losses_and_logs(extra, tokens)[0]


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
