"""What the language models share: a registered model for each memory in each host, and the running
memory of a training or an evaluation."""

import hashlib
import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any, Optional

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.models import (
    ARCH_MODEL_REGISTRY,
    FairseqLanguageModel,
    register_model,
    register_model_architecture,
)
from torch import Tensor

import fairseq_inf
from fairseq_inf.memory import LongTermMemory
from fairseq_inf.modules import BITS

from .decoder import MemoryDecoder
from .hosts import HOSTS
from .hosts.pretrained import PretrainedDecoder
from .settings import idle, kept_settings, resolve, setting

logger = logging.getLogger(__name__)

# where versions before 0.4 had the weights of a memory
RENAMED = (
    (r"\.attention\.memory_output\.", ".memory.output."),
    (r"\.attention\.memory_output\.", ".memory.reader.output."),
    (r"\.memory\.gate\.", ".memory.store.gate."),
    (r"\.memory\.(key\.|value\.|output\.|locate\.|gain$)", r".memory.reader.\1"),
)


@dataclass
class MemoryConfig(FairseqDataclass):
    """What every model with a long-term memory reads; a memory adds its own."""

    freeze_host: bool = setting(False, "learn the long-term memory only", kept=False)
    ltm_enabled: Optional[bool] = setting(
        None, "for --model-overrides \"{'ltm_enabled': False}\" alone: without long-term memory",
        kept=False,
    )  # fmt: skip


class MemoryLM(FairseqLanguageModel):
    """Keeps the running memory between calls, since fairseq's loops have no argument for it.

    One memory serves training and another evaluation, so a validation never touches the memory
    that the training goes on with.  A model says what its long-term memory is by `build_memory`.
    """

    # set by `register`
    arch: str
    config: type[FairseqDataclass]
    host: type[MemoryDecoder]
    has_memory: bool
    decoder: MemoryDecoder

    def __init__(self, decoder: MemoryDecoder, memory_flags: dict[str, Any]) -> None:
        """memory_flags: the settings that say what the numbers in a memory mean."""
        super().__init__(decoder)
        self.memory_flags = memory_flags
        self.states: dict[bool, Any] = {True: None, False: None}  # by self.training

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> "MemoryLM":
        resolve(cfg, cls.config)
        if cfg.decoder_embed_dim % cfg.decoder_attention_heads or cfg.decoder_embed_dim % 2:
            raise ValueError(
                f"--decoder-embed-dim {cfg.decoder_embed_dim} must be even and a multiple of "
                f"--decoder-attention-heads {cfg.decoder_attention_heads}"
            )
        cls.host.check(cfg)
        dictionary = task.source_dictionary
        embedding = cls.host.build_embedding(cfg, dictionary)
        decoder: Any = cls.host(cfg, dictionary, embedding, cls.build_memory(cfg))  # type: ignore
        split_parameters(decoder, getattr(cfg, "freeze_host", False))
        flags = {"--arch": cls.arch, **kept_settings(cfg, cls.config)}
        return cls(decoder, {**flags, "ltm_enabled": decoder.ltm_enabled})

    @classmethod
    def build_memory(cls, cfg: Any) -> Callable[[int], LongTermMemory | None]:
        """-> layer number -> its long-term memory, a new one each, or None for a layer without
        one.  `settings.told_by_flags` turns the arguments in its errors into flags."""
        return lambda number: None

    @classmethod
    def from_pretrained(
        cls, folder: str, checkpoint: str = "checkpoint_best.pt", data: str = ".", **settings: Any
    ) -> Any:
        """-> MemoryHub, to read, score and generate with"""
        return fairseq_inf.from_pretrained(folder, checkpoint, data, **settings)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | Sequence[int] | None = None,
        starts: Tensor | Sequence[bool] | None = None,
        project: bool = True,
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """One segment of each row.  starts: B, true for rows that begin a new stream; without
        it every row does, and nothing is carried from the last call.  project: False to only
        read it into the memory.  No GPU is waited for where lengths and starts are lists, or
        tensors of the CPU."""
        rows = src_tokens.size(0)
        state = self.states[self.training]
        begins = [True] if starts is None else torch.as_tensor(starts).tolist()
        if all(begins):
            state = self.decoder.initial_state(rows)
        elif state is None or state.num_rows != rows:
            raise ValueError(
                f"a segment of {rows} rows goes on with streams that were never begun: "
                "the first batch must have `starts` true in every row"
            )
        elif any(begins):
            state = state.reset(begins)
        x, state, extra = self.decoder(src_tokens, state, src_lengths, project)
        if not self.training and x is not None and x.device.type == "cpu":  # no GPU is waited for
            check_numbers(x[..., :8])  # of a vector that is not finite no logit is
        self.states[self.training] = state.detach()
        return x, extra

    @property
    def is_stateless(self) -> bool:
        """Whether a segment is read without anything of those before it."""
        decoder = self.decoder
        alone = decoder.short_term.size == 0 and decoder.roles is None
        alone = alone and decoder.token_shift is None
        return alone and all(layer.memory is None for layer in decoder.layers)

    def upgrade_state_dict_named(self, state_dict: dict[str, Any], name: str) -> None:
        """A checkpoint of a host alone serves any memory, which starts as new; so do roles."""
        super().upgrade_state_dict_named(state_dict, name)
        wanted = self.state_dict().keys()
        for key in [key for key in state_dict if key not in wanted]:
            for new in (re.sub(pattern, by, key) for pattern, by in RENAMED):
                if new in wanted:
                    state_dict[new] = state_dict.pop(key)
        if self.decoder.pretrained:
            for part, new_part in (
                ("long-term memory", self.memory_state_dict()),
                ("embedding of roles", self.role_state_dict()),
            ):
                if new_part and not new_part.keys() & state_dict.keys():
                    logger.info(f"the checkpoint has no {part}: it starts as new")
                    state_dict.update(new_part)

    def memory_state_dict(self) -> dict[str, Any]:
        """The part of the state dict that is the long-term memory's, and not its host's."""
        tensors: dict[str, Any] = {}
        for number, layer in enumerate(self.decoder.layers):
            if layer.memory is not None:
                tensors.update(layer.memory.state_dict(prefix=f"decoder.layers.{number}.memory."))
        return tensors

    def role_state_dict(self) -> dict[str, Any]:
        roles = self.decoder.roles
        return {} if roles is None else roles.state_dict(prefix="decoder.roles.")

    def pack(self, weights: str) -> None:
        """For an inference, weights in fewer bits: of BITS."""
        if weights not in BITS:
            *most, last = BITS
            raise ValueError(f"--weights must be {', '.join(most)} or {last}, got {weights}")
        if not isinstance(self.decoder, PretrainedDecoder):
            raise ValueError("--weights is for pretrained hosts, Llama and GPT-2: leave it out")
        if weights != "float32":
            self.decoder.pack(weights)
            self.memory_flags = {**self.memory_flags, "--weights": weights}

    def fingerprint(self) -> str:
        """Of these very weights and settings: a memory is read by the model that wrote it."""
        digest = hashlib.blake2b(repr(self.memory_flags).encode(), digest_size=16)
        for name, x in sorted(self.named_parameters()):
            digest.update(f"{name} {tuple(x.shape)} ".encode())
            digest.update(x.detach().cpu().float().contiguous().numpy().tobytes())
        return digest.hexdigest()


def check_numbers(found: Tensor) -> None:
    """Refuse NaN and infinity in what an evaluation finds.  Words that a model does not have are at
    -infinity."""
    if not bool(found.sum() < math.inf) and not bool((found < math.inf).all()):
        raise FloatingPointError(
            "the model computes NaN or infinity: its weights are too large for its precision, or "
            "its training has diverged; name an earlier checkpoint, or leave --fp16 and --bf16 out"
        )


def split_parameters(decoder: MemoryDecoder, freeze_host: bool) -> None:
    """fairseq's composite optimizer takes the memory's parameters as the group "memory"."""
    memories = [layer.memory for layer in decoder.layers if layer.memory is not None]
    remembering = {id(parameter) for memory in memories for parameter in memory.parameters()}
    for parameter in decoder.parameters():
        if id(parameter) in remembering:
            parameter.param_group = "memory"  # type: ignore[attr-defined]
        elif freeze_host:
            parameter.requires_grad = False
    if freeze_host and not remembering:
        raise ValueError("--freeze-host leaves nothing to learn: this model has no memory to train")


def with_defaults(config: type, name: str, settings: dict[str, Any]) -> Any:
    """A dataclass with other defaults."""
    changed = [
        (one.name, one.type, field(default=settings[one.name], metadata=one.metadata))
        for one in fields(config)
        if one.name in settings
    ]
    return make_dataclass(name, changed, bases=(config,))


def register(
    name: str, config: type | None = None, **settings: dict[str, Any]
) -> Callable[[type[MemoryLM]], type[MemoryLM]]:
    """Register a model in Transformer-XL as --arch `name`, and in each other host as `name`_<host>.

    config: a MemoryConfig with the fields of the memory, each of which is a flag; without one there
    is no memory, and `name` is Transformer-XL, `<host>_lm` each other host.
    settings: other defaults in a host, by its name, gpt2={"field": value}; or, by the suffix of an
    architecture that the host has sizes for, `name`_<suffix>.
    """

    def decorate(cls: type[MemoryLM]) -> type[MemoryLM]:
        cls.has_memory = config is not None
        for host in HOSTS.values():
            first = host is HOSTS["transformer_xl"]
            alone = name if first else f"{host.name}_lm"
            model = alone if config is None else name if first else f"{name}_{host.name}"
            bases = (host.Config,) if config is None else (config, host.Config)
            whole = make_dataclass(f"{cls.__name__}{host.__name__}Config", [], bases=bases)
            whole = with_defaults(whole, whole.__name__, settings.get(host.name, {}))
            own: Any = cls if first else type(f"{cls.__name__}{host.__name__}", (cls,), {})
            own.config, own.host, own.arch = whole, host, model
            register_model(model, dataclass=whole)(own)
            for suffix, sizes in host.architectures.items():
                if suffix in settings:
                    values = {**sizes, **settings[suffix]}
                    set_defaults = _set_defaults(values, whole)
                    register_model_architecture(model, f"{name}_{suffix}")(set_defaults)
        return cls

    return decorate


def _set_defaults(settings: dict[str, Any], config: type) -> Callable[[Any], None]:
    """But for those that a setting that was given keeps from being read."""

    def set_defaults(args: Any) -> None:
        given = vars(args).keys() & settings.keys()
        for name, value in settings.items():
            setattr(args, name, getattr(args, name, value))
        for name in (set(idle(args, config)) & settings.keys()) - given:
            delattr(args, name)

    return set_defaults


def host_of(arch: str) -> str | None:
    """The name of an architecture's host; None if it is none of ours."""
    model = ARCH_MODEL_REGISTRY.get(arch)
    return model.host.name if model is not None and issubclass(model, MemoryLM) else None
