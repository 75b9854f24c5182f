"""Checkpoints and memory files of version 0.3, as tests/old has them."""

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
def test_an_old_checkpoint_gives_the_scores_of_then_and_an_old_memory_file_is_refused(
    name, tmp_path
):
    shutil.copy(OLD / "dict.txt", tmp_path)
    hub = InfiniteFormerLM.from_pretrained(str(OLD), f"{name}.pt", str(tmp_path))
    memory = hub.read((OLD / "text.txt").read_text())
    scores = hub.score(QUESTION, memory)["positional_scores"]
    assert torch.allclose(scores, torch.tensor(SCORES[name]), atol=1e-5)
    with pytest.raises(ValueError, match=f"{name}.safetensors has schema .* write it again"):
        hub.load_memory(OLD / f"{name}.safetensors")
