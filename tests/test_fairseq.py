"""fairseq's own commands, on small data."""

import json
import os
import re
import shutil
import subprocess
import sys

import commands
import pytest
from conftest import MODEL, ROOT, TASK, TRAIN, evaluate, fairseq, load, result, train


def count_tokens(data_bin, split="test"):
    return len((data_bin.parent / f"{split}.txt").read_text().split()) + len(
        (data_bin.parent / f"{split}.txt").read_text().splitlines()
    )


def train_logs(printed):
    return [
        json.loads(line[line.index("{") :])
        for line in printed.splitlines()
        if "train_inner | {" in line
    ]


def test_training_logs_the_loss_its_parts_and_the_memory(trained):
    save_dir, printed = trained
    logs = train_logs(printed)
    names = {"loss", "nll_loss", "ppl", "kl", "ltm_sigma", "ltm_share"}
    assert names <= logs[-1].keys()
    assert float(logs[-1]["nll_loss"]) < float(logs[0]["nll_loss"])
    assert float(logs[-1]["loss"]) > float(logs[-1]["nll_loss"])
    assert 0 < float(logs[-1]["ltm_share"]) < 1 and float(logs[-1]["ltm_sigma"]) > 0
    valid = [line for line in printed.splitlines() if "| valid | {" in line]
    assert names <= {
        k.removeprefix("valid_") for k in json.loads(valid[-1][valid[-1].index("{") :])
    }
    written = b"".join(p.read_bytes() for p in (save_dir / "tb").rglob("events*"))
    assert all(name.encode() in written for name in names)
    by_layer = [
        f"{name}/layer{i}" for i in (0, 1) for name in ("attention", "space", "kl", "ltm_sigma")
    ]
    memory = b"".join(p.read_bytes() for p in (save_dir / "tb/memory").rglob("events*"))
    assert all(name.encode() in memory for name in by_layer)


@pytest.mark.parametrize("length,rows", [(12, 1), (7, 5), (64, 8)])
def test_evaluation_counts_every_token_at_any_length_and_batch_size(
    data_bin, trained, length, rows
):
    printed = evaluate(
        data_bin,
        trained[0] / "checkpoint_best.pt",
        "--tokens-per-sample",
        length,
        "--batch-size",
        rows,
    )
    tokens, perplexity = result(printed)
    assert tokens == count_tokens(data_bin)
    assert 1 < perplexity < 80


def test_word_probabilities_and_the_memory_switched_off(data_bin, trained):
    options = ["--tokens-per-sample", 12, "--batch-size", 1, "--stream-layout", "documents"]
    checkpoint = trained[0] / "checkpoint_best.pt"
    printed = evaluate(data_bin, checkpoint, *options, "--output-word-probs")
    words = re.findall(r"(\S+) \[-\d", printed)
    assert words == " </s> ".join(
        (data_bin.parent / "test.txt").read_text().splitlines()
    ).split() + ["</s>"]
    _, on = result(printed)
    _, off = result(
        evaluate(data_bin, checkpoint, *options, "--model-overrides", "{'ltm_enabled': False}")
    )
    assert on != off


@pytest.mark.slow
def test_documents_with_workers_update_freq_and_shards(data_bin, tmp_path):
    """Two epochs over two shards: as many tokens as both hold."""
    other = tmp_path / "other"
    shutil.copytree(data_bin, other)
    for suffix in (".bin", ".idx"):
        shutil.copy(data_bin / f"valid{suffix}", other / f"train{suffix}")
    printed = train(
        f"{data_bin}:{other}", tmp_path / "ck", "--stream-layout", "documents", "--max-epoch", 2,
        "--update-freq", 2, "--num-workers", 2, "--checkpoint-activations",
    )  # fmt: skip
    epochs = [
        json.loads(line[line.index("{") :])
        for line in printed.splitlines()
        if "| train | {" in line
    ]
    steps = [int(epochs[0]["train_num_updates"])]
    steps.append(int(epochs[1]["train_num_updates"]) - steps[0])
    for epoch, step, split in zip(epochs, steps, ("train", "valid"), strict=True):
        assert round(float(epoch["train_wpb"]) * step) == pytest.approx(
            count_tokens(data_bin, split), abs=step
        )


@pytest.mark.slow
def test_adaptive_softmax_and_the_wikitext_architecture(data_bin, tmp_path):
    model = (
        "--arch infinite_former_lm_wt103 --decoder-layers 1 --decoder-embed-dim 20 "
        "--decoder-ffn-embed-dim 16 --adaptive-cutoff 20,40 --stm-length 8 --ltm-basis 10"
    ).split()
    printed = train(data_bin, tmp_path, "--max-update", 30, "--seed", 2, model=model)
    logs = train_logs(printed)
    assert float(logs[-1]["nll_loss"]) < float(logs[0]["nll_loss"])
    cfg = load(tmp_path / "checkpoint_last.pt")["cfg"]["model"]
    assert cfg["decoder_attention_heads"] == 10 and cfg["decoder_post_norm"]
    assert cfg["ltm_schedule"] == "constant" and cfg["ltm_density"] == "gaussian"
    valid = json.loads(re.search(r"valid \| (\{.*\})", printed)[1])
    tokens, perplexity = result(
        evaluate(
            data_bin,
            tmp_path / "checkpoint_last.pt",
            "--tokens-per-sample",
            12,
            "--batch-size",
            4,
            "--gen-subset",
            "valid",
        )  # fmt: skip
    )
    assert tokens == count_tokens(data_bin, "valid")
    assert perplexity == pytest.approx(float(valid["valid_ppl"]), rel=1e-3)


def test_the_criterion_takes_a_model_without_memory(data_bin, tmp_path):
    model = "--arch transformer_lm --decoder-layers 1 --decoder-attention-heads 2".split()
    task = ["--task", "language_modeling", "--max-update", 10]
    logs = train_logs(train(data_bin, tmp_path, *task, model=model))
    assert "kl" not in logs[-1] and float(logs[-1]["loss"]) == float(logs[-1]["nll_loss"])


@pytest.mark.slow
@pytest.mark.parametrize("bf16", ["false", "true"])
def test_a_hydra_config_trains(data_bin, tmp_path, bf16):
    """The paper's WikiText-103 configuration, made small."""
    small = (
        "model.decoder_layers=1 model.decoder_embed_dim=20 model.decoder_ffn_embed_dim=16 "
        "model.adaptive_cutoff='20,40' common.cpu=true dataset.batch_size=4 "
        "optimization.max_update=6"
    ).split()
    fairseq(
        "hydra-train", "--config-dir", "examples/wikitext103/config/paper",
        "--config-name", "infinite_former_sticky", f"task.data={data_bin}",
        f"checkpoint.save_dir={tmp_path}/ck", f"hydra.run.dir={tmp_path}",
        f"common.bf16={bf16}", *small,
    )  # fmt: skip
    saved = load(tmp_path / "ck" / "checkpoint_last.pt")
    assert saved["cfg"]["model"]["ltm_sticky"] and saved["cfg"]["model"]["stm_length"] == 150
    assert str(saved["cfg"]["common"]["bf16"]).lower() == bf16
    weights = [x for name, x in saved["model"].items() if "float_tensor" not in name]
    assert all(x.isfinite().all() for x in weights)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8])
def test_wikitext_103_has_its_official_number_of_tokens(real_data, wikitext, rows):
    data, checkpoint = wikitext
    printed = evaluate(data, checkpoint, "--tokens-per-sample", 150, "--batch-size", rows)
    assert result(printed)[0] == 245_569


def prepare_wikitext(*args, cwd=ROOT, **env):
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", ROOT / "examples/wikitext103/prepare.sh", *map(str, args)],
        cwd=cwd, text=True, capture_output=True, env={**os.environ, "PATH": path, **env},
    )  # fmt: skip


@pytest.mark.slow
def test_wikitext_is_prepared_or_a_sentence_says_why_not(tmp_path):
    for split in ("train", "valid", "test"):
        done = prepare_wikitext(tmp_path, tmp_path / "bin")
        assert f"wiki.{split}.tokens does not exist" in done.stderr and done.returncode == 1
        (tmp_path / f"wiki.{split}.tokens").write_text(" a b c \n a b <unk> \n")
    done = prepare_wikitext(tmp_path, tmp_path / "bin", WORDS="none")
    assert "WORDS must be a positive number" in done.stderr and not (tmp_path / "bin").exists()
    assert prepare_wikitext(tmp_path, tmp_path / "bin", WORDS="6").returncode == 0
    words = (tmp_path / "bin" / "dict.txt").read_text().split()[::2]
    assert set(words[:2]) == {"a", "b"} and "c" not in words
    assert "exists already" in prepare_wikitext(tmp_path, tmp_path / "bin").stderr
    done = prepare_wikitext("", "other", WIKITEXT_URL="file:///none", cwd=tmp_path)
    assert "cannot be downloaded" in done.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "data").exists() and not (tmp_path / "other").exists()


@pytest.fixture(scope="module")
def wikitext(real_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wikitext")
    for split in ("train", "valid", "test"):  # the training split is not at hand
        (folder / f"wiki.{split}.tokens").symlink_to(real_data / "wikitext-103/wiki.test.tokens")
    done = prepare_wikitext(folder, folder / "bin")
    assert done.returncode == 0, done.stderr
    train(folder / "bin", folder / "ck", "--max-update", 1, "--disable-validation")
    return folder / "bin", folder / "ck" / "checkpoint_last.pt"


BAD = {
    "a missing split": (["--valid-subset", "nothing"], "split nothing is not in"),
    "N not divisible": (["--ltm-basis", 11], "--ltm-basis 11"),
    "tau out of range": (["--ltm-tau", 1], "--ltm-tau must be strictly between 0 and 1, got 1"),
    "unknown width": (
        ["--ltm-widths", "0.1,auto?"],
        "--ltm-widths (auto, or 0.01,0.05) takes numbers",
    ),
    "B larger than the corpus": (
        ["--batch-size", 100_000],
        "--batch-size on all processes wants 100000 streams",
    ),
    "unknown separator": (
        ["--stream-layout", "documents", "--document-separator", "<no>"],
        "--document-separator <no> is not in the dictionary",
    ),
    "no batch size": (["--batch-size", 0], "--batch-size must be at least 1"),
    "a sigma that is no number": (["--kl-sigma", "nan"], "--kl-sigma must be a positive number"),
    "NaN in the loss": (["--lr", "1e30", "--max-update", 20], "the loss is nan in training"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_in_one_sentence(name, data_bin, tmp_path):
    args, sentence = BAD[name]
    command = [data_bin, *TASK, *MODEL, *TRAIN, "--save-dir", tmp_path / "ck", "--max-update", 3]
    assert sentence in commands.refusal("fairseq-train", *command, *args)
    assert not (tmp_path / "ck" / "checkpoint_last.pt").exists()


def test_an_empty_split_and_a_missing_folder(data_bin, trained, tmp_path):
    folder = tmp_path / "bin"
    (tmp_path / "empty.txt").write_text("")
    fairseq("preprocess", "--only-source", "--srcdict", data_bin / "dict.txt", "--testpref",
            tmp_path / "empty.txt", "--destdir", folder)  # fmt: skip
    checkpoint = trained[0] / "checkpoint_best.pt"
    assert "holds no tokens" in evaluate(folder, checkpoint, ok=False).splitlines()[-1]
    assert "does not exist" in evaluate(tmp_path / "none", checkpoint, ok=False).splitlines()[-1]


def test_another_dictionary_is_refused_by_evaluation_and_by_training(data_bin, trained, tmp_path):
    folder = tmp_path / "bin"
    shutil.copytree(data_bin, folder)
    lines = (folder / "dict.txt").read_text().splitlines()
    (folder / "dict.txt").write_text("\n".join(lines[::-1]) + "\n")
    printed = evaluate(folder, trained[0] / "checkpoint_best.pt", ok=False)
    assert "is not the one that the checkpoint was trained with" in printed.splitlines()[-1]
    shutil.copytree(trained[0], tmp_path / "ck")
    for args in (
        [tmp_path / "ck"],
        [tmp_path / "new", "--finetune-from-model", tmp_path / "ck/checkpoint_last.pt"],
    ):
        printed = train(folder, *args, "--max-update", 210, ok=False)
        assert re.search(r"is not the one that \S+ was trained with", printed.splitlines()[-1])


def test_a_truncated_checkpoint_is_named(data_bin, trained, tmp_path):
    whole = (trained[0] / "checkpoint_last.pt").read_bytes()
    path = tmp_path / "checkpoint_last.pt"
    path.write_bytes(whole[: len(whole) // 2])
    last = train(data_bin, tmp_path, "--max-update", 210, ok=False).strip().splitlines()[-1]
    assert f"checkpoint {path} is truncated" in last
    assert f"checkpoint {path} is truncated" in evaluate(data_bin, path, ok=False).splitlines()[-1]
    assert path.stat().st_size == len(whole) // 2
