"""The decoder: (tokens, state) -> (output, new state), one segment of each stream at a time.

Everything here is the same for all hosts and all memories.  A host is a subclass in `hosts/`: it
says how layers are built, how tokens are embedded, what the head is and where its attention's
positions come from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Optional

import torch
import torch.nn.functional as F
from fairseq.dataclass import FairseqDataclass
from fairseq.models import FairseqDecoder
from omegaconf import II
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fairseq_inf.memory import COUNTER, LongTermMemory, ShortTermMemory, State, Window, mix
from fairseq_inf.memory.state import Ranges
from fairseq_inf.modules import DecoderLayer, LayerPlan, LayerState, Roles, Segment, SlotLine

from .settings import flag, setting
from .surprise import AROUND, Surprise, losses

# B rows (streams), T tokens of the segment, S short-term length, e width


@dataclass
class DecoderState(State):
    layers: tuple[LayerState, ...]
    filled: Tensor = field(metadata=COUNTER)  # B: how many vectors of the windows are real
    position: Tensor = field(metadata=COUNTER)  # B: tokens of the stream read so far
    key: Tensor  # B: hash of those tokens, the seed of sticky sampling
    role: tuple[Tensor, ...] = ()  # B: what the last of them is part of, if that is embedded
    surprise: tuple[Surprise, ...] = ()  # one, if a memory wants it
    last: tuple[Tensor, ...] = ()  # B: the last of them, if the next one is told; 0 if none

    def ranges(self) -> Ranges:
        yield "filled", self.position.clamp(max=1), self.layers[0].window.vectors.size(1)
        yield "position", self.filled, torch.iinfo(torch.long).max
        if self.role:
            yield "role.0", 0, torch.iinfo(torch.long).max
        if self.last:
            yield "last.0", 0, torch.iinfo(torch.long).max
        # whole numbers in a memory count what it has been given
        for name, x in self.tensors().items():
            if ".memory." in name and x.dtype in (torch.long, torch.int):
                yield name, 0, self.position[(..., *[None] * (x.dim() - 1))]


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # what is kept must serve a training later
def _causal(queries: int, past: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """0 for the keys that query i may see, up to past + i, and -inf for the others."""
    hidden = torch.full((queries, past + queries), -torch.inf, dtype=dtype, device=device)
    return hidden.triu(past + 1)


@dataclass
class DecoderConfig(FairseqDataclass):
    """What every decoder reads; a host adds its own."""

    decoder_layers: int = setting(4, "number of layers", least=1)
    decoder_embed_dim: int = setting(256, "width of the model, e", least=2)
    decoder_ffn_embed_dim: int = setting(1024, "inner width of the feed-forward nets", least=1)
    decoder_attention_heads: int = setting(4, "attention heads, H", least=1)
    dropout: float = setting(
        0.1, "dropout of embeddings and of each block's output", least=0, below=1, kept=False
    )
    attention_dropout: float = setting(
        0.0, "dropout of the attention weights", least=0, below=1, kept=False
    )
    role_words: Optional[str] = setting(
        None, "words that begin a part of a text, as <speaker1>,<speaker2>: an embedding of each "
        "is added to all tokens of its part",
    )  # fmt: skip
    checkpoint_activations: bool = setting(
        False, "recompute layers in the backward pass: less memory, more time", kept=False
    )
    seed: int = II("common.seed")


@dataclass
class WindowConfig(DecoderConfig):
    """What hosts read whose attention sees earlier segments."""

    stm_length: int = setting(
        256, "short-term memory: vectors that self-attention sees beside the segment, S", least=0
    )
    sink_tokens: int = setting(
        0, "first tokens of a stream that self-attention sees for ever, and that no long-term "
        "memory gets: a pretrained model leans on them", least=0,
    )  # fmt: skip


def score_features(decoder: Any, features: Tensor, target: Tensor) -> Tensor:
    """Log-probabilities of the targets, n, by what the head takes, n x e.  -> n"""
    found = [torch.zeros(0, device=target.device)]
    for x, own in zip(features.split(512), target.split(512), strict=True):
        out: Any = (decoder.head(x[None]), {})
        asked = {"target": own[None]}
        logs = decoder.get_normalized_probs(out, log_probs=True, sample=asked)[0]
        found.append(logs.gather(1, own[:, None]).squeeze(1).float())
    return torch.cat(found)


def build_roles(cfg: Any, dictionary: Any) -> Roles | None:
    if not cfg.role_words:
        return None
    words = cfg.role_words.split(",")
    for word in words:
        if word not in dictionary:
            raise ValueError(f"{flag('role_words')}: {word} is not in the dictionary of the data")
    return Roles([dictionary.index(word) for word in words], len(dictionary), cfg.decoder_embed_dim)


def build_token_shift(cfg: Any) -> nn.Parameter | None:
    """s, with a draw of its own: a model has the same first weights with it and without."""
    spread = getattr(cfg, "token_shift", None)
    if spread is None:
        return None
    draw = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
    return nn.Parameter(spread * torch.randn(cfg.decoder_embed_dim, generator=draw))


class MemoryDecoder(FairseqDecoder):
    """What a host says: everything up to `check_tokens`."""

    name: str  # what its models are called by: <memory>_<name>
    title: str  # in messages
    Config: type[FairseqDataclass]  # the settings that it reads
    # suffix -> settings: sizes that have an architecture of their own
    architectures: dict[str, dict[str, Any]] = {}
    pretrained = False  # its weights come from elsewhere: memories start silent

    layers: Any  # of DecoderLayer
    embed_tokens: Any
    norm: nn.Module
    adaptive_softmax: Any
    output_projection: Any

    @classmethod
    def check(cls, cfg: Any) -> None:
        """Raise an error if the configuration is one that this host cannot be."""

    @classmethod
    def build_embedding(cls, cfg: Any, dictionary: Any) -> nn.Module:
        embedding = nn.Embedding(len(dictionary), cfg.decoder_embed_dim, dictionary.pad())
        nn.init.normal_(embedding.weight, std=cfg.decoder_embed_dim**-0.5)
        nn.init.zeros_(embedding.weight[dictionary.pad()])
        return embedding

    def build_layer(self, cfg: Any, memory: LongTermMemory | None) -> DecoderLayer:
        raise NotImplementedError

    def embed(self, tokens: Tensor, place: Tensor) -> Tensor:
        """place: of each token in its segment, broadcastable to B x T."""
        raise NotImplementedError

    def head(self, x: Tensor) -> Tensor:
        """-> logits, or the features that an adaptive softmax takes"""
        raise NotImplementedError

    def positions(self, slots: SlotLine, shown: int, queries: int, hidden: Tensor) -> Any:
        """For `attend`: positions of the keys [slots; the last `shown` vectors of sinks and
        short-term memory; `queries` tokens].  hidden: added to the scores, broadcastable to B x H x
        T x P."""
        raise NotImplementedError

    def cache_positions(self, slots: SlotLine, length: int) -> Any:
        """For `placed` and `table`: those of [slots; sinks; short-term memory; `length` tokens]."""
        return None

    def slot_bias(self, slots: int, like: Tensor) -> Tensor | None:
        """Scores that depend on the place of a slot alone.  -> H x 1 x C"""
        return None

    def check_length(self, length: int) -> None:
        """Raise an error if a segment cannot have that many tokens."""

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise an error if the host has not all of these tokens."""

    # the same for all

    def __init__(
        self,
        cfg: Any,
        dictionary: Any,
        embed_tokens: nn.Module,
        build_memory: Callable[[int], LongTermMemory | None],
    ) -> None:
        """build_memory: layer number -> its long-term memory, or None."""
        super().__init__(dictionary)
        self.embed_tokens = embed_tokens
        self.adaptive_softmax = self.output_projection = None
        self.dim = cfg.decoder_embed_dim
        self.short_term = ShortTermMemory(
            getattr(cfg, "stm_length", 0), getattr(cfg, "sink_tokens", 0)
        )
        self.ltm_enabled = getattr(cfg, "ltm_enabled", None) is not False
        self.checkpoint_activations = cfg.checkpoint_activations
        self.dropout = nn.Dropout(cfg.dropout)
        self.roles = build_roles(cfg, dictionary)
        self.token_shift = build_token_shift(cfg)

        def draw_memory(number: int) -> LongTermMemory | None:
            """With a seed the host has the same first weights, whatever its memory."""
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(torch.initial_seed() + 1 + number)
                return build_memory(number)

        self.layers = nn.ModuleList(
            self.build_layer(cfg, draw_memory(number)) for number in range(cfg.decoder_layers)
        )

    @property
    def stm_length(self) -> int:
        return self.short_term.length

    def start_silent(self) -> None:
        """What the memories add is zero at first, but for slots that the host reads by itself."""
        for number, layer in enumerate(self.layers):
            if layer.memory is not None:
                layer.memory.start_silent(number, len(self.layers))

    def initial_state(self, rows: int) -> DecoderState:
        like = self.layers[0].inner.weight

        def zeros(device: Any = None) -> Tensor:
            return torch.zeros(rows, dtype=torch.long, device=device)

        def layer_state(layer: DecoderLayer) -> LayerState:
            vectors = like.new_zeros(rows, self.short_term.size, self.dim)
            marks = torch.zeros(*vectors.shape[:2], layer.num_marks, device=like.device)
            stored: Any = ()
            if layer.memory is not None:
                stored = layer.memory.initial_state(rows, like.device, like.dtype)
            kept = 0 if self.training else layer.attention.key_value.weight.size(0)
            return LayerState(
                Window(vectors, marks, vectors.new_zeros(*marks.shape[:2], kept)), stored
            )

        surprise: tuple[Surprise, ...] = ()
        if self.wants_surprise:
            losses = torch.zeros(rows, AROUND + self.stm_length, device=like.device)
            surprise = (Surprise(losses, like.new_zeros(rows, self.dim)),)
        return DecoderState(
            layers=tuple(layer_state(layer) for layer in self.layers),
            filled=zeros(),
            position=zeros(),
            key=zeros(like.device),
            role=() if self.roles is None else (zeros(like.device),),
            surprise=surprise,
            last=() if self.token_shift is None else (zeros(like.device),),
        )

    def mean_slots(self) -> int:
        """How many slots a layer has for further keys, in the mean over all."""
        slots = [0 if layer.memory is None else layer.memory.num_slots for layer in self.layers]
        return round(sum(slots) / len(slots))

    @property
    def wants_surprise(self) -> bool:
        return any(x.memory is not None and x.memory.wants_surprise for x in self.layers)

    def memory_states(self, state: DecoderState) -> list[State | None]:
        """The state of each layer's memory, None where there is none."""
        return [own.memory or None for own in state.layers]

    @staticmethod
    def plan_key(memory: LongTermMemory | None) -> Any:
        """Layers of the same key have the same plans."""
        return None if memory is None else (type(memory), memory.plan_key())

    def forward(
        self,
        tokens: Tensor,
        state: DecoderState,
        lengths: Tensor | Sequence[int] | None = None,
        project: bool = True,
        head: bool = True,
    ) -> tuple[Tensor | None, DecoderState, dict[str, Any]]:
        """tokens: B x T, padded on the right to the lengths (B, of the CPU if a GPU shall not be
        waited for) if there are any.  head: False for what the head takes, B x T x e.
        -> logits (features with an adaptive softmax, None unless `project`): B x T x V, state,
        extra: "layers", of each its Encounter with its memory, or None"""
        self.check_length(tokens.size(1))
        self.check_tokens(tokens)
        segment, plans = self.plan(tokens, state, lengths)
        roles = None if self.roles is None else self.roles.of(tokens, *state.role)
        place = torch.arange(tokens.size(1), device=tokens.device)
        x: Any = self.embedded(tokens, place, roles, *state.last)
        layers, met = [], []
        for number, (layer, old, plan) in enumerate(
            zip(self.layers, state.layers, plans, strict=True)
        ):
            speak = project or bool(state.surprise) or number + 1 < len(self.layers)
            x, after, encounter = self._through(layer, x, old, segment, plan, speak)
            layers.append(after)
            met.append(encounter)
        after = self._after(tokens, state, segment, tuple(layers), roles)
        after = replace(after, surprise=self._surprised(tokens, x, state, segment))
        if project and head:
            x = self.head(x)
        return x if project else None, after, {"layers": met}

    @torch.no_grad()
    def _surprised(
        self, tokens: Tensor, features: Tensor, state: DecoderState, segment: Segment
    ) -> tuple[Surprise, ...]:
        if not state.surprise:
            return ()
        [before] = state.surprise
        found = torch.zeros_like(tokens, dtype=torch.float)
        if self.ltm_enabled:
            x, target = torch.cat([before.last[:, None], features[:, :-1]], dim=1), tokens
            if self.output_projection is None:
                found = -score_features(self, x.flatten(0, 1), target.flatten())
            else:
                weight, bias = self.output_projection.weight, getattr(self, "absent", None)
                found = losses(self.norm(x.flatten(0, 1)), weight, bias, target.flatten())
            known = segment.real.clone()
            known[:, 0] &= before.last.any(dim=1)  # nothing comes before a stream
            found = found.view_as(tokens).where(known, 0)
        return (before.after(found, features, segment.lengths, self.stm_length),)

    def step(
        self,
        tokens: Tensor,
        place: Tensor,
        roles: Tensor | None,
        last: Tensor | None,
        each: Any,
    ) -> Tensor:
        """One token a row, B, in the middle of a segment.  place, roles: of each, last: before
        each, B.  each: what each layer's `step` needs.  -> B x 1 x V"""
        roles = None if roles is None else roles[:, None]
        x = self.embedded(tokens[:, None], place[:, None], roles, last)
        for layer, needs in zip(self.layers, each, strict=True):
            x = layer.step(x, *needs, self.ltm_enabled)
        return self.head(x)

    def embedded(
        self, tokens: Tensor, place: Tensor, roles: Tensor | None, last: Tensor | None = None
    ) -> Tensor:
        """E[w_t] + s * E[w_(t-1)] + r_t.  last: the tokens before the first ones, B"""
        x = self.embed(tokens, place)
        if self.token_shift is not None and last is not None:
            before = torch.cat([self.embed(last[:, None], place[..., :1]), x[:, :-1]], dim=1)
            x = x + self.token_shift * before
        return x if roles is None or self.roles is None else x + self.roles(roles)

    def _through(self, layer: DecoderLayer, *args: Any) -> Any:
        if self.checkpoint_activations and self.training:
            return checkpoint(layer, *args, use_reentrant=False)
        return layer(*args)

    def _after(
        self,
        tokens: Tensor,
        state: DecoderState,
        segment: Segment,
        layers: tuple[LayerState, ...],
        roles: Tensor | None,
    ) -> DecoderState:
        """The state after a segment."""
        lengths = segment.lengths
        scattered = mix(tokens + mix(torch.arange(tokens.size(1), device=tokens.device)))
        if segment.mask is not None:
            scattered = scattered * segment.mask
        key = mix(state.key + scattered.sum(dim=-1))
        if lengths is not None:
            key = torch.where(lengths > 0, key, state.key)

        def latest(of: Tensor, old: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            if lengths is None:
                return tuple(of[:, -1] for _ in old)
            found = of.gather(1, (lengths - 1).clamp(min=0)[:, None]).squeeze(1)
            return tuple(torch.where(lengths > 0, found, x) for x in old)

        return DecoderState(
            layers=layers,
            filled=self.short_term.after(state.filled, segment.read),
            position=state.position + segment.read,
            key=key,
            role=state.role if roles is None else latest(roles, state.role),
            last=latest(tokens, state.last),
        )

    def plan(
        self, tokens: Tensor, state: DecoderState, lengths: Tensor | Sequence[int] | None
    ) -> tuple[Segment, list[LayerPlan]]:
        """All that the CPU must know of a segment, before anything is computed."""
        t, mask, real_tokens = tokens.size(1), None, None
        read = torch.full_like(state.filled, t)
        if lengths is not None:
            read = torch.as_tensor(lengths).cpu()
            if min(read.tolist()) < t:
                real_tokens = read.to(tokens.device)
                mask = torch.arange(t, device=tokens.device) < real_tokens[:, None]
        short_term, joining = self.short_term, None
        filled, position = state.filled.tolist(), state.position.tolist()
        left, visible = short_term.left(filled, position), short_term.visible(filled, position)
        if short_term.joins(filled, position):
            waiting = state.layers[0].window.vectors.size(1) - short_term.size
            column, joins = short_term.joining(state.filled, state.position, waiting)
            joining = column.to(tokens.device), joins.to(tokens.device)
        shown = short_term.shown(visible)
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        surprise = None
        for known in state.surprise:
            surprise = known.passages(state.layers[0].window.vectors.size(1) - short_term.size)
        segment = Segment(
            short_term, joining, shown, read, real_tokens, mask, real, state.key, surprise
        )
        plans: dict[Any, LayerPlan] = {}
        positions: dict[Any, Any] = {}

        def layer_plan(layer: DecoderLayer, stored: State | None) -> LayerPlan:
            memory = layer.memory if self.ltm_enabled else None
            key = self.plan_key(memory)
            if key not in plans:
                write: Any = None if memory is None else memory.plan(left, stored)
                held: tuple[int, ...] = ()
                line = SlotLine()
                if memory is not None and memory.num_slots:
                    held = tuple(write.held) if write.slots else ()
                    line = SlotLine(write.slots, memory.num_slots, memory.spacing)
                if (held, line) not in positions:
                    positions[held, line] = self._positions(tokens, state, visible, held, line)
                plans[key] = LayerPlan(write, positions[held, line])
            return plans[key]

        each = zip(self.layers, self.memory_states(state), strict=True)
        return segment, [layer_plan(*layer_and_state) for layer_and_state in each]

    def _positions(
        self,
        tokens: Tensor,
        state: DecoderState,
        visible: list[int],
        held: tuple[int, ...],
        line: SlotLine,
    ) -> Any:
        """held: how many slots each row has, if there are any."""
        t, slots = tokens.size(1), line.shown
        shown = self.short_term.shown(visible)
        past = slots + shown
        hidden = _causal(t, past, self.layers[0].inner.weight.dtype, tokens.device)
        if min(visible) < shown or (slots and min(held) < slots):
            absent = [self.short_term.absent(state.filled, state.position, shown)]
            if slots:
                absent.insert(0, torch.arange(slots) < slots - torch.tensor(held)[:, None])
            every = F.pad(torch.cat(absent, dim=1), (0, t)).to(tokens.device)  # B x P
            hidden = hidden.masked_fill(every[:, None, None], -torch.inf)
        return self.positions(line, shown, t, self.with_slot_bias(hidden, slots))

    def with_slot_bias(self, hidden: Tensor, slots: int) -> Tensor:
        """hidden: ... x T x P, the slots first."""
        bias = self.slot_bias(slots, hidden) if slots else None
        return hidden if bias is None else hidden + F.pad(bias, (0, hidden.size(-1) - slots))

    def max_positions(self) -> int:
        return int(1e9)
