"""What a user may trust: exits, refusals, numbers that are the same everywhere."""

import gc
import logging
import os
import re
import stat
import subprocess
import sys
import time
import weakref
from pathlib import Path

import commands
import pytest
import sentencepiece
import torch
from conftest import (
    MODEL,
    ROOT,
    TASK,
    TRAIN,
    evaluate,
    fairseq,
    load,
    result,
    start_training,
    train,
)
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceConfig
from omegaconf import OmegaConf
from slow import Slow

from fairseq_inf.data import LineEncoding, StreamIterator
from fairseq_inf.data.encoding import SentencePiece
from fairseq_inf.hub import open_hub
from fairseq_inf.models import InfiniteFormerLM
from fairseq_inf.tasks.long_sequence_lm import LongSequenceLMConfig, LongSequenceLMTask

# the end of a process


def test_an_epoch_that_is_over_leaves_nothing_behind():
    batches = Slow()
    batches.size = 3
    epoch = StreamIterator(batches, None, {}, slice(0, 1), buffer_size=10).next_epoch_itr()
    assert len(list(epoch)) == 3
    kept = weakref.ref(epoch)
    del epoch
    gc.collect()
    assert kept() is None


@pytest.mark.slow
def test_a_process_that_ends_in_mid_epoch_has_exit_code_0():
    script = (
        "import os; from slow import Slow; from fairseq_inf.data import StreamIterator\n"
        "for _ in range(3):\n"
        "    if not os.fork():\n"
        "        iterator = StreamIterator(Slow(), None, {}, slice(0, 1), buffer_size=10)\n"
        "        next(iterator.next_epoch_itr())\n"
        "        break\n"
        "else:\n"
        "    assert [os.wait()[1] for _ in range(3)] == [0, 0, 0]"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT / "tests")
    assert done.returncode == 0


# two trainings in one folder


@pytest.mark.slow
def test_a_folder_has_one_training_at_a_time_and_a_kill_frees_it(data_bin, tmp_path):
    command = [data_bin, *TASK[:-1], 2, *MODEL, *TRAIN, "--save-dir", tmp_path]
    slow = ["--max-update", 100_000, "--save-interval-updates", 5, "--keep-interval-updates", 1]
    [first] = start_training([*command, *slow], 1, rows=4)
    deadline = time.time() + 120
    while not (tmp_path / "checkpoint_last.pt").exists() and time.time() < deadline:
        time.sleep(0.05)
    said = train(data_bin, tmp_path, "--max-update", 3, ok=False).strip().splitlines()[-1]
    assert re.fullmatch(
        rf"ValueError: --save-dir {tmp_path} is in use by another training \(process {first.pid} "
        r"on \S+\): name another folder, or end that one",
        said,
    )
    assert first.process.is_alive()
    first.kill()
    done = load(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    assert "done training" in train(data_bin, tmp_path, "--max-update", done + 2)


# what is read otherwise than in the training


@pytest.fixture(scope="module")
def by_documents(data_bin, tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    train(data_bin, folder, "--max-update", 20, "--stream-layout", "documents")
    return folder / "checkpoint_last.pt"


@pytest.mark.slow
def test_an_evaluation_reads_as_the_training_did(data_bin, by_documents):
    same = ["--tokens-per-sample", 12, "--stream-layout", "documents"]
    by_default = evaluate(data_bin, by_documents)
    assert result(by_default) == result(evaluate(data_bin, by_documents, *same))
    assert "in the training" not in by_default
    other = evaluate(data_bin, by_documents, "--tokens-per-sample", 7, "--stream-layout", "corpus")
    assert "--tokens-per-sample is 7, and was 12 in the training" in other
    assert "--stream-layout is corpus, and was documents in the training" in other
    assert result(other)[1] != result(by_default)[1]
    valid = ["--batch-size", 1, "--valid-subset", "test"]
    command = [data_bin, *TASK, "--path", by_documents, *valid]
    assert "in the training" not in fairseq("validate", *command)
    assert "was 12 in the training" in fairseq("validate", *command, "--tokens-per-sample", 9)


def test_the_hub_tells_of_another_segment_length(data_bin, by_documents, caplog):
    own = (str(by_documents.parent), by_documents.name, str(data_bin))
    with caplog.at_level(logging.WARNING):
        assert InfiniteFormerLM.from_pretrained(*own).length == 12
        assert not caplog.text
        assert InfiniteFormerLM.from_pretrained(*own, tokens_per_sample=7).length == 7
    assert "--tokens-per-sample is 7, and was 12 in the training" in caplog.text


@pytest.fixture
def pieces(tmp_path):
    """A data-bin with an encoding of its own, and another SentencePiece model."""
    lines = [f"the {a} and the {b}, isn't it" for a in "abcdefgh" for b in "ijklmnop"]
    for name, some in (("own", lines), ("other", [line[::-1] for line in lines])):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(some), model_prefix=str(tmp_path / name), vocab_size=300,
            byte_fallback=True, model_type="bpe", minloglevel=3, remove_extra_whitespaces=False,
            normalization_rule_name="identity", add_dummy_prefix=False,
        )  # fmt: skip
    data = tmp_path / "bin"
    data.mkdir()
    encoding = SentencePiece(tmp_path / "own.model")
    encoding.save(data)
    (data / "dict.txt").write_text(encoding.dictionary())
    (data / "documents.json").write_text('{"encoding": "sentencepiece"}')
    return data, tmp_path / "other.model"


def test_the_encoding_comes_from_the_data(pieces, caplog):
    data, other = pieces
    cfg = LongSequenceLMConfig(data=str(data))
    cfg.path = None
    task = LongSequenceLMTask.setup_task(cfg)
    text = "the a\n\nand the ☃"
    own = task.build_bpe(None)
    assert "<0x0A>" in own.encode(text) and own.decode(own.encode(text)) == text
    asked = OmegaConf.structured(SentencepieceConfig(sentencepiece_model=str(data / "spm.model")))
    asked._name = "sentencepiece"
    assert task.build_bpe(asked).decode(own.encode(text)) == text and not caplog.text
    asked.sentencepiece_model = str(other)
    assert not isinstance(task.build_bpe(asked), LineEncoding)
    assert f"--bpe sentencepiece does not encode as {data} does" in caplog.text


# the word <pad>


def test_the_word_pad_has_one_number_everywhere(data_bin, trained, tmp_path):
    (tmp_path / "test.txt").write_text("word1 <pad> word2 word3 <pad> <pad> word4\n" * 9)
    fairseq("preprocess", "--only-source", "--srcdict", data_bin / "dict.txt", "--testpref",
            tmp_path / "test.txt", "--destdir", tmp_path / "bin")  # fmt: skip
    path = trained[0] / "checkpoint_best.pt"
    tokens, perplexity = result(evaluate(tmp_path / "bin", path))
    assert tokens == 72
    command = [tmp_path / "bin", *TASK, "--path", path, "--batch-size", 1, "--valid-subset", "test"]
    said = fairseq("validate", *command, "--log-format", "simple")
    assert float(re.findall(r"ppl (\S+)", said)[-1]) == pytest.approx(perplexity, rel=1e-3)
    hub = InfiniteFormerLM.from_pretrained(str(path.parent), path.name, str(data_bin))
    found = hub.score((tmp_path / "test.txt").read_text())
    assert float(torch.exp(-found["score"])) == pytest.approx(perplexity, rel=1e-3)


# prompts


@pytest.mark.slow
@pytest.mark.parametrize("buffer", [1, 4])
def test_a_prompt_that_cannot_be_read_takes_no_answer_along(data_bin, trained, buffer):
    text = b"word1 word2\n\nXanadu Kubla\nword3\n\xff\xfe word1\n\nword4 word5\n"
    path = trained[0] / "checkpoint_best.pt"
    command = [data_bin, *TASK, "--path", path, "--max-len-b", 3, "--buffer-size", buffer]
    code, out, said = commands.run_apart("fairseq-interactive", command, ROOT, text)
    said += out
    assert code == 0, said
    assert re.findall(r"^H-(\d+)", out, re.M) == ["0", "3", "6"]
    assert "prompt 1 is empty" in said and "prompt 5 is empty" in said
    assert "no word of prompt 2 is in the dictionary" in said
    assert "prompt 4 is not UTF-8" in said and "Traceback" not in said
    scores = {n: len(line.split()) for n, line in re.findall(r"^P-(\d+)\t(.*)", out, re.M)}
    words = {n: len(line.split()) for n, line in re.findall(r"^H-(\d+)\t\S+\t(.*)", out, re.M)}
    assert all(scores[n] == words[n] + 1 for n in scores)  # the last is that of the end


def test_a_file_of_prompts_that_is_not_utf_8_is_refused(data_bin, trained, tmp_path):
    (tmp_path / "prompts").write_bytes(b"word1\n\xff\n")
    command = [data_bin, *TASK, "--path", trained[0] / "checkpoint_best.pt"]
    said = commands.refusal("fairseq-interactive", *command, "--input", tmp_path / "prompts")
    assert f"--input {tmp_path / 'prompts'} is not UTF-8: convert it" in said


# memory files, where they are written


@pytest.fixture(scope="module")
def hub(data_bin, trained):
    return InfiniteFormerLM.from_pretrained(str(trained[0]), "checkpoint_best.pt", str(data_bin))


def test_a_memory_is_written_to_files_only_and_through_links(hub, tmp_path):
    memory = hub.read("word1 word2")
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/null"):
        with pytest.raises(OSError, match="there is something that is no file"):
            memory.save(path)
    assert stat.S_ISFIFO(os.stat(tmp_path / "fifo").st_mode)
    with pytest.raises(ValueError, match="is not a file"):
        hub.load_memory(tmp_path / "fifo")
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "memory")
    memory.save(tmp_path / "link")
    memory.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there" / "memory").is_file()
    assert hub.load_memory(tmp_path / "link").tokens == 2


def test_a_memory_that_has_no_room_leaves_nothing(hub, tmp_path):
    hub.read("word1 word2").save(tmp_path / "memory")
    before = (tmp_path / "memory").read_bytes()
    with commands.room_for(1000), pytest.raises(OSError, match="cannot be written.*too large"):
        hub.read("word1 word2").save(tmp_path / "memory")
    assert (tmp_path / "memory").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_memory_of_two_texts_or_of_unknown_words_is_refused(hub, tmp_path):
    from fairseq_inf.memory import save_state

    reading = hub.read("word1 word2").reading
    for wrong in (
        reading.rows(torch.tensor([0, 0])),
        reading.with_tensors({**reading.tensors(), "tokens": reading.tokens + 10**6}),
    ):
        save_state(wrong, tmp_path / "memory", hub.fingerprint)
        with pytest.raises(ValueError, match="must be of one text, and of words in the dictionary"):
            hub.load_memory(tmp_path / "memory")


# every bad input and its sentence


class Code:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def with_code(checkpoint, path):
    """The same checkpoint with a call in its pickle."""
    state = {**load(checkpoint), "surprise": Code()}
    torch.save(state, path)
    return path


HUB = {
    "no text": (lambda hub: hub.read(None), "an open file, got NoneType None"),
    "bytes": (lambda hub: hub.read(b"word1"), "an open file, got bytes b'word1'"),
    "a number": (lambda hub: hub.score(3), "a text is a string here, got int 3"),
    "a path as a string": (lambda hub: hub.read("setup.py"), "no word of the text"),
    "a prompt of bytes": (lambda hub: hub.generate(b"x"), "a string or a list of them, got bytes"),
}


@pytest.mark.parametrize("name", HUB)
def test_the_hub_says_what_a_text_is(hub, name, monkeypatch, caplog):
    monkeypatch.chdir(ROOT)
    call, sentence = HUB[name]
    with pytest.raises((TypeError, ValueError), match=sentence):
        call(hub)
    assert ("read(pathlib.Path(…)) reads the file" in caplog.text) == ("path" in name)


def test_the_hub_refuses_unknown_settings(data_bin, trained):
    own = (str(trained[0]), "checkpoint_best.pt", str(data_bin))
    with pytest.raises(ValueError, match="ltm_enable is not a setting of this model, is it ltm_en"):
        InfiniteFormerLM.from_pretrained(*own, ltm_enable=False)
    assert not InfiniteFormerLM.from_pretrained(*own, ltm_enabled=False).model.decoder.ltm_enabled


EVALUATION = {
    "a typo in the overrides": (
        ["--model-overrides", "{'ltm_enable': False}"],
        "--model-overrides: ltm_enable is not a setting of this model, is it ltm_enabled?",
    ),
    "a setting without effect": (
        ["--model-overrides", "{'tokens_per_sample': 7}"],
        "--model-overrides: tokens_per_sample is not a setting of this model",
    ),
    "overrides that are a list": (
        ["--model-overrides", "['ltm_enabled']"],
        "--model-overrides must be a dict as {'ltm_enabled': False}, got \"['ltm_enabled']\"",
    ),
    "overrides that are nonsense": (["--model-overrides", "ltm_enabled="], "must be a dict as"),
    "no rows": (["--batch-size", 0], "side by side, got 0"),
    "a text": (["--path", "README.md"], "README.md is not a checkpoint: name one that"),
    "no checkpoint": (["--path", "none.pt"], "checkpoint none.pt does not exist or is not a file"),
    "a folder": (["--path", "tests"], "checkpoint tests does not exist or is not a file"),
}


@pytest.mark.parametrize("name", EVALUATION)
def test_an_evaluation_ends_in_the_sentence_alone(data_bin, trained, name):
    args, sentence = EVALUATION[name]
    path = trained[0] / "checkpoint_best.pt"
    assert sentence in commands.refusal("fairseq-eval-lm", data_bin, *TASK, "--path", path, *args)


def changed(checkpoint, path, change):
    """The same checkpoint with other weights."""
    state = load(checkpoint)
    for name, x in state["model"].items():
        change(name, x)
    torch.save(state, path)
    return path


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_checkpoint_with_nan_is_refused_and_the_tensor_named(trained, data_bin, tmp_path, value):
    def spoil(name, x):
        if name == "decoder.layers.1.outer.weight":
            x[0, 0] = value

    path = changed(trained[0] / "checkpoint_best.pt", tmp_path / "bad.pt", spoil)
    said = "NaN or infinity in decoder.layers.1.outer.weight"
    command = ["fairseq-eval-lm", data_bin, *TASK, "--path", path]
    assert said in commands.refusal(*command)
    assert said in commands.refusal(
        "fairseq-train", data_bin, *TASK, *MODEL, *TRAIN, "--save-dir", tmp_path / "save",
        "--finetune-from-model", path,
    )  # fmt: skip
    with pytest.raises(ValueError, match=said):
        open_hub(str(path), str(data_bin), cpu=True)
    assert said in commands.refusal("fairseq-inf-import", "--back", path, tmp_path / "out")


def test_numbers_that_overflow_in_an_evaluation_are_no_success(trained, data_bin, tmp_path):
    def enlarge(name, x):
        if x.is_floating_point():
            x.mul_(1e15)  # tied ones twice

    path = changed(trained[0] / "checkpoint_best.pt", tmp_path / "large.pt", enlarge)
    said = "the model computes NaN or infinity"
    assert said in commands.refusal("fairseq-eval-lm", data_bin, *TASK, "--path", path)
    hub = open_hub(str(path), str(data_bin), cpu=True)
    with pytest.raises(FloatingPointError, match=said):
        hub.score("word1 word2 word3")
    with pytest.raises(FloatingPointError, match=said):
        hub.generate("word1 word2 word3")
    with pytest.raises(FloatingPointError, match="is not written: .* has NaN or infinity"):
        hub.read("word1 word2 " * 40).save(tmp_path / "memory")
    assert not (tmp_path / "memory").exists()


TRAINING = {
    "half precision without a GPU": (["--fp16"], "--fp16 needs a GPU"),
    "a width of nothing": (["--ltm-widths", "1e-300"], "--ltm-widths must be positive numbers fro"),
    "no rows": (["--batch-size", 0], "side by side, got 0"),
}


@pytest.mark.parametrize("name", TRAINING)
def test_a_training_ends_in_the_sentence_alone(data_bin, tmp_path, name):
    args, sentence = TRAINING[name]
    command = [data_bin, *TASK, *MODEL, *TRAIN, "--save-dir", tmp_path, "--max-update", 2, *args]
    assert sentence in commands.refusal("fairseq-train", *command)
    assert not list(tmp_path.glob("*.pt"))


def test_the_traceback_is_there_for_those_who_ask(data_bin, tmp_path, monkeypatch):
    said = {}
    for asked in ("", "1"):
        monkeypatch.setenv("FAIRSEQ_INF_TRACEBACK", asked)
        said[asked] = train(data_bin, tmp_path, "--max-update", 2, "--fp16", ok=False)
        assert "--fp16 needs a GPU" in said[asked].strip().splitlines()[-1]
    assert "Traceback" in said["1"] and "Traceback" not in said[""]


def test_code_in_a_checkpoint_is_refused_everywhere_and_not_run(data_bin, trained, tmp_path):
    path = with_code(trained[0] / "checkpoint_best.pt", tmp_path / "checkpoint_last.pt")
    sentence = f"checkpoint {path} holds objects that run code when they are loaded, and is refused"
    each = ["--path", path, "--batch-size", 1]
    training = ["train", data_bin, *TASK, *MODEL, *TRAIN, "--max-update", 300, "--save-dir"]
    for name, *args in (
        ["eval-lm", data_bin, *TASK, *each],
        ["interactive", data_bin, *TASK, *each, "--buffer-size", 1],
        ["generate", data_bin, *TASK, *each],
        [*training, tmp_path],
        [*training, tmp_path / "new", "--finetune-from-model", path],
    ):
        assert sentence in commands.refusal(f"fairseq-{name}", *args)
    with pytest.raises(ValueError, match="run code"):
        InfiniteFormerLM.from_pretrained(str(tmp_path), path.name, str(data_bin))
    assert not (ROOT / "ran").exists() and not Path("ran").exists()


@pytest.mark.slow
def test_the_reading_command_says_where_it_cannot_write(data_bin, trained, tmp_path):
    (tmp_path / "text").write_text("word1 word2\n")
    os.mkfifo(tmp_path / "fifo")
    command = [tmp_path / "text", "--path", trained[0] / "checkpoint_best.pt", "--data", data_bin]
    said = commands.refusal("fairseq-inf-read", *command, "--output", tmp_path / "fifo", "--cpu")
    assert f"--output: {tmp_path / 'fifo'} cannot be written" in said
    assert stat.S_ISFIFO(os.stat(tmp_path / "fifo").st_mode)
