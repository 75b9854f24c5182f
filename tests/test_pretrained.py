"""Llama-family models: read from Hugging Face's folders and .gguf files, written back, encoded."""

import functools
import json
import shutil
import struct
import subprocess
import sys

import commands
import gguf
import numpy as np
import pytest
import torch
from conftest import ROOT
from fairseq.data import Dictionary
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode
from fairseq.data.indexed_dataset import MMapIndexedDataset
from safetensors.torch import load_file, save_file
from sentencepiece import SentencePieceProcessor
from test_prepare import AWKWARD, as_read, write
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from fairseq_inf.data.encoding import Tokenizers
from fairseq_inf.data.vocabulary import train_sentencepiece
from fairseq_inf.errors import Failure
from fairseq_inf.pretrained.gguf_file import read_gguf
from fairseq_inf.pretrained.source import read_source
from fairseq_inf.pretrained.tokenizer_json import byte_level, pieces
from fairseq_inf.pretrained.words import token_ids, token_rows, write_dictionary

SPECIAL = ["<|endoftext|>", "<|start|>", "<|end|>"]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), "th", "the", "Ġthe", "12"]
LISTS = {
    "tokens": TOKENS,
    "token_type": [3] * 3 + [1] * (len(TOKENS) - 3),
    "merges": ["t h", "th e", "Ġ the", "1 2"],
    "pre": "smollm",
}
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
KINDS = [
    {"num_key_value_heads": keys, "tie_word_embeddings": tied}
    for keys in (2, 4)
    for tied in (True, False)
]
# as in llama.cpp's convert_hf_to_gguf.py
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def hugging_face(folder, **sizes):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, **KINDS[0], **sizes})).eval()
    with torch.no_grad():  # norms that matter
        for x in model.parameters():
            if x.dim() == 1:
                x.add_(0.1 * torch.randn_like(x))
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(byte_level(LISTS))
    return model


def write_gguf(path, model, kind=None, arch="llama", **fields):
    """As llama.cpp would write it.  kind: of the matrices, float32 by default"""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(fields.pop("pre", LISTS["pre"]))
    writer.add_token_list(TOKENS)
    writer.add_token_types(LISTS["token_type"])
    writer.add_token_merges(LISTS["merges"])
    writer.add_eos_token_id(2)
    for name, value in fields.items():
        writer.add_string(name, value)
    for name, x in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, layer = name.removesuffix(".weight"), ""
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            layer = f"blk.{layer}."
        if stem.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if "q_" in stem else config.num_key_value_heads
            x = x.reshape(heads, 2, -1, x.size(1)).swapaxes(1, 2).reshape(x.shape)
        data = x.numpy().copy()
        if kind is not None and x.dim() == 2:
            data = gguf.quantize(data, kind)
            writer.add_tensor(f"{layer}{GGUF_NAMES[stem]}.weight", data, raw_dtype=kind)
        else:
            writer.add_tensor(f"{layer}{GGUF_NAMES[stem]}.weight", data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


convert = functools.partial(commands.call, "fairseq-inf-import")


# weights


@pytest.mark.parametrize("kind", KINDS[:2], ids=str)
def test_words_such_as_speaker1_are_new_ones_that_begin_as_the_mean(tmp_path, kind):
    theirs = hugging_face(tmp_path / "hf", **kind).state_dict()
    source, path = read_source(str(tmp_path / "hf")), tmp_path / "dict.txt"
    write_dictionary(path, len(TOKENS), 2)
    with open(path, "a") as file:
        file.write("<speaker1> 1\nmadeupword0000 0\n")
    dictionary = Dictionary.load(str(path))
    ids = token_ids(dictionary, len(TOKENS), 2, path)
    state = source.layout.to_ours(source.tensors, source.config, ids)
    new, absent = dictionary.index("<speaker1>"), dictionary.index("madeupword0000")
    head = "model.embed_tokens" if kind["tie_word_embeddings"] else "lm_head"
    for ours, name in (("embed_tokens", "model.embed_tokens"), ("output_projection", head)):
        found = state[f"decoder.{ours}.weight"]
        assert torch.allclose(found[new], theirs[f"{name}.weight"].mean(dim=0), atol=1e-6)
        assert not found[absent].any()
    assert state["decoder.absent"][[new, absent]].tolist() == [0, -torch.inf]
    rows, _ = token_rows(dictionary, state["decoder.absent"], 2, path)
    assert len(rows) == len(TOKENS) and new not in rows


def test_shards_are_read_as_one(tmp_path):
    model = hugging_face(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    one, two = (read_source(str(tmp_path / x)).tensors for x in ("whole", "shards"))
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
    next((tmp_path / "shards").glob("*.safetensors")).unlink()
    with pytest.raises(Failure, match="is missing: fetch it"):
        read_source(str(tmp_path / "shards"))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_gguf_file_is_the_folder_that_it_was_made_of(tmp_path, kind):
    model = hugging_face(tmp_path / "hf", **kind)
    one = read_source(str(tmp_path / "hf"))
    two = read_source(str(write_gguf(tmp_path / "model.gguf", model)))
    assert one.tensors.keys() == two.tensors.keys()
    assert all(torch.equal(one.tensors[k], two.tensors[k]) for k in one.tensors)
    names = [*SIZES, *kind]
    names.remove("bos_token_id")
    assert [one.config[name] for name in names] == [two.config[name] for name in names]
    for text in AWKWARD[:5]:
        ids = [
            Tokenizer.from_str(x.encoding["tokenizer.json"].decode()).encode(text).ids
            for x in (one, two)
        ]
        assert ids[0] == ids[1]


def test_quantised_weights_are_those_that_transformers_reads(tmp_path):
    model = hugging_face(tmp_path / "hf", hidden_size=64, intermediate_size=96)
    kind = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path / "model.gguf", model, kind)
    _, found, *_ = read_gguf(path)
    expected = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name].float()) for name in found)
    assert not torch.equal(found["model.norm.weight"], torch.ones(64))
    rough = (found["model.embed_tokens.weight"] - model.model.embed_tokens.weight).abs().max()
    assert 0 < rough < 1e-3


def test_other_spellings_of_config_json_are_read(tmp_path):
    hugging_face(tmp_path / "hf")
    path = tmp_path / "hf" / "config.json"
    config = json.loads(path.read_text())
    for name in ("rope_theta", "num_key_value_heads"):
        config.pop(name)
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
    config |= {"eos_token_id": [2, 0], "num_key_value_heads": 2, "rope_scaling": None}
    path.write_text(json.dumps(config))
    found = read_source(str(tmp_path / "hf")).config
    assert (found["rope_theta"], found["eos_token_id"]) == (77.0, 2)


def test_bad_models_are_refused_in_one_sentence_and_leave_nothing(tmp_path):
    model = hugging_face(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    out = tmp_path / "out"

    def broken(name, config=None, drop=(), add=None):
        folder = tmp_path / name
        shutil.copytree(tmp_path / "hf", folder)
        own = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**own, **(config or {})}))
        kept = {**{k: x for k, x in tensors.items() if k not in drop}, **(add or {})}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def cut(name, size):
        path = tmp_path / name
        path.write_bytes((tmp_path / "whole.gguf").read_bytes()[:size])
        return path

    write_gguf(tmp_path / "whole.gguf", model)
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}
    (tmp_path / "other.gguf").write_bytes(b"GGML" + b"\0" * 100)
    for source, said in (
        (broken("mistral", {"model_type": "mistral"}), "only 'gpt2' or 'llama'"),
        (broken("gelu", {"hidden_act": "gelu"}), "hidden_act is 'gelu'"),
        (broken("scaled", {"rope_scaling": {"rope_type": "llama3", "factor": 8}}), "rope_scaling"),
        (broken("heads", {"head_dim": 16}), "heads of 16"),
        (broken("keys", {"num_key_value_heads": 4}), "layers.0.self_attn.k_proj.weight is"),
        (broken("theta", {"rope_theta": "no"}), "rope_theta must be above 0"),
        (broken("eos", {"eos_token_id": 9999}), "eos_token_id 9999"),
        (broken("untied", {"tie_word_embeddings": False}), "no tensor lm_head.weight"),
        (broken("lacks", drop=["model.norm.weight"]), "no tensor norm.weight"),
        (broken("bias", add=bias), "self_attn.q_proj.bias"),
        (write_gguf(tmp_path / "falcon.gguf", model, arch="falcon"), "of a 'falcon'"),
        (write_gguf(tmp_path / "pre.gguf", model, pre="qwen2"), "tokenizer.ggml.pre is 'qwen2'"),
        (
            write_gguf(tmp_path / "yarn.gguf", model, **{"llama.rope.scaling.type": "yarn"}),
            "rope_scaling is 'yarn'",
        ),
        (cut("head.gguf", 300), "is damaged"),
        (cut("tail.gguf", 20_000), "is damaged"),
        (broken("few", {"num_attention_heads": None}), "num_attention_heads must be"),
        (tmp_path / "other.gguf", "nor a .gguf file"),
    ):
        assert said in commands.refusal("fairseq-inf-import", source, out)
        assert not out.exists() and not list(tmp_path.glob(".out*"))


# the encoding


@pytest.fixture
def encoding(tmp_path):
    (tmp_path / "tokenizer.json").write_text(byte_level(LISTS))
    return Tokenizers(tmp_path / "tokenizer.json")


def joined(encoding, text):
    return [token for part in encoding.encode(text) for token in part]


def test_byte_level_tokens_give_every_text_back(encoding):
    for text in [*AWKWARD, "the text <|end|> is <|endoftext|>", "12 the 1212"]:
        tokens = joined(encoding, text)
        assert encoding.decode(tokens) == text
        assert not {"0", "1", "2"} & set(tokens), "special tokens are no text"
    assert joined(encoding, " the") == [str(TOKENS.index("Ġthe"))]
    assert str(TOKENS.index("12")) not in joined(encoding, "12"), "SmolLM2 takes digits one by one"


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe"])
def test_a_text_that_is_cut_at_a_border_has_the_same_tokens(tmp_path, pre):
    (tmp_path / "tokenizer.json").write_text(byte_level({**LISTS, "pre": pre}))
    encoding = Tokenizers(tmp_path / "tokenizer.json")
    text = "the end.\n\n  The  next,\n1212 \t lines…\r\nit's  'the' x\n" * 3
    borders = {encoding.border(text[:end], 1) for end in range(2, len(text))} - {-1}
    assert len(borders) > 10
    for at in borders:
        assert joined(encoding, text[:at]) + joined(encoding, text[at:]) == joined(encoding, text)


def test_pieces_with_scores_are_merged_as_sentencepiece_does(tmp_path):
    """Llama 2's kind of encoding."""
    text = "the memory keeps what the window has lost,  line by line and page by page " * 20
    (tmp_path / "text.txt").write_text(text)
    train_sentencepiece([(tmp_path / "text.txt", len(text))], 320, tmp_path / "spm.model")
    model = SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    ids = range(model.vocab_size())
    special = [3 if model.is_control(i) or model.is_unknown(i) else 1 for i in ids]
    lists = {
        "tokens": [model.id_to_piece(i) for i in ids],
        "scores": [model.get_score(i) for i in ids],
        "token_type": [6 if model.is_byte(i) else special[i] for i in ids],
    }
    (tmp_path / "tokenizer.json").write_text(pieces(lists))
    encoding = Tokenizers(tmp_path / "tokenizer.json")
    for own in [text, "them pages keep  the ages", "é 記憶 🧠 <s> the", "\n\tthe page\n"]:
        assert [int(i) for i in joined(encoding, own)] == model.encode(own)
        assert encoding.decode(joined(encoding, own)) == own


def test_a_blank_that_other_programs_put_in_front_is_left_out(tmp_path):
    settings = json.loads(byte_level(LISTS))
    settings["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True
    # and as Llama 2 does it
    settings["normalizer"] = {"type": "Prepend", "prepend": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    settings["decoder"] = {"type": "Sequence", "decoders": [settings["decoder"], strip]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    encoding = Tokenizers(tmp_path / "tokenizer.json")
    assert joined(encoding, "the") == [str(TOKENS.index("the"))]
    assert encoding.decode(joined(encoding, " the")) == " the"


def test_bad_encodings_are_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(Failure, match="is damaged"):
        Tokenizers(path)
    lower = {**json.loads(byte_level(LISTS)), "normalizer": {"type": "Lowercase"}}
    path.write_text(json.dumps(lower))
    with pytest.raises(Failure, match="does not give a text back"):
        Tokenizers(path)
    path.write_text(byte_level(LISTS))
    (tmp_path / "dict.txt").write_text("5 1\n")
    with pytest.raises(Failure, match=r"dict.txt lacks tokens of .*tokenizer.json"):
        Tokenizers(path).dictionary()


def test_documents_are_prepared_with_the_encoding_of_an_import(tmp_path, encoding):
    write_dictionary(tmp_path / "dict.txt", len(TOKENS), 2)
    (tmp_path / "documents.json").write_text('{"encoding": "tokenizers"}')
    write(tmp_path / "in" / "test", AWKWARD[:5])
    data = tmp_path / "bin"
    args = [tmp_path / "in", data, "--encoding", tmp_path, "--workers", 2]
    commands.call("fairseq-inf-prepare", *args)
    words, items = Dictionary.load(str(data / "dict.txt")), MMapIndexedDataset(str(data / "test"))
    texts = [encoding.decode([words[i] for i in item[:-1].tolist()]) for item in items]
    assert texts == [*map(as_read, AWKWARD[:5])]
    assert (data / "tokenizer.json").read_text() == (tmp_path / "tokenizer.json").read_text()
    assert json.loads((data / "documents.json").read_text())["encoding"] == "tokenizers"


# the examples


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_file_of_llama2_c_becomes_the_folder_that_it_was_made_of(tmp_path, kind, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples" / "pretrained")
    import llama2c

    tokens = [
        b"<unk>",
        b"\n<s>\n",
        b"\n</s>\n",
        *(bytes([i]) for i in range(256)),
        b" ",
        b"a",
        b" a",
    ]
    model = hugging_face(tmp_path / "hf", vocab_size=len(tokens), **kind)
    theirs, tied = model.state_dict(), kind["tie_word_embeddings"]
    keys, words = kind["num_key_value_heads"], len(tokens) if tied else -len(tokens)
    parts = [theirs["model.embed_tokens.weight"]]
    for name in (
        "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj",
        "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.down_proj",
        "mlp.up_proj",
    ):  # fmt: skip
        for i in range(2):
            x = theirs[f"model.layers.{i}.{name}.weight"]
            if name.endswith(("q_proj", "k_proj")):
                heads = 4 if "q_" in name else keys
                x = x.reshape(heads, 2, -1, 32).swapaxes(1, 2)
            parts.append(x)
    parts += [theirs["model.norm.weight"], torch.zeros(64 * 8)]
    parts += [] if tied else [theirs["lm_head.weight"]]
    data = struct.pack("<7i", 32, 48, 2, 4, keys, words, 64)
    data += b"".join(x.contiguous().numpy().tobytes() for x in parts)
    data += struct.pack("<i", 6)
    data += b"".join(struct.pack("<fi", -i, len(x)) + x for i, x in enumerate(tokens))
    (tmp_path / "llama2.data").write_bytes(data)
    monkeypatch.setattr(
        sys, "argv", ["llama2c.py", str(tmp_path / "llama2.data"), str(tmp_path / "out")]
    )
    llama2c.main()
    found = read_source(str(tmp_path / "out"))
    expected = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.tensors.keys() == expected.keys()
    assert all(torch.equal(found.tensors[name], expected[name]) for name in expected)
    encoding = Tokenizers(tmp_path / "out" / "tokenizer.json")
    assert joined(encoding, "a a\n") == [str(3 + 256 + 1), str(3 + 256 + 2), str(3 + 10)]


def test_only_the_models_that_are_known_are_fetched(tmp_path):
    command = ["bash", ROOT / "examples" / "pretrained" / "fetch.sh"]
    run = {"cwd": tmp_path, "text": True, "capture_output": True}
    done = subprocess.run([*command, "gpt5"], **run)
    assert done.returncode and done.stderr == "gpt5 is not known: smollm2, stories15m.\n"
    assert not list(tmp_path.iterdir())
    assert "usage:" in subprocess.run([*command, "--help"], **run).stdout


# the command, and the model


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_an_imported_llama_gives_their_logits_and_goes_back(tmp_path, kind):
    from fairseq_inf.models import TransformerXLLM

    theirs = hugging_face(tmp_path / "hf", **kind)
    asked = {**SIZES, **kind, "bos_token_id": SIZES["eos_token_id"]}
    write_gguf(tmp_path / "model.gguf", theirs)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, len(TOKENS), (2, 32)))
    with torch.no_grad():
        expected = theirs(tokens).logits
    for source in ("hf", "model.gguf"):
        out, back = tmp_path / f"import-{source}", tmp_path / f"back-{source}"
        assert "wrote llama_lm" in convert(tmp_path / source, out)
        hub = TransformerXLLM.from_pretrained(str(out), "checkpoint.pt", ".")
        decoder, words = hub.model.decoder, hub.dictionary
        places = torch.tensor([words.index(str(i)) for i in range(len(TOKENS))])
        places[2] = words.eos()
        assert decoder.absent.isinf().sum() == 3, "<s>, <pad> and <unk> are no tokens"
        with torch.no_grad():
            found = decoder(places[tokens], decoder.initial_state(2))[0]
        assert (found[..., places] - expected).abs().max() < 1e-4
        assert hub.text_of(hub.tokens_of("the  end\n")) == "the  end\n"
        convert("--back", out / "checkpoint.pt", back)
        one, two = (load_file(x / "model.safetensors") for x in (tmp_path / "hf", back))
        assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)
        again = LlamaForCausalLM.from_pretrained(back).eval()
        with torch.no_grad():
            assert torch.equal(again(tokens).logits, expected)
        own = again.config.to_dict()
        assert {name: own[name] for name in asked} == asked
        assert (back / "tokenizer.json").is_file()
