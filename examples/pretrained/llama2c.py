"""A model of llama2.c's, checkpoint and tokenizer in one file, as a folder of Hugging Face's.

python examples/pretrained/llama2c.py llama2.data models/stories15m
"""

import argparse
import json
import struct
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from fairseq_inf.pretrained.gguf_file import halves
from fairseq_inf.pretrained.tokenizer_json import BYTE, CONTROL, pieces


def read_model(data):
    """-> config.json, tensors, and what follows them"""
    e, inner, layers, heads, keys, words, length = struct.unpack_from("<7i", data)
    tied, words, width = words > 0, abs(words), e // heads
    numbers, at = np.frombuffer(data, "<f4", (len(data) - 28) // 4, 28), 0

    def take(*shape):
        nonlocal at
        at += int(np.prod(shape))
        return torch.from_numpy(numbers[at - int(np.prod(shape)) : at].reshape(shape).copy())

    tensors = {"model.embed_tokens.weight": take(words, e)}
    for name, *shape in (
        ("input_layernorm", e),
        ("self_attn.q_proj", e, e),
        ("self_attn.k_proj", keys * width, e),
        ("self_attn.v_proj", keys * width, e),
        ("self_attn.o_proj", e, e),
        ("post_attention_layernorm", e),
        ("mlp.gate_proj", inner, e),
        ("mlp.down_proj", e, inner),
        ("mlp.up_proj", inner, e),
    ):
        for i, x in enumerate(take(layers, *shape)):
            turned = {"self_attn.q_proj": heads, "self_attn.k_proj": keys}.get(name)
            tensors[f"model.layers.{i}.{name}.weight"] = halves(x, turned) if turned else x
    tensors["model.norm.weight"] = take(e)
    take(2, length, width // 2)  # cosines and sines
    if not tied:
        tensors["lm_head.weight"] = take(words, e)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": words,
        "hidden_size": e,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "max_position_embeddings": length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 1,  # <s> stands between texts
    }
    return config, {name: x.contiguous() for name, x in tensors.items()}, data[28 + 4 * at :]


def read_pieces(data, words):
    """-> lists as of a .gguf file"""
    tokens, scores, at = [], [], 4
    for _ in range(words):
        score, size = struct.unpack_from("<fi", data, at)
        tokens.append(data[at + 8 : at + 8 + size])
        scores.append(score)
        at += 8 + size
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [token.decode().replace(" ", "\u2581") for token in tokens[len(names) :]]
    types = [CONTROL] * 3 + [BYTE] * 256 + [1] * (words - 259)
    return {"tokens": names, "scores": scores, "token_type": types}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="checkpoint with its tokenizer behind it")
    parser.add_argument("output", type=Path, help="folder to make")
    args = parser.parse_args()
    source, output = args.source, args.output
    config, tensors, rest = read_model(source.read_bytes())
    output.mkdir(parents=True)
    (output / "tokenizer.json").write_text(pieces(read_pieces(rest, config["vocab_size"])))
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
