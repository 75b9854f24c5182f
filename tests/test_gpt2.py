"""GPT-2 as a host: parity with Hugging Face's, import and its way back, fine-tuning."""

import functools
import json
import os
import re
import subprocess
import sys

import commands
import naive
import pytest
import torch
from conftest import ROOT, TASK, TRAIN, evaluate, fairseq, load, result, tool
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode
from safetensors.torch import load_file, save_file
from test_decoder import assert_equal
from transformers import GPT2Config, GPT2LMHeadModel
from zoo import make_model, stream, text

from fairseq_inf import pretrained
from fairseq_inf.experiments import perplexity
from fairseq_inf.models import TransformerXLLM
from fairseq_inf.models.generation import new_reading

WORDS = 61  # of the small GPT-2; the last one is its <|endoftext|>
SIZES = (
    "--decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 64 "
    "--decoder-attention-heads 2 --decoder-positions 32"
).split()
INFINITE = ["--arch", "infinite_former_lm_gpt2", "--ltm-basis", "16", "--ltm-widths", "0.05,0.2"]
CONFIGS = ROOT / "examples" / "gpt2" / "config"
PAIR = ("gpt2", "infinite_former")
INFINI = ["--arch", "infini_attention_lm_gpt2", "--infini-update", "delta"]
COMPRESSIVE = ["--arch", "compressive_transformer_lm_gpt2", "--cmem-length", "8"]


def hugging_face(folder=None, **sizes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": WORDS,
        "n_positions": 32,
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        **sizes,
    }
    last = sizes["vocab_size"] - 1
    model = GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=last, bos_token_id=last)).eval()
    with torch.no_grad():  # biases and norms that matter
        for x in model.parameters():
            if x.dim() == 1:
                x.add_(0.1 * torch.randn_like(x))
    if folder is not None:
        model.save_pretrained(folder)
    return model


convert = functools.partial(commands.call, "fairseq-inf-import")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """-> a folder with a small GPT-2 (hf), and what it is imported to (gpt2, infinite)"""
    folder = tmp_path_factory.mktemp("gpt2")
    hugging_face(folder / "hf")
    assert "wrote gpt2_lm" in convert(folder / "hf", folder / "gpt2")
    convert(folder / "hf", folder / "infinite", *INFINITE)
    convert(folder / "hf", folder / "compressive", *COMPRESSIVE)
    convert(folder / "hf", folder / "infini", *INFINI)
    return folder


@pytest.fixture(scope="module")
def data(small, tmp_path_factory):
    """Documents of GPT-2's tokens, binarized with the dictionary that the import wrote."""
    folder = tmp_path_factory.mktemp("data")
    draw = torch.Generator().manual_seed(0)
    for split, documents in (("train", 12), ("valid", 3), ("test", 4)):
        with open(folder / f"{split}.txt", "w") as file:
            for _ in range(documents):
                words = torch.randint(0, WORDS - 1, (8,), generator=draw)
                order = torch.randint(0, 8, (150,), generator=draw)
                file.write(" ".join(str(int(words[i])) for i in order) + "\n")
    out = folder / "bin"
    prefixes = [x for s in ("train", "valid", "test") for x in (f"--{s}pref", folder / f"{s}.txt")]
    fairseq(
        "preprocess", "--only-source", *prefixes, "--destdir", out,
        "--srcdict", small / "gpt2" / "dict.txt",
    )  # fmt: skip
    return out


def opened(folder):
    """-> the imported model, and for each GPT-2 token its place in our dictionary"""
    hub = TransformerXLLM.from_pretrained(str(folder), "checkpoint.pt", ".")
    words = hub.dictionary
    count = 1 + max(int(w) for w in words.symbols if w.isdigit())
    places = [words.index(str(i)) for i in range(count)]
    return hub.model, torch.tensor([*places, words.eos()])


# the layer


@pytest.mark.parametrize("name", ["transformer_xl", "compressive_transformer", "infini_attention"])
@pytest.mark.parametrize("segment", [5, 7])
def test_gpt2_equals_a_naive_one_with_its_gradients(name, segment):
    decoder = make_model(name, host="gpt2").double().decoder
    assert_equal(naive.gpt2, decoder, text(1, 33), segment)


def test_reads_of_a_new_memory_begin_at_the_newest_part_and_widen_by_layer():
    decoder = make_model("infinite_former", sharp=False, decoder_layers=3, host="gpt2").decoder
    state = decoder.initial_state(3)
    for part in text(3, 40).split(10, dim=1):
        _, state, extra = decoder(part, state)
    mus = torch.stack([layer.seen.mu.mean() for layer in extra["layers"]])
    sigmas = torch.stack([layer.seen.var.sqrt().mean() for layer in extra["layers"]])
    assert torch.allclose(sigmas, torch.tensor([0.05, 0.2, 0.8]), rtol=0.1)
    assert torch.allclose(mus, torch.tensor([0.95, 0.8, 0.5]), atol=0.05)


# parity with Hugging Face


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257},
        {"n_layer": 24, "n_embd": 128, "n_head": 16, "vocab_size": 1000},
    ],
    ids=["small", "deep"],
)
def test_logits_equal_those_of_hugging_face_after_import(shape, tmp_path):
    theirs = hugging_face(tmp_path / "hf", n_positions=1024, **shape)
    convert(tmp_path / "hf", tmp_path / "gpt2")
    ours, places = opened(tmp_path / "gpt2")
    decoder = ours.decoder
    draw = torch.Generator().manual_seed(1)
    for length in (1, 63, 512):
        tokens = torch.randint(0, shape["vocab_size"], (2, length), generator=draw)
        sizes = torch.tensor([length, (length + 1) // 2])
        mask = torch.arange(length) < sizes[:, None]
        with torch.no_grad():
            expected = theirs(tokens, attention_mask=mask.long()).logits
            padded = places[tokens].masked_fill(~mask, decoder.dictionary.pad())
            found, _, _ = decoder(padded, decoder.initial_state(2), sizes)
        assert (found[..., places] - expected)[mask].abs().max() < 1e-4
        others = torch.ones(found.size(-1), dtype=torch.bool).index_fill(0, places, False)
        assert (found[..., others] == -torch.inf).all(), "no probability for words it has not"


def test_the_same_weights_give_the_same_logits_before_any_import():
    theirs = hugging_face()
    decoder = make_model("transformer_xl", host="gpt2").decoder
    ids = torch.arange(len(decoder.dictionary))
    config = {**theirs.config.to_dict(), "vocab_size": len(ids), "n_inner": 64}
    tensors = theirs.state_dict()
    tensors["transformer.wte.weight"] = tensors["transformer.wte.weight"][: len(ids)]
    tensors.pop("lm_head.weight")
    decoder.embed_positions.weight.data = tensors["transformer.wpe.weight"]
    decoder.layers[0].inner, decoder.layers[1].inner = (torch.nn.Linear(16, 64) for _ in range(2))
    decoder.layers[0].outer, decoder.layers[1].outer = (torch.nn.Linear(64, 16) for _ in range(2))
    state = pretrained.GPT2.to_ours(tensors, config, ids)
    decoder.load_state_dict({k.removeprefix("decoder."): x for k, x in state.items()})
    tokens = text(2, 30)
    expected = theirs(tokens).logits[..., : len(ids)]
    assert torch.allclose(stream(decoder, tokens, 30)[0], expected, atol=1e-5)


# import, and the way back


def test_the_way_back_gives_the_same_bits(small, tmp_path):
    for name in ("gpt2", "infinite", "compressive", "infini"):
        convert("--back", small / name / "checkpoint.pt", tmp_path / name)
        one = load_file(small / "hf" / "model.safetensors")
        two = load_file(tmp_path / name / "model.safetensors")
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)
        again = GPT2LMHeadModel.from_pretrained(tmp_path / name).eval()
        tokens = torch.randint(0, WORDS, (2, 20))
        assert torch.equal(again(tokens).logits, hugging_face()(tokens).logits)


@pytest.mark.parametrize("twice", [False, True])
def test_any_order_of_the_dictionary(small, tmp_path, twice):
    """fairseq's own dictionary of GPT-2 is sorted by frequency, has <|endoftext|> twice, and words
    that fill it up."""
    listed = [str(i) for i in torch.randperm(WORDS - 1).tolist()]
    listed += [str(WORDS - 1), "madeupword0000"] if twice else []
    path = tmp_path / "dict.txt"
    path.write_text("".join(f"{word} 1\n" for word in listed))
    convert(small / "hf", tmp_path / "gpt2", "--dict", path)
    model, _ = opened(tmp_path / "gpt2")
    words = model.decoder.dictionary
    places = torch.tensor([*(words.index(str(i)) for i in range(WORDS - 1)), words.eos()])
    tokens = torch.randint(0, WORDS, (2, 20))
    found = stream(model.decoder, places[tokens], 20)[0]
    expected = hugging_face()(tokens).logits.log_softmax(dim=-1)
    assert torch.allclose(found.log_softmax(dim=-1)[..., places], expected, atol=1e-5)
    convert("--back", tmp_path / "gpt2" / "checkpoint.pt", tmp_path / "back")
    one = load_file(small / "hf" / "model.safetensors")
    two = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_old_pickles_and_half_precision_are_read(small, tmp_path):
    tensors = load_file(small / "hf" / "model.safetensors")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text((small / "hf" / "config.json").read_text())
    # the first GPT-2 of the hub has neither the prefix nor safetensors, and masks as buffers
    named = {k.removeprefix("transformer."): x.half() for k, x in tensors.items()}
    named["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    torch.save(named, tmp_path / "hf" / "pytorch_model.bin")
    convert(tmp_path / "hf", tmp_path / "gpt2")
    state = load(tmp_path / "gpt2" / "checkpoint.pt")["model"]
    weight = state["decoder.embed_positions.weight"]
    assert torch.equal(weight, tensors["transformer.wpe.weight"].half().float())


def test_bad_models_are_refused_in_one_sentence_and_leave_nothing(small, tmp_path):
    hf = small / "hf"
    config = json.loads((hf / "config.json").read_text())
    tensors = load_file(hf / "model.safetensors")

    def broken(name, change=None, drop=None, weights=True, text=None):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(text or json.dumps({**config, **(change or {})}))
        if weights:
            kept = {k: x for k, x in tensors.items() if k != drop}
            save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    class Code:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'was-run'}",)

    code = broken("code", weights=False)
    torch.save({"wte.weight": Code()}, code / "pytorch_model.bin")
    damaged = broken("damaged")
    (damaged / "model.safetensors").write_bytes(b"\0" * 100)
    other = tmp_path / "other.txt"
    other.write_text("".join(f"{i} 1\n" for i in range(40)))
    larger = tmp_path / "larger.txt"
    larger.write_text("".join(f"{i} 1\n" for i in range(90)))
    double = tmp_path / "double.txt"
    double.write_text("0 1\n" * 2)
    missing = "transformer.h.1.mlp.c_fc.weight"
    out = tmp_path / "out"
    for args, said in (
        ([broken("bert", {"model_type": "bert"})], "of a 'bert'"),
        ([broken("relu", {"activation_function": "relu"})], "activation_function"),
        ([broken("lacks", drop=missing)], "h.1.mlp.c_fc.weight"),
        ([broken("sizes", {"n_embd": 32})], "wte.weight"),
        ([broken("inner", {"n_inner": 48})], "h.0.mlp.c_fc.weight"),
        ([broken("layers", {"n_layer": 1})], "has a tensor h.1."),
        ([broken("type", {"n_head": "two"})], "n_head must be a positive number"),
        ([broken("list", weights=False, text="[]")], "config.json is damaged"),
        ([hf, "--ltm-bassis", "3"], "--ltm-bassis"),
        ([hf, *INFINITE[:2], "--ltm-basis", "many"], "--ltm-basis"),
        ([hf, "--decoder-layers", "3"], "does not fit the flags"),
        ([hf, "--activation-fn", "relu"], "--activation-fn relu"),
        ([hf, "--dict", double], "not a dictionary of fairseq's"),
        ([broken("empty", weights=False)], "neither model.safetensors nor"),
        ([broken("eos", {"eos_token_id": 50256})], "eos_token_id 50256"),
        ([code], "might run code"),
        ([damaged], "damaged"),
        ([tmp_path / "nowhere"], "not a folder"),
        ([hf, "--arch", "infinite_former_lm_gpt3"], "--arch infinite_former_lm_gpt3"),
        ([hf, "--arch", "infinite_former_lm"], "--arch infinite_former_lm"),
        ([hf, "--dict", other], "another vocabulary"),
        ([hf, "--dict", larger], "another vocabulary"),
        ([hf, "--dict", tmp_path / "none.txt"], "none.txt"),
        (["--back", hf / "model.safetensors"], "is not a checkpoint"),
        (["--back", small / "gpt2" / "checkpoint.pt", "--dict", other], "another vocabulary"),
    ):
        where = [*args[:1], out, *args[1:]] if args[0] != "--back" else [*args[:2], out, *args[2:]]
        assert said in commands.refusal("fairseq-inf-import", *where)
        assert not out.exists() and not list(tmp_path.glob(".out*"))
    assert not (tmp_path / "was-run").exists()
    said = commands.refusal("fairseq-inf-import", hf, tmp_path / "bert")
    assert "exists already" in said


@pytest.mark.parametrize("back", [False, True])
def test_a_full_disk_leaves_no_half_written_file(small, tmp_path, back):
    source = ["--back", small / "gpt2" / "checkpoint.pt"] if back else [small / "hf"]
    with commands.room_for(20_000):
        said = commands.refusal("fairseq-inf-import", *source, tmp_path / "out")
    assert f"{tmp_path / 'out'} cannot be written" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("last", [0, 7])
def test_the_end_of_text_may_be_any_token(tmp_path, last):
    model = hugging_face()
    model.config.eos_token_id = last
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "gpt2")
    convert("--back", tmp_path / "gpt2" / "checkpoint.pt", tmp_path / "back")
    one, two = (load_file(tmp_path / f / "model.safetensors") for f in ("hf", "back"))
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.slow
def test_an_imported_gpt2_brings_its_encoding(tmp_path, capsys, forked):
    """What is imported serves to prepare data, and to write."""
    symbols = [*bytes_to_unicode().values(), "th", "the", "<|endoftext|>"]
    hugging_face(tmp_path / "hf", vocab_size=len(symbols))
    (tmp_path / "hf" / "vocab.json").write_text(json.dumps({s: i for i, s in enumerate(symbols)}))
    (tmp_path / "hf" / "merges.txt").write_text("#version: 0.2\nt h\nth e\n")
    convert(tmp_path / "hf", tmp_path / "gpt2")
    hub = TransformerXLLM.from_pretrained(str(tmp_path / "gpt2"), "checkpoint.pt", ".")
    assert [hub.dictionary[i] for i in hub.tokens_of("the").tolist()] == ["257"]
    assert isinstance(hub.generate("on the other", max_tokens=40), str)
    for split in ("train", "validation", "test"):
        (tmp_path / "texts" / split).mkdir(parents=True)
        (tmp_path / "texts" / split / "1.txt").write_text("the other text\n")
    done = subprocess.run(
        ["bash", ROOT / "examples" / "gpt2" / "prepare.sh", tmp_path / "texts"], cwd=tmp_path,
        text=True, capture_output=True, env={**os.environ, "GPT2_BPE": str(tmp_path / "gpt2")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = tmp_path / "data-bin" / "gpt2-texts"
    assert (data / "dict.txt").read_text() == (tmp_path / "gpt2" / "dict.txt").read_text()
    command = ["perplexity", data, "--cpu", "--path", tmp_path / "gpt2" / "checkpoint.pt"]
    commands.enter(perplexity.main, *command)
    assert "3 words, perplexity" in capsys.readouterr().out
    (data / "documents.json").write_text('{"encoding": "gpt2"}')
    assert "does not count the words" in commands.refused(perplexity.main, *command)


# evaluation


@pytest.mark.slow
def test_right_after_import_a_memory_changes_no_perplexity(small, data):
    each = ["--tokens-per-sample", 16, "--batch-size", 2, "--stream-layout", "documents"]
    alone = evaluate(data, small / "gpt2" / "checkpoint.pt", *each)
    for name in ("infinite", "compressive", "infini"):
        path = small / name / "checkpoint.pt"
        off = evaluate(data, path, *each, "--model-overrides", "{'ltm_enabled': False}")
        assert result(evaluate(data, path, *each)) == result(off) == result(alone)
    model, places = opened(small / "infinite")
    tokens = torch.randint(4, WORDS, (2, 96))
    logits = stream(model.decoder, tokens, 16)[0]
    plain, _ = opened(small / "gpt2")
    difference = logits.log_softmax(dim=-1) - stream(plain.decoder, tokens, 16)[0].log_softmax(-1)
    assert difference[..., places].abs().max() < 1e-6


def test_sliding_windows_give_every_token_its_context(small, data):
    """By hand: token i from the last 16 or fewer, of which at least 12 are context."""
    path = small / "gpt2" / "checkpoint.pt"
    each = ["--tokens-per-sample", 16, "--batch-size", 3, "--stream-layout", "documents"]
    tokens, ppl = result(evaluate(data, path, *each, "--context-window", 12))
    model, _ = opened(small / "gpt2")
    decoder, words = model.decoder, model.decoder.dictionary
    total = count = 0
    for line in (data.parent / "test.txt").read_text().splitlines():
        own = [words.index(w) for w in line.split()] + [words.eos()]
        for begin in range(0, len(own), 4):
            first = max(0, begin - 12)
            inputs = torch.tensor([words.eos(), *own][first : begin + 4][: len(own) - first])[None]
            with torch.no_grad():
                logs = decoder(inputs, decoder.initial_state(1))[0][0].log_softmax(dim=-1)
            for at in range(begin, min(begin + 4, len(own))):
                total -= float(logs[at - first, own[at]])
                count += 1
    assert count == tokens
    assert abs(torch.tensor(total / count).exp() / ppl - 1) < 1e-3
    assert ppl != result(evaluate(data, path, *each))[1]
    said = evaluate(data, small / "infinite" / "checkpoint.pt", *each, "--context-window", 8, ok=0)
    assert "--context-window is not for streams" in said
    said = evaluate(data, path, *each, "--context-window", 16, ok=False)
    assert "less --context-window" in said
    with pytest.raises(ValueError, match="a segment of 33 tokens is longer than the 32 positions"):
        new_reading(decoder, 1, 33)


def test_words_that_gpt2_has_not_are_refused(small, tmp_path):
    (tmp_path / "test.txt").write_text("1 2 3 hello 4\n")
    fairseq(
        "preprocess", "--only-source", "--testpref", tmp_path / "test.txt",
        "--destdir", tmp_path / "bin", "--srcdict", small / "gpt2" / "dict.txt",
    )  # fmt: skip
    path = small / "gpt2" / "checkpoint.pt"
    said = evaluate(tmp_path / "bin", path, "--tokens-per-sample", 16, ok=False)
    assert "<unk>, which is not a token of this GPT-2" in said


# fine-tuning


def finetune(data, small, save_dir, *args, arch=INFINITE, ok=True):
    return fairseq(
        "train", data, *TASK, *arch, *SIZES, *TRAIN, "--stream-layout", "documents",
        "--finetune-from-model", small / "gpt2" / "checkpoint.pt", "--save-dir", save_dir,
        "--max-update", 30, "--lr", 0.002, *args, ok=ok,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("arch", [INFINITE, [*INFINITE, "--ltm-sticky"], COMPRESSIVE, INFINI])
def test_gpt2_alone_is_fine_tuned_with_any_memory(small, data, tmp_path, arch):
    printed = finetune(data, small, tmp_path, arch=arch)
    assert "has no long-term memory: it starts as new" in printed
    path = tmp_path / "checkpoint_last.pt"
    each = ["--tokens-per-sample", 12, "--batch-size", 2, "--stream-layout", "documents"]
    off = evaluate(data, path, *each, "--model-overrides", "{'ltm_enabled': False}")
    on = evaluate(data, path, *each)
    assert re.search(r"Loss .*", on)[0] != re.search(r"Loss .*", off)[0]


def test_a_frozen_host_stays_and_its_memory_learns(small, data, tmp_path):
    finetune(data, small, tmp_path, "--freeze-host")
    before = load(small / "gpt2" / "checkpoint.pt")["model"]
    after = load(tmp_path / "checkpoint_last.pt")["model"]
    for name, x in before.items():
        assert torch.equal(x, after[name]), name
    assert after["decoder.layers.1.memory.reader.output.weight"].abs().max() > 0
    convert("--back", tmp_path / "checkpoint_last.pt", tmp_path / "hf", "--dict", data / "dict.txt")
    one, two = (load_file(f / "model.safetensors") for f in (small / "hf", tmp_path / "hf"))
    assert all(torch.equal(one[key], two[key]) for key in one)
    said = finetune(
        data,
        small,
        tmp_path / "x",
        "--freeze-host",
        arch=["--arch", "selective_memory_lm_gpt2"],
        ok=0,
    )
    assert "--freeze-host leaves nothing to learn" in said


def test_a_segment_longer_than_the_positions_is_named(small, data, tmp_path):
    args = [data, *TASK, "--arch", "gpt2_lm", *SIZES, *TRAIN, "--tokens-per-sample", 64]
    said = commands.refusal("fairseq-train", *args, "--save-dir", tmp_path, "--max-update", 1)
    assert "lower --tokens-per-sample" in said


def test_plain_data_of_a_corpus_may_train_a_gpt2_from_scratch(data_bin, tmp_path):
    """Any dictionary, <unk> included."""
    model = ["--arch", "gpt2_lm", *SIZES]
    fairseq("train", data_bin, *TASK, *model, *TRAIN, "--save-dir", tmp_path, "--max-update", 20)
    tokens, ppl = result(
        evaluate(data_bin, tmp_path / "checkpoint_last.pt", "--tokens-per-sample", 12)
    )
    assert 1 < ppl < 100


# the configs, by hydra


@pytest.mark.slow
def test_each_group_has_its_own_learning_rate_and_resumes_exactly(small, data, tmp_path):
    def run(folder, updates):
        command = [
            tool("hydra-train"), "--config-dir", CONFIGS / "paper",
            "--config-name", "infinite_former_sticky", f"task.data={data}",
            f"checkpoint.save_dir={folder}", f"hydra.run.dir={folder}", "common.cpu=true",
            f"common.user_dir={ROOT / 'fairseq_inf'}", "common.log_format=json",
            f"checkpoint.finetune_from_model={small / 'gpt2' / 'checkpoint.pt'}",
            "task.tokens_per_sample=16", "model.decoder_layers=2", "model.decoder_embed_dim=16",
            "model.decoder_ffn_embed_dim=64", "model.decoder_attention_heads=2",
            "model.decoder_positions=32", "model.ltm_basis=16", "model.ltm_threshold=0",
            f"optimization.max_update={updates}", "+model.checkpoint_activations=true",
        ]  # fmt: skip
        done = subprocess.run([*map(str, command)], cwd=ROOT, text=True, capture_output=True)
        assert "done training" in done.stdout + done.stderr, done.stdout + done.stderr
        return load(folder / "checkpoint_last.pt")

    whole = run(tmp_path / "whole", 12)
    groups = whole["last_optimizer_state"]
    assert groups["default"]["param_groups"][0]["lr"] == 5e-5
    assert groups["memory"]["param_groups"][0]["lr"] == 2.5e-4
    first = run(tmp_path / "parts", 6)
    assert first["optimizer_history"][-1]["num_updates"] == 6
    # the memory of the training is part of what goes on
    parts = run(tmp_path / "parts", 12)
    for name, x in whole["model"].items():
        assert torch.equal(x, parts["model"][name]), name
    moved = whole["model"]["decoder.layers.0.memory.reader.output.weight"].abs().max()
    host = "decoder.layers.0.inner.weight"
    before = load(small / "gpt2" / "checkpoint.pt")["model"][host]
    assert 0 < (whole["model"][host] - before).abs().max() <= 12.1 * 5e-5 < moved <= 12.1 * 2.5e-4


@pytest.mark.slow
def test_compare_prints_words_sliding_windows_and_memories_off(small, data, tmp_path):
    (tmp_path / "bin").mkdir()
    for path in data.iterdir():
        (tmp_path / "bin" / path.name).write_bytes(path.read_bytes())
    lines = (data.parent / "test.txt").read_text().splitlines()
    tokens = sum(len(line.split()) + 1 for line in lines)
    counts = {"documents": 4, "words": 300, "tokens": tokens}
    (tmp_path / "bin" / "documents.json").write_text(json.dumps({"encoding": "x", "test": counts}))
    sizes = [
        f"model.{w[2:].replace('-', '_')}={v}" for w, v in zip(SIZES[::2], SIZES[1::2], strict=True)
    ]
    command = [
        sys.executable, "-m", "fairseq_inf.experiments.compare",
        *(CONFIGS / "small" / f"{r}.yaml" for r in PAIR),
        "--data", tmp_path / "bin", "--out", tmp_path / "out", "--cpu", "--jobs", 2, "--seeds", 1,
        "--eval-rows", 2, "--context-window", 6, "task.tokens_per_sample=12", *sizes,
        "optimization.max_update=4", "dataset.batch_size=2",
        f"checkpoint.finetune_from_model={small / 'gpt2' / 'checkpoint.pt'}",
    ]  # fmt: skip
    done = subprocess.run([*map(str, command)], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = re.findall(r"^\| (.*) \|$", done.stdout, re.M)
    head, rows = rows[0].split(" | "), [row.split(" | ") for row in rows[2:]]
    assert [row[0] for row in rows] == ["gpt2", "gpt2, sliding window", "infinite former"]
    assert head[3] == "per word" and "16.64 / 32.61" in rows[2]
    path = tmp_path / "out" / "gpt2" / "seed1"
    found = json.loads((path / "result.json").read_text())
    assert abs(found["on"]["word_ppl"] / 2 ** (found["on"]["bits"] * tokens / 300) - 1) < 1e-9
    assert found["sliding"]["ppl"] != found["on"]["ppl"]
    command = [
        sys.executable,
        "-m",
        "fairseq_inf.experiments.perplexity",
        tmp_path / "bin",
        "--cpu",
        "--path",
    ]
    command = [*map(str, [*command, path / "checkpoint_last.pt", "--batch-size", 2])]
    printed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True).stdout
    assert printed.splitlines()[1] == f"300 words, perplexity {found['on']['word_ppl']:.2f}"
