"""What a policy rates highest of what leaves the window is kept whole, and the host reads it."""

import pytest
import torch
from conftest import load, train
from zoo import HOSTS, make_model, stream, text

from fairseq_inf.memory import SelectiveMemory, selective
from fairseq_inf.models.watch import Watch


def test_the_best_rated_of_each_row_keep_their_order():
    memory = SelectiveMemory(1, slots=5, pick=2)
    state = memory.initial_state(2)
    vectors = torch.arange(12.0).view(2, 6, 1)
    looks = torch.tensor([[9.0, 1, 5, 2, 7, 3], [0, 0, 4, 1, 0, 2]])
    marks = torch.stack([looks, torch.ones_like(looks)], dim=2)
    plan = memory.plan([5, 2], state)  # the first column has not left the first row
    state, _ = memory.write(vectors, state, plan, key=torch.zeros(2).long(), marks=marks)
    first, second = state.slots.squeeze(2).tolist()
    assert first == [0, 0, 2, 4, 5] and second == [0, 0, 0, 0, 11]
    assert state.held.tolist() == [3, 1]


def test_a_policy_is_found_by_its_name(monkeypatch):
    def newest(left):
        return torch.arange(left.looks.size(1)).expand_as(left.looks)

    monkeypatch.setitem(selective.POLICIES, "newest", newest)
    memory = SelectiveMemory(1, slots=4, pick=3, policy="newest")
    state, marks = memory.initial_state(1), torch.rand(1, 6, 2)
    args = {"key": torch.zeros(1).long(), "marks": marks}
    state, _ = memory.write(torch.arange(6.0).view(1, 6, 1), state, memory.plan([6], state), **args)
    assert state.slots.flatten().tolist() == [0, 0, 4, 5]
    with pytest.raises(ValueError, match="policy must be one of looks, random, newest, got worst"):
        SelectiveMemory(1, slots=4, policy="worst")


def test_a_state_that_was_read_without_its_memory_goes_on_with_it():
    decoder = make_model("selective", host="llama").decoder
    decoder.ltm_enabled = False
    _, state = stream(decoder, text(2, 40), 5)
    decoder.ltm_enabled = True
    out, after = stream(decoder, text(2, 20), 5, state)
    assert out.isfinite().all() and (after.layers[0].memory.held == 7).all()


@pytest.mark.parametrize("host", HOSTS)
def test_looks_are_those_of_the_attention_and_hardly_count_from_near(host, monkeypatch):
    """One query in two looks, for both; from less than two tokens away it counts a thousandth, and
    its weight a tenth of it."""
    monkeypatch.setattr(selective, "FAR", 2)
    decoder = make_model("transformer_xl", host=host).double().decoder
    attention = decoder.layers[0].attention
    _, state = stream(decoder, text(2, 15), 5)
    met, attend = {}, attention.attend

    def attended(query, key, value, positions):
        met["one"] = attend(query, key, value, positions)
        met["two"] = attention.weights(query, key, positions) @ value
        met["every second"] = attention.weights(query, key, positions, 2)
        return met["one"]

    attention.attend = attended
    with torch.no_grad():
        decoder(text(2, 5), state)
    assert torch.allclose(met["one"], met["two"], atol=1e-9)
    weights = met["every second"].sum(dim=1)  # B x T' x P
    past, expected = weights.size(2) - 5, torch.zeros(2, weights.size(2), 2)
    for number, query in enumerate(range(0, 5, 2)):
        for key in range(past + query + 1):
            far = past + query - key >= 2
            expected[:, key, 0] += (1.0 if far else 1e-4) * weights[:, number, key]
            expected[:, key, 1] += 1.0 if far else 1e-3
    monkeypatch.setattr(selective, "EVERY", 2)
    marks = SelectiveMemory(16, slots=4).mark(met["every second"], 5, None)
    assert torch.allclose(marks, 2 * expected, atol=1e-6)


def test_all_that_has_left_as_slots_where_it_would_stand_is_the_host_with_a_longer_window():
    """Untrained: further keys of one softmax, with the host's own maps."""
    settings = {"host": "llama", "sharp": False, "sink_tokens": 0}
    model = make_model("selective", ltm_slots=40, ltm_pick=1, ltm_rank=0, **settings)
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.3)
    assert not model.memory_state_dict()
    plain = make_model("transformer_xl", **{**settings, "stm_length": 40})
    plain.load_state_dict(model.state_dict())
    one, other = (stream(x.double().decoder, text(1, 45), 5)[0] for x in (model, plain))
    assert torch.allclose(one, other, atol=1e-9)


def test_a_watched_memory_names_what_it_has_taken():
    decoder, tokens = make_model("selective", host="llama").decoder, text(2, 43)
    state, taken = decoder.initial_state(2), []
    with torch.no_grad(), Watch(decoder) as watched:
        for part in tokens.split(5, dim=1):
            _, state, _ = decoder(part, state)
            numbers, vectors = watched.layers[1].row(1)
            taken += list(zip(numbers.tolist(), vectors, strict=True))
    numbers = [number for number, _ in taken]
    assert numbers == sorted(numbers) and len(set(numbers)) == len(numbers) > 7
    kept = state.layers[1].memory.slots[1]
    assert torch.equal(kept, torch.stack([vector for _, vector in taken[-7:]]))


@pytest.mark.slow
def test_a_correction_of_the_slots_is_all_that_a_frozen_host_learns(data_bin, tmp_path):
    sizes = "--decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 "
    sizes += "--decoder-attention-heads 4 --decoder-key-heads 2 --stm-length 12 --sink-tokens 2 "
    sizes += "--ltm-slots 8 --ltm-pick 2 --ltm-rank 2 --freeze-host --checkpoint-activations"
    model, saved = ["--arch", "selective_memory_lm_llama", *sizes.split()], []
    for updates in (1, 20):
        folder = tmp_path / str(updates)
        assert "done training" in train(data_bin, folder, "--max-update", updates, model=model)
        saved.append(load(folder / "checkpoint_last.pt")["model"])
    changed = {name for name in saved[0] if not torch.equal(saved[0][name], saved[1][name])}
    wanted = {name for name in saved[0] if ".memory.correction." in name}
    assert changed == wanted and wanted
