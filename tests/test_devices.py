"""What a GPU asks of every memory in every host, on torch's meta device, which has no numbers: a
value that is read back to the CPU, or a tensor that was left there, is an error."""

import pytest
import torch
from torch import nn
from zoo import HOSTS, MEMORIES, make_model, text

from fairseq_inf.criterions.cross_entropy_with_kl import CrossEntropyWithKL
from fairseq_inf.memory import COUNTER
from fairseq_inf.memory.state import State
from fairseq_inf.models.generation import Continuation, new_reading, read

ALL = [(memory, host) for memory in MEMORIES for host in HOSTS]
every = pytest.mark.parametrize("memory,host", ALL, ids=[f"{m} in {h}" for m, h in ALL])


def elsewhere(memory, host, **settings):
    return make_model(memory, host=host, **settings).to("meta")


def samples(rows=3, length=5, segments=6):
    """Batches as the tasks give them: tokens on the device, lengths and starts on the CPU.  One row
    ends early, and begins anew."""
    for number in range(segments):
        lengths = [length, length, 2 if number == 3 else length]
        yield {
            "target": torch.full((rows, length), 5, device="meta"),
            "ntokens": sum(lengths),
            "nsentences": rows,
            "net_input": {
                "src_tokens": torch.full((rows, length), 5, device="meta"),
                "src_lengths": lengths,
                "starts": [number == 0, number == 0, number in (0, 4)],
            },
        }


def counters(state):
    for name, field in ((f.name, f) for f in state.__dataclass_fields__.values()):
        value = getattr(state, name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, State):
                yield from counters(part)
            else:
                yield part, field.metadata is COUNTER or bool(field.metadata.get("counter"))


def criterion():
    task = type("Task", (), {"target_dictionary": None})()
    made = CrossEntropyWithKL.__new__(CrossEntropyWithKL)
    nn.Module.__init__(made)
    made.task, made.padding_idx, made.report_accuracy = task, 1, True
    made.weights, made.settings = {"kl": 1e-5, "reconstruction": 1.0}, {"kl_sigma": 0.1}
    return made


@every
def test_a_step_of_training_and_a_validation_wait_for_no_gpu(memory, host):
    model, loss_of = elsewhere(memory, host, dropout=0.1), criterion()
    for training in (True, False):
        model.train(training)
        for sample in samples():
            loss, _, _ = loss_of(model, sample)
            assert loss.device.type == "meta"
            if training:
                loss.backward()
                assert all(p.grad.device.type == "meta" for p in model.parameters())
        for tensor, counts in counters(model.states[training]):
            assert tensor.device.type == ("cpu" if counts else "meta")


@every
def test_reading_and_generating_wait_for_no_gpu(memory, host):
    """Rows of different lengths, over the border of a segment."""
    decoder = elsewhere(memory, host).decoder
    tokens, lengths = text(3, 23).to("meta"), torch.tensor([23, 7, 15])
    reading = new_reading(decoder, 3, 6)
    reading = read(decoder, reading, tokens, lengths)
    reading = read(decoder, reading, tokens[:, :3], torch.tensor([3, 3, 3]))
    go_on = Continuation(decoder, reading)
    for _ in range(8):
        output = go_on.feed(torch.full((3,), 5, device="meta"))
        assert output.device.type == "meta"


def test_the_rows_of_a_state_are_chosen_and_reset_by_the_cpu():
    decoder = elsewhere("gibbs", "transformer_xl").decoder
    _, state, _ = decoder(text(3, 5).to("meta"), decoder.initial_state(3))
    other = state.rows(torch.tensor([2, 0])).reset([True, False])
    assert other.position.tolist() == [0, 5] and other.key.device.type == "meta"
    assert other.to("meta").position.device.type == "cpu"
