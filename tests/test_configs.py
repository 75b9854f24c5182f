"""The configs of the examples, whatever there is in examples/*/config/*/*.yaml."""

import argparse
from types import SimpleNamespace

import pytest
import yaml
from conftest import ROOT
from fairseq.data import Dictionary
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_CONFIG_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from omegaconf import OmegaConf

import fairseq_inf.models
import fairseq_inf.tasks.guests  # noqa: F401  (registers models, tasks and the criterion)

EXAMPLES = ROOT / "examples"
CONFIGS = [
    str(path.relative_to(EXAMPLES)) for path in sorted(EXAMPLES.glob("*/config/*/[!_]*.yaml"))
]
TABLES = sorted({config.rpartition("/")[0] for config in CONFIGS})

MEMORIES = [
    "compressive_transformer",
    "infini_attention",
    "infinite_former",
    "infinite_former_sticky",
    "transformer_xl",
]
ROWS = {
    "dialogue": [
        "compressive_transformer",
        "host",
        "host_without_document",
        "infinite_former",
        "infinite_former_gibbs",
        "infinite_former_sticky",
    ],
    "gpt2": ["compressive_transformer", "gpt2", "infinite_former", "infinite_former_sticky"],
    "sorting": MEMORIES,
    "wikitext103": MEMORIES,
}
# what the paper's models have that their architectures do not say
DEFAULTS = {
    "dialogue": {"role_words": "<doc>,<speaker1>,<speaker2>"},
}


def read(config):
    """With its bases, which have none of its settings."""
    path = EXAMPLES / config
    own = yaml.safe_load(path.read_text())
    bases = [base for base in own.pop("defaults", []) if base != "_self_"]
    parts = [yaml.safe_load(path.with_name(f"{base}.yaml").read_text()) for base in bases]
    return OmegaConf.to_container(OmegaConf.merge(own, *parts))


def read_table(table):
    """-> the configs in a folder by the names of their rows"""
    return {path.stem: read(path) for path in sorted((EXAMPLES / table).glob("[!_]*.yaml"))}


def known(section, name):
    """-> the dataclass that says which settings a section of a config may have"""
    if section == "model":
        return MODEL_DATACLASS_REGISTRY[name]
    if section == "task":
        return TASK_DATACLASS_REGISTRY[name]
    if section in REGISTRIES:
        return REGISTRIES[section]["dataclass_registry"][name]
    return FairseqConfig.__annotations__[section]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_has_only_settings_that_there_are(config):
    for section, settings in read(config).items():
        OmegaConf.merge(OmegaConf.structured(known(section, settings.pop("_name", None))), settings)


@pytest.mark.parametrize("config", [config for config in CONFIGS if "/small/" in config])
def test_a_small_config_makes_a_model_that_takes_its_segments(config):
    settings = read(config)
    name = settings["model"].pop("_name")
    cfg = OmegaConf.merge(
        OmegaConf.structured(MODEL_DATACLASS_REGISTRY[name]), {**settings["model"], "seed": 1}
    )
    words = Dictionary()
    for word in (settings["model"].get("role_words") or "").split(","):
        words.add_symbol(word)
    task = SimpleNamespace(source_dictionary=words)
    model = MODEL_REGISTRY[name].build_model(cfg, task)
    model.decoder.check_length(settings["task"]["tokens_per_sample"])


@pytest.mark.parametrize("table", TABLES)
def test_the_rows_of_a_table_differ_in_their_memory_alone(table):
    example, _, scale = table.split("/")
    folder = "small" if (example, scale) == ("wikitext103", "small") else example
    rows, shared, rates = read_table(table), [], set()
    wanted = ROWS.get(example, list(rows))
    assert list(rows) == wanted if scale == "paper" else set(rows) >= set(wanted)
    for row, config in rows.items():
        place = config["checkpoint"].pop("save_dir").replace("${hydra:job.config_name}", row)
        assert place == f"checkpoints/{folder}/{row}"
        own = ["_name", "ltm", "cmem", "compression", "infini", "slot"]
        if example in ("recall", "sorting"):
            own.append("stm")
        config["model"] = {k: v for k, v in config["model"].items() if not k.startswith(tuple(own))}
        optimizer, scheduler = config.pop("optimizer"), config.pop("lr_scheduler")
        if optimizer["_name"] == "composite":
            host, memory = optimizer["groups"]["default"], optimizer["groups"]["memory"]
            assert scheduler == {"_name": "pass_through"}
            assert [host["lr_float"]] == config["optimization"]["lr"]
            rates.add(memory["lr_float"])
            optimizer, scheduler = host["optimizer"], host["lr_scheduler"]
        shared.append((config, optimizer, scheduler))
    assert len(shared) > 1 and all(one == shared[0] for one in shared)
    both = "finetune_from_model" in config["checkpoint"] and not config["model"].get("freeze_host")
    assert len(rates) == both  # a rate of its own beside the host's


@pytest.mark.parametrize("scale", ["paper", "small"])
def test_short_and_long_term_memory_together_are_as_long_in_every_row_of_sorting(scale):
    lengths = set()
    for row, config in read_table(f"sorting/config/{scale}").items():
        model = config["model"]
        if row == "infini_attention":  # a matrix, whose size is the heads'
            assert model["stm_length"] == config["task"]["tokens_per_sample"]
        else:
            lengths.add(sum(model.get(k, 0) for k in ("stm_length", "ltm_basis", "cmem_length")))
    assert len(lengths) == 1


@pytest.mark.parametrize("config", [config for config in CONFIGS if "/paper/" in config])
def test_a_config_of_the_paper_says_what_its_architecture_says(config):
    example, _, _, row = config.removesuffix(".yaml").split("/")
    model = read(config)["model"]
    name = model["_name"]
    suffix = {"wikitext103": "_wt103", "sorting": "_sorting"}.get(example, "")
    args = argparse.Namespace(_name=name, **DEFAULTS.get(example, {}))
    ARCH_CONFIG_REGISTRY[name + suffix](args)
    assert model.pop("ltm_sticky", False) == row.endswith("sticky")
    if example == "gpt2":  # the paper's: the architecture is unbounded by itself
        assert model.pop("ltm_threshold", None) == (2048 if "infinite" in row else None)
    if example == "dialogue" and row == "compressive_transformer":
        args.compression_rate = 3
    if row.endswith("gibbs"):  # what the paper has not
        args.ltm_widths, args.ltm_schedule, args.ltm_density = "auto", "uniform", "gibbs"
    structure = OmegaConf.structured(MODEL_DATACLASS_REGISTRY[name])
    said, meant = (
        OmegaConf.merge(structure, {k: v for k, v in settings.items() if k != "_name"})
        for settings in (model, vars(args))
    )
    assert said == meant
