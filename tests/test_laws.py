"""What every memory keeps in every host."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import commands
import pytest
import torch
from conftest import ROOT, TASK, TRAIN, free_port
from test_generation import assert_tokens_one_by_one
from test_resume import assert_equal_but_for_rounding, assert_same_training
from zoo import (
    HOSTS,
    MEMORIES,
    SIZES,
    arch_of,
    assert_same,
    learn,
    losses_and_logs,
    make_model,
    stream,
    text,
)

from fairseq_inf.memory import load_state, save_state

ALL = [(memory, host) for memory in MEMORIES for host in HOSTS]
every = pytest.mark.parametrize("memory,host", ALL, ids=[f"{m} in {h}" for m, h in ALL])
REMEMBERING = [(memory, host) for memory, host in ALL if memory != "transformer_xl"]
every_memory = pytest.mark.parametrize(
    "memory,host", REMEMBERING, ids=[f"{m} in {h}" for m, h in REMEMBERING]
)


@every
def test_a_stream_in_two_calls_equals_one_run(memory, host):
    decoder = make_model(memory, host=host).decoder
    tokens = text(3, 40)
    whole, end = stream(decoder, tokens, 5)
    first, middle = stream(decoder, tokens[:, :20], 5)
    second, final = stream(decoder, tokens[:, 20:], 5, middle)
    assert torch.equal(whole, torch.cat([first, second], dim=1))
    assert_same(end, final, atol=0)


@every
def test_a_state_is_the_same_after_its_file(memory, host, tmp_path):
    decoder = make_model(memory, host=host).decoder
    _, state = stream(decoder, text(3, 40), 5)
    save_state(state, tmp_path / "memory", "me")
    # the short-term memory of a new state has no room for a segment yet
    _, template = stream(decoder, text(1, 5), 5)
    again = load_state(tmp_path / "memory", template, "me")
    assert_same(state, again, atol=0)
    more = text(3, 15, seed=8)
    one, two = (stream(decoder, more, 5, state)[0] for state in (state, again))
    assert torch.equal(one, two)


@every
def test_a_reset_row_equals_a_fresh_row_and_the_others_go_on(memory, host):
    decoder = make_model(memory, host=host).decoder
    _, state = stream(decoder, text(3, 30), 5)
    after = text(3, 5, seed=5)
    out, _, _ = decoder(after, state)
    mixed, _, _ = decoder(after, state.reset(torch.tensor([False, True, False])))
    fresh, _, _ = decoder(after, decoder.initial_state(3))
    assert torch.allclose(mixed[1], fresh[1], atol=1e-5)
    assert torch.allclose(mixed[[0, 2]], out[[0, 2]], atol=1e-5)


@every
def test_a_permuted_batch_gives_permuted_outputs_and_states(memory, host):
    decoder = make_model(memory, host=host).decoder
    _, state = stream(decoder, text(3, 30), 5)
    order, after = torch.tensor([2, 0, 1]), text(3, 5, seed=5)
    out, whole, _ = decoder(after, state)
    permuted, other, _ = decoder(after[order], state.rows(order))
    assert torch.allclose(out[order], permuted, atol=1e-5)
    assert_same(whole.rows(order), other, atol=1e-5)


@every
def test_rows_of_a_ragged_batch_equal_rows_alone(memory, host):
    """Streams of different length and age side by side, with padding in mid-stream."""
    decoder = make_model(memory, host=host).decoder
    pieces = [[5, 5, 5, 5, 5], [5, 2, 5, 1, 5], [5, 0, 0, 5, 3]]
    tokens = [text(1, sum(p), seed=10 + row) for row, p in enumerate(pieces)]
    together = decoder.initial_state(3)
    outs = [[] for _ in pieces]
    at = [0, 0, 0]
    for step in range(5):
        lengths = torch.tensor([p[step] for p in pieces])
        batch = torch.full((3, 5), 1)
        for row in range(3):
            batch[row, : lengths[row]] = tokens[row][0, at[row] : at[row] + lengths[row]]
            at[row] += int(lengths[row])
        with torch.no_grad():
            out, together, _ = decoder(batch, together, lengths)
        for row in range(3):
            outs[row].append(out[row, : lengths[row]])
    for row, piece in enumerate(pieces):
        state, at, expected = decoder.initial_state(1), 0, []
        for size in filter(None, piece):
            with torch.no_grad():
                out, state, _ = decoder(tokens[row][:, at : at + size], state)
            at += size
            expected.append(out[0])
        assert torch.allclose(torch.cat(outs[row]), torch.cat(expected), atol=1e-5), row
        assert together.position[row] == state.position[0]
        assert together.key[row] == state.key[0]


@every
def test_reading_without_output_leaves_the_same_state(memory, host):
    decoder = make_model(memory, host=host).decoder
    tokens, lengths = text(3, 35), torch.tensor([5, 2, 4])
    with torch.no_grad():
        _, wanted = stream(decoder, tokens, 5)
        _, wanted, _ = decoder(tokens[:, :5], wanted, lengths)
        state = decoder.initial_state(3)
        for part in tokens.split(5, dim=1):
            out, state, _ = decoder(part, state, project=False)
            assert out is None
        _, state, _ = decoder(tokens[:, :5], state, lengths, project=False)
    assert_same(wanted, state, atol=0)


@every
def test_a_new_state_is_zero_and_every_state_has_its_shapes_and_kinds(memory, host):
    decoder = make_model(memory, host=host).decoder
    state = decoder.initial_state(3)
    for name, x in state.tensors().items():
        assert len(x) == 3 and not x.any(), name
    shapes = None
    for part in text(3, 30).split(5, dim=1):
        _, state, _ = decoder(part, state)
        after = {name: (x.shape, x.dtype) for name, x in state.tensors().items()}
        assert shapes is None or after == shapes
        shapes = after


@every_memory
def test_an_empty_memory_adds_exactly_nothing_and_a_full_one_something(memory, host):
    on, off = (make_model(memory, host=host, ltm_enabled=flag).decoder for flag in (None, False))
    off.load_state_dict(on.state_dict())
    tokens = text(2, 5)
    one, other = (stream(decoder, tokens, 5)[0] for decoder in (on, off))
    assert torch.equal(one, other)
    tokens = text(2, 40)
    one, other = (stream(decoder, tokens, 5)[0] for decoder in (on, off))
    assert not torch.allclose(one, other, atol=1e-3)


@every_memory
def test_a_disabled_memory_equals_a_model_without_one(memory, host):
    off = make_model(memory, host=host, ltm_enabled=False)
    plain = make_model("transformer_xl", host=host)
    own = off.memory_state_dict()
    plain.load_state_dict({k: v for k, v in off.state_dict().items() if k not in own})
    tokens = text(2, 40)
    one, other = (stream(model.decoder, tokens, 5)[0] for model in (off, plain))
    assert torch.equal(one, other)


@every_memory
def test_with_a_seed_the_host_has_the_same_weights_whatever_its_memory(memory, host):
    own = make_model(memory, sharp=False, host=host).state_dict()
    alone = make_model("transformer_xl", sharp=False, host=host).state_dict()
    for name, x in alone.items():
        assert torch.equal(x, own[name]), name


@every_memory
def test_a_silent_memory_adds_exactly_nothing_and_yet_learns(memory, host):
    if memory == "selective":
        return  # it serves as it is: tests/test_selective.py
    model = make_model(memory, host=host, sharp=host == "transformer_xl")
    if host == "transformer_xl":  # others are so as they are built
        model.decoder.start_silent()
    plain = make_model("transformer_xl", host=host).decoder
    own = model.memory_state_dict()
    plain.load_state_dict(
        {k.removeprefix("decoder."): v for k, v in model.state_dict().items() if k not in own}
    )
    tokens = text(3, 40)
    one, other = (stream(decoder, tokens, 5)[0] for decoder in (model.decoder, plain))
    assert torch.allclose(one, other, atol=1e-6)
    state = model.decoder.initial_state(3)
    for part in tokens.split(5, dim=1):
        out, state, _ = model.decoder(part, state)
    out.square().sum().backward()
    assert model.decoder.layers[0].memory.output.weight.grad.abs().max() > 0


@every
def test_training_and_evaluation_keep_apart_memories(memory, host):
    model = make_model(memory, host=host)
    yes, no = torch.tensor([True, True]), torch.tensor([False, False])
    model.train()
    model(text(2, 5), None, yes)
    kept = model.states[True]
    model.eval()
    model(text(2, 5), None, yes)
    model(text(2, 5), None, no)
    assert model.states[True] is kept and model.states[False].position.tolist() == [10, 10]


@every
def test_every_parameter_has_a_gradient_in_every_step(memory, host):
    """Also before anything is remembered: data-parallel training waits for each of them."""
    model = make_model(memory, host=host).train()
    for i in range(4):
        model.zero_grad()
        out, losses = learn(model, text(2, 5, seed=i), i == 0)
        (out.sum() + sum(losses.values())).backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []


@every
def test_activation_checkpointing_changes_nothing(memory, host):
    grads = []
    for flag in (False, True):
        model = make_model(memory, host=host, checkpoint_activations=flag, dropout=0.1).train()
        torch.manual_seed(5)
        for i in range(4):
            model.zero_grad()
            out, losses = learn(model, text(2, 5, seed=i), i == 0)
            (out.square().sum() + sum(losses.values())).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        assert torch.allclose(grad, grads[1][name], atol=1e-5, rtol=1e-4), name


@every
def test_losses_and_logs_are_finite_and_have_names(memory, host):
    model = make_model(memory, host=host)
    _, state = stream(model.decoder, text(2, 30), 5)
    _, _, extra = model.decoder(text(2, 5), state)
    losses, logs = losses_and_logs(extra, text(2, 5))
    for total, of in [*logs.values(), *((x, 1) for x in losses.values())]:
        assert torch.isfinite(torch.as_tensor(total)) and of > 0


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_single_precision(dtype, memory, host):
    try:
        torch.nn.LayerNorm(2).to(dtype)(torch.ones(1, 2, dtype=dtype))
    except RuntimeError as error:
        pytest.skip(f"this torch has no {dtype} on CPUs: {error}")
    tokens, sharp = text(2, 60), host == "transformer_xl"
    # rounding may turn a choice: there is none where all have a place
    room = {"ltm_slots": 60} if memory == "selective" else {}
    one, two = (make_model(memory, host=host, sharp=sharp, **room) for _ in range(2))
    exact, _ = stream(one.decoder, tokens, 5)
    half, state = stream(two.to(dtype).decoder, tokens, 5)
    assert half.dtype == dtype
    coefficients = [x for name, x in state.tensors().items() if "coefficients" in name]
    assert all(x.dtype == torch.float32 for x in coefficients)
    assert (half.float() - exact).abs().max() < 0.05 * exact.abs().max()


@every
def test_tokens_one_by_one_have_the_probabilities_of_one_pass(memory, host):
    assert_tokens_one_by_one(make_model(memory, host=host).double().decoder, atol=1e-9)


def test_layers_may_have_different_memories():
    """Each has its own plan: slots in one, a signal in the other."""
    model = make_model("compressive_transformer", decoder_layers=4).double()
    others = [make_model("gibbs", decoder_layers=4), make_model(decoder_layers=4)]
    for number, other in enumerate(others):
        model.decoder.layers[number].memory = other.double().decoder.layers[number].memory
    model.decoder.layers[3].memory = None
    assert_tokens_one_by_one(model.decoder, atol=1e-9)
    tokens = text(3, 40)
    _, state = stream(model.decoder, tokens, 5)
    states = [layer.memory for layer in state.layers]
    assert len({type(memory) for memory in states[:3]}) == 2 and states[3] == ()


# by fairseq's commands


def flags(memory, host):
    words = ["--arch", arch_of(memory, host)]
    for name, value in {**SIZES, **MEMORIES[memory][1], **HOSTS[host]}.items():
        flag = "--" + name.replace("_", "-")
        words += ([flag] if value else []) if isinstance(value, bool) else [flag, value]
    return words


def train(data, save_dir, memory, host, *args, world=1):
    """In so many processes, which share the rows."""
    command = [data, *TASK, *flags(memory, host), *TRAIN, "--save-dir", save_dir]
    command += ["--optimizer", "nag", "--momentum", 0, "--lr", 0.5, "--dropout", 0]
    command += ["--disable-validation", "--batch-size", 4 // world, "--max-update", 9, *args]
    ranks = [[]]
    if world > 1:
        shared = [
            "--distributed-world-size", world, "--distributed-no-spawn", "--ddp-backend",
            "legacy_ddp", "--distributed-backend", "gloo", "--distributed-init-method",
            f"tcp://127.0.0.1:{free_port()}",
        ]  # fmt: skip
        ranks = [[*shared, "--distributed-rank", rank] for rank in range(world)]
    with ThreadPoolExecutor(world) as pool:
        runs = [pool.submit(commands.run, "fairseq-train", [*command, *r], ROOT) for r in ranks]
    for run in runs:
        code, printed = run.result()
        assert code == 0, printed[-3000:]


@pytest.mark.slow
@every
def test_two_processes_train_as_one_and_a_training_resumes_to_the_same_bits(
    memory, host, data_bin, tmp_path
):
    one, two, resumed = (tmp_path / name for name in ("one", "two", "resumed"))
    train(data_bin, one, memory, host)
    train(data_bin, two, memory, host, "--save-interval-updates", 5, world=2)
    first, second = one / "checkpoint_last.pt", two / "checkpoint_last.pt"
    assert_equal_but_for_rounding(first, second, validated=False)
    if host == "transformer_xl":  # no host adds anything to what is saved
        resumed.mkdir()
        shutil.copy(two / "checkpoint_1_5.pt", resumed / "checkpoint_last.pt")
        train(data_bin, resumed, memory, host, world=2)
        assert_same_training(second, resumed / "checkpoint_last.pt")
