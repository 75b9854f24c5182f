"""Checkpoints and memory files of version 0.3, as tests/old keeps them."""

import json
import shutil

import pytest
import torch
from conftest import ROOT

from fairseq_inf.models import InfiniteFormerLM

OLD = ROOT / "tests" / "old"
SCORES = json.loads((OLD / "scores.json").read_text())
QUESTION = "w1 w2 w3 w4 w5 w6 w7 w8 w9 w10"


@pytest.mark.parametrize("name", SCORES)
def test_an_old_checkpoint_and_its_memory_file_give_the_scores_of_then(name, tmp_path):
    shutil.copy(OLD / "dict.txt", tmp_path)
    hub = InfiniteFormerLM.from_pretrained(str(OLD), f"{name}.pt", str(tmp_path))
    expected = torch.tensor(SCORES[name])

    def asked(memory):
        return hub.score(QUESTION, memory)["positional_scores"]

    memory = hub.read((OLD / "text.txt").read_text())
    assert torch.allclose(asked(memory), expected, atol=1e-5)
    if name == "compressive_gpt2":  # its output projection has another name now
        with pytest.raises(ValueError, match="written by another model, or with other settings"):
            hub.load_memory(OLD / f"{name}.safetensors")
    else:
        assert torch.allclose(
            asked(hub.load_memory(OLD / f"{name}.safetensors")), expected, atol=1e-5
        )
