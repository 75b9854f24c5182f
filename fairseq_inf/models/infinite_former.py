"""The ∞-former language model: its configuration, its architectures, its running memory."""

import hashlib
from dataclasses import dataclass, field
from typing import Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models import FairseqLanguageModel, register_model, register_model_architecture
from fairseq.modules import AdaptiveInput
from omegaconf import II
from torch import nn

from fairseq_inf.memory import ContinuousMemory, load_state, save_state

from .decoder import MemoryDecoder


def _field(default, text):
    return field(default=default, metadata={"help": text})


@dataclass
class InfiniteFormerConfig(FairseqDataclass):
    decoder_layers: int = _field(4, "number of layers")
    decoder_embed_dim: int = _field(256, "width of the model, e")
    decoder_ffn_embed_dim: int = _field(1024, "inner width of the feed-forward nets")
    decoder_attention_heads: int = _field(4, "attention heads, H")
    decoder_post_norm: bool = _field(False, "layer norm after each block and not before it")
    activation_fn: ChoiceEnum(utils.get_available_activation_fns()) = _field(
        "gelu", "activation of the feed-forward nets"
    )
    dropout: float = _field(0.1, "dropout of embeddings and of each block's output")
    attention_dropout: float = _field(0.0, "dropout of the attention weights")
    activation_dropout: float = _field(0.0, "dropout inside the feed-forward nets")
    untie_embeddings: bool = _field(False, "an output projection apart from the embeddings")
    adaptive_input: bool = _field(False, "adaptive input embeddings")
    adaptive_input_factor: float = _field(4, "narrowing of each band of the adaptive input")
    adaptive_input_cutoff: Optional[str] = _field(None, "cutoffs of the adaptive input, a,b,c")
    adaptive_softmax_cutoff: Optional[str] = _field(None, "cutoffs of the adaptive softmax, a,b,c")
    adaptive_softmax_factor: float = _field(4, "narrowing of each band of the adaptive softmax")
    adaptive_softmax_dropout: float = _field(0, "dropout of the tails of the adaptive softmax")
    tie_adaptive_weights: bool = _field(False, "tie adaptive softmax to adaptive input")
    tie_adaptive_proj: bool = _field(False, "tie the projections of the two as well")
    checkpoint_activations: bool = _field(False, "recompute layers in the backward pass")
    stm_length: int = _field(256, "short-term memory: vectors kept for the self-attention, S")
    ltm_basis: int = _field(256, "basis functions of the long-term memory, N; 0 for none")
    ltm_widths: str = _field("0.01,0.05", "widths of the basis functions, which share them evenly")
    ltm_tau: float = _field(0.5, "share of the signal that the past is contracted to, in ]0,1[")
    ltm_samples: Optional[int] = _field(None, "samples of the past at a write, M (default: N)")
    ltm_ridge: float = _field(0.5, "penalty of the ridge regression")
    ltm_sticky: bool = _field(False, "sample the past where the last segment looked at it")
    ltm_bins: int = _field(128, "bins of the histogram of sticky memories, D")
    ltm_layers: Optional[str] = _field(
        None, "layers with a long-term memory, 0,1,.. (default: all)"
    )
    ltm_threshold: int = _field(0, "forget everything after this many vectors; 0 for never")
    ltm_enabled: Optional[bool] = _field(
        None, "only for --model-overrides: {'ltm_enabled': False} switches the long-term memory off"
    )
    seed: int = II("common.seed")


@register_model("infinite_former_lm", dataclass=InfiniteFormerConfig)
class InfiniteFormerLM(FairseqLanguageModel):
    """Keeps the running memory between calls, since fairseq's loops have no argument for it.

    One memory serves training and another evaluation, so a validation never touches the memory
    that the training goes on with.
    """

    def __init__(self, decoder, memory_flags):
        """memory_flags: the settings that say what the numbers in a memory mean."""
        super().__init__(decoder)
        self.memory_flags = memory_flags
        self.states = {True: None, False: None}  # by self.training

    @classmethod
    def build_model(cls, cfg, task):
        check_sizes(cfg)
        dictionary = task.source_dictionary
        cutoff = None
        if cfg.adaptive_softmax_cutoff:
            cutoff = numbers(cfg.adaptive_softmax_cutoff, "--adaptive-softmax-cutoff", int)
            check_cutoff(cutoff, "--adaptive-softmax-cutoff", dictionary)
        embedding = build_embedding(cfg, dictionary)
        decoder = MemoryDecoder(cfg, dictionary, embedding, build_memories(cfg), cutoff)
        return cls(decoder, memory_flags(cfg))

    def forward(self, src_tokens, src_lengths=None, starts=None):
        """One segment of each row.  starts: B, true for rows that begin a new stream; without
        it every row does, and nothing is carried from the last call."""
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
        x, state, extra = self.decoder(src_tokens, state, src_lengths)
        self.states[self.training] = state.detach()
        return x, extra

    def fingerprint(self):
        """Of these very weights and settings: a memory is read by the model that wrote it."""
        digest = hashlib.blake2b(repr(self.memory_flags).encode(), digest_size=16)
        for name, x in sorted(self.named_parameters()):
            digest.update(f"{name} {tuple(x.shape)} ".encode())
            digest.update(x.detach().cpu().float().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def save_memory(self, path):
        """Write the memory of the last evaluation to a file."""
        if self.states[False] is None:
            raise ValueError("there is no memory to save: read something first, in eval mode")
        save_state(self.states[False], path, self.fingerprint())

    def load_memory(self, path):
        """Go on in evaluation with the memory in a file that `save_memory` wrote."""
        state = load_state(path, self.decoder.initial_state(1), self.fingerprint())
        self.states[False] = state.to(next(self.parameters()).device)


def check_sizes(cfg):
    least = {
        "decoder_layers": 1,
        "decoder_embed_dim": 1,
        "decoder_ffn_embed_dim": 1,
        "decoder_attention_heads": 1,
        "stm_length": 0,
        "ltm_basis": 0,
        "ltm_threshold": 0,
    }
    for name, bound in least.items():
        if getattr(cfg, name) < bound:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} must be at least {bound}, got {getattr(cfg, name)}")
    for name in ("dropout", "attention_dropout", "activation_dropout"):
        if not 0 <= getattr(cfg, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} must be at least 0 and below 1, got {getattr(cfg, name)}")
    if cfg.decoder_embed_dim % cfg.decoder_attention_heads or cfg.decoder_embed_dim % 2:
        raise ValueError(
            f"--decoder-embed-dim {cfg.decoder_embed_dim} must be even and a multiple of "
            f"--decoder-attention-heads {cfg.decoder_attention_heads}"
        )


def memory_flags(cfg):
    """What a saved memory depends on, by flag."""
    names = ["stm_length", "ltm_basis"]
    if cfg.ltm_basis:
        names += ["ltm_widths", "ltm_tau", "ltm_samples", "ltm_ridge", "ltm_layers"]
        names += ["ltm_sticky", "ltm_threshold"] + ["ltm_bins"] * cfg.ltm_sticky
    return {"--" + name.replace("_", "-"): getattr(cfg, name) for name in names}


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


def build_memories(cfg):
    """layer number -> its ContinuousMemory, or None for a layer without one."""
    if cfg.ltm_basis == 0:
        return lambda number: None
    widths = numbers(cfg.ltm_widths, "--ltm-widths", float)
    layers = set(range(cfg.decoder_layers))
    if cfg.ltm_layers is not None:
        chosen = set(numbers(cfg.ltm_layers, "--ltm-layers", int))
        if not chosen <= layers:
            raise ValueError(
                f"--ltm-layers {cfg.ltm_layers} names a layer that is not among the "
                f"{cfg.decoder_layers} layers, which count from 0"
            )
        layers = chosen

    def build(number):
        if number not in layers:
            return None
        return ContinuousMemory(
            cfg.decoder_embed_dim,
            cfg.decoder_attention_heads,
            cfg.ltm_basis,
            widths,
            tau=cfg.ltm_tau,
            samples=cfg.ltm_samples,
            ridge=cfg.ltm_ridge,
            sticky=cfg.ltm_sticky,
            bins=cfg.ltm_bins,
            seed=cfg.seed * 1000 + number,
        )

    return build


@register_model_architecture("infinite_former_lm", "infinite_former_lm_wt103")
def infinite_former_lm_wt103(args):
    """WikiText-103 from scratch, as in appendix D of the paper, on Transformer-XL's decoder."""
    for name, value in {
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
        "ltm_basis": 150,
        "ltm_widths": "0.01,0.05",
        "ltm_tau": 0.5,
    }.items():
        setattr(args, name, getattr(args, name, value))
