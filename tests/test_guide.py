"""The guide to a memory in a decoder of one's own: its code is what is tested."""

import re
import subprocess
import sys

import torch
from conftest import ROOT
from torch import nn

GUIDE = ROOT / "examples" / "own_decoder" / "README.md"
CODE = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)


def layer():
    torch.manual_seed(0)
    names = {}
    exec(CODE[0], names)
    return names["Layer"](dim=16, heads=2).eval()


def read(layer, segments):
    last, state = torch.zeros(len(segments[0]), 0, 16), layer.memory.initial_state(len(segments[0]))
    outs = []
    for x in segments:
        y, last, state, _ = layer(x, last, state)
        outs.append(y)
    return outs, last, state


def test_it_runs_without_fairseq_and_is_ten_lines():
    assert sum(code.count("# memory\n") for code in CODE) == 10
    block = "import sys; sys.modules['fairseq'] = None\n"
    command = [sys.executable, "-c", block + "\n".join(CODE)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_it_starts_as_the_layer_without_a_memory_and_then_remembers():
    model = layer()
    first, other, second = torch.randn(3, 2, 7, 16)
    alone, _, _ = read(model, [second])
    assert torch.equal(read(model, [first, second])[0][1], alone[0])
    nn.init.normal_(model.memory.output.weight)
    one, two = (read(model, [x, second])[0][1] for x in (first, other))
    assert not torch.allclose(one, two, atol=1e-3)


def test_a_row_that_begins_anew_is_as_a_fresh_one():
    model = layer()
    nn.init.normal_(model.memory.output.weight)
    first, second = torch.randn(2, 2, 7, 16)
    _, last, state = read(model, [first, second])
    ended = torch.tensor([True, False])
    state = state.reset(ended)
    plan = model.memory.plan([0 if e else last.size(1) for e in ended], state)
    query = torch.randn(2, 2, 5, 8)
    found, _, after = model.memory(query, last, state, plan)
    assert not found[0].any() and found[1].any()
    assert after.tokens.tolist() == [0, 14]
