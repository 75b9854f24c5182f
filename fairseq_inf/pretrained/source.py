"""A pretrained model as it is found: a folder in Hugging Face's layout, its name at the hub, or a
.gguf file."""

import json
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fairseq_inf.errors import Failure
from fairseq_inf.files import read_text

from . import LAYOUTS
from .gguf_file import is_gguf, read_gguf
from .layout import Chat, Config, Layout, Tensors

TOKENIZER, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
WHOLE, SHARDS, PICKLED = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


@dataclass
class Source:
    path: Path
    layout: Layout
    config: Config
    tensors: Tensors
    encoding: dict[str, bytes]  # the files of its encoding by our names, none if it has none
    chat: Chat | None  # its chat template


def read_source(name: str) -> Source:
    path = Path(name)
    if is_gguf(path):
        config, tensors, encoding, chat = read_gguf(path)
        layout = find_layout(config, path)
        return Source(path, layout, layout.check(config, path), tensors, encoding, chat)
    folder = find_folder(name)
    path = folder / "config.json"
    config = read_json(path, "is it a model of Hugging Face?")
    layout = find_layout(config, path)
    config = layout.check(config, path)
    encoding = read_encoding(folder, layout)
    return Source(folder, layout, config, read_weights(folder), encoding, read_chat(folder))


def find_layout(config: Config, path: Path) -> Layout:
    kind = config.get("model_type")
    if kind not in LAYOUTS:
        known = " or ".join(map(repr, LAYOUTS))
        raise Failure(f"{path} is of a {kind!r}: only {known} can be imported")
    return LAYOUTS[kind]


def find_folder(name: str) -> Path:
    """A folder with the model: itself, or what is downloaded from the hub."""
    if os.path.isdir(name):
        return Path(name)
    if os.path.exists(name) or name.startswith((".", "/", "~")):
        raise Failure(f"{name} is not a folder with config.json and {WHOLE}, nor a .gguf file")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise Failure(
            f"{name} is not a folder; to download it from the hub, pip install "
            "'fairseq_inf[pretrained]'"
        ) from None
    wanted = {"config.json", SHARDS, "*.safetensors", TOKENIZER, TEMPLATE}
    wanted |= {file for layout in LAYOUTS.values() for file in layout.encoding[1]}
    try:
        return Path(snapshot_download(name, allow_patterns=sorted(wanted)))
    except Exception as error:  # a dozen kinds, of three libraries
        reason = str(error).strip().splitlines()[0]
        raise Failure(f"{name} is neither a folder nor can it be downloaded: {reason}") from None


def read_json(path: Path, hint: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise Failure(f"{path} does not exist: {hint}") from None
    except ValueError:
        found = None
    except OSError as error:
        raise Failure(f"{path} cannot be read: {error.strerror}") from None
    if not isinstance(found, dict):
        raise Failure(f"{path} is damaged: fetch it again")
    return found


def read_weights(folder: Path) -> Tensors:
    """-> tensors by their names; nothing of a file is run"""
    if (folder / WHOLE).is_file():
        return read_safetensors(folder / WHOLE)
    if (folder / SHARDS).is_file():
        shards = read_json(folder / SHARDS, "").get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(x, str) for x in shards.values()):
            raise Failure(f"{folder / SHARDS} is damaged: fetch it again")
        files = [folder / Path(name).name for name in sorted({*shards.values()})]
        return {name: x for file in files for name, x in read_safetensors(file).items()}
    if (folder / PICKLED).is_file():
        return read_pickle(folder / PICKLED)
    raise Failure(f"{folder} has neither {WHOLE} nor {PICKLED}")


def read_safetensors(path: Path) -> Tensors:
    if not path.is_file():
        raise Failure(f"{path} is missing: fetch it")
    try:
        return load_file(path)
    except (SafetensorError, OSError):
        raise Failure(f"{path} is damaged or cannot be read: fetch it again") from None


def read_pickle(path: Path) -> Tensors:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        if not path.read_bytes().startswith((b"PK", b"\x80")):
            raise Failure(f"{path} is damaged: fetch it again") from None
        raise Failure(
            f"{path} holds more than tensors, which might run code, and is not loaded: "
            f"convert it to {WHOLE} where you trust it"
        ) from None
    except (RuntimeError, OSError, EOFError):
        raise Failure(f"{path} is damaged or cannot be read: fetch it again") from None
    if not isinstance(tensors, dict) or not all(
        isinstance(x, torch.Tensor) for x in tensors.values()
    ):
        raise Failure(f"{path} is not a dictionary of tensors")
    return tensors


def read_encoding(folder: Path, layout: Layout) -> dict[str, bytes]:
    """-> the files of the encoding by our names, none if one of them is missing"""
    files = {ours: folder / theirs for theirs, ours in layout.encoding[1].items()}
    if not all(path.is_file() for path in files.values()):
        return {}
    return {name: path.read_bytes() for name, path in files.items()}


def read_chat(folder: Path) -> Chat | None:
    """The chat template and the tokens that it names, None if there is none."""
    path = folder / TOKENIZER
    found = read_json(path, "") if path.is_file() else {}
    template = found.get("chat_template")
    if isinstance(template, list):  # several, by their names
        named = {x.get("name"): x.get("template") for x in template if isinstance(x, dict)}
        template = named.get("default")
    if (folder / TEMPLATE).is_file():
        template = read_text(folder / TEMPLATE)
    if not isinstance(template, str):
        return None
    tokens = {name: found.get(name) for name in ("bos_token", "eos_token")}
    tokens = {name: x.get("content") if isinstance(x, dict) else x for name, x in tokens.items()}
    return {"template": template, "tokens": {name: x or "" for name, x in tokens.items()}}
