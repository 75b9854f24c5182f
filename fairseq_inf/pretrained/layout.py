"""What a family of models is called at Hugging Face's, beside what it is called here."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fairseq_inf.errors import Failure

from .words import ABSENT, NEW

Config = dict[str, Any]  # of config.json
Tensors = dict[str, Tensor]
Chat = dict[str, Any]  # {"template": in jinja, "tokens": {"bos_token": .., "eos_token": ..}}
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Part:
    """Tensors of theirs and of ours that hold the same rows, one behind another.

    theirs, ours: names with their rows.  columns: of a matrix.  transposed: they multiply by it
    from the right.
    """

    theirs: Mapping[str, int]
    ours: Mapping[str, int]
    columns: int | None = None
    transposed: bool = False

    def to_ours(self, tensors: Tensors) -> Tensors:
        found = []
        for name, rows in self.theirs.items():
            shape = (rows,) if self.columns is None else (rows, self.columns)
            x = take(tensors, name, shape[::-1] if self.transposed else shape)
            found.append(x.T if self.transposed else x)
        return _split(found, self.ours)

    def to_theirs(self, model: Tensors) -> Tensors:
        found = _split([model[name] for name in self.ours], self.theirs)
        return {name: x.T.contiguous() if self.transposed else x for name, x in found.items()}


def _split(found: list[Tensor], names: Mapping[str, int]) -> Tensors:
    parts = torch.cat(found).split(list(names.values()))
    return {name: x.contiguous() for name, x in zip(names, parts, strict=True)}


def take(tensors: Tensors, name: str, shape: tuple[int, ...]) -> Tensor:
    if name not in tensors:
        raise Failure(f"the model has no tensor {name}: it is not whole, or of another kind")
    x = tensors[name].float()
    if x.shape != shape:
        raise Failure(f"{name} is {tuple(x.shape)}, by config.json it must be {shape}")
    return x


@dataclass(frozen=True)
class Field:
    """A field of config.json, and the setting of the model that it is here."""

    theirs: str
    ours: str
    default: Any = None  # a value, or a function of the config; without it the field must be there
    wanted: str = "a positive number"
    good: Callable[[Any], bool] = lambda x: type(x) is int and x > 0


def rate(theirs: str, ours: str, default: float) -> Field:
    def good(x: Any) -> bool:
        return isinstance(x, int | float) and 0 <= x < 1

    return Field(theirs, ours, default, "at least 0 and below 1", good)


def positive(theirs: str, ours: str, default: float) -> Field:
    def good(x: Any) -> bool:
        return isinstance(x, int | float) and x > 0

    return Field(theirs, ours, default, "above 0", good)


@dataclass(frozen=True)
class Layout:
    name: str  # model_type of config.json, and the host's
    title: str
    model: str  # the class of transformers
    prefix: str  # of the names of all tensors but the head
    embedding: str
    fields: tuple[Field, ...]
    fixed: Mapping[str, Any]  # of config.json: what another value would change in the model
    parts: Callable[[Config], Iterator[Part]]  # all weights but embedding and head
    ignored: str  # pattern of the tensors that are no weights
    encoding: tuple[str, Mapping[str, str]]  # its name, and its files: theirs, ours
    tied: bool  # whether the head is the embedding, where config.json doesn't say
    end: int  # eos_token_id, where config.json doesn't say
    tidy: Callable[[Config], Config] = lambda config: config  # to one spelling of the fields

    def check(self, config: Config, path: Path) -> Config:
        """-> the config with all fields that are needed, each of them possible"""
        config = self.tidy(config)
        for name, value in self.fixed.items():
            if config.get(name, value) != value:
                raise Failure(f"{path}: {name} is {config[name]!r}, only {value!r} can be imported")
        found = {"tie_word_embeddings": self.tied, "eos_token_id": self.end, **config}
        for field in (Field("vocab_size", ""), *self.fields):
            value = found.get(field.theirs)
            if value is None:
                value = field.default(found) if callable(field.default) else field.default
            if not field.good(value):
                raise Failure(f"{path}: {field.theirs} must be {field.wanted}, got {value!r}")
            found[field.theirs] = value
        end, words = found["eos_token_id"], found["vocab_size"]
        if not isinstance(end, int) or not 0 <= end < words:
            raise Failure(f"{path}: eos_token_id {end} is not one of the {words} tokens")
        return found

    def get(self, config: Config, setting: str) -> Any:
        """-> the value of one of our settings"""
        [found] = (config[field.theirs] for field in self.fields if field.ours == setting)
        return found

    def settings(self, config: Config) -> dict[str, Any]:
        """Those of the model of this size."""
        found = {field.ours: config[field.theirs] for field in self.fields}
        return found if config["tie_word_embeddings"] else {**found, "untie_embeddings": True}

    def config(self, settings: Mapping[str, Any], words: int, end: int) -> Config:
        """config.json for a model of ours.  settings: of its checkpoint"""
        return {
            "architectures": [self.model],
            "model_type": self.name,
            "vocab_size": words,
            **{field.theirs: settings[field.ours] for field in self.fields},
            "tie_word_embeddings": not settings.get("untie_embeddings"),
            "bos_token_id": end,
            "eos_token_id": end,
            **self.fixed,
        }

    def to_ours(self, tensors: Tensors, config: Config, ids: Tensor) -> Tensors:
        """ids: of `token_ids`.  New words begin as the mean of all."""
        tensors = {name.removeprefix(self.prefix): x for name, x in tensors.items()}
        width, real = self.get(config, "decoder_embed_dim"), ids >= 0
        shape = (config["vocab_size"], width)

        def rows(words: Tensor) -> Tensor:
            found = torch.zeros(len(ids), width).index_put((real,), words[ids[real]])
            return torch.where((ids == NEW)[:, None], words.mean(dim=0), found)

        words = take(tensors, self.embedding, shape)
        found = {"embed_tokens.weight": rows(words), "output_projection.weight": rows(words)}
        if not config["tie_word_embeddings"]:
            found["output_projection.weight"] = rows(take(tensors, HEAD, shape))
        elif HEAD in tensors and not torch.equal(tensors[HEAD].float(), words):
            raise Failure(f"{HEAD} is not {self.embedding}, but by config.json they are tied")
        found["absent"] = torch.zeros(len(ids)).masked_fill(ids == ABSENT, -torch.inf)
        used = {self.embedding, HEAD}
        for part in self.parts(config):
            found |= part.to_ours(tensors)
            used |= part.theirs.keys()
        for name in tensors.keys() - used:
            if not re.fullmatch(self.ignored, name):
                raise Failure(f"the model has a tensor {name}, which by config.json it has not")
        return {f"decoder.{name}": x for name, x in found.items()}

    def to_theirs(self, model: Tensors, config: Config, rows: Tensor) -> Tensors:
        """rows: the place of each token in the dictionary"""
        model = {name.removeprefix("decoder."): x.float() for name, x in model.items()}
        found = {self.embedding: model["embed_tokens.weight"][rows]}
        for part in self.parts(config):
            found |= part.to_theirs(model)
        found = {self.prefix + name: x for name, x in found.items()}
        if not config["tie_word_embeddings"]:
            found[HEAD] = model["output_projection.weight"][rows]
        return found
