"""Each architecture has the settings that it reads, and no others."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import ROOT
from fairseq import options
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY
from zoo import make_model

from fairseq_inf.models.memory_lm import MemoryLM

ARCHS = [
    arch
    for arch, model in ARCH_MODEL_REGISTRY.items()
    if isinstance(model, type) and issubclass(model, MemoryLM)
]


def test_the_page_of_flags_is_the_one_that_the_code_makes():
    made = subprocess.run(
        [sys.executable, "docs/flags.py"], cwd=ROOT, text=True, capture_output=True, check=True
    )
    page = (ROOT / "docs" / "flags.md").read_text()
    assert page == made.stdout, "python docs/flags.py > docs/flags.md"


def test_models_and_tasks_have_45_settings_at_the_most():
    page = (ROOT / "docs" / "flags.md").read_text().split("## Criterion")[0]
    assert 30 < len(re.findall(r"^\| `--", page, re.M)) <= 45


def parse(arch, *flags):
    """As fairseq-train does."""
    parser = options.get_training_parser("language_modeling")
    return options.parse_args_and_arch(parser, ["data", "--arch", arch, *flags])


@pytest.mark.parametrize("arch", ARCHS)
def test_an_architecture_takes_its_own_settings_and_refuses_those_of_all_others(arch, capsys):
    own = ARCH_MODEL_REGISTRY[arch].config.__dataclass_fields__
    every = {
        name: one
        for other in ARCHS
        for name, one in ARCH_MODEL_REGISTRY[other].config.__dataclass_fields__.items()
        if one.metadata.get("help") and name != "ltm_enabled"
    }
    flags = {name: "--" + name.replace("_", "-") for name in every}
    for name, one in every.items():
        if name not in own:
            with pytest.raises(SystemExit):
                parse(arch, flags[name], *([] if one.type is bool else ["1"]))
            assert f"unrecognized arguments: {flags[name]}" in capsys.readouterr().err
    given = []
    for name, one in every.items():
        if name in own:
            value = getattr(one.default, "value", one.default)
            given += [flags[name], *([] if one.type is bool else [str(value or 1)])]
    assert {name for name in every if name in own} <= vars(parse(arch, *given)).keys()


def test_a_default_of_an_architecture_yields_to_what_is_given():
    """The paper's tau, where another schedule has none."""
    arch = "infinite_former_lm_sorting"
    assert parse(arch).ltm_tau == 0.75
    assert not hasattr(parse(arch, "--ltm-schedule", "logarithmic"), "ltm_tau")
    assert parse(arch, "--ltm-schedule", "logarithmic", "--ltm-tau", "0.5").ltm_tau == 0.5


@pytest.mark.parametrize("heads,keys", [(9, 3), (2, 2), (4, 4), (6, 2)])
def test_a_llama_of_any_number_of_heads_has_heads_of_keys(heads, keys):
    config = ARCH_MODEL_REGISTRY["llama_lm"].config
    cfg = config(decoder_attention_heads=heads, decoder_embed_dim=8 * heads, decoder_layers=1)
    cfg.seed = 1
    words = SimpleNamespace(source_dictionary=Dictionary())
    model = ARCH_MODEL_REGISTRY["llama_lm"].build_model(cfg, words)
    assert model.decoder.layers[0].attention.key_value.weight.size(0) == 2 * 8 * keys


@pytest.mark.parametrize(
    "name,settings,said",
    [
        ("infinite_former", {"ltm_basis": 1_000_000}, "--ltm-basis must be at most 16,384, got "
         "1,000,000: a write is a matrix of so many rows and columns, here 8,000 GB"),
        ("infinite_former", {"ltm_density": "gibbs", "ltm_gain": 1e30}, "--ltm-gain must be "
         "above 0 and at most 100, got 1e"),
        ("compressive_transformer", {"cmem_length": 0}, "--cmem-length must be at least 1"),
        ("selective", {"ltm_slots": 0}, "--ltm-slots must be at least 1"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be_is_refused(name, settings, said):
    with pytest.raises(ValueError, match=said):
        make_model(name, **settings)


@pytest.mark.parametrize(
    "settings,said",
    [
        ({"ltm_density": "gaussian", "ltm_gain": 1.0}, "--ltm-gain is not read with --ltm-density "
         "gaussian, only with gibbs: leave it out"),
        ({"ltm_oldest": 99, "ltm_schedule": "uniform"}, "--ltm-oldest is not read with "
         "--ltm-schedule uniform, only with logarithmic: leave it out"),
        ({"ltm_tau": 0.5, "ltm_schedule": "logarithmic"}, "--ltm-tau is not read with "
         "--ltm-schedule logarithmic, only with constant or uniform: leave it out"),
    ],
)  # fmt: skip
def test_a_setting_that_another_one_makes_idle_is_refused(settings, said):
    with pytest.raises(ValueError, match=said):
        make_model(**{"ltm_density": "gibbs", "ltm_schedule": "uniform", **settings})
