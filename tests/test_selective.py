"""What a policy rates highest of what leaves the window is kept whole, and the host reads it."""

import re

import naive
import pytest
import torch
from conftest import ROOT, load, train
from zoo import HOSTS, make_model, stream, text

from fairseq_inf.memory import SelectiveMemory, selective
from fairseq_inf.models import surprise
from fairseq_inf.models.watch import Watch


def written(memory, chunks, left=None):
    """One row is given vectors, a chunk at a time.  chunks: of (vectors: W x e, marks: W x 3)
    -> state"""
    state, key = memory.initial_state(1), torch.zeros(1).long()
    for vectors, marks in chunks:
        plan = memory.plan([len(vectors)], state)
        state, _ = memory.write(vectors[None], state, plan, AsTheyAre, key, marks[None])
    return state


class AsTheyAre:
    @staticmethod
    def key_value(vectors):
        return vectors


def chunks(sizes, width=4, seed=0):
    torch.manual_seed(seed)
    return [(torch.randn(n, width), torch.rand(n, 3)) for n in sizes]


@pytest.mark.parametrize(
    "policy", ["looks", "surprise", "last", "surprise,looks", "looks,surprise,last", "random"]
)
def test_of_all_that_ever_left_the_best_rated_are_kept_in_the_order_of_their_age(policy):
    """Against a list that is sorted anew at each write, in writes of odd sizes."""
    memory, kept = SelectiveMemory(4, 5, policy), []
    given = chunks([3, 0, 7, 1, 13, 2, 9])
    for step in range(len(given)):
        vectors, marks = given[step]
        first = sum(len(x) for x, _ in given[:step])
        come = [(first + i, *pair) for i, pair in enumerate(zip(vectors, marks, strict=True))]
        kept = naive.select(kept + come, 5, policy)
        state = written(memory, given[: step + 1])
        assert state.held.tolist() == [len(kept)] and state.given.tolist() == [first + len(come)]
        numbers = state.number[0, 5 - len(kept) :].tolist()
        assert numbers == sorted(numbers)
        if policy != "random":
            assert numbers == [number for number, _, _ in kept]
        everything = torch.cat([x for x, _ in given[: step + 1]])
        assert torch.equal(state.slots[0, 5 - len(kept) :], everything[numbers])


def test_rows_are_written_apart_and_what_has_not_left_does_not_count():
    memory, key = SelectiveMemory(1, 3, "looks"), torch.zeros(2).long()
    state = memory.initial_state(2)
    vectors = torch.arange(12.0).view(2, 6, 1)
    looks = torch.tensor([[9.0, 1, 5, 2, 7, 3], [0, 0, 4, 1, 0, 2]])
    marks = torch.stack([looks, torch.ones_like(looks), torch.zeros_like(looks)], dim=2)
    plan = memory.plan([5, 2], state)  # the first column has not left the first row
    state, _ = memory.write(vectors, state, plan, AsTheyAre, key, marks)
    assert state.slots.squeeze(2).tolist() == [[2, 4, 5], [0, 10, 11]]
    assert state.number.tolist()[0] == [1, 3, 4] and state.number[1, 1:].tolist() == [0, 1]


def test_a_policy_is_found_by_its_name(monkeypatch):
    def first(left):
        return -left.number

    monkeypatch.setitem(selective.POLICIES, "first", first)
    assert written(SelectiveMemory(4, 3, "first"), chunks([6, 4])).number.tolist() == [[0, 1, 2]]
    with pytest.raises(ValueError, match="policy must be of looks, .*first, got 'worst'"):
        SelectiveMemory(4, 3, "looks,worst")


def test_the_policy_of_the_guide_keeps_what_is_least_like_the_others(monkeypatch):
    """Also in a row that has less than the others."""
    guide = (ROOT / "CONTRIBUTING.md").read_text().split("## Add a policy")[1]
    names = vars(selective).copy()
    exec(re.search(r"```python\n(.*?)```", guide, re.S)[1], names)
    monkeypatch.setitem(selective.POLICIES, "key_diff", names["key_diff"])
    memory, vectors = SelectiveMemory(4, 2, "key_diff"), torch.ones(2, 6, 4)
    vectors[:, 2, 0] = vectors[:, 4, 1] = -1
    vectors[1, :2] = torch.tensor([-9.0, 9, 1, 1])  # have not left
    plan = memory.plan([6, 4], memory.initial_state(2))
    args = AsTheyAre, torch.zeros(2).long(), torch.zeros(2, 6, 2)
    state, _ = memory.write(vectors, memory.initial_state(2), plan, *args)
    assert state.number.tolist() == [[2, 4], [0, 2]]
    SelectiveMemory(4, 2, "looks,key_diff")


def test_looks_go_on_while_a_vector_is_kept():
    memory = SelectiveMemory(4, 3, "looks")
    state = written(memory, chunks([2]))
    seen = torch.tensor([[[9.0, 9], [5, 2], [1, 1]]])  # the first slot is empty
    after = memory.observe(state, seen, None).marks - state.marks
    assert torch.allclose(after, torch.tensor([[[0.0, 0], [5, 2], [1, 1]]]))


def test_in_int8_a_number_is_a_254th_of_the_largest_beside_it_at_most():
    given = chunks([9], width=64)
    exact, coarse = (written(SelectiveMemory(64, 9, "last", x), given) for x in ("full", "int8"))
    assert coarse.slots.dtype == torch.int8 and coarse.slots.shape == exact.slots.shape
    memory = SelectiveMemory(64, 9, "last", "int8")
    error = (memory.restored(coarse.slots, coarse.scales) - exact.slots).abs()
    largest = exact.slots.unflatten(2, (2, -1)).abs().amax(dim=-1, keepdim=True)
    assert (error.unflatten(2, (2, -1)) <= largest / 253).all() and error.max() > 0


@pytest.mark.parametrize("precision", ["full", "int8"])
def test_what_a_host_predicts_hardly_depends_on_the_precision(precision):
    settings = {"host": "llama", "ltm_slots": 20, "ltm_policy": "last", "ltm_rank": 0}
    exact, other = (
        stream(make_model("selective", ltm_precision=x, **settings).decoder, text(2, 60), 5)[0]
        for x in ("full", precision)
    )
    error = (exact - other).abs().max() / exact.abs().max()
    assert error < (1e-9 if precision == "full" else 0.05)


def test_what_is_unlikely_is_known_from_some_words_of_a_large_dictionary():
    torch.manual_seed(0)
    x, weight, bias = torch.randn(300, 8) / 2, torch.randn(20_000, 8), torch.randn(20_000)
    bias[:2048] += 2
    target = torch.randint(20_000, (300,))
    exact = -(x @ weight.T + bias).log_softmax(dim=1).gather(1, target[:, None]).squeeze(1)
    found = surprise.losses(x, weight, bias, target)
    assert torch.corrcoef(torch.stack([found, exact]))[0, 1] > 0.99
    assert (found - exact).abs().mean() < 0.1
    few = surprise.losses(x, weight[:3000], None, target % 3000)
    exact = -(x @ weight[:3000].T).log_softmax(dim=1).gather(1, target[:, None] % 3000).squeeze(1)
    assert torch.allclose(few, exact, atol=1e-4)


@pytest.mark.parametrize("host", HOSTS)
def test_a_passage_is_as_surprising_as_its_tokens_were_unlikely(host, monkeypatch):
    """Segments of any length.  Passages of three tokens, the best of those in a row of five."""
    monkeypatch.setattr(surprise, "PASSAGE", 3)
    monkeypatch.setattr(surprise, "NEAR", 5)
    monkeypatch.setattr(surprise, "AROUND", 3)
    decoder, tokens = make_model("selective", host=host).decoder, text(2, 30)
    monkeypatch.setattr("fairseq_inf.models.decoder.AROUND", 3)
    state, whole, parts = decoder.initial_state(2), [], [5, 5, 3, 5, 5, 5, 2]
    for part in tokens.split(parts, dim=1):
        out, state, _ = decoder(part, state)
        whole.append(out.log_softmax(dim=-1))
    logs, losses = torch.cat(whole, dim=1), torch.zeros(2, 30)
    losses[:, 1:] = -logs[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)
    [known] = state.surprise
    window = state.layers[0].window.vectors.size(1) - decoder.short_term.sinks
    assert torch.allclose(known.losses[:, -window:], losses[:, 30 - window :], atol=1e-5)
    found = known.passages(window)
    for row in range(2):
        mean = [losses[row, max(i - 1, 1) : i + 2].square().mean() for i in range(30)]
        for place in range(30 - window, 30):
            best = float(max(mean[place - 2 : place + 3]))
            assert float(found[row, place - 30 + window]) == pytest.approx(best, abs=1e-4)


def test_layers_may_have_policies_by_their_depth():
    """And surprise is known to those that want it."""
    decoder = make_model("selective", host="llama", ltm_policy="last/surprise").decoder
    _, state = stream(decoder, text(1, 60), 5)
    first, second = (layer.memory.number[0].tolist() for layer in state.layers)
    given = int(state.layers[0].memory.given)
    assert first == list(range(given - 7, given)) != second
    with pytest.raises(ValueError, match="--ltm-policy must be of looks.*, got 'worst'"):
        make_model("selective", ltm_policy="last/worst")


def test_all_that_has_left_where_it_would_stand_is_the_host_with_a_longer_window():
    """Untrained: further keys of one softmax, by the host's own maps."""
    settings = {"host": "llama", "sharp": False, "sink_tokens": 0}
    model = make_model("selective", ltm_slots=40, ltm_rank=0, **settings)
    for x in model.parameters():
        torch.nn.init.normal_(x, std=0.3)
    assert not model.memory_state_dict()
    plain = make_model("transformer_xl", **{**settings, "stm_length": 40})
    plain.load_state_dict(model.state_dict())
    one, other = (stream(x.double().decoder, text(1, 45), 5)[0] for x in (model, plain))
    assert torch.allclose(one, other, atol=1e-9)


def test_a_watched_memory_names_what_it_keeps():
    decoder, tokens = make_model("selective", host="llama").decoder, text(2, 43)
    state, given = decoder.initial_state(2), {}
    with torch.no_grad(), Watch(decoder) as watched:
        for part in tokens.split(5, dim=1):
            _, state, _ = decoder(part, state)
            own = watched.layers[1]
            given.update(zip(own.numbers[1].tolist(), own.vectors[1], strict=True))
    numbers, vectors = own.row(1)
    assert len(numbers) == 7 and numbers.tolist() == sorted(set(numbers.tolist()))
    assert min(numbers) >= 2  # no sink
    made = decoder.layers[1].attention.key_value(torch.stack([given[i] for i in numbers.tolist()]))
    assert torch.allclose(vectors, made, atol=1e-6)
    assert torch.equal(vectors, state.layers[1].memory.slots[1])


@pytest.mark.slow
def test_a_correction_of_the_slots_is_all_that_a_frozen_host_learns(data_bin, tmp_path):
    sizes = "--decoder-layers 2 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 "
    sizes += "--decoder-attention-heads 4 --decoder-key-heads 2 --stm-length 12 --sink-tokens 2 "
    sizes += "--ltm-slots 8 --ltm-rank 2 --freeze-host --checkpoint-activations"
    model, saved = ["--arch", "selective_memory_lm_llama", *sizes.split()], []
    for updates in (1, 20):
        folder = tmp_path / str(updates)
        assert "done training" in train(data_bin, folder, "--max-update", updates, model=model)
        saved.append(load(folder / "checkpoint_last.pt")["model"])
    changed = {name for name in saved[0] if not torch.equal(saved[0][name], saved[1][name])}
    wanted = {name for name in saved[0] if ".memory.correction." in name}
    assert changed == wanted and wanted
