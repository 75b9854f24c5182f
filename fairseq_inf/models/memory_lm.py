"""What the language models share: configuration, architectures, running memory."""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum
from fairseq.models import (
    ARCH_MODEL_REGISTRY,
    FairseqLanguageModel,
    register_model,
    register_model_architecture,
)
from fairseq.modules import AdaptiveInput
from omegaconf import II, open_dict
from torch import Tensor, nn

from fairseq_inf.memory import Goals, LongTermMemory

from .decoder import MemoryDecoder
from .flags import flag, numbers, setting
from .hosts import HOSTS

logger = logging.getLogger(__name__)


@dataclass
class MemoryLMConfig(*(host.Config for host in HOSTS.values())):  # type: ignore[misc]
    decoder_host: ChoiceEnum(list(HOSTS)) = setting("transformer_xl", "whose layers and positions")
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
    sink_tokens: int = setting(
        0, "first tokens of a stream that the self-attention sees for ever", before=0
    )
    ltm_pick: int = setting(
        1, "of so many vectors that leave the short-term memory the long-term memory gets one, "
        "those that self-attention has looked at most; 1: all", before=1,
    )  # fmt: skip
    ltm_start: ChoiceEnum(["silent", "host"]) = setting(
        "silent", "a new memory of a pretrained host adds exactly nothing (silent), or its slots "
        "are read by the host's own attention from the start (host)", before="silent",
    )  # fmt: skip
    ltm_rank: int = setting(
        0, "rank of a learned correction of the slots of a memory, none at first; 0: no such",
        before=0,
    )  # fmt: skip
    ltm_enabled: Optional[bool] = setting(
        None, "only for --model-overrides: {'ltm_enabled': False} switches the long-term memory off"
    )
    seed: int = II("common.seed")


class MemoryLM(FairseqLanguageModel):
    """Keeps the running memory between calls, since fairseq's loops have no argument for it.

    One memory serves training and another evaluation, so a validation never touches the memory
    that the training goes on with.  A model says what its long-term memory is by `build_memory`.
    """

    config: type[MemoryLMConfig]  # set by `register`
    has_memory = True
    takes_goals = True  # has losses beside the likelihood, for the criterion
    decoder: MemoryDecoder

    def __init__(self, decoder: MemoryDecoder, memory_flags: dict[str, Any]) -> None:
        """memory_flags: the settings that say what the numbers in a memory mean."""
        super().__init__(decoder)
        self.memory_flags = memory_flags
        self.states: dict[bool, Any] = {True: None, False: None}  # by self.training

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "MemoryLM":
        check_sizes(cfg)
        host = HOSTS[str(cfg.decoder_host)]
        host.refuse(cfg)
        dictionary = task.source_dictionary
        if cfg.adaptive_softmax_cutoff:
            name = "--adaptive-softmax-cutoff"
            check_cutoff(numbers(cfg.adaptive_softmax_cutoff, name, int), name, dictionary)
        decoder = host(cfg, dictionary, build_embedding(cfg, dictionary), cls.build_memory(cfg))
        split_parameters(decoder, cfg.freeze_host)
        return cls(decoder, cls.memory_settings(cfg, host, decoder))

    @classmethod
    def build_memory(cls, cfg: Any) -> Callable[[int], LongTermMemory | None]:
        """-> layer number -> its long-term memory, a new one each, or None for a layer without
        one.  `flags.told_by_flags` turns the arguments in its errors into flags."""
        return lambda number: None

    @classmethod
    def memory_settings(
        cls, cfg: Any, host: type[MemoryDecoder], decoder: MemoryDecoder
    ) -> dict[str, Any]:
        """What the numbers in a memory depend on beside the weights: all settings of the memory
        itself, and those of its host."""
        common = {field.name for field in fields(MemoryLMConfig)}
        names = [field.name for field in fields(cls.config) if field.name not in common]
        names = [
            "stm_length",
            "sink_tokens",
            "ltm_pick",
            "decoder_post_norm",
            "activation_fn",
            *names,
        ]
        names += host.memory_fields
        if host is not HOSTS["transformer_xl"]:
            names.insert(0, "decoder_host")
        before = {
            field.name: field.metadata["before"]
            for field in fields(cls.config)
            if "before" in field.metadata
        }
        settings = {}
        for name in names:
            value = getattr(cfg, name)
            value = (
                str(value) if isinstance(value, Enum) else value
            )  # a checkpoint holds plain ones
            if name not in before or value != before[name]:
                settings[flag(name)] = value
        return {**settings, "ltm_enabled": decoder.ltm_enabled}

    @classmethod
    def from_pretrained(
        cls, folder: str, checkpoint: str = "checkpoint_best.pt", data: str = ".", **settings: Any
    ) -> Any:
        """-> MemoryHub, to read, score and generate with"""
        from fairseq_inf.hub import from_pretrained

        return from_pretrained(folder, checkpoint, data, **settings)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        starts: Tensor | None = None,
        project: bool = True,
        goals: Goals | None = None,
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """One segment of each row.  starts: B, true for rows that begin a new stream; without
        it every row does, and nothing is carried from the last call.  project: False to only
        read it into the memory.  goals: what is to be learned beside the likelihood."""
        rows = src_tokens.size(0)
        state = self.states[self.training]
        begins = [True] if starts is None else starts.tolist()
        if all(begins):
            state = self.decoder.initial_state(rows)
        elif state is None or state.num_rows != rows:
            raise ValueError(
                f"a segment of {rows} rows goes on with streams that were never begun: "
                "the first batch must have `starts` true in every row"
            )
        elif any(begins):
            state = state.reset(starts)
        x, state, extra = self.decoder(src_tokens, state, src_lengths, project, goals)
        self.states[self.training] = state.detach()
        return x, extra

    @property
    def is_stateless(self) -> bool:
        """Whether a segment is read without anything of those before it."""
        decoder = self.decoder
        return decoder.short_term.size == 0 and all(x.memory is None for x in decoder.layers)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """A checkpoint of a host alone serves any memory, which starts as new."""
        super().upgrade_state_dict_named(state_dict, name)
        for key in [key for key in state_dict if ".attention.memory_output." in key]:
            # where version 0.3 had it
            new = key.replace(".attention.memory_output.", ".memory.output.")
            state_dict[new] = state_dict.pop(key)
        own = self.memory_state_dict()
        if self.decoder.pretrained and own and not own.keys() & state_dict.keys():
            logger.info("the checkpoint has no long-term memory: it starts as new")
            state_dict.update(own)

    def memory_state_dict(self) -> dict[str, Any]:
        """The part of the state dict that is the long-term memory's, and not its host's."""
        found: dict[str, Any] = {}
        for number, layer in enumerate(self.decoder.layers):
            if layer.memory is not None:
                found.update(layer.memory.state_dict(prefix=f"decoder.layers.{number}.memory."))
        return found

    def fingerprint(self) -> str:
        """Of these very weights and settings: a memory is read by the model that wrote it."""
        digest = hashlib.blake2b(repr(self.memory_flags).encode(), digest_size=16)
        for name, x in sorted(self.named_parameters()):
            digest.update(f"{name} {tuple(x.shape)} ".encode())
            digest.update(x.detach().cpu().float().contiguous().numpy().tobytes())
        return digest.hexdigest()


def complete(cfg: Any) -> None:
    """Give the configuration of an older checkpoint what its model was without saying so."""
    model = ARCH_MODEL_REGISTRY.get(cfg.get("_name") or cfg.get("arch"))
    if model is None or not issubclass(model, MemoryLM):
        return
    with open_dict(cfg):
        for field in fields(model.config):
            if field.name not in cfg:
                cfg[field.name] = field.metadata.get("before", field.default)


def check_sizes(cfg: Any) -> None:
    least = {
        "decoder_layers": 1,
        "decoder_embed_dim": 1,
        "decoder_ffn_embed_dim": 1,
        "decoder_attention_heads": 1,
        "stm_length": 0,
        "sink_tokens": 0,
        "ltm_pick": 1,
        "ltm_rank": 0,
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


def split_parameters(decoder: MemoryDecoder, freeze_host: bool) -> None:
    """fairseq's composite optimizer takes the memory's parameters as the group "memory"."""
    memories = [layer.memory for layer in decoder.layers if layer.memory is not None]
    own = {id(parameter) for memory in memories for parameter in memory.parameters()}
    for parameter in decoder.parameters():
        if id(parameter) in own:
            parameter.param_group = "memory"  # type: ignore[attr-defined]
        elif freeze_host:
            parameter.requires_grad = False
    if freeze_host and not own:
        raise ValueError("--freeze-host leaves nothing to learn: this model has no memory to train")


def build_embedding(cfg: Any, dictionary: Any) -> nn.Module:
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


def check_cutoff(cutoff: list[int], flag: str, dictionary: Any) -> None:
    if cutoff != sorted(set(cutoff)) or cutoff[0] < 1 or cutoff[-1] > len(dictionary):
        raise ValueError(
            f"{flag} must rise and stay within the {len(dictionary)} words of the dictionary, "
            f"got {','.join(map(str, cutoff))}"
        )


def register(
    name: str, config: type[MemoryLMConfig], **settings: dict[str, Any]
) -> Callable[[type[MemoryLM]], type[MemoryLM]]:
    """Register a model as --arch `name`, and as `name`_wt103, `name`_gpt2 and so on for the sizes
    of every host.

    config: MemoryLMConfig with the fields of the memory, each of which is a flag, and something
    that a saved memory depends on.
    settings: of the memory in an architecture, by its suffix (wt103={"field": value}), or by the
    name of the host, for all of its sizes that have none of their own.
    """

    def decorate(cls: type[MemoryLM]) -> type[MemoryLM]:
        cls.config = config
        cls = register_model(name, dataclass=config)(cls)
        for host, decoder in HOSTS.items():
            for suffix, sizes in decoder.architectures.items():
                own = {**sizes, **settings.get(suffix, settings.get(host, {}))}
                if host != config.decoder_host:
                    own["decoder_host"] = host
                arch = f"{name}_{suffix}"
                if not cls.has_memory and host != "transformer_xl":
                    arch = suffix.replace(host, f"{host}_lm", 1)  # the host alone
                register_model_architecture(name, arch)(_defaults(own))
        return cls

    return decorate


def _defaults(settings: dict[str, Any]) -> Callable[[Any], None]:
    def set_defaults(args: Any) -> None:
        for name, value in settings.items():
            setattr(args, name, getattr(args, name, value))

    return set_defaults
