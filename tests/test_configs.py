"""The configs of the examples, whatever there is in examples/*/config/*/*.yaml but their bases."""

import argparse
from types import SimpleNamespace

import pytest
from conftest import ROOT
from fairseq.data import Dictionary
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_CONFIG_REGISTRY, MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

import fairseq_inf.tasks.guests  # noqa: F401  (registers models, tasks and the criterion)
from fairseq_inf.experiments.runs import compose

try:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
except ImportError:  # before 1.1
    from hydra.experimental import compose as hydra_compose
    from hydra.experimental import initialize_config_dir

EXAMPLES = ROOT / "examples"
FILES = sorted(EXAMPLES.glob("*/config/*/[!_]*.yaml"))
CONFIGS = [str(path.relative_to(EXAMPLES)) for path in FILES]
TABLES = sorted({config.rpartition("/")[0] for config in CONFIGS})

PAPER = ["compressive_transformer", "infinite_former", "infinite_former_sticky"]
MEMORIES = {*PAPER, "infini_attention", "transformer_xl"}
ROWS = {
    "dialogue": {*PAPER, "host", "host_without_document", "infinite_former_gibbs"},
    "gpt2": {*PAPER, "gpt2"},
    "sorting": MEMORIES,
    "wikitext103": MEMORIES,
}
# what the paper's models have that their architectures do not say
DEFAULTS = {"dialogue": {"role_words": "<doc>,<speaker1>,<speaker2>"}}
HOSTS_ALONE = ("gpt2", "host", "host_without_document")


def read(config):
    return OmegaConf.to_container(compose(EXAMPLES / config))


def read_table(table):
    """-> the configs in a folder by the names of their rows"""
    configs = [config for config in CONFIGS if config.startswith(f"{table}/")]
    return {config.rpartition("/")[2].removesuffix(".yaml"): read(config) for config in configs}


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


def load(path):
    return OmegaConf.to_container(OmegaConf.load(path))


def test_bases_and_rows_say_a_setting_once():
    """So that it does not matter which of them wins."""

    def leaves(settings, at=()):
        for name, value in settings.items():
            place = (*at, name)
            yield from leaves(value, place) if isinstance(value, dict) else [place]

    for path in FILES:
        own = load(path)
        bases = [load(path.with_name(f"{name}.yaml")) for name in own.pop("defaults", [])[1:]]
        said = [place for part in (own, *bases) for place in leaves(part)]
        assert len(set(said)) == len(said), path


@pytest.mark.parametrize("row", ["gpt2", "infinite_former"])
def test_fairseq_hydra_train_puts_a_config_and_its_bases_together_as_we_do(row):
    def within(part, whole):
        if isinstance(part, dict):
            return all(within(x, whole[name]) for name, x in part.items())
        return part in (whole, "???")

    table = "gpt2/config/small"
    with initialize_config_dir(str(EXAMPLES / table)):
        ConfigStore.instance().store(name=row, node=FairseqConfig)  # as its main does
        composed = OmegaConf.to_container(hydra_compose(row), enum_to_str=True)
    assert within(read(f"{table}/{row}.yaml"), composed)


@pytest.mark.parametrize("config", [config for config in CONFIGS if "/small/" in config])
def test_a_small_config_makes_a_model_that_takes_its_segments(config):
    settings = read(config)
    name = settings["model"].pop("_name")
    cfg = OmegaConf.merge(
        OmegaConf.structured(MODEL_DATACLASS_REGISTRY[name]), {**settings["model"], "seed": 1}
    )
    if "llama" in name:  # its depth and width are SmolLM2's
        cfg.decoder_layers, cfg.decoder_ffn_embed_dim = 2, 8
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
    wanted = ROWS.get(example, set())
    assert set(rows) == wanted if scale == "paper" else set(rows) >= wanted
    for row, config in rows.items():
        save_dir = config["checkpoint"].pop("save_dir")
        assert save_dir.replace("${hydra:job.config_name}", row) == f"checkpoints/{folder}/{row}"
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
    name, suffix = model.pop("_name"), {"wikitext103": "_wt103", "sorting": "_sorting"}
    args = argparse.Namespace()
    ARCH_CONFIG_REGISTRY[name + suffix.get(example, "")](args)
    assert (name == "gpt2_lm") == (row in HOSTS_ALONE)
    own = {"ltm_sticky": True} if row.endswith("sticky") else {}
    if example == "gpt2" and "infinite" in row:  # the architecture is unbounded by itself
        own["ltm_threshold"] = 2048
    if example == "dialogue" and row == "compressive_transformer":
        own["compression_rate"] = 3
    if row.endswith("gibbs"):  # what the paper has not
        own = {"ltm_widths": "auto", "ltm_schedule": "uniform", "ltm_density": "gibbs"}
    elif "infinite" in row:
        own["ltm_tau"] = getattr(args, "ltm_tau", 0.5)
    plain = OmegaConf.structured(MODEL_DATACLASS_REGISTRY[name])
    wanted = OmegaConf.merge(plain, {**DEFAULTS.get(example, {}), **vars(args), **own})
    assert OmegaConf.merge(plain, model) == wanted
