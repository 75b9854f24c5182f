"""Models with memories in lm-evaluation-harness give what they give here."""

import json
from types import SimpleNamespace

import pytest
import torch
from commands import enter
from conftest import ROOT
from test_pretrained import KINDS, convert, hugging_face

from fairseq_inf.experiments import evaluate
from fairseq_inf.experiments.haystack import told

pytest.importorskip("lm_eval", reason="pip install 'fairseq_inf[evaluation]' to test it")

from fairseq_inf.experiments.harness import HarnessLM

BOOK = told(60, 20, 4, 1)[0]  # of many segments
# contexts that begin alike, some for longer than a segment, and others
ASKED = [
    ("", "the end"),
    ("12", " is the"),
    (BOOK, " The end"),
    (BOOK, " is 12."),
    (f"{BOOK} Who was it?", " It was the"),
    (f"{BOOK} Who was it? ", "The the"),
    ("the other", " book, which is longer than a segment"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    hugging_face(folder / "hf", **KINDS[0], max_position_embeddings=4096)
    flags = "--arch selective_memory_lm_llama --stm-length 8 --ltm-slots 8 --tokens-per-sample 16"
    convert(folder / "hf", folder / "model", *flags.split())
    return folder / "model"


@pytest.fixture(scope="module", params=[1, 3])
def model(folder, request):
    path = str(folder / "checkpoint.pt")
    return HarnessLM(path, batch_size=request.param, device="cpu")


def requests(args):
    return [SimpleNamespace(args=own) for own in args]


def test_likelihoods_are_those_of_hub_score_whatever_is_read_together(model):
    hub = model.hub
    found = model.loglikelihood(requests(ASKED), disable_tqdm=True)
    for (context, continuation), (logs, _) in zip(ASKED, found, strict=True):
        skip = len(hub.tokens_of(context.rstrip()))
        scores = hub.score(context + continuation)["positional_scores"][skip:]
        assert logs == pytest.approx(float(scores.sum()), abs=1e-4)
    texts = [BOOK, "the end", "12"]
    rolling = model.loglikelihood_rolling(requests([(text,) for text in texts]), disable_tqdm=True)
    for text, logs in zip(texts, rolling, strict=True):
        assert logs == pytest.approx(float(hub.score(text)["positional_scores"].sum()), abs=1e-3)


def test_what_is_generated_is_what_the_hub_generates_up_to_a_stop(model):
    hub = model.hub
    contexts = [context for context, _ in ASKED[1:]]
    whole = [hub.generate(context, max_tokens=20) for context in contexts]
    settings = {"until": ["no such"], "max_gen_toks": 20}
    asked = requests([(context, settings) for context in contexts])
    assert model.generate_until(asked, disable_tqdm=True) == whole
    stops = [text[len(text) // 2] for text in whole]
    asked = requests([(c, {**settings, "until": x}) for c, x in zip(contexts, stops, strict=True)])
    found = model.generate_until(asked, disable_tqdm=True)
    assert found == [text.split(stop)[0] for text, stop in zip(whole, stops, strict=True)]
    greedy = model.loglikelihood(requests([(contexts[1], whole[1])]), disable_tqdm=True)
    assert greedy[0][1] and not all(
        likeliest for _, likeliest in model.loglikelihood(requests(ASKED))
    )
    torch.manual_seed(1)
    drawn = {"do_sample": True, "temperature": 5.0, "max_gen_toks": 20}
    assert model.generate_until(requests([(contexts[0], drawn)]))[0] != whole[0]


@pytest.mark.slow
def test_the_needles_are_a_task_that_needs_no_network(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = f"run --model fairseq_inf --model_args path={folder}/checkpoint.pt,ltm_slots=4 "
    words += f"--include_path {ROOT}/examples/needles --tasks needles,needles_said --device cpu "
    words += f"--output_path {tmp_path}/out --batch_size 4"
    sizes = json.dumps({"words": 60, "every": 20, "candidates": 3, "texts": 2})
    enter(evaluate.main, "evaluate", *words.split(), "--metadata", sizes)
    [path] = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(path.read_text())
    for task in ("needles", "needles_said"):
        assert found["n-samples"][task]["effective"] == 6
        assert 0 <= found["results"][task]["acc,none"] <= 1
