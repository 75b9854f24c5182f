"""Llama as a host: parity with Hugging Face's and with a naive one, settings, commands."""

import functools

import naive
import pytest
import torch
from conftest import train
from fairseq.models import ARCH_MODEL_REGISTRY
from test_decoder import assert_equal
from test_generation import assert_tokens_one_by_one
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import MEMORIES, make_model, stream, text

from fairseq_inf.models import InfiniteFormerLM
from fairseq_inf.models.generation import new_reading
from fairseq_inf.models.hosts import LlamaDecoder
from fairseq_inf.modules import RMSNorm

llama = functools.partial(make_model, host="llama")


# parity with Hugging Face


def hugging_face(decoder, cfg):
    """A LlamaForCausalLM with weights that matter, which the decoder gets too."""
    torch.manual_seed(0)
    first = decoder.layers[0]
    config = LlamaConfig(
        vocab_size=len(decoder.dictionary),
        hidden_size=decoder.dim,
        intermediate_size=first.inner.out_features,
        num_hidden_layers=len(decoder.layers),
        num_attention_heads=first.attention.num_heads,
        num_key_value_heads=first.attention.num_key_heads,
        max_position_embeddings=cfg["decoder_positions"],
        rope_theta=cfg["rope_theta"],
        rms_norm_eps=decoder.norm.eps,
        tie_word_embeddings=not cfg.get("untie_embeddings"),
        pad_token_id=decoder.dictionary.pad(),
    )
    theirs = LlamaForCausalLM(config).eval()
    state = theirs.state_dict()
    for x in state.values():
        norm = x.dim() == 1
        torch.nn.init.normal_(x, mean=float(norm), std=0.1 if norm else 0.5 * decoder.dim**-0.5)
    theirs.load_state_dict(state)
    state = theirs.state_dict()
    ours = {"absent": decoder.absent, "norm.weight": state["model.norm.weight"]}
    ours["embed_tokens.weight"] = state["model.embed_tokens.weight"]
    ours["output_projection.weight"] = state["lm_head.weight"]
    for i in range(len(decoder.layers)):
        old, new = f"model.layers.{i}.", f"layers.{i}."
        key, value = (state[f"{old}self_attn.{x}_proj.weight"] for x in "kv")
        ours |= {
            new + "attention_norm.weight": state[old + "input_layernorm.weight"],
            new + "attention.query.weight": state[old + "self_attn.q_proj.weight"],
            new + "attention.key_value.weight": torch.cat([key, value]),
            new + "attention.output.weight": state[old + "self_attn.o_proj.weight"],
            new + "ffn_norm.weight": state[old + "post_attention_layernorm.weight"],
            new + "gate.weight": state[old + "mlp.gate_proj.weight"],
            new + "inner.weight": state[old + "mlp.up_proj.weight"],
            new + "outer.weight": state[old + "mlp.down_proj.weight"],
        }
    decoder.load_state_dict(ours)
    return theirs


SMALL = {
    "decoder_key_heads": None,
    "decoder_layers": 3,
    "decoder_embed_dim": 48,
    "decoder_ffn_embed_dim": 112,
    "decoder_attention_heads": 6,
    "decoder_positions": 600,
    "rope_theta": 5000.0,
    "norm_eps": 1e-6,
    "stm_length": 0,
    "sink_tokens": 0,
}
SIZES_OF = ("layers", "embed_dim", "ffn_embed_dim", "attention_heads", "key_heads", "positions")
SMOL = {f"decoder_{name}": getattr(LlamaDecoder.Config, f"decoder_{name}") for name in SIZES_OF}
SMOL |= {"rope_theta": 100000.0, "norm_eps": 1e-5}


@pytest.mark.parametrize(
    "sizes",
    [
        {**SMALL, "decoder_key_heads": 2},
        {**SMALL, "decoder_key_heads": 2, "untie_embeddings": True},
        SMALL,
        {**SMALL, "untie_embeddings": True},
        {**SMALL, "decoder_key_heads": 1, "stm_length": 88},
        {**SMOL, "decoder_layers": 6},
    ],
    ids=["grouped", "grouped-untied", "plain", "untied", "short-term", "SmolLM2"],
)
def test_logits_equal_those_of_hugging_face(sizes):
    decoder = llama("transformer_xl", sharp=False, **sizes).decoder
    theirs = hugging_face(decoder, sizes)
    draw = torch.Generator().manual_seed(1)
    for length in (1, 63, 512):
        tokens = torch.randint(4, len(decoder.dictionary), (2, length), generator=draw)
        lengths = torch.tensor([length, (length + 1) // 2])
        mask = torch.arange(length) < lengths[:, None]
        tokens = tokens.masked_fill(~mask, decoder.dictionary.pad())
        with torch.no_grad():
            expected = theirs(tokens, attention_mask=mask.long()).logits
            found, _, _ = decoder(tokens, decoder.initial_state(2), lengths)
        assert expected[mask].std() > 0.1
        assert (found - expected)[mask].abs().max() < 1e-4, length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_that_of_hugging_face_to_the_bit(dtype):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    ours, theirs = RMSNorm(64, 1e-6).to(dtype), LlamaRMSNorm(64, 1e-6).to(dtype)
    torch.nn.init.normal_(ours.weight)
    theirs.load_state_dict(ours.state_dict())
    x = (50 * torch.randn(3, 5, 64)).to(dtype)
    assert torch.equal(ours(x), theirs(x))


def test_a_stream_in_segments_equals_hugging_face_on_the_whole():
    sizes = {**SMALL, "decoder_key_heads": 3, "stm_length": 130}
    decoder = llama("transformer_xl", sharp=False, **sizes).decoder
    tokens = text(2, 130)
    with torch.no_grad():
        expected = hugging_face(decoder, sizes)(tokens).logits
    assert (stream(decoder, tokens, 17)[0] - expected).abs().max() < 1e-4


# the layer


@pytest.mark.parametrize("name", ["transformer_xl", "compressive_transformer"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("stm,segment,sinks", [(6, 5, 0), (7, 3, 4), (0, 7, 2)])
def test_llama_equals_a_naive_one_with_its_gradients(name, heads, stm, segment, sinks):
    decoder = llama(name, decoder_key_heads=heads, stm_length=stm, sink_tokens=sinks)
    assert_equal(naive.llama, decoder.double().decoder, text(1, 33), segment)


def test_short_term_memory_as_long_as_the_text_equals_one_long_segment():
    decoder = llama("transformer_xl", stm_length=63).double().decoder
    tokens = text(2, 63)
    whole, _ = stream(decoder, tokens, 63)
    for segment in (1, 7, 10):
        assert torch.allclose(whole, stream(decoder, tokens, segment)[0], atol=1e-9)


def test_keys_are_found_at_their_distance_however_long_the_stream():
    """What a segment makes of the last S vectors does not depend on where in the stream it is."""
    decoder = llama("transformer_xl", decoder_layers=1, sink_tokens=0).double().decoder
    tokens = text(1, 400)
    whole, state = stream(decoder, tokens, 5)
    assert state.position.item() == 400
    last, _ = stream(decoder, tokens[:, 385:], 5)  # one layer looks S = 6 vectors back
    assert torch.allclose(whole[:, 395:], last[:, 10:], atol=1e-9)


@pytest.mark.parametrize("name", MEMORIES)
def test_tokens_one_by_one_without_a_short_term_memory(name):
    assert_tokens_one_by_one(llama(name, stm_length=0).double().decoder, atol=1e-9)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("host", ["gpt2", "llama"])
@pytest.mark.parametrize("name", ["transformer_xl", "compressive_transformer", "gibbs"])
def test_tokens_one_by_one_of_heads_that_share_keys(name, host, whole, monkeypatch):
    """Of all of a cache, too, as in half precision."""
    monkeypatch.setattr("fairseq_inf.models.generation.copies_parts", lambda like: whole)
    heads = {"decoder_attention_heads": 4, **({"decoder_key_heads": 2} if host == "llama" else {})}
    decoder = make_model(name, host=host, **heads).double().decoder
    assert_tokens_one_by_one(decoder, atol=1e-9)


# settings


@pytest.mark.parametrize(
    "arch", ["infinite_former_lm_llama", "selective_memory_lm_llama", "llama_lm"]
)
def test_every_memory_has_an_architecture_of_smollm2(arch):
    config = ARCH_MODEL_REGISTRY[arch].config()
    assert {name: getattr(config, name) for name in SMOL} == SMOL


@pytest.mark.parametrize(
    "kwargs,flag",
    [
        ({"decoder_key_heads": 3}, "--decoder-key-heads 3 must divide --decoder-attention-heads 2"),
        ({"decoder_key_heads": 0}, "--decoder-key-heads must be at least 1, got 0"),
        ({"decoder_embed_dim": 18}, "--decoder-embed-dim 18 over --decoder-attention-heads 2"),
        ({"rope_theta": 0.0}, "--rope-theta must be at least"),
        ({"norm_eps": -1.0}, "--norm-eps must be at least"),
    ],
)
def test_bad_settings_name_their_flag(kwargs, flag):
    with pytest.raises(ValueError, match=flag):
        llama(**kwargs)


def test_sinks_short_term_memory_and_segment_stay_within_the_positions():
    decoder = llama(decoder_positions=18).decoder
    new_reading(decoder, 1, 10)
    said = "a segment of 11 tokens after a short-term memory of 6 after 2 sinks is longer than the "
    said += "18 positions of this Llama: lower --tokens-per-sample or"
    with pytest.raises(ValueError, match=said):
        decoder(text(1, 11), decoder.initial_state(1))


def test_words_that_the_model_has_not_are_refused_and_never_said():
    decoder = llama().decoder
    decoder.absent[5] = -torch.inf
    tokens = torch.tensor([[4, 6, 7]])
    out, state, _ = decoder(tokens, decoder.initial_state(1))
    assert (out[..., 5] == -torch.inf).all() and out[..., 6].isfinite().all()
    with pytest.raises(ValueError, match="the text has w1, which is not a token of this Llama"):
        decoder(torch.tensor([[4, 5]]), state)


def test_what_a_memory_depends_on_is_part_of_its_fingerprint():
    model = llama(sharp=False)
    for other in ({"rope_theta": 500.0}, {"norm_eps": 1e-6}):
        changed = llama(sharp=False, **other)
        changed.load_state_dict(model.state_dict())
        assert changed.fingerprint() != model.fingerprint()
    assert llama(sharp=False).fingerprint() == model.fingerprint()


# by fairseq's commands


SIZES = (
    "--decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 "
    "--decoder-attention-heads 4 --decoder-key-heads 2 --stm-length 12 --untie-embeddings"
).split()
TRAINED = {
    "infinite_former_lm_llama": ["--ltm-basis", "10", "--ltm-widths", "0.05,0.2"],
    "compressive_transformer_lm_llama": ["--cmem-length", "8", "--compression-rate", "5"],
    "llama_lm": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("arch", TRAINED)
def test_a_memory_file_of_a_trained_llama_answers_as_the_memory_itself(data_bin, arch, tmp_path):
    model = ["--arch", arch, *SIZES, *TRAINED[arch]]
    assert "done training" in train(data_bin, tmp_path, "--max-update", 20, model=model)
    hub = InfiniteFormerLM.from_pretrained(str(tmp_path), "checkpoint_last.pt", str(data_bin))
    memory = hub.read((data_bin.parent / "valid.txt").read_text())
    memory.save(tmp_path / "m.safetensors")
    again = hub.load_memory(tmp_path / "m.safetensors")
    question = "word1 word2 word3 word4"
    asked = hub.score(question, memory)["positional_scores"]
    assert torch.equal(asked, hub.score(question, again)["positional_scores"])
    assert not torch.equal(asked, hub.score(question)["positional_scores"])
    assert hub.generate("word1", memory) == hub.generate("word1", again)
