"""Reading, going on token by token, memory files: in the process and by fairseq's commands."""

import io
import pathlib
import re
import subprocess

import pytest
import sentencepiece
import torch
from conftest import BASELINES, TASK, evaluate, fairseq, load, result, tool, train
from fairseq import search
from fairseq.data import Dictionary
from zoo import MEMORIES, make_model, text

from fairseq_inf.commands import text_named
from fairseq_inf.data.encoding import GPT2, SentencePiece
from fairseq_inf.files import read_text
from fairseq_inf.models import InfiniteFormerLM
from fairseq_inf.models.generation import Continuation, new_reading, read
from fairseq_inf.models.prompt_model import Nucleus, PromptModel
from fairseq_inf.tasks.long_sequence_lm import LongSequenceLMConfig, LongSequenceLMTask

LENGTH = 5  # tokens of a segment; the short-term memory has 6
PROMPTS = [1, 3, 5, 6, 10, 12, 23, 40]  # shorter and longer than L and than S + L


def evaluation(decoder, tokens):
    """One pass over a stream.  tokens: n.  -> log-probabilities of all words: n x V"""
    inputs = torch.cat([torch.tensor([decoder.dictionary.eos()]), tokens[:-1]])[None]
    state, out = decoder.initial_state(1), []
    with torch.no_grad():
        for part in inputs.split(LENGTH, dim=1):
            x, state, _ = decoder(part, state)
            out.append(logarithms(decoder, x)[0])
    return torch.cat(out)


def logarithms(decoder, x):
    """fairseq's own function computes them in single precision."""
    if decoder.adaptive_softmax is None:
        return x.log_softmax(dim=-1)
    return decoder.get_normalized_probs((x, None), log_probs=True)


def ragged(texts, sizes):
    tokens = torch.full((len(texts), max(sizes)), 1)
    for row, (whole, size) in enumerate(zip(texts, sizes, strict=True)):
        tokens[row, :size] = whole[:size]
    return tokens, torch.tensor(sizes)


def settings(kind):
    return {
        "plain": {},
        "post norm": {"decoder_post_norm": True},
        "no short-term memory": {"stm_length": 0},
        "memory off": {"ltm_enabled": False},
        "adaptive": {"adaptive_cutoff": "10,20"},
    }[kind]


@pytest.mark.parametrize(
    "kind", ["plain", "post norm", "no short-term memory", "memory off", "adaptive"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MEMORIES)
def test_tokens_one_by_one_have_the_probabilities_of_one_pass(name, dtype, kind):
    """In double precision also with weights that magnify every difference in the memory."""
    sharp = dtype == torch.float64
    atol = 1e-9 if sharp and kind != "adaptive" else 1e-5
    if name == "transformer_xl" and kind == "memory off":
        return  # there is none
    decoder = make_model(name, sharp=sharp, **settings(kind)).to(dtype).decoder
    assert_tokens_one_by_one(decoder, atol)


def assert_tokens_one_by_one(decoder, atol):
    """Ragged prompts side by side, across the borders of segments, rows changing places: all have
    the probabilities of one pass."""
    texts = [text(1, size + 30, seed=size)[0] for size in PROMPTS]
    expected = [evaluation(decoder, whole) for whole in texts]
    tokens, lengths = ragged(texts, PROMPTS)
    reading, scores = read(decoder, new_reading(decoder, len(texts), LENGTH), tokens, lengths, True)
    for row, size in enumerate(PROMPTS):
        wanted = expected[row][:size].gather(1, texts[row][:size, None])[:, 0]
        assert torch.allclose(scores[row, :size], wanted.float(), atol=1e-5)
    go_on = Continuation(decoder, reading)
    first = go_on.output.clone()
    for step in range(29):
        logs = logarithms(decoder, go_on.output)[:, 0]
        for row, size in enumerate(PROMPTS):
            assert torch.allclose(logs[row], expected[row][size + step], atol=atol), (row, step)
        if step % 4 == 1:
            order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(step))
            go_on.reorder(order)
            go_on.reorder(order.argsort())
        go_on.feed(torch.stack([texts[row][size + step] for row, size in enumerate(PROMPTS)]))
    # nothing of this has touched the reading
    assert torch.equal(first, Continuation(decoder, reading).output)
    assert reading.count.tolist() == [(size + 1 - 1) % LENGTH + 1 for size in PROMPTS]


@pytest.mark.parametrize("name", MEMORIES)
def test_rows_that_end_change_places_or_are_doubled_go_on_as_they_would(name):
    decoder = make_model(name).double().decoder
    texts = [text(1, size + 30, seed=size)[0] for size in PROMPTS]
    expected = [evaluation(decoder, whole) for whole in texts]
    reading = read(decoder, new_reading(decoder, len(texts), LENGTH), *ragged(texts, PROMPTS))
    go_on, rows = Continuation(decoder, reading), list(range(len(texts)))
    kept = {3: [5, 0, 2, 7, 1], 9: [3, 0, 4, 1], 13: [2, 0], 17: [1, 1, 0]}
    for step in range(25):
        if step in kept:
            go_on.reorder(torch.tensor(kept[step]))
            rows = [rows[row] for row in kept[step]]
        logs = logarithms(decoder, go_on.output)[:, 0]
        assert len(logs) == len(rows)
        for own, row in zip(logs, rows, strict=True):
            assert torch.allclose(own, expected[row][PROMPTS[row] + step], atol=1e-9), (row, step)
        go_on.feed(torch.stack([texts[row][PROMPTS[row] + step] for row in rows]))


@pytest.mark.parametrize("sharpness", [0.1, 8.0])
def test_a_nucleus_is_drawn_from_as_fairseq_does(sharpness):
    """Also where it has more tokens than are sorted at first."""
    words = Dictionary()
    logs = (sharpness * torch.randn(3, 1, 9000)).log_softmax(dim=-1)
    drawn = []
    for kind in (search.Sampling, Nucleus):
        torch.manual_seed(1)
        drawn.append(kind(words, sampling_topp=0.9).step(0, logs.clone(), torch.zeros(3, 1, 0)))
    for one, two in zip(*drawn, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", MEMORIES)
def test_a_text_in_parts_is_read_as_the_whole(name):
    decoder = make_model(name).decoder
    whole = text(2, 33)
    at_once = read(decoder, new_reading(decoder, 2, LENGTH), whole, torch.tensor([33, 33]))
    reading = new_reading(decoder, 2, LENGTH)
    for part in (whole[:, :1], whole[:, 1:1], whole[:, 1:17], whole[:, 17:]):
        reading = read(decoder, reading, part, torch.full((2,), part.size(1)))
    for (name, a), b in zip(at_once.tensors().items(), reading.tensors().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-6), name


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("name", MEMORIES)
def test_fairseqs_search_scores_its_hypotheses_as_an_evaluation_does(name, beam):
    from fairseq.sequence_generator import SequenceGenerator

    model = make_model(name, sharp=False)
    decoder = model.decoder
    texts = [text(1, size, seed=size)[0] for size in PROMPTS]
    tokens, lengths = ragged(texts, PROMPTS)
    generator = SequenceGenerator(
        [PromptModel(model, LENGTH)], decoder.dictionary, beam_size=beam, max_len_b=17, min_len=9
    )
    sample = {"net_input": {"src_tokens": tokens, "src_lengths": lengths}}
    for row, found in enumerate(generator.generate([model], sample)):
        assert len(found) == beam
        for hypothesis in found:
            logs = evaluation(decoder, torch.cat([texts[row], hypothesis["tokens"]]))
            logs = logs[len(texts[row]) :].gather(1, hypothesis["tokens"][:, None])[:, 0]
            assert torch.allclose(hypothesis["positional_scores"], logs, atol=1e-5)
    # greedy is the best word of each step
    if beam == 1:
        best = generator.generate([model], sample)[3][0]["tokens"]
        so_far = texts[3]
        for token in best[:9]:
            logs = evaluation(decoder, torch.cat([so_far, token[None]]))[-1]
            logs[decoder.dictionary.eos()] = logs[decoder.dictionary.pad()] = -torch.inf
            assert token == logs.argmax()
            so_far = torch.cat([so_far, token[None]])


# by fairseq's commands


ARCHS = ["infinite_former_lm", *BASELINES]


@pytest.fixture(scope="module")
def checkpoints(data_bin, trained, tmp_path_factory):
    """A checkpoint of each architecture, and what its training printed."""
    found = {"infinite_former_lm": (trained[0] / "checkpoint_last.pt", trained[1])}
    for name, model in BASELINES.items():
        folder = tmp_path_factory.mktemp(name)
        printed = train(data_bin, folder, "--max-update", 60, model=model)
        found[name] = (folder / "checkpoint_last.pt", printed)
    return found


def hypotheses(printed):
    """-> for each prompt the words and the scores (base 2) of its hypotheses"""
    words = re.findall(r"^H-(\d+)\t\S+\t(.*)$", printed, re.M)
    scores = re.findall(r"^P-\d+\t(.*)$", printed, re.M)
    found = {}
    for (number, line), values in zip(words, scores, strict=True):
        found.setdefault(int(number), []).append((line.split(), [float(v) for v in values.split()]))
    return found


def interactive(data_bin, checkpoint, prompts, tmp_path, *args, ok=True):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{prompt}\n" for prompt in prompts))
    return fairseq(
        "interactive", data_bin, *TASK, "--tokens-per-sample", 12, "--path", checkpoint,
        "--input", path, "--buffer-size", 10, "--batch-size", 10, *args, ok=ok,
    )  # fmt: skip


@pytest.fixture(scope="module")
def prompts(data_bin):
    """Prompts shorter and longer than a segment and than the short-term memory."""
    lines = (data_bin.parent / "test.txt").read_text().splitlines()
    return [" ".join(lines[0].split()[:size]) for size in (1, 7, 15, 40)]


@pytest.mark.parametrize("name", ARCHS)
def test_interactive_continues_prompts_of_any_length(
    data_bin, checkpoints, prompts, tmp_path, name
):
    path = checkpoints[name][0]
    printed = interactive(
        data_bin, path, prompts, tmp_path, "--beam", 3, "--nbest", 3, "--max-len-b", 20,
        "--min-len", 14,
    )  # fmt: skip
    found = hypotheses(printed)
    assert sorted(found) == [0, 1, 2, 3] and all(len(h) == 3 for h in found.values())
    hub = InfiniteFormerLM.from_pretrained(str(path.parent), path.name, str(data_bin))
    for number, prompt in enumerate(prompts):
        memory = hub.read(prompt)
        for words, scores in found[number]:
            assert 14 <= len(words) <= 20
            own = hub.score(" ".join(words), memory)["positional_scores"] / torch.tensor(2.0).log()
            assert torch.allclose(own, torch.tensor(scores[: len(words)]), atol=2e-4)


def test_generate_continues_the_lines_of_a_split(data_bin, checkpoints):
    lines = (data_bin.parent / "test.txt").read_text().splitlines()
    path = checkpoints["infinite_former_lm"][0]
    printed = fairseq(
        "generate", data_bin, *TASK, "--tokens-per-sample", 12, "--path", path, "--batch-size", 3,
        "--beam", 2, "--max-len-b", 15,
    )  # fmt: skip
    assert sorted(hypotheses(printed)) == list(range(len(lines)))
    sources = dict(re.findall(r"^S-(\d+)\t(.*)$", printed, re.M))
    assert [sources[str(i)] for i in range(len(lines))] == [line.strip() for line in lines]


@pytest.mark.parametrize("how", [["--sampling-topk", 3], ["--sampling-topp", 0.5]])
def test_sampling_keeps_to_the_likely_words_and_repeats_with_its_seed(
    data_bin, checkpoints, prompts, tmp_path, how
):
    path = checkpoints["infinite_former_lm"][0]
    options = ["--sampling", *how, "--beam", 1, "--nbest", 1, "--max-len-b", 12, "--seed", 1]
    one, same = (
        hypotheses(interactive(data_bin, path, prompts[:2], tmp_path, *options)) for _ in range(2)
    )
    assert one == same
    hub = InfiniteFormerLM.from_pretrained(str(path.parent), path.name, str(data_bin))
    decoder = hub.model.decoder
    go_on = Continuation(decoder, hub.read(prompts[1]).reading)
    for word in hub.tokens_of(" ".join(one[1][0][0])):
        probabilities = go_on.output[0, 0].softmax(-1)
        likelier = probabilities[probabilities > probabilities[word]]
        assert len(likelier) < 3 if how[0] == "--sampling-topk" else likelier.sum() < 0.5
        go_on.feed(word[None])


BAD = {
    "too long": (["word1"], ["--max-len-b", 2_000_000], "--max-len-b"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_prompts_end_in_one_sentence(data_bin, checkpoints, tmp_path, case):
    prompts, options, said = BAD[case]
    path = checkpoints["infinite_former_lm"][0]
    printed = interactive(data_bin, path, prompts, tmp_path, *options, ok=False)
    assert said in printed.strip().splitlines()[-1]


def test_some_unknown_words_are_told(data_bin, checkpoints, tmp_path):
    path = checkpoints["infinite_former_lm"][0]
    printed = interactive(data_bin, path, ["word1 Xanadu"], tmp_path, "--max-len-b", 5)
    assert "1 of the 2 words of prompt 0 are not in the dictionary" in printed
    assert hypotheses(printed)


# the baselines by fairseq's commands


def test_a_compressive_model_logs_its_loss_by_name(checkpoints):
    printed = checkpoints["compressive_transformer_lm"][1]
    values = [float(v) for v in re.findall(r'"reconstruction": "([\d.]+)"', printed)]
    assert values and values[-1] > 0
    assert '"reconstruction":' not in checkpoints["transformer_xl_lm"][1]


def test_evaluation_with_a_longer_short_term_memory(data_bin, checkpoints):
    path = checkpoints["transformer_xl_lm"][0]
    options = ["--tokens-per-sample", 12, "--batch-size", 1]
    short = result(evaluate(data_bin, path, *options))
    longer = result(evaluate(data_bin, path, *options, "--model-overrides", "{'stm_length': 640}"))
    assert short[0] == longer[0] and short[1] != longer[1]


# the hub, and memory files


@pytest.fixture(scope="module")
def hub(data_bin, checkpoints):
    path = checkpoints["infinite_former_lm"][0]
    return InfiniteFormerLM.from_pretrained(str(path.parent), path.name, str(data_bin))


@pytest.mark.parametrize("name", ARCHS)
def test_a_memory_file_answers_as_the_memory_itself(data_bin, checkpoints, tmp_path, name):
    path = checkpoints[name][0]
    hub = InfiniteFormerLM.from_pretrained(str(path.parent), path.name, str(data_bin))
    lines = (data_bin.parent / "valid.txt").read_text()
    memory = hub.read(lines)
    assert memory.tokens == len(lines.split()) + lines.count("\n")
    memory.save(tmp_path / "m.safetensors")
    again = hub.load_memory(tmp_path / "m.safetensors")
    question = "word1 word2 word3 word4"
    asked = hub.score(question, memory)["positional_scores"]
    assert torch.equal(asked, hub.score(question, again)["positional_scores"])
    assert not torch.equal(asked, hub.score(question)["positional_scores"])
    assert hub.generate("word1", memory) == hub.generate("word1", again)
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


@pytest.mark.slow
def test_reading_by_the_command_equals_reading_in_the_process(
    data_bin, checkpoints, tmp_path, real_data
):
    """A book of a megabyte.  The command reads the file in parts."""
    saved = load(checkpoints["infinite_former_lm"][0])
    saved["cfg"]["task"]["tokens_per_sample"] = 200  # in fewer steps
    path = tmp_path / "checkpoint.pt"
    torch.save(saved, path)
    hub = InfiniteFormerLM.from_pretrained(str(tmp_path), path.name, str(data_bin))
    book = max((real_data / "pg19" / "test").glob("*.txt"), key=lambda p: p.stat().st_size)
    whole = book.read_text()[:1_000_000]
    (tmp_path / "book.txt").write_text(whole)
    command = [tool("inf-read"), tmp_path / "book.txt", "--path", path, "--data", data_bin,
               "--output", tmp_path / "m.safetensors", "--cpu"]  # fmt: skip
    done = subprocess.run(command, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    here = hub.read(whole)
    assert f"{here.tokens:,} tokens" in done.stdout
    question = "word1 word2 word3 word4"
    asked = hub.score(question, hub.load_memory(tmp_path / "m.safetensors"))
    expected = hub.score(question, here)
    assert torch.allclose(asked["positional_scores"], expected["positional_scores"], atol=1e-5)
    assert "%|" in done.stderr  # the progress bar


@pytest.mark.slow
def test_the_command_goes_on_from_a_memory_with_what_comes_in(data_bin, checkpoints, hub, tmp_path):
    first, second = "word1 word2 word3 " * 9, "word4 word5 " * 9
    hub.read(first).save(tmp_path / "first")
    path = checkpoints["infinite_former_lm"][0]
    command = [tool("inf-read"), "-", "--path", path, "--data", data_bin, "--memory",
               tmp_path / "first", "--output", tmp_path / "both", "--cpu"]  # fmt: skip
    done = subprocess.run(command, text=True, capture_output=True, input=second)
    assert done.returncode == 0, done.stderr
    both, whole = hub.load_memory(tmp_path / "both"), hub.read(first + second)
    assert both.tokens == whole.tokens
    asked, expected = (hub.score("word1 word2", m)["positional_scores"] for m in (both, whole))
    assert torch.allclose(asked, expected, atol=1e-5)


def test_bad_memory_files_and_texts(data_bin, checkpoints, hub, tmp_path):
    memory = hub.read("word1 word2")
    path = tmp_path / "m.safetensors"
    memory.save(path)
    other = checkpoints["transformer_xl_lm"][0]
    other = InfiniteFormerLM.from_pretrained(str(other.parent), other.name, str(data_bin))
    with pytest.raises(ValueError, match="another model"):
        other.load_memory(path)
    with pytest.raises(ValueError, match="another model"):
        other.score("word1", memory)
    own = checkpoints["infinite_former_lm"][0]
    longer = InfiniteFormerLM.from_pretrained(
        str(own.parent), own.name, str(data_bin), tokens_per_sample=20
    )
    with pytest.raises(ValueError, match="--tokens-per-sample"):
        longer.load_memory(path)
    off = InfiniteFormerLM.from_pretrained(
        str(own.parent), own.name, str(data_bin), ltm_enabled=False
    )
    with pytest.raises(ValueError, match="other settings"):
        off.load_memory(path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match="damaged"):
        hub.load_memory(path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        hub.load_memory(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="cannot be written"):
        memory.save(tmp_path / "none" / "m.safetensors")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        memory.save(tmp_path)
    with pytest.raises(ValueError, match="empty"):
        hub.generate("")
    with pytest.raises(ValueError, match="empty"):
        hub.score("")
    for bad in ({"max_tokens": 10**9}, {"max_tokens": 0}, {"max_tokens": 5, "min_len": 9}):
        with pytest.raises(ValueError, match="--max-len-b"):
            hub.generate("word1", **bad)
    for bad, said in (
        ({"sampling": True, "sampling_topp": 5.0}, "--sampling-topp must be above 0 and at most 1"),
        ({"sampling": True, "sampling_topk": -7}, "--sampling-topk must be at least 1, got -7"),
        ({"sampling_topk": 3}, "are of --sampling"),
        ({"temperature": 0.0}, "--temperature must be a positive number"),
    ):
        with pytest.raises(ValueError, match=said):
            hub.generate("word1", **bad)
    for bad in ("colour", "max_len_a", "prefix_size", "match_source_len", "print_alignment"):
        with pytest.raises(ValueError, match=f"{bad.replace('_', '.')} is not"):
            hub.generate("word1", **{bad: 1})
    with pytest.raises(ValueError, match="--beam"):
        hub.generate("word1", beam=0)
    with pytest.raises(ValueError, match="list of prompts is empty"):
        hub.generate([])
    with pytest.raises(TypeError, match="read or load_memory"):
        hub.score("word1", str(path))
    with pytest.raises(ValueError, match="no word"):
        hub.read("Xanadu")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        hub.read(pathlib.Path("none.txt"))
    with pytest.raises(TypeError, match="open it as text"):
        hub.read(io.BytesIO(b"word1"))


def test_the_hub_goes_on_from_a_memory_and_in_batch(hub):
    memory = hub.read("word1 word2 word3 " * 20)
    together = hub.generate(["word1", "word2 word3"], memory, max_tokens=9)
    assert together == [hub.generate(p, memory, max_tokens=9) for p in ("word1", "word2 word3")]
    assert len(hub.generate("", memory, max_tokens=9, min_len=9).split()) == 9


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_text_file_is_read_in_one_way(hub, tmp_path, end, monkeypatch):
    text = "word1 word2\nword3\n"
    expected = hub.tokens_of(text)
    for mark in (b"", b"\xef\xbb\xbf"):
        written = mark + text.replace("\n", end).encode()
        (tmp_path / "text").write_bytes(written)
        assert read_text(tmp_path / "text") == text
        assert torch.equal(torch.cat([*hub.pieces(tmp_path / "text")]), expected)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(written)))
        assert torch.equal(torch.cat([*hub.pieces(text_named("-", None))]), expected)


@pytest.mark.parametrize("kind", ["words", "sentencepiece", "gpt2"])
def test_a_file_in_parts_has_the_tokens_of_the_whole(kind, hub, real_data, tmp_path, monkeypatch):
    """Empty lines, long lines, and parts of any size."""
    book = min((real_data / "pg19" / "test").glob("*.txt")).read_text()[:6000]
    book = book[:2000] + "\n\n \n" + book[2000:] + " no end" * 100
    (tmp_path / "book.txt").write_bytes(book.encode())
    encoding = None
    if kind == "gpt2":
        encoding = GPT2(real_data / "gpt2_bpe")
    elif kind == "sentencepiece":
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(book.splitlines()), model_prefix=str(tmp_path / "spm"),
            vocab_size=400, byte_fallback=True, model_type="bpe", minloglevel=3,
            normalization_rule_name="identity", remove_extra_whitespaces=False,
            add_dummy_prefix=False, allow_whitespace_only_pieces=True,
        )  # fmt: skip
        encoding = SentencePiece(tmp_path / "spm.model")
    monkeypatch.setattr(hub, "encoding", encoding)
    for size in (7, 100, 1000):
        monkeypatch.setattr("fairseq_inf.hub.CHUNK", size)
        total, parts = hub.parts(tmp_path / "book.txt")
        texts, sizes = zip(*parts, strict=True)
        assert "".join(texts) == book and sum(sizes) == total == len(book.encode())
        assert len(texts) > 5
        if encoding is None:
            assert torch.equal(torch.cat([hub.tokens_of(t) for t in texts]), hub.tokens_of(book))
        else:
            whole = [word for part in encoding.encode(book) for word in part]
            assert [w for t in texts for part in encoding.encode(t) for w in part] == whole
            assert encoding.decode(whole) == book


def test_prompts_of_a_split_keep_their_numbers_and_lose_their_ends(data_bin, tmp_path):
    lines = "word1 word2 word3\n\nword4\nword5 word3\n"
    (tmp_path / "test.txt").write_text(lines)
    fairseq("preprocess", "--only-source", "--srcdict", data_bin / "dict.txt", "--testpref",
            tmp_path / "test.txt", "--destdir", tmp_path / "bin")  # fmt: skip
    for layout, separator, expected in (
        ("corpus", "</s>", {0: "word1 word2 word3", 2: "word4", 3: "word5 word3"}),
        ("documents", "word3", {0: "word1 word2", 1: "</s> word4 </s> word5"}),
    ):
        cfg = LongSequenceLMConfig(
            data=str(tmp_path / "bin"), stream_layout=layout, document_separator=separator
        )
        cfg.dataset_impl = cfg.path = None
        cfg.train_subset = "train"
        task = LongSequenceLMTask.setup_task(cfg)
        task.load_dataset("test")
        found = task.get_batch_iterator(task.dataset("test"), max_sentences=2)
        found = {
            int(number): task.dictionary.string(text[:size], include_eos=True)
            for batch in found.next_epoch_itr(shuffle=False)
            for number, text, size in zip(batch["id"], *batch["net_input"].values(), strict=True)
        }
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "options,said",
    [
        (["none.txt"], "none.txt does not exist"),
        (["text", "--output", "none/m"], "--output"),
        (["text", "--output", "."], "--output"),
        (["text", "--path", "none.pt"], "none.pt does not exist"),
        (["text", "--data", "none"], "none"),
        (["empty"], "empty"),
        (["latin"], "is not UTF-8"),
    ],
)
def test_the_command_ends_in_one_sentence(data_bin, checkpoints, tmp_path, options, said):
    (tmp_path / "text").write_text("word1 word2\n")
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin").write_bytes(b"word1 \xe9\n")
    defaults = {"--path": checkpoints["infinite_former_lm"][0], "--data": data_bin, "--output": "m"}
    given = dict(zip(options[1::2], options[2::2], strict=True))
    flags = [str(word) for pair in {**defaults, **given}.items() for word in pair]
    command = [tool("inf-read"), options[0], *flags, "--cpu"]
    done = subprocess.run(command, text=True, capture_output=True, cwd=tmp_path)
    assert done.returncode != 0 and said in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "latin", "text"]
