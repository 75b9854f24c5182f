"""A talk with an instruction-tuned model about a document, in its own turns."""

import json
import re

import commands
import pytest
import torch
from conftest import ROOT
from test_dialogue import called
from test_pretrained import LISTS, SPECIAL, convert, hugging_face, write_gguf
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from fairseq_inf import talk
from fairseq_inf.analysis.why import looks, parts, seen_by
from fairseq_inf.commands import chat
from fairseq_inf.data.turns import ABOUT
from fairseq_inf.errors import Failure
from fairseq_inf.experiments import asking
from fairseq_inf.files import read_text
from fairseq_inf.hub import open_hub
from fairseq_inf.pretrained.source import read_source
from fairseq_inf.pretrained.tokenizer_json import byte_level

PLAIN = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('no system') }}{% endif %}{% if m.role == 'user' %}"
    "{{ '[ask] ' + m.content | trim + ' [answer]' }}{% else %}"
    "{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
SAID = ["Where is it?", "There.", "And then, the 12?", "The end"]
DOCUMENT = "the <|start|> of the\n<|end|> ferry: 12"


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """-> template -> the folder of an import with a small memory, and the model's own"""
    made = {}

    def make(template):
        if template not in made:
            folder = tmp_path_factory.mktemp("import")
            hugging_face(folder / "hf", max_position_embeddings=2048)
            tokens = {"bos_token": SPECIAL[1], "eos_token": {"content": SPECIAL[2]}}
            settings = {**tokens, "chat_template": template}
            (folder / "hf" / "tokenizer_config.json").write_text(json.dumps(settings))
            flags = "--arch selective_memory_lm_llama --stm-length 8 --ltm-slots 64".split()
            convert(folder / "hf", folder / "out", *flags, "--tokens-per-sample", 16)
            made[template] = folder / "out"
        return made[template]

    return make


def theirs(template, talk):
    """The tokens of a talk by transformers."""
    text = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_level(LISTS)),
        chat_template=template, bos_token=SPECIAL[1], eos_token=SPECIAL[2],
    )  # fmt: skip
    return text.apply_chat_template(talk, return_dict=False)


@pytest.mark.parametrize("template", [PLAIN, NO_SYSTEM], ids=["system", "none"])
def test_turns_are_those_of_the_template(imported, template):
    hub = open_hub(str(imported(template)), cpu=True)
    turns = hub.turns
    document = DOCUMENT.replace("<|", "<").replace("|>", ">")
    found = torch.cat([
        hub.tokens_of_document(f"\n{document}\n"),
        hub.tokens_of_pieces(*turns.first, SAID[0], *turns.answer, SAID[1], *turns.next, SAID[2]),
    ])  # fmt: skip
    roles = ["user", "assistant", "user"]
    talk = [{"role": who, "content": text} for who, text in zip(roles, SAID, strict=False)]
    if template == PLAIN:
        talk = [{"role": "system", "content": ABOUT + document}, *talk]
    else:
        talk[0]["content"] = f"{ABOUT}{document}\n\n{SAID[0]}"
    words = [int(x) if x.isdigit() else 2 for x in map(hub.dictionary.__getitem__, found.tolist())]
    end = {"role": "assistant", "content": SAID[3]}
    assert words == theirs(template, [*talk, end])[: len(words)]
    assert {hub.dictionary.eos()} == turns.ends


def test_what_is_said_is_never_a_special_token(imported):
    hub = open_hub(str(imported(PLAIN)), cpu=True)
    document = hub.tokens_of_document(DOCUMENT)
    border = torch.isin(document, torch.tensor(sorted(hub.turns.special)))
    assert border.sum() == 1, "the template's own"
    asked = hub.tokens_of_pieces("<|end|>", *hub.turns.answer)
    assert [hub.dictionary[i] for i in asked.tolist()].count("</s>") == 1
    assert hub.text_of(document[-20:]).endswith("<|end|> ferry: 12")


def test_an_answer_is_what_one_reading_of_the_talk_makes_likeliest(imported):
    hub = open_hub(str(imported(PLAIN)), cpu=True)
    memory = hub.read_document(DOCUMENT * 3)
    told, stream = hub.chat(memory), hub.tokens_of_document(DOCUMENT * 3)
    for question in SAID:
        if question == SAID[1]:
            told.get_ready()
        text = "".join(told.ask(question, max_tokens=11))
        stream = torch.cat([stream, told.asked])
        reading = hub.read_tokens(stream).reading
        unknown = hub.dictionary.unk()
        never = [hub.dictionary[i] for i in told.never.tolist() if i != unknown]
        [expected] = hub.go_on(reading, max_tokens=11, without=never)
        assert told.answered.tolist() == expected.tolist()[: len(told.answered)]
        assert text == hub.text_of(told.answered).lstrip().rstrip("\ufffd")
        stream = torch.cat([stream, told.answered])
        assert told.memory.tokens == len(stream)
    score = hub.score("the", told.memory)["score"]
    assert torch.allclose(score, hub.score("the", hub.read_tokens(stream))["score"], atol=1e-5)


def test_ctrl_c_stops_an_answer_and_not_the_talk(imported, tmp_path, monkeypatch):
    document = tmp_path / "notes.txt"
    document.write_text(DOCUMENT)
    args = ["--path", imported(PLAIN), "--document", document, "--max-tokens", 9, "--cpu"]
    whole, _ = called(chat, *args, typed="a\nb\n")
    chosen, choose = [], talk.choose

    def interrupted(*args):
        chosen.append(choose(*args))
        if len(chosen) == 3:
            raise KeyboardInterrupt
        return chosen[-1]

    monkeypatch.setattr(talk, "choose", interrupted)
    printed, failed = called(chat, *args, typed="a\nb\n")
    assert failed is None and len(chosen) > 3
    assert printed.count("it:  ") == 2 and " …\n" in printed and " …\n" not in whole


def test_one_question_is_answered_for_scripts(imported, tmp_path, capsys):
    document = tmp_path / "notes.txt"
    document.write_bytes(b"\xef\xbb\xbf" + DOCUMENT.replace("\n", "\r\n").encode())
    args = ["--path", imported(PLAIN), "--document", document, "--max-tokens", 9, "--cpu"]
    printed, failed = called(chat, *args, "--ask", "Where?")
    hub = open_hub(str(imported(PLAIN)), cpu=True)
    expected = "".join(hub.chat(hub.read_document(DOCUMENT)).ask("Where?", max_tokens=9))
    assert failed is None and printed == expected + "\n"
    document.write_text(" ")
    assert "is empty" in called(chat, *args, "--ask", "Where?")[1]
    called(chat, *args, "--ask", " ")
    assert "error: --ask is empty" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [5, 40])
def test_looks_are_shared_out_among_what_is_in_sight_and_what_is_kept(imported, asked):
    hub = open_hub(str(imported(PLAIN)), cpu=True, ltm_slots=20)
    text = DOCUMENT * 6
    memory = hub.read_tokens(hub.tokens_of_document(text)[: 6 * 16 + 2])
    answer = hub.tokens_of(text)[:asked]
    own = looks(hub, memory, answer)
    size = memory.tokens + asked
    assert len(own.weights) == len(own.window) == len(own.kept) == size - 1, "the last is no input"
    assert own.weights.min() >= 0
    # the first vector of all, eos, is a token of no text
    assert 0.3 < float(own.weights.sum()) <= 1 + 1e-6
    if asked == 5:  # of one segment
        assert not own.weights[~own.window & ~own.kept].any()
    assert 0 < int((own.kept & ~own.window).sum()) <= 20 * len(hub.model.decoder.layers)
    # in one pass over a stream that is short enough, by hand
    short = hub.read_tokens(answer[:2])
    weights = looks(hub, short, answer[2:5]).weights
    found = {}
    inputs = torch.cat([torch.tensor([hub.dictionary.eos()]), answer[:4]])
    with torch.no_grad(), seen_by(hub.model.decoder, found):
        hub.model.decoder(inputs[None], hub.model.decoder.initial_state(1))
    mean = torch.stack([x[0, :, 2:].mean(dim=(0, 1)) for x in found.values()]).mean(dim=0)
    assert torch.allclose(weights.float(), mean[1:], atol=1e-6)


def test_phrases_are_whole():
    text = "Dr. Fisk is in. The ferry, which leaves\nat seven: late.\n\n" + "word " * 40
    found = [text[begin:end] for begin, end in parts(text)]
    assert found[:4] == ["Dr. Fisk is in.", "The ferry, which leaves", "at seven:", "late."]
    assert all(piece.strip() == piece or piece.endswith(" ") for piece in found)
    assert all(set(piece.split()) == {"word"} and len(piece) <= 90 for piece in found[4:])
    assert "".join("".join(found).split()) == "".join(text.split())


def test_why_says_what_was_looked_at_and_where_the_document_stands(imported, tmp_path):
    document = tmp_path / "notes.txt"
    document.write_text("\n".join(f"the {i} of the ferry: 12." for i in range(30)))
    args = ["--path", imported(PLAIN), "--document", document, "--max-tokens", 9, "--cpu"]
    printed, failed = called(chat, *args, typed="/why\nWhere?\n/why\nAnd?\n/why\n")
    assert failed is None and "there is no answer yet" in printed
    told = [line for line in printed.splitlines() if line.startswith("Of the document's")]
    assert len(told) == 2 and printed.count("% of what this answer looked at is in the doc") == 2
    for line in told:
        total, *rest = map(int, re.findall(r"\d+", line))
        assert len(rest) == 3 and sum(rest) == total


def test_templates_are_found_where_models_have_them(tmp_path):
    model = hugging_face(tmp_path / "hf")
    folder, settings = tmp_path / "hf", tmp_path / "hf" / "tokenizer_config.json"
    assert read_source(str(folder)).chat is None
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": PLAIN}]
    tokens = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    expected = {"template": PLAIN, "tokens": tokens}
    for own in (PLAIN, named):
        settings.write_text(json.dumps({**tokens, "chat_template": own}))
        assert read_source(str(folder)).chat == expected
    settings.write_text(json.dumps(tokens))
    (folder / "chat_template.jinja").write_text(PLAIN)
    assert read_source(str(folder)).chat == expected
    path = write_gguf(tmp_path / "x.gguf", model, **{"tokenizer.chat_template": PLAIN})
    assert read_source(str(path)).chat == {**expected, "tokens": {**tokens, "bos_token": ""}}


@pytest.mark.parametrize(
    "template, said",
    [
        ("{{ ''.__class__.__mro__ }}", "chat template cannot be used"),
        ("{% for m in messages %}", "chat template cannot be used"),
        ("hello", "does not say what it is given"),
        (None, "is damaged: import the model again"),
    ],
)
def test_templates_that_cannot_be_used_are_refused(imported, template, said):
    folder = imported(PLAIN)
    hub = open_hub(str(folder), cpu=True)
    before = (folder / "chat.json").read_text()
    try:
        (folder / "chat.json").write_text(json.dumps({"template": template, "end": 2}))
        with pytest.raises(Failure, match=said):
            hub.read_document("x")
        (folder / "chat.json").unlink()
        with pytest.raises(Failure, match="does not say how a talk"):
            hub.read_document("x")
    finally:
        (folder / "chat.json").write_text(before)


# questions about documents


def test_questions_are_asked_once_each_and_the_likeliest_answer_is_that_of_one_reading(
    imported, tmp_path, monkeypatch, capsys
):
    (tmp_path / "notes.txt").write_text(DOCUMENT)
    lines = ["colour: red, green, blue, the 12", "", "colour | What is it? | green"]
    (tmp_path / "notes.questions").write_text("\n".join([*lines, "colour | And? | red"]))
    hub = open_hub(str(imported(PLAIN)), cpu=True)
    memory = hub.read_document(DOCUMENT)
    asked = hub.tokens_of_pieces(*hub.turns.first, "What is it?", *hub.turns.answer)
    others = ["red", "green", "blue", "the 12", "12 the", "a", "th"]
    behind = hub.read_tokens(asked, memory)
    means = [float(hub.score(x, behind)["positional_scores"].mean()) for x in others]
    assert asking.likeliest(hub, memory, asked, others) == max(range(7), key=means.__getitem__)
    output = tmp_path / "out.json"
    args = [str(tmp_path), "--path", imported(PLAIN), "--output", output, "--max-tokens", 3]
    commands.enter(asking.main, "asking", *args, "--cpu")
    printed = capsys.readouterr().out
    assert [line.split("|")[2].strip() for line in printed.splitlines()[-4:]] == [
        "sight", "memory", "window", "nothing"
    ]  # fmt: skip
    found = json.loads(output.read_text())
    [first, second] = found["notes memory"]["answers"]
    expected = "".join(hub.chat(memory).ask("What is it?", max_tokens=3))
    assert first["said"] == expected and second["question"] == "And?"
    monkeypatch.setattr(asking, "ask", None)  # all have been asked
    commands.enter(asking.main, "asking", *args, "--cpu")
    (tmp_path / "notes.questions").write_text("colour: red\ncolour | What? | green")
    said = commands.refused(asking.main, "asking", *args[:-3], tmp_path / "new.json")
    assert "notes.questions, line 2: green is not among those of colour" in said


def test_each_question_of_the_examples_is_answered_in_its_document():
    for path in sorted((ROOT / "examples" / "ask").glob("*.questions")):
        questions, text = asking.read_questions(path), read_text(path.with_suffix(".txt"))
        assert len(questions) == 10
        for question in questions:
            assert question.answer in text and len(set(question.others)) == 10
            assert not any(len(x) > 3 and x in question.text for x in [question.answer])
