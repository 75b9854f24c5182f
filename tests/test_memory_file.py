"""Memory files: what is loaded is what was saved, or there is a sentence; there is no third way."""

import json
import random
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from zoo import MEMORIES, make_model, text

from fairseq_inf.memory import load_state, save_state
from fairseq_inf.memory.file import SCHEMA, checksum
from fairseq_inf.models.generation import new_reading, read

LENGTH = 5
CASES = 2_000  # of each model


@pytest.fixture(params=MEMORIES)
def memory(request, tmp_path):
    """-> the model's decoder, the reading of a text, its file"""
    decoder = make_model(request.param).decoder
    reading = read(decoder, new_reading(decoder, 1, LENGTH), text(1, 43), torch.tensor([43]))
    path = tmp_path / "memory.safetensors"
    save_state(reading, path, "me")
    return decoder, reading, path


def scores(decoder, reading):
    _, found = read(decoder, reading, text(1, 9, seed=3), torch.tensor([9]), score=True)
    return found


def load(decoder, path):
    return load_state(path, new_reading(decoder, 1, LENGTH), "me")


def forge(path, lie, schema=SCHEMA):
    """A file with a right checksum of changed tensors."""
    tensors = lie(load_file(path))
    metadata = {"schema": schema, "fingerprint": "me", "checksum": checksum(tensors)}
    save_file(tensors, path, metadata=metadata)


def damaged(draw, whole):
    """The bytes of a file after an accident or a lie."""
    size = struct.unpack("<Q", whole[:8])[0]
    kind = draw.choice(["flip", "flip", "flip", "cut", "more", "swap", "header", "length"])
    if kind == "flip":
        out = bytearray(whole)
        for _ in range(draw.choice([1, 1, 2, 20])):
            out[draw.randrange(len(out))] ^= 1 << draw.randrange(8)
        return bytes(out)
    if kind == "cut":
        return whole[: draw.randrange(len(whole))]
    if kind == "more":
        return whole + draw.randbytes(draw.randrange(1, 40))
    if kind == "swap":  # two bytes of the body
        out = bytearray(whole)
        a, b = draw.sample(range(8 + size, len(out)), 2)
        out[a], out[b] = out[b], out[a]
        return bytes(out)
    if kind == "length":
        return struct.pack("<Q", draw.choice([0, 1, size - 1, size + 1, 2**63])) + whole[8:]
    header = json.loads(whole[8 : 8 + size])
    names = [name for name in header if name != "__metadata__"]
    name, other = draw.sample(names, 2)
    lie = draw.choice(["name", "shape", "dtype", "offsets", "missing", "metadata", "exchange"])
    if lie == "name":
        header[name + "?"] = header.pop(name)
    elif lie == "shape":
        header[name]["shape"] = [draw.choice([0, -1, 2, 10**6]), *header[name]["shape"][1:]]
    elif lie == "dtype":
        header[name]["dtype"] = draw.choice(["F16", "I64", "U8", "X", None])
    elif lie == "offsets":
        header[name]["data_offsets"] = header[other]["data_offsets"]
    elif lie == "missing":
        del header[name]
    elif lie == "metadata":
        key = draw.choice(list(header["__metadata__"]))
        header["__metadata__"][key] = draw.choice(["", "x", SCHEMA, SCHEMA + "0"])
    else:
        header[name], header[other] = header[other], header[name]
    words = json.dumps(header).encode()
    return struct.pack("<Q", len(words)) + words + whole[8 + size :]


def test_a_damaged_file_gives_the_same_scores_or_one_sentence(memory):
    decoder, reading, path = memory
    whole, expected = path.read_bytes(), scores(decoder, reading)
    draw, refused = random.Random(1), 0
    for number in range(CASES):
        path.write_bytes(damaged(draw, whole))
        try:
            found = load(decoder, path)
        except ValueError as error:
            assert f"memory file {path}" in str(error) and "\n" not in str(error), number
            refused += 1
        else:
            assert torch.equal(scores(decoder, found), expected), number
    assert refused > 0.9 * CASES


COUNTERS = [-(2**63), -7, -1, 10**6, 2**31, 2**63 - 1]


def test_a_counter_out_of_its_range_is_refused_though_the_checksum_is_right(memory):
    decoder, reading, path = memory
    counters = [
        name
        for name, x in reading.tensors().items()
        if x.dtype in (torch.int, torch.long) and not name.endswith(("key", "position"))
    ]
    assert "count" in counters and "memory.filled" in counters
    for name in counters:
        for value in COUNTERS:
            kind = torch.iinfo(reading.tensors()[name].dtype)
            word = name in ("tokens", "memory.last.0") and value > 0
            if word or not kind.min <= value <= kind.max:
                continue  # the hub knows the dictionary
            forge(
                path, lambda x, name=name, value=value: {**x, name: torch.full_like(x[name], value)}
            )
            with pytest.raises(ValueError, match=f"cannot be a memory: {name} is out of its range"):
                load(decoder, path)
            save_state(reading, path, "me")
    for value in (0, LENGTH + 1):
        forge(path, lambda x, value=value: {**x, "count": torch.tensor([value])})
        with pytest.raises(ValueError, match="count is out of its range"):
            load(decoder, path)
        save_state(reading, path, "me")


def test_an_empty_memory_with_something_in_it_is_refused(tmp_path):
    decoder = make_model("infinite_former").decoder
    reading = read(decoder, new_reading(decoder, 1, LENGTH), text(1, 43), torch.tensor([43]))
    path = tmp_path / "memory"
    save_state(reading, path, "me")
    name = "memory.layers.0.memory.tokens"
    forge(path, lambda x: {**x, name: torch.zeros_like(x[name])})
    with pytest.raises(ValueError, match=f"{name} is out of its range"):
        load(decoder, path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_values_that_no_memory_has_are_refused(memory, value):
    decoder, _, path = memory
    name = "memory.layers.0.window.vectors"
    forge(path, lambda x: {**x, name: x[name].index_fill(1, torch.tensor([0]), value)})
    with pytest.raises(ValueError, match=f"NaN, infinity or more than 1e\\+09 in {name}"):
        load(decoder, path)


def test_no_rows_are_refused(memory):
    decoder, _, path = memory
    forge(path, lambda x: {name: y[:0].clone() for name, y in x.items()})
    with pytest.raises(ValueError, match="does not fit this model"):
        load(decoder, path)


@pytest.mark.parametrize("number", [1, 2])
def test_a_file_of_an_older_version_is_refused(memory, number):
    decoder, _, path = memory
    forge(path, dict, f"fairseq_inf memory {number}")
    with pytest.raises(ValueError, match="write it again with this version"):
        load(decoder, path)
