"""Facts in a text, and what a model knows of them at its end."""

import csv
import random
import re
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from commands import enter, refused
from test_pretrained import KINDS, convert, hugging_face

from fairseq_inf.experiments import evaluate, haystack, needles
from fairseq_inf.experiments.haystack import END, FORMS, Needle
from fairseq_inf.experiments.needles import Answer, Found, Row, Text
from fairseq_inf.hub import open_hub

TOKENS, EVERY, L = 1100, 260, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model that can encode any text, a byte a token."""
    folder = tmp_path_factory.mktemp("needles")
    hugging_face(folder / "hf", **KINDS[0], max_position_embeddings=TOKENS)
    flags = "--arch selective_memory_lm_llama --stm-length 8 --ltm-slots 16 "
    flags += f"--tokens-per-sample {L}"
    convert(folder / "hf", folder / "model", *flags.split())
    return folder / "model"


@pytest.fixture(scope="module")
def hub(folder):
    return open_hub(str(folder / "checkpoint.pt"), str(folder), cpu=True)


@pytest.fixture(scope="module")
def text(hub):
    hay = haystack.haystack(hub, TOKENS, "1")
    return Text(1, 0, *haystack.plant(hub, hay, list(FORMS), EVERY, 4, "1 0"))


def test_facts_stand_at_their_places_and_the_text_is_what_it_was_but_for_them(hub, text):
    hay = haystack.haystack(hub, TOKENS, "1")
    assert len(text.tokens) == TOKENS and len(text.needles) == TOKENS // EVERY
    left = needles.counted(text)
    assert torch.equal(text.tokens[left], hay[: int(left.sum())])
    for number, needle in enumerate(text.needles):
        assert number * EVERY < needle.place < (number + 1) * EVERY - needle.length
        told = hub.text_of(text.tokens[needle.place : needle.place + needle.length])
        assert told.strip() == FORMS[needle.form].tell(needle.key, needle.answer)
        assert END.search(hub.text_of(text.tokens[: needle.place]))
        assert FORMS[needle.form].ask(needle.key).endswith("is")
        assert len(set(needle.candidates)) == 4
    assert {needle.form for needle in text.needles} == set(FORMS)
    again, same = haystack.plant(hub, hay, list(FORMS), EVERY, 4, "1 0")
    assert torch.equal(again, text.tokens) and same == text.needles
    assert not torch.equal(haystack.plant(hub, hay, list(FORMS), EVERY, 4, "2 0")[0], text.tokens)


@pytest.mark.parametrize("form", FORMS)
def test_answers_of_other_facts_are_candidates_and_words_of_the_text_are_none(form):
    said = "Edgar told Hugo of 1234 bells in the winter."
    told = haystack.draw([form], 9, 6, said, random.Random(1))
    answers = [needle.answer for needle in told]
    assert len({needle.key for needle in told}) == len(set(answers)) == 9
    for needle in told:
        assert set(needle.candidates) <= set(answers) and len(set(needle.candidates)) == 6
        assert not {"Edgar", "Hugo", "1234", "winter"} & {needle.key, *needle.candidates}
    for words in (haystack.FIRST_NAMES.split(), haystack.WORDS.split()):
        assert not any(a != b and b.startswith(a) for a in words for b in words)


def turned(text):
    """Two questions, four times each: each candidate once in the place of the answer."""
    for needle in text.needles[:2]:
        for first in range(4):
            own = needle.candidates
            yield replace(needle, candidates=own[first:] + own[:first])


@pytest.mark.parametrize("spoken", [5, 40])  # a question begins in one segment or goes over two
def test_the_answer_is_recalled_where_hub_score_finds_it_likeliest(hub, text, spoken):
    memory = hub.read_tokens(text.tokens[:-spoken])
    before = {name: x.clone() for name, x in memory.reading.tensors().items()}
    asked = list(turned(text))
    found = needles.ask(hub, memory.reading, asked)
    for name, x in memory.reading.tensors().items():
        assert torch.equal(x, before[name]), f"asking has changed {name}"
    for needle, answer in zip(asked, found, strict=True):
        question = FORMS[needle.form].ask(needle.key)
        skip = len(hub.tokens_of(question))
        sums = [
            float(hub.score(f"{question} {word}", memory)["positional_scores"][skip:].sum())
            for word in needle.candidates
        ]
        assert answer.nats == pytest.approx(sums[0], abs=1e-4)
        assert answer.recalled == (max(sums) == sums[0])
    assert sum(answer.recalled for answer in found) == 2
    assert found[0].said == hub.generate(
        FORMS[asked[0].form].ask(asked[0].key), memory, needles.SAID
    )


def test_everything_in_sight_is_one_pass_over_text_and_question(folder, text):
    model = open_hub(str(folder), cpu=True).cfg.model
    settings = needles.everything(model, TOKENS, L)
    hub = open_hub(str(folder), cpu=True, ltm_enabled=False, **settings)
    hub.length *= needles.LONGER
    alone = {"stm_length": 0, "decoder_positions": 2 * TOKENS}
    decoder = open_hub(str(folder), cpu=True, ltm_enabled=False, **alone).model.decoder
    found = needles.measure(hub, text, context=100)
    eos = torch.tensor([hub.dictionary.eos()])
    logs = None
    for needle, answer in zip(text.needles, found.answers, strict=True):
        asked = hub.tokens_of(FORMS[needle.form].ask(needle.key))
        told = torch.cat([eos, text.tokens, asked, hub.tokens_of(f" {needle.answer}")])
        with torch.no_grad():
            out, _, _ = decoder(told[None, :-1], decoder.initial_state(1))
        logs = out[0].log_softmax(dim=-1).gather(1, told[1:, None])[:, 0]
        own = logs[TOKENS + len(asked) :].sum()
        assert answer.nats == pytest.approx(float(own), abs=1e-3)
    kept = needles.counted(text)[100:]
    assert found.bits == pytest.approx(-float(logs[100:TOKENS][kept].mean() / 0.6931472), abs=1e-4)
    assert found.with_facts == pytest.approx(-float(logs[100:TOKENS].mean() / 0.6931472), abs=1e-4)
    assert found.by_place == [pytest.approx(found.bits)]
    assert found.memory == 0 and found.window > TOKENS * 32 * 4 * 2  # vectors of two layers


@pytest.mark.skipif(bool(find_spec("lm_eval")), reason="it is installed")
def test_the_harness_says_what_it_needs(capsys):
    assert "pip install 'fairseq_inf[evaluation]'" in refused(evaluate.main, "evaluate", "run")
    enter(evaluate.main, "evaluate", "--help")
    assert capsys.readouterr().out.startswith("usage: fairseq-inf-evaluate")


def row(texts, known, name="rigged"):
    """A row that knows what `known` says of a needle."""
    found = [
        Found(
            [Answer(known(x), -1.0, x.answer.upper() if known(x) else "") for x in t.needles],
            bits=2.0, with_facts=1.5, seconds=0.001, window=2_000_000, memory=500_000,
        )
        for t in texts
    ]  # fmt: skip
    return Row(name, None, {}, found=found)


def test_facts_are_counted_by_how_long_ago_they_were_told():
    told = [("name", 10), ("key", 600), ("number", 1_300), ("name", 1_900)]
    drawn = [Needle(form, "x", ["Leon", "Joan"], place) for form, place in told]
    texts = [Text(seed, 0, torch.zeros(2_048), drawn) for seed in (1, 2)]
    knows, new = row(texts, lambda x: True), row(texts, lambda x: x.place > 1_000)
    assert needles.shares(texts, knows) == [100, 100] and needles.shares(texts, new) == [50, 50]
    head, _, *lines = needles.lines_of(texts, [knows, new], list(FORMS), 512).splitlines()
    head, all_, some = ([x.strip() for x in line.split("|")[1:-1]] for line in (head, *lines))
    assert head[4:8] == ["< 512", "512–1,024", "1,024–2,048", "2,048–4,096"]
    assert all_[4:8] == ["2/2", "2/2", "4/4", "0/0"] and some[4:8] == ["2/2", "2/2", "0/4", "0/0"]
    assert some[8:12] == ["50.00 ± 0.00", "100.00 ± 0.00", "0.00 ± 0.00", "50.00 ± 0.00"]
    assert some[1:3] == ["2.0000", "1.5000"] and some[12:] == ["2.0", "0.5", "1.0"]


def test_settings_stand_side_by_side_on_the_same_texts(folder, tmp_path, capsys):
    """And what needs no memory is measured once."""
    own = [folder, "--path", folder, "--tokens", 300, "--context", 50]
    own += ["--every", 256, "--seeds", 2, "--output", tmp_path / "out"]
    own += ["--cache", tmp_path / "cache.jsonl"]
    rows = ["--memory", "{}", "--memory", "{'stm_length': 16}"]
    enter(needles.main, "needles", *own, *rows)
    names = ["nothing", "window of", "everything", "memory", "window of", "{'stm_length': 16}"]
    shown = capsys.readouterr().out
    table = [line for line in shown.splitlines() if line.startswith("| ")][2:]
    assert [name in line for name, line in zip(names, table, strict=True)] == [True] * 6
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(needles.FILES)
    told = list(csv.DictReader(open(tmp_path / "out" / "needles.csv")))
    assert len(told) == 6 * 2
    facts = [
        [(x["key"], x["answer"], x["place"]) for x in told[i : i + 2]] for i in range(0, 12, 2)
    ]
    assert all(x == facts[0] for x in facts) and facts[0][0] != facts[0][1]
    by_text = list(csv.DictReader(open(tmp_path / "out" / "texts.csv")))
    by_name = {x["row"]: x for x in by_text}
    assert len(by_text) == 5 * 2 and by_name["memory"]["memory"] != "0"
    enter(needles.main, "needles", *own, *rows[:2])
    again = capsys.readouterr().out
    kept = [line for line in again.splitlines() if line.startswith(("| window", "| every"))]
    assert all(line in shown for line in kept), "with their times, too"
    for said, words in (
        ("ltm_slot is not a setting of this model", ["--memory", "{'ltm_slot': 1}"]),
        ("--memory must be a dict", ["--memory", "8"]),
        ("has no split none", ["--split", "none"]),
        ("exclude each other", ["--split", "valid", "--text", __file__]),
        ("--text no.txt does not exist", ["--text", "no.txt"]),
        ("has fewer than --tokens 999", ["--text", folder / "documents.json", "--tokens", 999]),
        ("--every 64 leaves no room for a fact of", ["--every", 64]),
        ("--candidates must be at least 2", ["--candidates", 1]),
        ("has no checkpoint", ["--path", tmp_path]),
        ("No such file", ["--output", tmp_path / "no" / "out"]),
    ):  # fmt: skip
        assert said in refused(needles.main, "needles", *own, *words)
    assert not re.search("Traceback", again)
