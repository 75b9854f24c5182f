"""Weights in fewer bits: codes of a file are kept, one product has one value in all its forms, and
reading and writing agree."""

import commands
import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_pretrained import convert, hugging_face, write_gguf
from torch import nn
from zoo import make_model, text

from fairseq_inf.hub import open_hub
from fairseq_inf.models.generation import Continuation, new_reading, read
from fairseq_inf.modules import BITS, PackedLinear, pack

Q4_1 = gguf.GGMLQuantizationType.Q4_1
FEWER = ["bf16", "int8", "int4"]
WIDE = {"decoder_embed_dim": 64, "decoder_ffn_embed_dim": 96}  # there is a kernel for


def linear(rows, columns, bias=False):
    torch.manual_seed(0)
    return nn.Linear(columns, rows, bias)


def q4_1(weight):
    """-> what llama.cpp makes of a weight, and the codes in its blocks of two halves and 16 bytes,
    of which number i is in the low half of byte i, and number i + 16 in the high half"""
    blocks = gguf.quantize(weight.detach().numpy(), Q4_1)
    packed = blocks.reshape(len(weight), -1, 20)[..., 4:]
    codes = np.concatenate([packed & 15, packed >> 4], axis=-1).reshape(weight.shape)
    return torch.from_numpy(gguf.dequantize(blocks, Q4_1)), torch.from_numpy(codes)


def test_a_q4_1_file_keeps_its_codes():
    one = linear(48, 96)
    weight, codes = q4_1(one.weight)
    one.weight.data = weight
    four = PackedLinear(one, 4)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    assert torch.equal(four.codes, packed)
    # only the two numbers of a group are rounded, to 8 bits each
    reach = weight.view(48, 3, 32).abs().amax(dim=-1, keepdim=True).expand(-1, -1, 32).flatten(1)
    assert ((four.weight.float() - weight).abs() <= 2**-6 * reach).all()
    assert (linear(48, 96).weight - weight).abs().max() > 0.002


def test_a_map_that_a_file_holds_in_more_bits_gets_eight():
    maps = nn.ModuleDict({"fine": linear(48, 96), "coarse": linear(48, 96), "odd": linear(9, 33)})
    maps["coarse"].weight.data, _ = q4_1(maps["coarse"].weight)
    pack([maps], "int4")
    assert {name: x.bits for name, x in maps.items()} == {"fine": 8, "coarse": 4, "odd": 8}
    maps = nn.ModuleDict({"one": linear(48, 96), "odd": linear(9, 33)})  # of a file of floats
    pack([maps], "int4")
    assert {name: x.bits for name, x in maps.items()} == {"one": 4, "odd": 8}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weights", FEWER)
def test_few_rows_have_the_product_of_many(weights, bias):
    one = linear(48, 96, bias)
    x = torch.randn(2, 9, 96).bfloat16()
    exact = F.linear(x.float(), one.weight, one.bias)
    packed = PackedLinear(one, BITS[weights])
    many = packed(x)
    few = torch.cat([packed(x[:, i : i + 2]) for i in range(0, 9, 2)], dim=1)
    assert few.dtype == many.dtype == torch.bfloat16
    assert (few - many).abs().max() < 0.01 * exact.abs().max()
    rough = (many.float() - exact).abs().max() / exact.abs().max()
    assert {"bf16": 0, "int8": 0, "int4": 0.02}[weights] < rough
    assert rough < {"bf16": 0.01, "int8": 0.02, "int4": 0.2}[weights]


@pytest.mark.parametrize("host", ["llama", "gpt2"])
@pytest.mark.parametrize("weights", FEWER)
def test_tokens_one_by_one_follow_one_pass(weights, host):
    exact = make_model("selective", host=host, sharp=False, **WIDE).decoder
    model = make_model("selective", host=host, sharp=False, **WIDE)
    model.pack(weights)
    decoder = model.decoder
    assert decoder.embed_tokens.weight is decoder.output_projection.weight
    tokens, length = text(2, 43), 5
    lengths = torch.tensor([43, 43])

    def scores(decoder):
        return read(decoder, new_reading(decoder, 2, length), tokens, lengths, score=True)[1]

    go_on, found = Continuation(decoder, new_reading(decoder, 2, length)), []
    for i in range(43):
        out = go_on.output[:, 0].float().log_softmax(dim=-1)
        found.append(out.gather(1, tokens[:, i, None]))
        go_on.feed(tokens[:, i])
    one_by_one, one_pass = torch.cat(found, dim=1), scores(decoder)
    assert (one_by_one - one_pass).abs().max() < 0.05
    assert 0 < (one_pass - scores(exact)).abs().max() < 0.1


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model = hugging_face(folder / "hf", hidden_size=64, intermediate_size=96)
    path = write_gguf(folder / "model.gguf", model, Q4_1)
    flags = "--arch selective_memory_lm_llama --stm-length 8 --ltm-slots 8".split()
    convert(path, folder / "out", *flags, "--tokens-per-sample", 16)
    return folder / "out"


def test_a_memory_is_of_the_weights_that_wrote_it(imported, tmp_path):
    book, file = tmp_path / "book.txt", tmp_path / "memory.safetensors"
    book.write_text("the " * 40)
    options = ("--path", imported, "--output", file)
    commands.call("fairseq-inf-read", book, *options, "--weights", "int4")
    hub = open_hub(str(imported), weights="int4")
    memory = hub.load_memory(file)
    assert hub.generate("the", memory, max_tokens=20, min_len=19)
    for other in ({}, {"weights": "int8"}):
        with pytest.raises(ValueError, match="use the checkpoint, overrides, --weights and"):
            open_hub(str(imported), **other).load_memory(file)
    assert hub.fingerprint != open_hub(str(imported), weights="bf16").fingerprint


def test_weights_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="--weights must be float32, bf16, int8 or int4, got int5"):
        make_model(host="llama").pack("int5")
    with pytest.raises(ValueError, match="--weights is for pretrained hosts, Llama and GPT-2"):
        make_model().pack("int4")
