"""The memory of Infini-attention: parity with the naive one, gradients, long streams."""

import naive
import pytest
import torch
from zoo import losses_and_logs, make_model, stream, text

from fairseq_inf.memory import InfiniMemory
from fairseq_inf.modules import GPT2Attention

HEADS, DIM = 2, 8
UPDATES = ["linear", "delta"]


def make(update, dtype=torch.float64):
    torch.manual_seed(0)
    memory = InfiniMemory(DIM, HEADS, update)
    torch.nn.init.normal_(memory.beta)
    return memory.to(dtype), GPT2Attention(DIM, HEADS).to(dtype)


def draw(*shape, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def step(memory, attention, vectors, query, own, state, counts=None):
    """Write, then read.  -> D, state"""
    plan = memory.plan(counts or [vectors.size(1)] * len(vectors), state)
    state, _ = memory.write(vectors, state, plan, attention)
    change, _ = memory.read(query, own, memory.contents(state, attention, query.dtype))
    return change, state


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("queries", [1, 7])
def test_the_fast_memory_equals_the_naive_one(update, queries):
    """Output, state and every gradient, over writes of odd lengths and none, row by row
    differently."""
    memory, attention = make(update)
    state, slow = memory.initial_state(3), [[None] * HEADS for _ in range(3)]
    held = torch.zeros(3)
    for segment, counts in enumerate([(0, 0, 0), (63, 1, 0), (5, 0, 0), (0, 7, 13), (1, 31, 2)]):
        vectors = draw(3, max(counts) + segment % 2, DIM, seed=segment)
        query, own = draw(2, 3, HEADS, queries, DIM // HEADS, seed=9 + segment)
        variables = [query.requires_grad_(), own.requires_grad_(), memory.beta]
        change, state = step(memory, attention, vectors, query, own, state, counts)
        out, expected = own + change, []
        held += torch.tensor(counts)
        assert state.tokens.tolist() == held.tolist()
        for row, count in enumerate(counts):
            keys, values = attention.project(vectors[row : row + 1, vectors.size(1) - count :])
            for head in range(HEADS):
                if count:
                    slow[row][head] = naive.infini_write(
                        memory, keys[0, head], values[0, head], slow[row][head]
                    )
                wanted = slow[row][head]
                expected.append(
                    naive.infini_read(query[row, head], own[row, head], wanted, memory.beta[head])
                )
                if wanted is not None:  # means over the vectors stored, and not sums
                    assert torch.allclose(state.matrix[row, head] * held[row], wanted[0])
                    assert torch.allclose(state.normaliser[row, head] * held[row], wanted[1])
        expected = torch.stack(expected).view_as(out)
        assert torch.allclose(out, expected, atol=1e-10)
        if max(counts):  # the host's maps of keys and values learn from the write
            variables += attention.key_value.parameters()
        weight = draw(*out.shape, seed=7)
        fast, naively = (
            torch.autograd.grad((x * weight).sum(), variables, materialize_grads=True)
            for x in (out, expected)  # an empty memory has no use for a query
        )
        for one, two in zip(fast, naively, strict=True):
            assert torch.allclose(one, two, atol=1e-10)
        state, slow = (
            state.detach(),
            [[s and tuple(x.detach() for x in s) for s in r] for r in slow],
        )


def test_gradients_reach_the_maps_of_keys_and_values_but_not_the_vectors_or_the_past():
    memory, attention = make("delta")
    query, own = draw(2, 1, HEADS, 3, DIM // HEADS, seed=1)
    vectors = [draw(1, 5, DIM, seed=seed).requires_grad_() for seed in (2, 3)]
    _, first = step(memory, attention, vectors[0], query, own, memory.initial_state(1))
    change, _ = step(memory, attention, vectors[1], query, own, first)
    assert first.matrix.requires_grad
    change.sum().backward()
    assert vectors[0].grad is None and vectors[1].grad is None
    assert attention.key_value.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_empty_row_adds_exactly_nothing_beside_a_full_one(update, dtype):
    memory, attention = make(update, dtype)
    query, own = draw(2, 2, HEADS, 3, DIM // HEADS, seed=1, dtype=dtype)
    state = memory.initial_state(2, dtype=dtype)
    change, state = step(
        memory, attention, draw(2, 4, DIM, seed=2, dtype=dtype), query, own, state, [0, 4]
    )
    assert change.dtype == dtype and not change[0].any() and change[1].all()
    assert not state.matrix[0].any() and not state.normaliser[0].any()


def test_the_first_write_is_the_same_by_both_rules():
    found = []
    for update in UPDATES:
        memory, attention = make(update)
        query, own = draw(2, 1, HEADS, 3, DIM // HEADS, seed=1)
        state = memory.initial_state(1)
        found.append(step(memory, attention, draw(1, 9, DIM, seed=2), query, own, state)[0])
    assert torch.equal(*found)


def test_what_a_linear_memory_gives_is_between_the_values_that_it_holds():
    memory, attention = make("linear")
    vectors = draw(1, 9, DIM, seed=2)
    query, own = 9 * draw(1, HEADS, 30, DIM // HEADS, seed=1), torch.zeros(1)
    change, _ = step(memory, attention, vectors, query, own, memory.initial_state(1))
    found = change / memory.beta.sigmoid()[:, None, None]
    values = attention.project(vectors)[1]
    for side, holds in ((values.amin(2), torch.ge), (values.amax(2), torch.le)):
        assert holds(found, side[:, :, None]).all()


@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_million_tokens_leave_no_number_larger_than_the_first_ones_did(update, dtype):
    memory, attention = make(update, dtype)
    exact, twin = make(update)
    state, slow = memory.initial_state(1, dtype=dtype), exact.initial_state(1)
    largest = {}
    with torch.no_grad():
        for segment in range(250):
            vectors = 3 * draw(1, 4000, DIM, seed=segment, dtype=dtype)
            query, own = draw(2, 1, HEADS, 5, DIM // HEADS, seed=segment, dtype=dtype)
            change, state = step(memory, attention, vectors, query, own, state)
            wanted, slow = step(exact, twin, vectors.double(), query.double(), own.double(), slow)
            assert torch.isfinite(change).all()
            largest[segment] = state.matrix.abs().max(), state.normaliser.abs().max()
    assert state.tokens.item() == 1_000_000 and state.matrix.dtype == torch.float32
    assert all(end < 1.5 * start for start, end in zip(largest[0], largest[249], strict=True))
    assert (change - wanted).abs().max() < {torch.float32: 1e-5}.get(dtype, 0.02)


@pytest.mark.parametrize("far", [-300.0, 300.0])
def test_queries_and_keys_far_from_zero_stay_finite_with_their_gradients(far):
    memory, attention = make("delta", torch.float32)
    query = torch.full((1, HEADS, 3, DIM // HEADS), far, requires_grad=True)
    state = memory.initial_state(1)
    for seed in range(3):
        vectors = draw(1, 5, DIM, seed=seed, dtype=torch.float32)
        torch.nn.init.constant_(attention.key_value.bias, far)
        change, state = step(memory, attention, vectors, query, torch.zeros(1), state)
    change.sum().backward()
    for x in (change, query.grad, attention.key_value.weight.grad, memory.beta.grad):
        assert torch.isfinite(x).all()


def test_the_mean_gate_is_logged_over_tokens_that_read_something():
    decoder = make_model("infini_attention").decoder
    for layer, gates in zip(decoder.layers, ((0.2, 0.4), (0.6, 0.9)), strict=True):
        layer.memory.beta.data = torch.tensor(gates).logit()
    tokens = text(2, 5)
    _, _, extra = decoder(tokens, decoder.initial_state(2))
    assert losses_and_logs(extra, tokens)[1]["ltm_gate"][1] == 0
    _, state = stream(decoder, text(2, 15), 5)
    state = state.reset(torch.tensor([True, False]))
    _, _, extra = decoder(tokens, state)
    total, of = losses_and_logs(extra, tokens)[1]["ltm_gate"]
    assert of == 2 * 5 and total / of == pytest.approx(0.525, rel=1e-5)


@pytest.mark.parametrize(
    "args,said",
    [
        ((8, 2, "cubic"), "update must be linear or delta, got cubic"),
        ((8, 3), "8 dimensions cannot be split evenly between 3 heads"),
    ],
)
def test_bad_settings_name_their_argument(args, said):
    with pytest.raises(ValueError, match=said):
        InfiniMemory(*args)
