"""Document-grounded dialogue: conversations, the task, answers, measures and the talk."""

import contextlib
import copy
import io
import json
import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, fairseq
from fairseq.data import Dictionary, data_utils
from zoo import HOSTS, MEMORIES, make_model

from fairseq_inf.analysis.why import attended
from fairseq_inf.commands import chat
from fairseq_inf.data import SequenceBatches, StreamDataset
from fairseq_inf.dialogue import cmu_dog, evaluate, prepare, scores
from fairseq_inf.dialogue.answers import Answers
from fairseq_inf.dialogue.experiment import report
from fairseq_inf.dialogue.facts import known_facts
from fairseq_inf.dialogue.turns import MARKERS, find_said, find_turns
from fairseq_inf.errors import Failure
from fairseq_inf.hub import open_hub
from fairseq_inf.models.generation import Continuation, OpenSegment, Reading, new_reading, read
from fairseq_inf.models.transformer_xl import TransformerXLLM
from fairseq_inf.pretrained.checkpoint import build, save_checkpoint
from fairseq_inf.tasks.long_sequence_lm import LongSequenceLMConfig

L = 32  # tokens of a segment


def called(command, *args, typed=""):
    """A command in this process.  -> what it printed, what it failed with"""
    printed, failed = io.StringIO(), None
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", [command.__name__, *map(str, args)])
        patch.setattr(sys, "stdin", io.StringIO(typed))
        try:
            command.main()
        except SystemExit as stopped:
            failed = stopped.code
    return printed.getvalue(), failed


def film(number, name="Frozen"):
    facts = {
        "movieName": name, "year": "2013", "genre": "Comedy", "director": "Chris Buck",
        "cast": ["Idina Menzel as Elsa", "Josh Gad as Olaf"],
        "introduction": f"{name} is a film about two sisters and a snowman.",
        "rating": ["Rotten Tomatoes: 89%"], "critical_response": ["a great big snowy pleasure"],
    }  # fmt: skip
    scenes = {str(i): f"In scene {i} of {name} somebody sings and the snow falls." for i in (1, 2)}
    return {"0": facts, **scenes, "3": "At the end it is warm again.", "wikiDocumentIdx": number}


def conversation(number, *messages):
    history = [{"uid": f"user{who}", "text": text, "docIdx": 0} for who, text in messages]
    return {"wikiDocumentIdx": number, "history": history}


MESSAGES = [
    (1, "hello  there"), (1, "what film is it?"), (2, "it is Frozen, with Idina Menzel"),
    (1, "who directed it?"), (2, "Chris Buck did."), (2, " "), (2, "It has a snowman!"),
    (1, "I like snow, thanks"),
]  # fmt: skip


def write_data(folder):
    """A CMU-DoG of two films; b stands in train and in valid, c in train and in test."""
    files = {f"WikiData/{name}": film(i, name) for i, name in enumerate(("Frozen", "Jaws"))}
    for split, names in {"train": "abcdefgh", "valid": "bpq", "test": "crs"}.items():
        for i, name in enumerate(names):
            said = MESSAGES[: len(MESSAGES) - i % 5]
            files[f"Conversations/{split}/{name}"] = conversation(i % 2, *said)
    for name, content in files.items():
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("cmu_dog"))


@pytest.fixture(scope="module")
def data(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("dialogue") / "bin"
    printed, failed = called(prepare, source, out, "--part", "--vocab-size", 320)
    assert "responses" in printed and failed is None
    return out


def streams(data, split):
    words = Dictionary.load(str(data / "dict.txt"))
    lines = data_utils.load_indexed_dataset(str(data / split), words, "mmap")
    return StreamDataset(lines, words, "documents", words.eos(), str(data / split))


@pytest.fixture(scope="module")
def split(data):
    return streams(data, "test")


def turns_of(split, number):
    return find_turns(split[number].numpy(), split.dictionary, "")


# the data


def test_the_whole_data_set_has_the_published_responses(real_data):
    films = cmu_dog.load_films(real_data / "cmu_dog")
    conversations = cmu_dog.load_conversations(real_data / "cmu_dog", films)
    cmu_dog.check_published(conversations, real_data / "cmu_dog")
    counted = {s: (len(c), sum(x.responses for x in c)) for s, c in conversations.items()}
    assert counted == {"train": (3373, 72922), "valid": (184, 3626), "test": (556, 11577)}
    assert len(films) == 30 and all(text.count("\n") >= 8 for text in films.values())


def test_a_stream_is_a_document_and_then_the_turns_each_with_its_end(data, source, hub):
    train = streams(data, "train")
    words, first, turns = train.dictionary, train[0], turns_of(train, 0)
    text = cmu_dog.film_text(film(0), source)
    assert words[int(first[0])] == "<doc>" and "Film: Frozen\n" in text and text.count("\n") == 11
    assert hub.text_of(first[1 : turns[0].begin]) == text
    spoken = [words[int(first[x.begin])] + hub.text_of(first[x.begin + 1 : x.end]) for x in turns]
    assert spoken == [
        "<speaker1> hello there what film is it?",
        "<speaker2> it is Frozen, with Idina Menzel",
        "<speaker1> who directed it?",
        "<speaker2> Chris Buck did. It has a snowman!",
        "<speaker1> I like snow, thanks",
    ]
    assert turns[-1].end == len(first) - 1


def test_what_stands_in_train_is_taken_out_of_the_other_splits(data):
    counts = json.loads((data / "documents.json").read_text())
    for split, documents in {"train": 8, "valid": 2, "test": 2}.items():
        assert counts[split]["documents"] == len(streams(data, split)) == documents
    assert counts["valid"]["responses"] == 3 + 3


def test_data_are_encoded_as_others_that_know_the_markers_and_may_leave_the_document_out(
    source, data, split, tmp_path
):
    again = tmp_path / "bin"
    called(prepare, source, again, "--part", "--encoding", data, "--without-document")
    assert (again / "dict.txt").read_text() == (data / "dict.txt").read_text()
    bare = streams(again, "test")
    for number in range(len(split)):
        begin = turns_of(split, number)[0].begin
        assert begin > 0 and torch.equal(bare[number], split[number][begin:])


CALL, FROZEN = "Conversations/test/r.json", "WikiData/Frozen.json"


@pytest.mark.parametrize(
    "name,content,said",
    [
        (CALL, '{"history": [', "broken JSON"),
        (CALL, conversation(7, *MESSAGES), "wikiDocumentIdx 7"),
        (CALL, conversation(0, *MESSAGES[:2]), "two turns"),
        (CALL, conversation(0, (3, "hi")), "user1 or"),
        (CALL, {"wikiDocumentIdx": 0, "history": ["hi"]}, "user1 or"),
        (CALL, {"wikiDocumentIdx": [0], "history": []}, "[0], is not in"),
        (CALL, conversation(0, (1, "\ud800"), (2, "hi")), "half a character"),
        (FROZEN, {**film(0), "2": "  "}, "section 2"),
        (FROZEN, {**film(0), "0": {}}, "section 0"),
        ("WikiData/Jaws.json", film(0), "wikiDocumentIdx 0"),
        (FROZEN, [], "JSON object"),
        (None, None, "train has 8 conversations with 25 responses"),
    ],
)
def test_bad_data_are_named_in_one_sentence_and_leave_nothing(tmp_path, name, content, said):
    source = write_data(tmp_path / "source")
    part = ["--part"] * bool(name)  # without it the data are to be whole
    if name:
        text = content if isinstance(content, str) else json.dumps(content)
        (source / name).write_text(text)
    _, failure = called(prepare, source, tmp_path / "bin", *part, "--vocab-size", 320)
    assert str(source / (name or "")) in failure and said in failure and "\n" not in failure
    assert name or "--part" in failure
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


# the task


@pytest.mark.parametrize("document", [False, True])
def test_targets_are_what_is_said_and_the_ends_of_turns(split, document):
    eos, pad = split.dictionary.eos(), split.dictionary.pad()
    batch = SequenceBatches(
        split, 2, L, slice(0, 2), lambda dataset, number: find_said(dataset, number, document)
    )[0]
    assert batch["segments"][0]["net_input"]["src_tokens"][:, 0].tolist() == [eos, eos]
    firsts = []
    for row in range(2):
        targets = torch.cat([segment["target"][row] for segment in batch["segments"]])
        tokens, turns = split[row], turns_of(split, row)
        parts = [tokens[turn.begin + 1 : turn.end + 1] for turn in turns]
        if document:
            parts.insert(0, tokens[1 : turns[0].begin])
        assert torch.equal(targets[targets != pad], torch.cat(parts))
        firsts.append(1 if document else turns[0].begin + 1)
    assert batch["first"] == min(firsts) // L


# roles


@pytest.mark.parametrize("host", HOSTS)
def test_roles_go_on_over_segments_and_tokens(host):
    model = make_model("infinite_former", host=host, role_words="w1,w2")
    decoder = model.decoder
    torch.nn.init.normal_(decoder.roles.weight)
    words = [decoder.dictionary.index(f"w{i}") for i in (1, 2)]
    text = torch.randint(10, 30, (2, 25), generator=torch.Generator().manual_seed(1))
    text[0, 3], text[0, 17], text[1, 9] = words[0], words[1], words[1]
    of = decoder.roles.of(text, torch.tensor([0, 1]))
    assert of[0].tolist() == [0] * 3 + [1] * 14 + [2] * 8
    assert of[1].tolist() == [1] * 9 + [2] * 16
    reading = new_reading(decoder, 2, 7)
    _, whole = read(decoder, reading, text, torch.tensor([25, 25]), score=True)
    go_on = Continuation(decoder, read(decoder, reading, text[:, :2], torch.tensor([2, 2])))
    for i in range(2, 25):
        logs = decoder.get_normalized_probs((go_on.output, None), log_probs=True)[:, 0]
        assert torch.allclose(logs.gather(1, text[:, i : i + 1])[:, 0], whole[:, i], atol=1e-4)
        go_on.feed(text[:, i])


def test_new_roles_add_exactly_nothing_and_a_word_must_be_known():
    plain = make_model(host="llama")
    model = make_model(host="llama", sharp=False, role_words="w1,w2")
    state = plain.state_dict()
    model.upgrade_state_dict(state)
    model.load_state_dict(state)
    tokens = torch.randint(4, 30, (2, 9))
    assert torch.equal(plain(tokens)[0], model(tokens)[0])
    assert [x.memory_flags["--role-words"] for x in (plain, model)] == [None, "w1,w2"]
    with pytest.raises(ValueError, match="--role-words: <who> is not in the dictionary"):
        make_model(role_words="<who>")


# answers


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", MEMORIES)
def test_a_branch_is_the_reading_of_what_stands_before_it(name, host):
    """Nothing behind it is visible: neither in what it puts out nor in any of its tensors."""
    decoder = make_model(name, host=host).decoder
    draw = torch.Generator().manual_seed(0)
    text = torch.randint(4, 30, (3, 31), generator=draw)
    start = read(decoder, new_reading(decoder, 3, 12), text[:, :25], torch.tensor([25, 17, 5]))
    rows, counts = torch.tensor([0, 2, 2, 1]), torch.tensor([1, 3, 6, 4])
    segment, other = torch.randint(4, 30, (2, 3, 12), generator=draw)
    ends = torch.tensor([1, 4, 6])[:, None]  # of the longest branch of each row
    changed = torch.where(torch.arange(12) < ends, segment, other)
    one, two = (
        OpenSegment(decoder, Reading(start.memory, x, torch.full((3,), 12))).branch(rows, counts)
        for x in (segment, changed)
    )
    longest = torch.tensor([0, 2, 3])  # branch 1 ends before what was changed
    other = two.rows(longest).tensors()
    for part, x in one.rows(longest).tensors().items():
        assert torch.equal(x, other[part]), part
    behind = torch.arange(12) >= counts[:, None]
    tokens = segment[rows].masked_fill(behind, decoder.dictionary.pad())
    alone = Continuation(decoder, Reading(start.memory.rows(rows), tokens, counts))
    branch = Continuation(decoder, one)
    for _ in range(15):  # over a border
        assert torch.allclose(branch.output, alone.output, atol=1e-4)
        token = alone.output[:, 0].argmax(dim=-1)
        branch.feed(token), alone.feed(token)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """-> checkpoint of a config of the example, made small, and its loss in the last validation"""
    folder = tmp_path_factory.mktemp("trained")
    sizes = "layers=2 embed_dim=32 ffn_embed_dim=64 attention_heads=2 key_heads=2".split()
    printed = fairseq(
        "hydra-train", "--config-dir", ROOT / "examples/dialogue/config/small",
        "--config-name", "infinite_former_gibbs", *(f"model.decoder_{x}" for x in sizes),
        "model.stm_length=8", "+model.ltm_basis=64", f"task.tokens_per_sample={L}",
        f"task.data={data}", "dataset.batch_size=4", "dataset.valid_subset=test",
        "dataset.validate_interval=99", "checkpoint.save_interval=99",
        "optimization.max_update=20", "optimizer.groups.default.lr_float=0.005",
        f"checkpoint.save_dir={folder}", "checkpoint.finetune_from_model=null",
        f"hydra.run.dir={folder}", "common.bf16=false", "common.cpu=true",
        "common.log_format=json",
    )  # fmt: skip
    return folder / "checkpoint_last.pt", float(re.search(r'"test_nll_loss": "(.+?)"', printed)[1])


@pytest.fixture(scope="module")
def hub(trained, data):
    hub = open_hub(str(trained[0]), str(data), cpu=True)
    with torch.no_grad():  # so that the memory matters
        for layer in hub.model.decoder.layers:
            torch.nn.init.normal_(layer.memory.output.weight)
    return hub


class Lines(list):
    sizes = None


def changed(dataset, number, at):
    """The same split with another token at a place of a stream."""
    new = copy.copy(dataset)
    new.lines = Lines(dataset.lines[i].clone() for i in range(len(dataset)))
    new.lines.sizes = dataset.lines.sizes
    new.lines[number][at] = 10 if int(dataset[number][at]) != 10 else 11
    return new


GREEDY = {"max_tokens": 20, "beam": 1}


def test_the_reference_is_never_in_sight_of_its_own_answer(hub, split):
    before = Answers(hub, split).run(**GREEDY)
    for place, turn in enumerate(turns_of(split, 0)[1:], 1):
        # the first word of what was said: all else of it comes later
        after = Answers(hub, changed(split, 0, turn.begin + 1)).run(**GREEDY)
        for said, again in zip(before, after, strict=True):
            if said.conversation == 0 and said.turn <= place:
                assert said.answer == again.answer
                assert (said.nll != again.nll) == (said.turn == place), "it is judged by it"


def test_a_document_longer_than_a_segment_is_in_memory_before_the_first_turn(hub, split):
    [document, _] = Answers(hub, split).documents
    decoder = hub.model.decoder
    assert len(document) > 4 * L + decoder.stm_length
    reading = hub.read_tokens(document).reading
    assert int(reading.memory.position + reading.count) == len(document) + 1
    # its first words have left segment and short-term memory, and still matter
    told = {}
    for memory in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoder, "ltm_enabled", memory)
            one, other = (Answers(hub, x).run(0)[0].nll for x in (split, changed(split, 0, 2)))
        told[memory] = one != other
    assert told == {True: True, False: False}


def score(hub, tokens):
    """-> of each token its log-probability after those before it"""
    decoder = hub.model.decoder
    reading, length = new_reading(decoder, 1, L), torch.tensor([len(tokens)])
    return read(decoder, reading, tokens[None], length, score=True)[1][0]


def test_likelihoods_are_those_of_reading_each_stream_alone_and_of_the_task(
    hub, data, split, trained
):
    turns = iter(Answers(hub, split).run(0, rows=2))
    for number in range(len(split)):
        logs = score(hub, split[number])
        for turn in turns_of(split, number):
            said = next(turns)
            wanted = -float(logs[turn.begin + 1 : turn.end + 1].sum())
            assert said.nll == pytest.approx(wanted, abs=1e-3)
            assert (said.conversation, said.tokens) == (number, turn.end - turn.begin)
    plain = Answers(open_hub(str(trained[0]), str(data), cpu=True), split).run(0)
    bits = sum(x.nll for x in plain) / sum(x.tokens for x in plain) / np.log(2)
    assert trained[1] == pytest.approx(bits, abs=2e-3)


def test_answers_are_the_same_one_by_one_and_side_by_side(hub, data):
    split = streams(data, "train")
    one = Answers(hub, split, 4).run(rows=1, branches=1, **GREEDY)
    two = Answers(hub, split, 4).run(rows=4, branches=5, **GREEDY)
    assert [x.answer for x in one] == [x.answer for x in two]
    assert all(x.answer == "" for x in one if x.turn == 0)
    some = Answers(hub, split, 4).run(2, **GREEDY)
    assert [x.nll for x in some] == pytest.approx([x.nll for x in one], abs=1e-3)
    assert [x.answer for x in some] == [x.answer if x.conversation < 2 else "" for x in one]
    assert not any(marker in x.answer for x in one for marker in MARKERS)


def test_draws_repeat_with_their_seed(hub, split):
    settings = {"max_tokens": 12, "sampling": True, "sampling_topp": 0.9}
    one, again, other = (
        [x.answer for x in Answers(hub, split).run(seed=seed, **settings)] for seed in (1, 1, 2)
    )
    assert one == again != other


def test_what_an_answer_looked_at_is_found_by_its_place(hub, split):
    tokens, begin = split[0], turns_of(split, 0)[-1].begin
    weights = attended(hub, tokens, begin)
    assert len(weights) == len(tokens)
    assert weights.min() >= 0 and float(weights.sum()) == pytest.approx(1)
    in_sight = min(len(tokens) - begin, 8)
    assert not weights[-in_sight:].any(), "it has not left the short-term memory"


def test_a_fact_is_known_if_it_is_likeliest_after_its_own_document(hub, split):
    answers = Answers(hub, split)
    index = split.dictionary.index
    # the films of these two documents differ, their casts and directors do not
    before = [
        *(index("<speaker1>"), *hub.tokens_of(" what is the movie called?").tolist()),
        *(split.dictionary.eos(), index("<speaker2>"), *hub.tokens_of(" it is called").tolist()),
    ]
    names = [hub.text_of(x).split("Film: ")[1].split("\n")[0] for x in answers.documents]
    assert sorted(names) == ["Frozen", "Jaws"]
    logs = np.zeros((2, 2))
    for i, document in enumerate(answers.documents):
        for j, name in enumerate(names):
            fact = hub.tokens_of(f" {name}")
            text = torch.cat([document, torch.tensor(before), fact])
            logs[i, j] = float(score(hub, text)[-len(fact) :].sum())
    [(name, (share, gain))] = known_facts(answers, among=2, rows=3).items()
    assert name == "film" and share == np.mean(logs.argmax(0) == [0, 1])
    assert gain == pytest.approx((logs[0, 0] - logs[1, 0] + logs[1, 1] - logs[0, 1]) / 2, abs=1e-4)
    assert abs(gain) > 1e-3, "the memory matters"


# measures


@pytest.fixture
def nltk(real_data, monkeypatch):
    nltk = pytest.importorskip("nltk", reason="pip install 'fairseq_inf[dialogue]'")
    monkeypatch.setattr(nltk.data, "path", [str(real_data / "nltk_data")])
    return nltk


@pytest.mark.slow
def test_meteor_is_that_of_nltk(nltk):
    answer = "It is a guide to action which ensures that the military always obeys the commands of"
    reference = (
        "It is a guide to action that ensures that the military will forever heed Party commands"
    )
    meteor = scores.load_meteor()
    assert round(meteor(f"{answer} the party", reference), 4) == 0.6944, "what its manual says"
    assert meteor("", reference) == meteor("?", reference) == 0


def test_without_wordnet_it_is_said_which_folder_is_missing(tmp_path, monkeypatch):
    nltk = pytest.importorskip("nltk")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    # one that has not been loaded yet
    empty = nltk.corpus.util.LazyCorpusLoader("wordnet", nltk.corpus.reader.WordNetCorpusReader)
    monkeypatch.setattr(nltk.corpus, "wordnet", empty)
    with pytest.raises(Failure, match="corpora/wordnet is not there: set NLTK_DATA"):
        scores.load_meteor()


def test_rouge_is_that_of_its_readme():
    found = scores.rouge(
        ["The quick brown dog jumps on the log."], ["The quick brown fox jumps over the lazy dog"]
    )
    assert {name: float(x[0]) for name, x in found.items()} == pytest.approx(
        {"rouge1": 12 / 17, "rouge1_recall": 6 / 9, "rougeL": 10 / 17, "rougeL_recall": 5 / 9}
    )


@pytest.mark.parametrize("answer,reference,wanted", [
    ("The film is Frozen.", "the film was frozen!", 2 / 3), ("cat cat cat", "cat dog", 2 / 5),
    ("a cat", "The CAT", 1), ("rock-n-roll", "rock n roll", 1), ("", "hello", 0),
    ("?!", "hello", 0), ("hello", "...", 0), ("!", "?", 0),
])  # fmt: skip
def test_f1_counts_words_that_both_have(answer, reference, wanted):
    assert scores.f1(answer, reference) == pytest.approx(wanted)


def test_bleu_and_chrf_of_a_split_are_those_of_sacrebleu(monkeypatch):
    from sacrebleu.metrics import BLEU, CHRF

    monkeypatch.setattr(scores, "load_meteor", lambda: lambda answer, reference: 0.0)
    answers = ["The dog bit the man.", "It wasn't surprising.", "The man had just bitten him.", ""]
    references = ["The dog bit the man.", "It was not unexpected.", "The man bit him.", "Why?"]
    each = [scores.f1(*pair) for pair in zip(answers, references, strict=True)]
    wanted = {
        "bleu": BLEU().corpus_score(answers, [references]).score,
        "chrf": CHRF().corpus_score(answers, [references]).score,
        "f1": 100 * np.mean(each),
    }
    found = scores.bootstrap(scores.statistics(answers, references))
    assert {name: found[name]["value"] for name in wanted} == pytest.approx(wanted)


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(100):
        each = np.stack([rng.random(60) < 0.3, np.ones(60)], axis=1).astype(float)
        found = scores.bootstrap({"f1": each}, draws=200)["f1"]
        assert found["low"] <= found["value"] <= found["high"]
        held += found["low"] <= 30 <= found["high"]
    assert 88 <= held <= 99


def test_conversations_are_drawn_whole():
    each = np.array([[1.0, 1], [3, 1], [10, 2]])
    total = scores.by_conversation(each, [0, 0, 1])
    assert total.tolist() == [[4, 2], [10, 2]]
    found = scores.bootstrap({"ppl": total})["ppl"]
    assert found["value"] == pytest.approx(np.exp(14 / 4))
    assert (found["low"], found["high"]) == pytest.approx((np.exp(2), np.exp(5)))


def test_chance_and_a_difference_are_told_apart():
    rng = np.random.default_rng(1)
    base = rng.random(200)
    one = {"f1": np.stack([base, np.ones(200)], axis=1)}
    noise = {"f1": np.stack([base + 0.1 * rng.standard_normal(200), np.ones(200)], axis=1)}
    worse = {"f1": np.stack([base - 0.05 + 0.1 * rng.standard_normal(200), np.ones(200)], axis=1)}
    assert scores.compare(one, one)["f1"] == {"difference": 0.0, "p": 1.0}
    assert scores.compare(one, noise)["f1"]["p"] > 0.05
    better = scores.compare(one, worse)["f1"]
    assert better["p"] < 0.01 and 3 < better["difference"] < 7
    assert scores.compare(worse, one)["f1"]["difference"] == pytest.approx(-better["difference"])


# the commands


@pytest.mark.slow
def test_a_split_is_answered_measured_and_compared(trained, data, tmp_path, nltk):
    one, two, examples = (tmp_path / name for name in ("one.json", "two.json", "examples.md"))
    args = [data, "--path", trained[0], "--cpu", "--max-tokens", 10, "--output"]
    printed, failed = called(evaluate, *args, one, "--examples", examples)
    assert failed is None
    lines = examples.read_text().splitlines()
    assert lines[0] == "Conversation 1" and "Conversation 2" in lines
    assert lines[2:4] == ["- hello there what film is it?", "- it is Frozen, with Idina Menzel"]
    assert lines[4].startswith("  - model: ") and lines[5].startswith("  - looked at “")
    assert all(f"| {measure.title} | " in printed for measure in scores.MEASURES.values())
    result = json.loads(one.read_text())
    assert (result["conversations"], result["responses"]) == (2, 3 + 3)
    assert all(x["low"] <= x["value"] <= x["high"] for x in result["measures"].values())
    assert result["turns"][1]["text"] == "it is Frozen, with Idina Menzel"
    called(evaluate, *args, two, "--memory-off", "--greedy")
    printed, failed = called(evaluate, "--compare", one, two)
    assert failed is None and "| perplexity | " in printed and printed.count("\n") == 11
    called(evaluate, *args, two, "--answered", 0, "--conversations", 1)
    _, failed = called(evaluate, "--compare", one, two)
    assert "different conversations" in failed


@pytest.mark.parametrize(
    "content", ["[", '{"turns": [], "statistics": {}}', '{"turns": [1]}', "[" * 100_000, None]
)
def test_what_cannot_be_compared_is_named(tmp_path, content):
    path = tmp_path / "one.json"
    if content is not None:
        path.write_text(content)
    _, failed = called(evaluate, "--compare", path, path)
    assert f"--compare {path} " in failed and "\n" not in failed


def interrupted(*args, **settings):
    raise KeyboardInterrupt


def test_bad_requests_are_named_before_anything_is_read(trained, data, tmp_path, monkeypatch):
    output = tmp_path / "one.json"
    args = [data, "--path", trained[0], "--cpu", "--answered", 0, "--output"]
    _, failed = called(evaluate, *args, output, "--facts")
    assert "--facts needs 10 documents to compare, these conversations have 2" in failed
    _, failed = called(evaluate, *args, tmp_path / "no" / "one.json")
    assert f"{tmp_path / 'no' / 'one.json'} cannot be written" in failed
    monkeypatch.setattr(Answers, "run", interrupted)
    assert called(evaluate, *args, output)[1] == 130
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flag, value", [("--topp", "0"), ("--max-tokens", 10**12), ("--seed", 2**64)]
)
@pytest.mark.parametrize("command", [evaluate, chat])
def test_draws_that_cannot_be_are_refused(command, flag, value, capsys):
    args = ["--path", "x", flag, value]
    args += (
        ["x", "--output", "x"] if command is evaluate else ["--data", "x", "--document", __file__]
    )
    called(command, *args)
    assert f"error: {flag} must be " in capsys.readouterr().err


def test_a_model_of_another_task_answers_if_it_knows_the_markers(data, tmp_path):
    def answer(data, *more):
        words = Dictionary.load(str(data / "dict.txt"))
        settings = {"decoder_layers": 1, "decoder_embed_dim": 16, "stm_length": 8}
        task = LongSequenceLMConfig(
            "long_sequence_lm", data=str(data), tokens_per_sample=L, stream_layout="documents"
        )
        path, kind = tmp_path / "checkpoint.pt", TransformerXLLM
        save_checkpoint(path, build(kind, settings, words), settings, task, words)
        args = [data, "--path", path, "--cpu", "--answered", 0, "--output", tmp_path / "out.json"]
        return called(evaluate, *args, *more)

    printed, failed = answer(data, "--bf16")
    assert failed is None and "| perplexity | " in printed
    assert "has no long-term memory" in answer(data, "--memory-off")[1]
    (tmp_path / "dict.txt").write_text("it 1\nis 1\n")
    _, failed = answer(tmp_path)
    assert "does not know <doc>, <speaker1>, <speaker2>: name a model of --task dialogue" in failed


def test_a_talk_ends_with_the_input_and_says_why(trained, data, tmp_path, monkeypatch):
    document = tmp_path / "film.txt"
    document.write_text(cmu_dog.film_text(film(0), document))
    args = ["--path", trained[0], "--data", data, "--document", document, "--cpu"]
    printed, failed = called(chat, *args, typed="/why\nwho directed it?\n\n/why\n/x\n\udcff?\n")
    assert failed is None
    assert "there is no answer yet" in printed
    assert printed.count("it:  ") == 2, "what is not UTF-8 ends no talk"
    assert "of what this answer looked at is in the document" in printed
    assert printed.count(chat.HELP) == 2
    assert "in the long-term memory only" in printed, "it is one signal"
    monkeypatch.setattr("builtins.input", interrupted)
    assert called(chat, *args)[1] == 130, "Ctrl-C leaves without a traceback"
    document.write_text(" ")
    assert str(document) in called(chat, *args)[1]


def test_the_table_pools_the_seeds_and_compares_with_the_host():
    draw = np.random.default_rng(0)

    def result(config, seed, gain, without):
        means = {
            name: np.stack([draw.random(40) + gain, np.ones(40)], axis=1)
            for name in set(scores.MEASURES) - {"ppl", "bleu", "chrf"}
        }
        corpus = {"bleu": np.full((40, 10), 5.0), "chrf": np.full((40, 18), 5.0)}
        sums = {"ppl": np.tile([50 * (2 - gain), 50], (60, 1))}  # of more than are answered
        facts = {}
        if seed == 2:  # the first; of others perplexity alone
            sums, facts = {**sums, **means, **corpus}, {"film": [0.2, 1.0]}
        statistics = {name: x.tolist() for name, x in sums.items()}
        row = {"config": config, "seed": seed, "ppl": np.exp(2 - gain), "statistics": statistics}
        return {**row, "facts": facts, "seconds": 120, "without": without}

    results = [result("host", seed, 0.0, 7.0 + seed) for seed in (1, 2)]
    results += [result("infinite_former", seed, 0.3, 9.0) for seed in (2, 1)]
    rows = [SimpleNamespace(name=name) for name in ("host", "infinite_former")]
    lines = report(results, rows, [2, 1]).splitlines()
    assert lines[2].startswith("| host | 7.39 ± 0.00 | 7.39, 7.39 | 9.00 | 20 % | ")
    assert lines[3].startswith("| infinite former | 5.47 ± 0.00 | 5.47, 5.47 | 9.00")
    assert "2.00 ± 0.00 | 18.02, 8.92, 15.28, 12.51, 7.52 |" in lines[3]
    assert lines[-1].startswith("infinite_former against host: perplexity -1.92 (p = 0.001), F1 +")
