"""What the pages for people say: their links lead somewhere, their code runs, their names exist."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest
from conftest import ROOT
from fairseq.models import ARCH_MODEL_REGISTRY

import fairseq_inf.models  # noqa: F401  (registers them)
from fairseq_inf.criterions.cross_entropy_with_kl import CrossEntropyWithKLConfig
from fairseq_inf.experiments.sorting.task import SortingConfig
from fairseq_inf.tasks.long_sequence_lm import LongSequenceLMConfig

GUIDE = ROOT / "CONTRIBUTING.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")])


def anchors(text):
    """The names that headings have, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    heads = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_to_files_and_headings_that_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found.read_text()), target


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_names_are_those_of_the_code(page):
    text = (ROOT / page).read_text()
    examples = re.findall(r"```python.*?```", text, flags=re.S)
    code = [
        path.read_text()
        for name in ("fairseq_inf", "tests")
        for path in ROOT.glob(f"{name}/**/*.py")
    ]
    words = set(re.findall(r"\w+", "\n".join([*code, *examples])))
    names = re.findall(r"`([A-Za-z_.]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    assert len(names) > 20
    for name in names:
        assert set(name.split(".")) <= words, name


def test_every_flag_of_ours_has_its_row():
    """What only repeats a setting of fairseq's, ${...}, has no row."""
    page = (ROOT / "docs" / "flags.md").read_text()
    configs = {model.config for model in ARCH_MODEL_REGISTRY.values() if hasattr(model, "config")}
    configs |= {LongSequenceLMConfig, SortingConfig, CrossEntropyWithKLConfig}
    assert len(configs) > 5
    for config in configs:
        for field in fields(config):
            if "help" in field.metadata and field.name != "data":
                assert f"`--{field.name.replace('_', '-')}`" in page, field.name


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The package with the memory of the guide in it."""
    folder = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("fairseq_inf", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    shutil.copyfile(ROOT / "pyproject.toml", folder / "pyproject.toml")
    blocks = re.findall(r"```python\n# (\S+\.py)(.*?)\n(.*?)```", GUIDE.read_text(), re.S)
    for name, place, code in blocks:
        path = folder / name
        before = path.read_text() if path.exists() else ""
        if place:
            head = f"{place.removeprefix(', in ')} = {{\n"
            assert head in before
            path.write_text(before.replace(head, head + code))
        else:
            path.write_text(before + code)
    assert len(blocks) == 4
    return folder


def keep_laws(tree, *options):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["tests/test_laws.py", *options]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return int(re.search(r"(\d+) passed", done.stdout)[1])


@pytest.mark.slow
def test_the_memory_of_the_guide_keeps_all_laws(tree):
    assert keep_laws(tree, "-m", "not slow", "-k", "mean") >= 2 * 15


@pytest.mark.slow
def test_the_memory_of_the_guide_resumes(tree):
    assert keep_laws(tree, "-m", "slow", "-k", "mean and transformer_xl") == 1


def test_the_code_of_the_guide_is_in_the_style_of_the_house(tree):
    files = ["fairseq_inf/memory/mean.py", "fairseq_inf/models/mean.py"]
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, *files]
        done = subprocess.run(ruff, cwd=tree, text=True, capture_output=True)
        assert done.returncode == 0, done.stdout + done.stderr
