"""Checkpoints and memory files of version 0.3, as tests/old has them, and what followed it."""

import json
import re
import shutil

import pytest
import torch
from conftest import ROOT
from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf
from zoo import make_model

from fairseq_inf.models import InfiniteFormerLM
from fairseq_inf.models.settings import resolve
from fairseq_inf.models.upgrade import upgrade

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


# what every model had between 0.3 and 0.4, and a continuous memory
BETWEEN = {
    "adaptive_input": False, "adaptive_softmax_cutoff": None, "activation_fn": "gelu",
    "decoder_host": "transformer_xl", "ltm_pick": 1, "ltm_start": "silent", "slot_spacing": 0.0,
}  # fmt: skip
CONTINUOUS = {
    "ltm_schedule": "uniform", "ltm_density": "gibbs", "ltm_oldest": 1_000_000, "ltm_gain": 0.1,
    "ltm_bins": 128, "ltm_points": None,
}  # fmt: skip


def upgraded(name, **settings):
    cfg = OmegaConf.create({"_name": name, "seed": 1, **settings})
    upgrade(cfg)
    resolve(cfg, ARCH_MODEL_REGISTRY[cfg["_name"]].config)
    return cfg


@pytest.mark.parametrize(
    "settings",
    [
        {"ltm_samples": 64},
        {"ltm_schedule": "logarithmic", "ltm_oldest": 99},
        {"ltm_density": "gaussian", "ltm_tau": 0.5},
    ],
)
def test_the_settings_of_a_checkpoint_are_kept(settings):
    now = {"ltm_schedule": "uniform", "ltm_density": "gibbs"}
    for before in (now, BETWEEN | CONTINUOUS):
        cfg = upgraded("infinite_former_lm", **before | settings)
        assert {name: cfg[name] for name in settings} == settings


def test_the_sizes_of_gpt2_that_had_names_load():
    settings = BETWEEN | {"decoder_host": "gpt2", "activation_fn": "gelu_accurate"}
    sizes = {"decoder_layers": 24, "decoder_embed_dim": 1024}
    for old, now in (
        ("gpt2_lm_medium", "gpt2_lm"),
        ("infinite_former_lm_gpt2_xl", "infinite_former_lm_gpt2"),
    ):
        cfg = upgraded(old, **settings, **sizes)
        assert cfg["_name"] == now and {name: cfg[name] for name in sizes} == sizes


@pytest.mark.parametrize(
    "settings", [{"ltm_pick": 4}, {"ltm_points": 512}, {"slot_spacing": 4.0}, {"ltm_start": "host"}]
)
def test_an_old_setting_that_is_gone_is_refused_where_it_changed_the_numbers(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=f"the checkpoint has {name} .*: load it with the version"):
        upgraded("infinite_former_lm", **BETWEEN | CONTINUOUS | settings)


@pytest.mark.parametrize("density", ["gaussian", "gibbs"])
def test_the_weights_of_a_memory_that_was_in_one_piece_load(density):
    model = make_model(ltm_density=density, ltm_schedule="constant")
    new = model.state_dict()
    old = {re.sub(r"\.memory\.(reader|store)\.", ".memory.", name): x for name, x in new.items()}
    assert old.keys() != new.keys()
    model.upgrade_state_dict_named(old, "")
    assert old.keys() == new.keys() and all(old[name] is new[name] for name in new)
