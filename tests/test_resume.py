"""A training that is killed and started again ends as if nothing had happened."""

import os
import re
import shutil
import subprocess
import time

import pytest
import torch
from conftest import MODEL, ROOT, TASK, TRAIN, finish, load, start_training, tool, train

pytestmark = pytest.mark.slow

RUN = (
    "--tokens-per-sample 24 --max-update 36 --save-interval-updates 6 "
    "--max-valid-steps 2 --dropout 0.1"
).split()
# an epoch has 29 updates: saves fall in mid-epoch, and the run goes on into the second one


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def assert_same_training(a, b):
    a, b = load(a), load(b)
    assert same(a["model"], b["model"])
    assert same(a["last_optimizer_state"], b["last_optimizer_state"])
    iterators = [x["extra_state"]["train_iterator"] for x in (a, b)]
    assert iterators[0]["iterations_in_epoch"] > 0 and iterators[0]["memory"] is not None
    assert same(*iterators)


def start(data, save_dir, *args, world=1, model=MODEL):
    command = [*TASK, *model, *TRAIN, "--save-dir", save_dir, *RUN, *args]
    return start_training([data, *command], world, rows=4)


def kill_after(processes, path):
    """SIGKILL as soon as a file is there, before the copies of that checkpoint are made."""
    deadline = time.time() + 120
    while not path.exists() and time.time() < deadline and processes[0].process.is_alive():
        time.sleep(0.001)
    for process in processes:
        process.kill()
    assert path.exists(), processes[0].finish()[1][-3000:]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 process", "2 processes"])
def uninterrupted(request, data_bin, tmp_path_factory):
    save_dir = tmp_path_factory.mktemp("whole")
    printed = finish(start(data_bin, save_dir, world=request.param))
    return request.param, save_dir, printed[0]


def test_a_killed_training_ends_bit_equal(uninterrupted, data_bin, tmp_path):
    world, whole, _ = uninterrupted
    kill_after(start(data_bin, tmp_path, world=world), tmp_path / "checkpoint_1_6.pt")
    kill_after(start(data_bin, tmp_path, world=world), tmp_path / "checkpoint_1_18.pt")
    # half a copy, as a kill in the middle of fairseq's copying leaves it
    last = tmp_path / "checkpoint_last.pt"
    copy = (tmp_path / "checkpoint_1_18.pt").read_bytes()
    last.write_bytes(copy[: len(copy) // 2])
    printed = finish(start(data_bin, tmp_path, world=world))
    assert "was truncated by a kill: restored from" in printed[0]
    assert_same_training(whole / "checkpoint_last.pt", last)


def test_without_validation_the_memory_is_saved_all_the_same(data_bin, tmp_path):
    for name, updates in (("a", 12), ("b", 6), ("b", 12)):
        args = ["--disable-validation", "--max-update", updates]
        finish(start(data_bin, tmp_path / name, *args, world=2))
    assert_same_training(tmp_path / "a/checkpoint_last.pt", tmp_path / "b/checkpoint_last.pt")


def test_a_stop_before_the_first_validation_saves_the_memory_too(data_bin, tmp_path):
    late = ["--validate-after-updates", 100, "--save-interval-updates", 0]
    for name, updates in (("a", 12), ("b", 6), ("b", 12)):
        finish(start(data_bin, tmp_path / name, *late, "--max-update", updates, world=2))
    assert_same_training(tmp_path / "a/checkpoint_last.pt", tmp_path / "b/checkpoint_last.pt")


SGD = ["--dropout", 0, "--max-update", 12, "--optimizer", "nag", "--momentum", 0, "--lr", 0.5]
# Adam makes a step of full size even of a gradient that is only rounding


def assert_equal_but_for_rounding(one, two, validated=True):
    one, two = load(one), load(two)
    if validated:
        losses = [state["extra_state"]["val_loss"] for state in (one, two)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    for name, x in one["model"].items():
        assert torch.allclose(x, two["model"][name], atol=1e-4), name
    memories = [state["extra_state"]["train_iterator"]["memory"] for state in (one, two)]
    assert torch.equal(memories[0]["key"], memories[1]["key"])
    for name, x in memories[0].items():
        assert torch.allclose(x.double(), memories[1][name].double(), atol=1e-3), name


@pytest.fixture(scope="module")
def alone(data_bin, tmp_path_factory):
    """The last checkpoint of one process."""
    path = tmp_path_factory.mktemp("alone")
    finish(start(data_bin, path, *SGD))
    return path / "checkpoint_last.pt"


def test_two_processes_equal_one(alone, data_bin, tmp_path):
    """The same rows in the same order give the same loss, memory and parameters."""
    finish(start(data_bin, tmp_path, *SGD, world=2))
    assert_equal_but_for_rounding(alone, tmp_path / "checkpoint_last.pt")


@pytest.fixture
def two_hosts():
    """Two network namespaces with an address each, and a wire between them.  -> name and address of
    each"""

    def ip(*words, check=True):
        subprocess.run(["ip", *words], check=check, capture_output=True)

    names = [f"inf{os.getpid()}{letter}" for letter in "ab"]
    addresses = ["10.77.0.1", "10.77.0.2"]
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            a, b = (["name", name, "netns", name] for name in names)
            ip("link", "add", *a, "type", "veth", "peer", *b)
            for name, address in zip(names, addresses, strict=True):
                own = ["-n", name]
                ip(*own, "address", "add", f"{address}/24", "dev", name)
                for device in (name, "lo"):
                    ip(*own, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"this machine lets nobody have network namespaces: {error}")
        yield list(zip(names, addresses, strict=True))
    finally:
        if shutil.which("ip"):
            for name in names:
                ip("netns", "delete", name, check=False)


def test_two_hosts_equal_one_process(alone, two_hosts, data_bin, tmp_path):
    """Each has an address of its own, and sees nothing else of the other."""
    (_, master), processes = two_hosts[0], []
    for rank, (name, _) in enumerate(two_hosts):
        words = [
            "ip", "netns", "exec", name, tool("train"), data_bin, *TASK, *MODEL, *TRAIN,
            "--save-dir", tmp_path, *RUN, *SGD, "--batch-size", 2, "--distributed-world-size", 2,
            "--distributed-rank", rank, "--distributed-no-spawn", "--distributed-backend", "gloo",
            "--distributed-init-method", f"tcp://{master}:29500", "--ddp-backend", "legacy_ddp",
        ]  # fmt: skip
        processes.append(
            subprocess.Popen(
                [str(word) for word in words], cwd=ROOT, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, env={**os.environ, "GLOO_SOCKET_IFNAME": name},
            )
        )  # fmt: skip
    for process in processes:
        printed, _ = process.communicate(timeout=500)
        assert process.returncode == 0, printed[-3000:]
    assert_equal_but_for_rounding(alone, tmp_path / "checkpoint_last.pt")


def test_other_streams_start_with_a_fresh_memory_and_say_so(data_bin, tmp_path):
    train(data_bin, tmp_path, *RUN, "--max-update", 20)
    printed = train(
        data_bin, tmp_path, *RUN, "--max-update", 25, "--batch-size", 2, "--tokens-per-sample", 10
    )
    message = re.search(
        r"another memory or streams \((.*)\): the memory starts afresh, at segment (\d+)", printed
    )
    assert message[1] == "--tokens-per-sample 24 -> 10, --batch-size 4 -> 2"
    assert int(message[2]) > 20
    # another memory: the same place in the same streams
    train(data_bin, tmp_path / "b", *RUN, "--max-update", 20)
    printed = train(data_bin, tmp_path / "b", *RUN, "--max-update", 22, "--ltm-widths", "0.1,0.2")
    assert "(--ltm-widths 0.05,0.2 -> 0.1,0.2): the memory starts afresh, at segment 20" in printed
