"""Where is a word now?  A mark in the signal is where the tracker says, whatever came since."""

import pytest
import torch
from zoo import HOSTS, MEMORIES, continuous, make_model, stream, text

from fairseq_inf.analysis.sample import phrases
from fairseq_inf.memory import CompressiveMemory, GaussianDensity, Places, Weights
from fairseq_inf.models.watch import Watch

N, T = 64, 64  # basis functions, words of a write
SCHEDULES = {
    "constant": {"schedule": "constant", "tau": 0.9},
    "uniform": {"schedule": "uniform"},
    "uniform with a ceiling": {"schedule": "uniform", "tau": 0.9},
    "logarithmic": {"schedule": "logarithmic", "oldest": 16384},
}


def open_gate(memory):
    """What is stored is what was given."""
    with torch.no_grad():
        memory.store.gate.weight.zero_()
        memory.store.gate.bias.fill_(100)
    return memory.double().eval()


def make_memory(**settings):
    torch.manual_seed(0)
    return open_gate(continuous(2, 1, N, (1 / N,), samples=4 * N, ridge=0.01, **settings))


def write(memory, state, places, vectors):
    plan = memory.plan([len(vectors)], state)
    after, _ = memory.write(vectors[None], state, plan)
    [move] = memory.moves(state, after, plan, None)
    places.follow(move)
    return after


@torch.no_grad()
def find(memory, state):
    """Where the mark is: the middle of what stands out of the signal."""
    t = torch.linspace(0, 1, 20 * N + 1, dtype=torch.float64)
    height = memory.at(state, t)[0, :, 0].clamp(min=0)
    height = torch.where(height > height.max() / 2, height, 0)
    return float((height * t).sum() / height.sum())


@pytest.mark.parametrize("sticky", [False, True], ids=["linear", "sticky"])
@pytest.mark.parametrize("word", [5, 30, 58])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_mark_is_where_the_tracker_says_after_1_5_and_20_updates(schedule, word, sticky):
    memory = make_memory(sticky=sticky, bins=N, **schedule)
    state, places = memory.initial_state(1, dtype=torch.float64), Places()
    vectors = torch.zeros(T, 2, dtype=torch.float64)
    vectors[:, 0] = torch.exp(-0.5 * ((torch.arange(T) - word) / 2) ** 2)  # a bump around the word
    state = write(memory, state, places, vectors)
    for update in range(1, 21):
        if sticky:  # half of the reads are around the mark
            at = GaussianDensity(
                places.t[word - places.first].view(1, 1, 1), torch.full((1, 1, 1), 0.04)
            )
            even = GaussianDensity(torch.full((1, 1, 1), 0.5), torch.full((1, 1, 1), 4.0))
            looked = [memory.reader.mass(x, N, None) for x in (at, even)]
            state.histogram = sum(x / x.sum() for x in looked).double() / 2
        state = write(memory, state, places, torch.zeros(T, 2, dtype=torch.float64))
        if update in (1, 5, 20):
            own = word - places.first
            half = float(places.spaces()[own]) / 2
            assert find(memory, state) == pytest.approx(float(places.t[own]), abs=half + 1 / N)


@pytest.mark.parametrize("schedule", ["constant", "uniform"])
def test_what_a_sticky_memory_held_at_a_place_it_holds_where_that_has_moved(schedule):
    memory = make_memory(sticky=True, bins=N, **SCHEDULES[schedule])
    state, places = memory.initial_state(1, dtype=torch.float64), Places()
    smooth = torch.linspace(0, 6, 5 * T, dtype=torch.float64)
    vectors = torch.stack([smooth.sin(), smooth.cos()], dim=1)
    for part in vectors.split(T):
        state.histogram = torch.full_like(state.histogram, 1 / N)
        state.histogram[:, 40:50] += 5 / N
        before, old = state, Places()
        old.t, old.first, old.begin = places.t, places.first, places.begin
        state = write(memory, state, places, part)
        if not len(old.t):
            continue
        held = len(places.t) - len(part)
        inner = slice(held // 10, held - held // 10)
        one = memory.at(before, old.t[-held:])[0, inner]
        two = memory.at(state, places.t[:held])[0, inner]
        assert float((one - two).norm() / one.norm()) < 0.1


def test_sticky_memories_give_a_word_that_is_looked_at_more_space():
    spaces = {}
    for sticky in (False, True):
        memory = make_memory(sticky=sticky, bins=N, tau=0.9)
        state, places = memory.initial_state(1, dtype=torch.float64), Places()
        for _ in range(6):
            if sticky and len(places.t):
                near = (torch.arange(N) + 0.5).div(N).sub(places.t[5]).abs() < 0.05
                state.histogram = (near / near.sum()).double()[None]
            state = write(memory, state, places, torch.randn(T, 2, dtype=torch.float64))
        spaces[sticky] = places.spaces()
    assert spaces[True][5] > 3 * spaces[False][5]


def test_every_word_is_where_its_schedule_moves_it_exactly():
    memory = make_memory(schedule="logarithmic", oldest=4096)
    state, places = memory.initial_state(1, dtype=torch.float64), Places()
    for _ in range(9):
        state = write(memory, state, places, torch.randn(T, 2, dtype=torch.float64))
    age = 9 * T - 0.5 - torch.arange(9 * T, dtype=torch.float64)
    assert torch.allclose(places.t, memory.store.schedule.place(age), atol=1e-12)
    assert places.begin == pytest.approx(float(memory.store.schedule.place(torch.tensor(9.0 * T))))


def watch(model, tokens, length):
    """-> of each row, segment and layer with a memory: row, places, what was written, the state"""
    decoder, places = model.decoder, {}
    state = decoder.initial_state(len(tokens))
    with torch.no_grad(), Watch(decoder) as watched:
        for part in tokens.split(length, dim=1):
            _, state, _ = decoder(part, state)
            for number, written in watched.layers.items():
                for row, move in enumerate(written.moves or ()):
                    places.setdefault((number, row), Places()).follow(move)
                    yield row, places[number, row], written, state.layers[number].memory


PLACED = [
    (m, h) for m in MEMORIES for h in HOSTS if m not in ("transformer_xl", "infini_attention")
]


@pytest.mark.parametrize("memory,host", PLACED, ids=[f"{m} in {h}" for m, h in PLACED])
def test_spaces_sum_to_one_and_masses_of_words_to_the_mass_of_the_line(memory, host):
    model, reads = make_model(memory, host=host), 0
    for row, places, own, _ in watch(model, text(2, 60), 5):
        assert float(places.spaces().sum()) + places.begin == pytest.approx(1)
        assert (places.spaces() >= 0).all()
        if own.seen is None or not len(places.t):
            continue
        whole = own.seen.mass(torch.tensor([places.begin, 1.0]))[row]
        words = own.seen.mass(places.edges().float())[row]
        assert words.shape[-1] == len(places.t)
        assert torch.allclose(words.sum(dim=-1), whole[..., 0], atol=1e-5)
        assert (words > -1e-6).all()
        reads += 1
    assert reads > 10


@pytest.mark.parametrize("name", ["infinite_former", "gibbs"])
def test_the_mass_of_a_word_is_the_integral_of_the_density_over_its_cell(name):
    *_, (row, places, own, _) = watch(make_model(name), text(1, 60), 5)
    edges = places.edges()
    found = own.seen.mass(edges.float())[row, 1, 3]
    t = (torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000
    if name == "gibbs":  # a step for each point
        masses = own.seen.masses()[row, 1, 3].double()
        height = masses[(t * len(masses)).long()] * len(masses)
    else:
        mu, var = (x[row, 1, 3].double() for x in (own.seen.mu, own.seen.var))
        height = torch.distributions.Normal(mu, var.sqrt()).log_prob(t).exp()
    for i, (a, b) in enumerate(zip(edges[:-1], edges[1:], strict=True)):
        inside = height[(t >= a) & (t < b)].sum() / 400_000
        assert float(found[i]) == pytest.approx(float(inside), abs=2e-5)


def test_a_trace_of_few_cells_keeps_the_mass_of_all():
    weights = Weights(torch.softmax(torch.randn(3, 5, 40), dim=-1) * 0.8)
    parts = weights.parts(16)
    assert torch.allclose(parts["mass"].sum(-1) + parts["rest"], torch.tensor(0.8))
    assert torch.equal(weights.weights.gather(-1, parts["cell"]), parts["mass"])


def test_slots_are_named_by_the_words_that_made_them():
    memory = CompressiveMemory(4, 6, rate=3).double()
    state, places = memory.initial_state(1, dtype=torch.float64), Places()
    words = torch.randn(47, 4, dtype=torch.float64)
    for part in words.split([5, 1, 7, 2, 12, 20]):
        state = write(memory, state, places, part)
    assert places.after == 45 and len(places.t) == 18  # two wait, and 27 are lost
    slot = (places.t * 6).long()
    for number in range(6):
        own = words[places.first : places.after][slot == number]
        assert len(own) == 3
        assert torch.allclose(memory.compress(own[None])[0, 0], state.slots[0, number])
    assert torch.equal(memory.at(state, places.t)[0], state.slots[0, slot])


@pytest.mark.parametrize("host", HOSTS)
def test_what_each_slot_gets_of_the_attention_is_what_it_brings_to_its_output(host):
    decoder = make_model("compressive_transformer", host=host).double().decoder
    attention, brought = decoder.layers[0].attention, []
    attend, apart = attention.attend, attention.apart

    def of_slots(value, shown):
        """Of the slots alone."""
        return torch.cat([value[:, :, :shown], torch.zeros_like(value[:, :, shown:])], dim=2)

    def attended(query, key, value, positions):
        shown = watched.layers[0].plan.slots
        brought.append((value[:, :, :shown], attend(query, key, of_slots(value, shown), positions)))
        return attend(query, key, value, positions)

    def parted(weights, value, shown):
        brought.append((value[:, :, :shown], attention.mix(weights, of_slots(value, shown))))
        return apart(weights, value, shown)

    attention.attend, attention.apart = attended, parted
    state, reads = decoder.initial_state(2), 0
    with torch.no_grad(), Watch(decoder) as watched:
        for part in text(2, 40).split(5, dim=1):
            _, state, _ = decoder(part, state)
            if watched.layers[0].plan.slots:
                value, expected = brought[-1]
                weights = watched.layers[0].seen.masses()
                empty = weights.size(-1) - value.size(2)
                assert (weights[..., :empty] == 0).all()
                assert torch.allclose(weights[..., empty:].double() @ value, expected, atol=1e-6)
                reads += 1
    assert reads > 3


@pytest.mark.parametrize("memory", MEMORIES)
def test_who_is_watched_does_the_same_then_and_later(memory):
    model = make_model(memory)
    out, state = stream(model.decoder, text(2, 40), 5)
    with Watch(model.decoder):
        watched = stream(model.decoder, text(2, 40), 5)
    for again, other in (watched, stream(model.decoder, text(2, 40), 5)):
        assert torch.equal(out, again)
        for name, x in state.tensors().items():
            assert torch.equal(x, other.tensors()[name])


def test_a_memory_that_forgets_at_a_threshold_names_only_what_came_since():
    model = make_model(ltm_threshold=20, ltm_sticky=False, stm_length=0)
    last = 0
    for _, places, _, _ in watch(model, text(1, 60), 5):
        assert len(places.t) <= 20
        last = max(last, places.first)
    assert last > 30


def test_a_gibbs_memory_holds_at_a_place_what_its_signal_is_there():
    memory = continuous(4, 2, 8, (0.1,), "gibbs").double()
    state, places = memory.initial_state(1, dtype=torch.float64), Places()
    state = write(memory, state, places, torch.randn(5, 4, dtype=torch.float64))
    expected = memory.store.basis.evaluate(places.t) @ state.coefficients
    assert torch.equal(memory.at(state, places.t), expected)


def test_phrases_are_the_largest_runs_and_none_over_another():
    spaces = [1, 1, 9, 9, 1, 1, 1, 5, 5, 1]
    assert phrases(spaces, width=2, most=3)[:2] == [(2, 4), (7, 9)]
    found = phrases([0.1] * 50, width=4, most=6)
    assert len(found) == 6 and all(b - a == 4 for a, b in found)
    starts = sorted(a for a, _ in found)
    assert all(b - a >= 4 for a, b in zip(starts, starts[1:], strict=False))
    assert phrases([]) == []


@pytest.mark.parametrize("host", HOSTS)
def test_vectors_come_with_their_numbers_in_the_stream(host):
    model, tokens = make_model("gibbs", host=host), text(2, 43)
    come = {0: [], 1: []}
    for row, _, own, _ in watch(model, tokens, 5):
        come[row].append(own.row(row)[0])
    for parts in come.values():
        numbers = torch.cat(parts[::2])  # of the first layer
        first = model.decoder.short_term.sinks
        assert numbers.tolist() == list(range(first, first + len(numbers)))
        assert len(numbers) > 25


@pytest.mark.parametrize("memory", ["gibbs", "selective"])
def test_a_vector_is_that_of_the_word_of_its_number(memory):
    model, tokens = make_model(memory, token_shift=None), text(2, 43)
    decoder, come = model.decoder, 0
    with torch.no_grad():
        made = decoder.layers[0].source(decoder.embed(tokens, torch.zeros(1, dtype=torch.long)))
        if memory == "selective":
            made = decoder.layers[0].attention.key_value(made)
    for number, (row, _, own, _) in enumerate(watch(model, tokens, 5)):
        if number % 4 < 2:  # the first layer, two rows
            numbers, vectors = own.row(row)
            assert torch.allclose(vectors, made[row, numbers], atol=1e-6)
            come += len(numbers)
    assert come > 25
