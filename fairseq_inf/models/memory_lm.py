"""What the three language models share: configuration, architectures, running memory."""

import hashlib
import logging
from dataclasses import dataclass, field
from enum import Enum
from typing import Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import FairseqLanguageModel, register_model_architecture
from fairseq.modules import AdaptiveInput
from omegaconf import II
from torch import nn

from .decoder import MemoryDecoder
from .gpt2_decoder import GPT2Decoder

logger = logging.getLogger(__name__)


def setting(default, text):
    return field(default=default, metadata={"help": text})


@dataclass
class MemoryLMConfig(FairseqDataclass):
    decoder_host: ChoiceEnum(["transformer_xl", "gpt2"]) = setting(
        "transformer_xl", "whose layers and positions: relative ones, or learned ones of a segment"
    )
    decoder_positions: int = setting(1024, "learned positions of a segment, for GPT-2")
    freeze_host: bool = setting(False, "learn the long-term memory only")
    decoder_layers: int = setting(4, "number of layers")
    decoder_embed_dim: int = setting(256, "width of the model, e")
    decoder_ffn_embed_dim: int = setting(1024, "inner width of the feed-forward nets")
    decoder_attention_heads: int = setting(4, "attention heads, H")
    decoder_post_norm: bool = setting(False, "layer norm after each block and not before it")
    activation_fn: ChoiceEnum(utils.get_available_activation_fns()) = setting(
        "gelu", "activation of the feed-forward nets"
    )
    dropout: float = setting(0.1, "dropout of embeddings and of each block's output")
    attention_dropout: float = setting(0.0, "dropout of the attention weights")
    activation_dropout: float = setting(0.0, "dropout inside the feed-forward nets")
    untie_embeddings: bool = setting(False, "an output projection apart from the embeddings")
    adaptive_input: bool = setting(False, "adaptive input embeddings")
    adaptive_input_factor: float = setting(4, "narrowing of each band of the adaptive input")
    adaptive_input_cutoff: Optional[str] = setting(None, "cutoffs of the adaptive input, a,b,c")
    adaptive_softmax_cutoff: Optional[str] = setting(None, "cutoffs of the adaptive softmax, a,b,c")
    adaptive_softmax_factor: float = setting(4, "narrowing of each band of the adaptive softmax")
    adaptive_softmax_dropout: float = setting(0, "dropout of the tails of the adaptive softmax")
    tie_adaptive_weights: bool = setting(False, "tie adaptive softmax to adaptive input")
    tie_adaptive_proj: bool = setting(False, "tie the projections of the two as well")
    checkpoint_activations: bool = setting(False, "recompute layers in the backward pass")
    stm_length: int = setting(256, "short-term memory: vectors kept for the self-attention, S")
    ltm_enabled: Optional[bool] = setting(
        None, "only for --model-overrides: {'ltm_enabled': False} switches the long-term memory off"
    )
    seed: int = II("common.seed")


class MemoryLM(FairseqLanguageModel):
    """Keeps the running memory between calls, since fairseq's loops have no argument for it.

    One memory serves training and another evaluation, so a validation never touches the memory
    that the training goes on with.  A model says what its long-term memory is by `build_memory`.
    """

    memory_settings = ()  # fields of the configuration that the numbers in its memory depend on

    def __init__(self, decoder, memory_flags):
        """memory_flags: the settings that say what the numbers in a memory mean."""
        super().__init__(decoder)
        self.memory_flags = memory_flags
        self.states = {True: None, False: None}  # by self.training

    @classmethod
    def build_model(cls, cfg, task):
        check_sizes(cfg)
        host = MemoryDecoder
        if cfg.decoder_host == "gpt2":
            check_gpt2(cfg)
            host = GPT2Decoder
        dictionary = task.source_dictionary
        cutoff = None
        if cfg.adaptive_softmax_cutoff:
            cutoff = numbers(cfg.adaptive_softmax_cutoff, "--adaptive-softmax-cutoff", int)
            check_cutoff(cutoff, "--adaptive-softmax-cutoff", dictionary)
        embedding = build_embedding(cfg, dictionary)
        decoder = host(cfg, dictionary, embedding, cls.build_memory(cfg), cutoff)
        split_parameters(decoder, cfg.freeze_host)
        names = ("stm_length", "decoder_post_norm", "activation_fn", *cls.memory_settings)
        if host is GPT2Decoder:
            names = ("decoder_host", *names)
        settings = {flag(name): getattr(cfg, name) for name in names}
        settings["ltm_enabled"] = decoder.ltm_enabled
        # a checkpoint holds plain values only
        return cls(decoder, {k: str(v) if isinstance(v, Enum) else v for k, v in settings.items()})

    @classmethod
    def build_memory(cls, cfg):
        """-> layer number -> its long-term memory, or None for a layer without one"""
        return lambda number: None

    @classmethod
    def from_pretrained(cls, folder, checkpoint="checkpoint_best.pt", data=".", **settings):
        """-> MemoryHub, to read, score and generate with"""
        from fairseq_inf.hub import from_pretrained

        return from_pretrained(folder, checkpoint, data, **settings)

    def forward(self, src_tokens, src_lengths=None, starts=None, project=True):
        """One segment of each row.  starts: B, true for rows that begin a new stream; without
        it every row does, and nothing is carried from the last call.  project: False to only
        read it into the memory."""
        rows = src_tokens.size(0)
        state = self.states[self.training]
        if starts is None or bool(starts.all()):
            state = self.decoder.initial_state(rows)
        elif state is None or state.num_rows != rows:
            raise ValueError(
                f"a segment of {rows} rows goes on with streams that were never begun: "
                "the first batch must have `starts` true in every row"
            )
        elif bool(starts.any()):
            state = state.reset(starts)
        x, state, extra = self.decoder(src_tokens, state, src_lengths, project)
        self.states[self.training] = state.detach()
        return x, extra

    @property
    def is_stateless(self):
        """Whether a segment is read without anything of those before it."""
        decoder = self.decoder
        return decoder.stm_length == 0 and all(layer.memory is None for layer in decoder.layers)

    def upgrade_state_dict_named(self, state_dict, name):
        """A checkpoint of GPT-2 alone serves any memory, which starts as new."""
        super().upgrade_state_dict_named(state_dict, name)
        own = {key: x for key, x in self.state_dict().items() if is_memory(key)}
        if isinstance(self.decoder, GPT2Decoder) and own and not own.keys() & state_dict.keys():
            logger.info("the checkpoint has no long-term memory: it starts as new")
            state_dict.update(own)

    def fingerprint(self):
        """Of these very weights and settings: a memory is read by the model that wrote it."""
        digest = hashlib.blake2b(repr(self.memory_flags).encode(), digest_size=16)
        for name, x in sorted(self.named_parameters()):
            digest.update(f"{name} {tuple(x.shape)} ".encode())
            digest.update(x.detach().cpu().float().contiguous().numpy().tobytes())
        return digest.hexdigest()


def check_sizes(cfg):
    least = {
        "decoder_layers": 1,
        "decoder_embed_dim": 1,
        "decoder_ffn_embed_dim": 1,
        "decoder_attention_heads": 1,
        "stm_length": 0,
    }
    for name, bound in least.items():
        if getattr(cfg, name) < bound:
            raise ValueError(f"{flag(name)} must be at least {bound}, got {getattr(cfg, name)}")
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        if not 0 <= getattr(cfg, name) < 1:
            value = getattr(cfg, name)
            raise ValueError(f"{flag(name)} must be at least 0 and below 1, got {value}")
    if cfg.decoder_embed_dim % cfg.decoder_attention_heads or cfg.decoder_embed_dim % 2:
        raise ValueError(
            f"--decoder-embed-dim {cfg.decoder_embed_dim} must be even and a multiple of "
            f"--decoder-attention-heads {cfg.decoder_attention_heads}"
        )


def check_gpt2(cfg):
    for name in (
        "decoder_post_norm",
        "untie_embeddings",
        "adaptive_input",
        "adaptive_softmax_cutoff",
    ):
        if getattr(cfg, name):
            raise ValueError(f"{flag(name)} is not for GPT-2: leave it out")
    if cfg.stm_length:
        raise ValueError(
            f"--stm-length must be 0 for GPT-2, got {cfg.stm_length}: its positions begin anew "
            "with each segment, so that the last one's keys do not fit"
        )


def is_memory(name):
    """Whether a parameter of this name belongs to the long-term memory, and not to its host."""
    return ".memory." in name or ".memory_output." in name


def split_parameters(decoder, freeze_host):
    """fairseq's composite optimizer takes the memory's parameters as the group "memory"."""
    found = False
    for name, parameter in decoder.named_parameters():
        if is_memory(name):
            parameter.param_group, found = "memory", True
        elif freeze_host:
            parameter.requires_grad = False
    if freeze_host and not found:
        raise ValueError("--freeze-host leaves nothing to learn: this model has no memory to train")


def flag(name):
    return "--" + name.replace("_", "-")


def numbers(text, flag, kind):
    """'a,b,c' as a list of numbers."""
    try:
        return [kind(part) for part in str(text).split(",")]
    except ValueError:
        raise ValueError(f"{flag} takes numbers with commas between them, got {text!r}") from None


def build_embedding(cfg, dictionary):
    dim = cfg.decoder_embed_dim
    if cfg.adaptive_input:
        cutoff = cfg.adaptive_input_cutoff or cfg.adaptive_softmax_cutoff
        if not cutoff:
            raise ValueError("--adaptive-input needs --adaptive-input-cutoff")
        cutoff = numbers(cutoff, "--adaptive-input-cutoff", int)
        check_cutoff(cutoff, "--adaptive-input-cutoff", dictionary)
        return AdaptiveInput(
            len(dictionary), dictionary.pad(), dim, cfg.adaptive_input_factor, dim, cutoff
        )
    if cfg.tie_adaptive_weights:
        raise ValueError("--tie-adaptive-weights needs --adaptive-input")
    embedding = nn.Embedding(len(dictionary), dim, dictionary.pad())
    nn.init.normal_(embedding.weight, std=dim**-0.5)
    nn.init.zeros_(embedding.weight[dictionary.pad()])
    return embedding


def check_cutoff(cutoff, flag, dictionary):
    if cutoff != sorted(set(cutoff)) or cutoff[0] < 1 or cutoff[-1] > len(dictionary):
        raise ValueError(
            f"{flag} must rise and stay within the {len(dictionary)} words of the dictionary, "
            f"got {','.join(map(str, cutoff))}"
        )


# the paper's experiments: appendices D, C.1 and C.2
ARCHITECTURES = {
    "wt103": {
        "decoder_layers": 16,
        "decoder_embed_dim": 410,
        "decoder_ffn_embed_dim": 2100,
        "decoder_attention_heads": 10,
        "decoder_post_norm": True,
        "activation_fn": "relu",
        "adaptive_input": True,
        "adaptive_input_factor": 1,
        "adaptive_input_cutoff": "20000,40000,200000",
        "adaptive_softmax_cutoff": "20000,40000,200000",
        "adaptive_softmax_factor": 1,
        "tie_adaptive_weights": True,
        "tie_adaptive_proj": True,
        "stm_length": 150,
    },
    "sorting": {
        "decoder_layers": 3,
        "decoder_embed_dim": 300,
        "decoder_ffn_embed_dim": 300,
        "decoder_attention_heads": 6,
        "dropout": 0.0,
        "stm_length": 1024,
    },
}
for size, (layers, width, heads) in {
    "gpt2": (12, 768, 12),
    "gpt2_medium": (24, 1024, 16),
    "gpt2_large": (36, 1280, 20),
    "gpt2_xl": (48, 1600, 25),
}.items():
    ARCHITECTURES[size] = {
        "decoder_host": "gpt2",
        "decoder_layers": layers,
        "decoder_embed_dim": width,
        "decoder_ffn_embed_dim": 4 * width,
        "decoder_attention_heads": heads,
        "activation_fn": "gelu_accurate",
        "attention_dropout": 0.1,
        "stm_length": 0,
    }
GPT2_SIZES = [name for name in ARCHITECTURES if name.startswith("gpt2")]


def architecture(model, experiment, name=None, **settings):
    """Register <model>_<experiment>, or another name."""

    def set_defaults(args):
        for name, value in {**ARCHITECTURES[experiment], **settings}.items():
            setattr(args, name, getattr(args, name, value))

    register_model_architecture(model, name or f"{model}_{experiment}")(set_defaults)
