"""A model of llama.cpp's, one .gguf file, under the names of Hugging Face's."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fairseq_inf.errors import Failure

from .layout import HEAD, Chat, Config, Tensors
from .tokenizer_json import byte_level, pieces

FIELDS = {
    "llama.block_count": "num_hidden_layers",
    "llama.embedding_length": "hidden_size",
    "llama.feed_forward_length": "intermediate_size",
    "llama.attention.head_count": "num_attention_heads",
    "llama.attention.head_count_kv": "num_key_value_heads",
    "llama.attention.key_length": "head_dim",
    "llama.context_length": "max_position_embeddings",
    "llama.rope.freq_base": "rope_theta",
    "llama.rope.scaling.type": "rope_scaling",
    "llama.attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
}
WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": HEAD.removesuffix(".weight"),
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def is_gguf(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def read_gguf(path: Path) -> tuple[Config, Tensors, dict[str, bytes], Chat | None]:
    """-> config.json, tensors, files of the encoding, chat template: as in Hugging Face's folder"""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise Failure(f"{path} needs pip install 'fairseq_inf[pretrained]'") from None
    try:
        return _read(GGUFReader(path), path)
    except Failure:
        raise
    except Exception:  # whatever half a file leads to
        raise Failure(f"{path} is damaged or cannot be read: fetch it again") from None


def _read(reader: Any, path: Path) -> tuple[Config, Tensors, dict[str, bytes], Chat | None]:
    from gguf import dequantize

    values = {name: field.contents() for name, field in reader.fields.items()}
    kind = values.get("general.architecture")
    if kind != "llama":
        raise Failure(f"{path} is of a {kind!r}: only 'llama' can be imported")
    tensors = {
        _name(x.name, path): torch.from_numpy(np.array(dequantize(x.data, x.tensor_type)))
        for x in reader.tensors
    }
    config = {theirs: _rounded(values[own]) for own, theirs in FIELDS.items() if own in values}
    config["model_type"], config["tie_word_embeddings"] = kind, HEAD not in tensors
    config["vocab_size"] = len(tensors["model.embed_tokens.weight"])
    unpermute(tensors, config)
    return config, tensors, read_encoding(values), read_chat(values)


def _rounded(value: Any) -> Any:
    """A number as it was written before it became a float32."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _name(name: str, path: Path) -> str:
    stem, _, end = name.rpartition(".")
    block, _, part = stem.partition(".")[2].partition(".")
    if stem in WHOLE and end == "weight":
        return f"{WHOLE[stem]}.weight"
    if stem.startswith("blk.") and block.isdigit() and part in LAYER and end == "weight":
        return f"model.layers.{block}.{LAYER[part]}.weight"
    raise Failure(f"{path} has a tensor {name}, which no plain Llama has: it cannot be imported")


def unpermute(tensors: Tensors, config: Config) -> None:
    """llama.cpp turns neighbours (2i, 2i + 1) of a head by its positions, Hugging Face i and
    i + d/2: put the rows of queries and keys in the order of the latter."""
    queries = config["num_attention_heads"]
    heads = {"q_proj": queries, "k_proj": config.get("num_key_value_heads", queries)}
    for name, x in tensors.items():
        count = heads.get(name.split(".")[-2], 0)
        if count and len(x) % (2 * count) == 0:
            tensors[name] = halves(x, count)


def halves(x: Tensor, heads: int) -> Tensor:
    """Rows of each head: the even ones, then the odd ones."""
    return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def read_encoding(values: dict[str, Any]) -> dict[str, bytes]:
    """tokenizer.json, or nothing where the file has no tokens or of a kind that is not known."""
    own = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in values.items()
        if name.startswith("tokenizer.ggml.")
    }
    make = {"gpt2": byte_level, "llama": pieces}.get(own.get("model", ""))
    return {"tokenizer.json": make(own).encode()} if make else {}


def read_chat(values: dict[str, Any]) -> Chat | None:
    template, words = (values.get(f"tokenizer.{x}") for x in ("chat_template", "ggml.tokens"))
    if not isinstance(template, str) or words is None:
        return None
    numbers = {x: values.get(f"tokenizer.ggml.{x}_token_id") for x in ("bos", "eos")}
    tokens = {f"{x}_token": "" if i is None else words[i] for x, i in numbers.items()}
    return {"template": template, "tokens": tokens}
