"""What self-attention has looked at most goes on to the long-term memory, and the host reads it."""

import pytest
import torch
from conftest import load, train
from zoo import HOSTS, make_model, stream, text

from fairseq_inf.memory import KeptMemory, Leaving, pick


def test_the_most_looked_at_of_each_row_keep_their_order():
    left = torch.arange(12.0).view(2, 6, 1)
    looked = torch.tensor([[9.0, 1, 5, 2, 7, 3], [0, 0, 4, 1, 0, 2]])
    leaving = Leaving(torch.tensor([5, 4]), torch.tensor([3, 1]), 3)
    first, second = pick(left, looked, leaving).squeeze(2).tolist()
    assert first == [2, 4, 5]  # the first column has not left this row
    assert second[-1] == 8


def test_what_is_looked_at_stays_and_the_rest_fades():
    """Against a list of each row: vectors come, are looked at, and the least looked-at go."""
    rows, size, rng = 3, 6, torch.Generator().manual_seed(1)
    memory = KeptMemory(2, size)
    state = memory.initial_state(rows)
    lists = [[] for _ in range(rows)]  # of vector, mark
    came = 0
    for counts in ([4, 0, 2], [4, 3, 0], [1, 5, 5], [0, 0, 0], [3, 5, 4], [5, 2, 5]):
        vectors = torch.arange(came, came + rows * 5 * 2.0).view(rows, 5, 2)
        looked, came = torch.rand(rows, 5, generator=rng), came + rows * 10
        plan = memory.plan(counts, state)
        state, _ = memory.write(vectors, state, plan, looked=looked)
        for row, count in enumerate(counts):
            own = [(v, m * 0.5 ** (count / 256)) for v, m in lists[row]]
            first = 5 - count
            own += zip(vectors[row, first:].tolist(), looked[row, first:].tolist(), strict=True)
            least = sorted(m for _, m in own)[: max(len(own) - size, 0)]
            lists[row] = [(v, m) for v, m in own if m not in least]
        shown = torch.rand(rows, plan.slots, generator=rng)
        shown[torch.arange(plan.slots) < plan.slots - state.held[:, None]] = 0  # are masked
        state = memory.mark(state, shown)
        for row, own in enumerate(lists):
            assert plan.held[row] == state.held[row] == len(own)
            more = shown[row, plan.slots - len(own) :].tolist()
            lists[row] = own = [(v, m + x) for (v, m), x in zip(own, more, strict=True)]
            slots, marks = state.slots[row, size - len(own) :], state.marks[row, size - len(own) :]
            assert slots.tolist() == [v for v, _ in own]
            assert torch.allclose(marks, torch.tensor([m for _, m in own]))
            assert not state.slots[row, : size - len(own)].any()


def test_a_vector_that_is_looked_at_outlives_a_window_of_slots():
    """What a whole model does: the newest slots of a memory without ranks forget it."""
    memory = KeptMemory(1, 3)
    state = memory.initial_state(1)
    for number in range(1, 50):
        plan = memory.plan([1], state)
        looked = torch.full((1, 1), 5.0 if number == 1 else 1.0)
        state, _ = memory.write(torch.full((1, 1, 1), float(number)), state, plan, looked=looked)
        state = memory.mark(state, state.slots[:, 3 - plan.slots :, 0] == 1.0)
    assert state.slots[0, 0] == 1 and state.slots[0, -1] > 45


@pytest.mark.parametrize("host", HOSTS)
def test_the_weights_of_an_attention_are_those_that_it_attends_with(host, monkeypatch):
    monkeypatch.setattr("fairseq_inf.modules.attention.LOOKS", 2)
    monkeypatch.setattr("fairseq_inf.modules.attention.FAR", 2)
    decoder = make_model("transformer_xl", host=host).double().decoder
    attention = decoder.layers[0].attention
    _, state = stream(decoder, text(2, 15), 5)
    tokens, found = text(2, 5), {}

    def spy(query, key, value, positions, first=0, drop=True):
        found["one"] = type(attention).attend(attention, query, key, value, positions, first, drop)
        found["weights"] = attention.weights(query, key, positions, 1)
        found["two"] = found["weights"] @ value
        found["looked"] = attention.looked(query, key, positions, None)
        return found["one"]

    attention.attend = spy
    with torch.no_grad():
        decoder(tokens, state)
    assert torch.allclose(found["one"], found["two"], atol=1e-9)
    # one query in two looks; from less than two tokens away that counts a thousandth
    weights = found["weights"].sum(dim=1)  # B x T x P
    past, looked = weights.size(2) - 5, torch.zeros_like(weights[:, 0])
    for query in range(0, 5, 2):
        for key in range(weights.size(2)):
            counts = 1.0 if past + query - key >= 2 else 1e-3
            looked[:, key] += counts * weights[:, query, key]
    assert torch.allclose(found["looked"].double(), looked, atol=1e-6)


@pytest.mark.parametrize("memory", ["picked", "slots_of_signal"])
def test_a_memory_that_the_host_reads_serves_without_training(memory):
    """As it is built: further keys of one softmax, with the host's own maps."""
    own = {"ltm_start": "host", "ltm_rank": 0, "ltm_pick": 1, "ltm_schedule": "uniform"}
    own |= {"cmem_length": 40, "ltm_points": 34, "ltm_basis": 34, "ltm_ridge": 1e-9}
    kind = make_model(memory, host="llama", sharp=False)
    fields = {name for name in own if hasattr(type(kind).config, name)}
    own = {name: own[name] for name in fields}
    settings = {"host": "llama", "sharp": False, "sink_tokens": 0, "slot_spacing": 1.0}
    model = make_model(memory, **settings, **own)
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.3)
    assert not model.memory_state_dict()
    plain = make_model("transformer_xl", **{**settings, "stm_length": 40})
    plain.load_state_dict(model.state_dict())
    tokens = text(1, 45)
    if memory == "picked":  # all that has left is a slot, where it would stand: nothing is lost
        one, other = (stream(x.double().decoder, tokens, 5)[0] for x in (model, plain))
        assert torch.allclose(one, other, atol=1e-9)
    else:
        short = make_model("transformer_xl", **settings)
        short.load_state_dict(model.state_dict())
        outs = [stream(x.double().decoder, tokens, 5)[0] for x in (model, plain, short)]
        assert (outs[0] - outs[2]).abs().max() > 1e-3


def test_flags_that_need_slots_say_so():
    for own in ({"ltm_start": "host"}, {"ltm_rank": 4}):
        with pytest.raises(ValueError, match="needs a memory with slots, which the host's own"):
            make_model("gibbs", host="llama", **own)
    with pytest.raises(ValueError, match="--ltm-sticky is not for points that the host's"):
        make_model("slots_of_signal", ltm_sticky=True)
    with pytest.raises(ValueError, match="--ltm-pick must be at least 1, got 0"):
        make_model(ltm_pick=0)


@pytest.mark.slow
def test_a_correction_of_the_slots_is_all_that_a_frozen_host_learns(data_bin, tmp_path):
    sizes = "--decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 "
    sizes += "--decoder-attention-heads 4 --decoder-key-heads 2 --stm-length 12 --sink-tokens 2 "
    sizes += "--cmem-length 8 --compression-rate 1 --compression mean --ltm-pick 2 --ltm-rank 2 "
    sizes += "--ltm-start host --slot-spacing 2 --freeze-host --checkpoint-activations"
    model = ["--arch", "compressive_transformer_lm_llama", *sizes.split()]
    saved = []
    for updates in (1, 20):
        folder = tmp_path / str(updates)
        assert "done training" in train(data_bin, folder, "--max-update", updates, model=model)
        saved.append(load(folder / "checkpoint_last.pt")["model"])
    changed = {name for name in saved[0] if not torch.equal(saved[0][name], saved[1][name])}
    wanted = {name for name in saved[0] if ".memory.correction." in name}
    assert changed == wanted and wanted
