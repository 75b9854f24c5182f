"""Made from the declarations of the settings:  python docs/flags.py > docs/flags.md"""

import argparse
import pathlib
from dataclasses import MISSING, fields

from fairseq.criterions import CRITERION_DATACLASS_REGISTRY
from fairseq.models import ARCH_CONFIG_REGISTRY, MODEL_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from fairseq.utils import import_user_module

ROOT = pathlib.Path(__file__).parent.parent
import_user_module(argparse.Namespace(user_dir=str(ROOT / "fairseq_inf")))

from fairseq_inf.models.hosts import HOSTS  # noqa: E402
from fairseq_inf.models.memory_lm import MemoryLM  # noqa: E402
from fairseq_inf.models.settings import flag  # noqa: E402

MODELS = {
    model.config: model
    for model in MODEL_REGISTRY.values()
    if isinstance(model, type) and issubclass(model, MemoryLM)
}
WINDOW = ("stm_length", "sink_tokens")

ABOVE = """# Flags

What each model, task and criterion reads, and nothing else: a flag that an architecture does not read is refused by its name.
This page is made from the code, by `python docs/flags.py`. `fairseq-train --user-dir DIR --task long_sequence_lm --arch ARCH
--help` prints the same for one architecture, beside fairseq's own flags; `DIR` is the folder of the installed package. In hydra
configs and in `--model-overrides` flags have underscores: `ltm_basis`.

An architecture is a memory in a host: `infinite_former_lm` is in Transformer-XL, `infinite_former_lm_gpt2` in GPT-2,
`infinite_former_lm_llama` in Llama; so are `compressive_transformer_lm`, `infini_attention_lm` and `selective_memory_lm`. The
hosts without a memory are `transformer_xl_lm`, `gpt2_lm` and `llama_lm`. [memories.md](memories.md) says how they work.
"""  # noqa: E501
BELOW = """
Every token of a split is a target exactly once an epoch, whatever L, the batch size (`--batch-size`: streams that are read side
by side) or the number of processes: targets cross the borders of segments, no remainder is dropped, the first token of a stream
is predicted from `</s>`. In evaluation segments, layout and separator are those of the training, from the checkpoint.

## What is logged

| also to `--tensorboard-logdir` | |
| --- | --- |
| `loss`, `nll_loss`, `ppl` | with and without what the memory learns beside the likelihood; perplexity |
| `kl`, `reconstruction` | what it learns so, a token |
| `ltm_share` | share of the memory in the attention's output |
| `ltm_sigma`, `ltm_entropy` | mean standard deviation of the reads, and entropy of those of a Gibbs density |
| `ltm_gate` | mean gate of Infini-attention |
| `DIR/memory`: `attention/layer0`, `space/layer0`, `kl/layer0`, … | at each validation, by layer: where the memory is read, what \
space its words hold, and all of the above; see [inspect.md](inspect.md) |"""  # noqa: E501


def settings(*configs):
    """-> of each setting that one of the dataclasses has, by name, its fields by dataclass"""
    found = {}
    for config in configs:
        for one in fields(config):
            if one.metadata.get("help") and one.name != "data":  # that is no flag
                found.setdefault(one.name, {})[config] = one
    return found


def shown(value):
    value = getattr(value, "value", value)
    if value is None or value is MISSING:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)


def defaults(by):
    """Of a setting, and where it is another one."""
    first, others = None, {}
    for config, one in by.items():
        value, host = shown(one.default), getattr(MODELS.get(config), "host", None)
        if first is None:
            first = value
        elif value != first:
            others[value] = f"{value} in {host.title}" if host else value
    return "; ".join([first or "none", *others.values()]) if others else first


def table(names, title, who):
    """who: readers of a setting, in words, from its fields by dataclass"""
    print(f"\n## {title}\n\n| flag | | default | read by |\n| --- | --- | --- | --- |")
    for name, by in names.items():
        facts = next(iter(by.values())).metadata
        only = [f"`{flag(k)} {v.replace(',', ', ')}`" for k, v in facts.get("with", {}).items()]
        reads = ", with ".join([who(by), *only])
        print(f"| `{flag(name)}` | {facts['help']} | {defaults(by)} | {reads} |")


def model_readers(by):
    """Which hosts, or which memories."""
    models = [MODELS[config] for config in by]
    hosts = [host for host in HOSTS.values() if any(m.host is host for m in models)]
    if len(models) == sum(m.host in hosts for m in MODELS.values()):
        return "all" if len(hosts) == len(HOSTS) else ", ".join(host.title for host in hosts)
    if len(models) == sum(m.has_memory for m in MODELS.values()):
        return "all with a memory"
    return ", ".join(f"`{m.arch}`" for m in models if m.host is HOSTS["transformer_xl"])


def main():
    print(ABOVE, end="")
    names = settings(*MODELS)
    of_memory = {
        name: by
        for name, by in names.items()
        if name in WINDOW or all(MODELS[config].has_memory for config in by)
    }
    table(of_memory, "Memory", model_readers)
    table({n: by for n, by in names.items() if n not in of_memory}, "Host", model_readers)
    print("\nThe paper's sizes, for what is not given:\n\n| architecture | |\n| --- | --- |")
    for arch, set_defaults in ARCH_CONFIG_REGISTRY.items():
        if getattr(set_defaults, "__module__", "") == "fairseq_inf.models.memory_lm":
            values = argparse.Namespace()
            set_defaults(values)
            told = ", ".join(f"`{flag(k)} {shown(v)}`" for k, v in vars(values).items())
            print(f"| `{arch}` | {told} |")
    tasks = {
        c: n for n, c in TASK_DATACLASS_REGISTRY.items() if c.__module__.startswith("fairseq_inf.")
    }
    table(settings(*tasks), "Task", lambda by: ", ".join(f"`{tasks[c]}`" for c in by))
    criterion = CRITERION_DATACLASS_REGISTRY["cross_entropy_with_kl"]
    table(settings(criterion), "Criterion", lambda by: "`cross_entropy_with_kl`")
    print(BELOW)


if __name__ == "__main__":
    main()
