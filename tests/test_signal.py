"""Schedules and the Gibbs density, against their equations."""

import argparse

import naive
import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from test_memory import DIM, HEADS, inputs
from zoo import continuous

from fairseq_inf.models.infinite_former import InfiniteFormerConfig

WRITES = (7, 7, 3, 12, 1)


def make(density="gibbs", double=True, num_basis=12, **kwargs):
    torch.manual_seed(0)
    memory = continuous(DIM, HEADS, num_basis, (1 / num_basis,), density, **kwargs)
    torch.nn.init.xavier_uniform_(memory.output.weight)  # a Gibbs memory begins silent
    return (memory.double() if double else memory).eval()


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "uniform"},
        {"schedule": "uniform", "tau": 0.6},
        {"schedule": "uniform", "samples": 40, "ridge": 0.01},
        {"schedule": "logarithmic", "oldest": 200},
    ],
    ids=str,
)
def test_a_gibbs_memory_equals_the_naive_one(settings):
    """Output, density, state and every gradient, over writes of odd sizes."""
    memory = make(**settings)
    state, slow, held = memory.initial_state(2), [None, None], 0
    for number, size in enumerate(WRITES):
        q, x = inputs(2, size, 4, seed=number)
        q.requires_grad_()
        out, density, state = memory(q, x, state)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=out.dtype)
        fast = torch.autograd.grad((out * weight).sum(), [q, *memory.parameters()])
        loss = 0
        for row in range(2):
            old = None if slow[row] is None else slow[row].detach()
            slow[row] = naive.write_by_schedule(memory, x[row], old, held)
            z, masses = naive.read_gibbs(memory, q[row], slow[row], held + size)
            loss = loss + (z * weight[row]).sum()
            assert torch.allclose(state.coefficients[row], slow[row], atol=1e-9)
            assert torch.allclose(density.masses()[row].double(), masses, atol=1e-5)
            assert torch.allclose(out[row], z, atol=1e-8)
        expected = torch.autograd.grad(loss, [q, *memory.parameters()])
        names = ["query", *dict(memory.named_parameters())]
        for name, one, two in zip(names, fast, expected, strict=True):
            assert torch.allclose(one, two, atol=1e-8 * max(1, two.abs().max())), name
        state, held = state.detach(), held + size


def test_an_empty_row_has_no_gradient_also_in_half_precision():
    """The loss is scaled by thousands there."""
    memory = make(double=False, schedule="uniform").half()
    state = memory.initial_state(2)
    query, x = inputs(2, 7, 4, seed=0)
    query = query.half().requires_grad_()
    out, _, _ = memory(query, x.half(), state, memory.plan([7, 0], state))
    assert not out[1].any()
    found = torch.autograd.grad(out.sum() * 1024, [query, *memory.parameters()])
    assert all(torch.isfinite(gradient).all() for gradient in found)
    assert found[0][0].any() and not found[0][1].any()


@pytest.mark.parametrize("kind", ["gaussian", "gibbs"])
@pytest.mark.parametrize("sticky", [False, True])
@pytest.mark.parametrize("schedule", ["constant", "uniform", "logarithmic"])
def test_documents_of_different_ages_side_by_side_end_as_they_would_alone(kind, sticky, schedule):
    memory = make(kind, schedule=schedule, sticky=sticky, threshold=40, oldest=300)
    counts = [[7, 7, 7, 7], [7, 0, 3, 12], [0, 0, 0, 5], [12, 12, 12, 12]]
    together = memory.initial_state(4)
    alone = [memory.initial_state(1) for _ in counts]
    for step in range(4):
        q, x = inputs(4, 12, 3, seed=step)
        plan = memory.plan([c[step] for c in counts], together)
        out, _, together = memory(q, x, together, plan, key=torch.arange(4))
        for row, c in enumerate(counts):
            one, key = slice(row, row + 1), torch.tensor([row])
            own = memory.plan([c[step]], alone[row])
            expected, _, alone[row] = memory(q[one], x[one], alone[row], own, key=key)
            assert torch.allclose(out[one], expected, atol=1e-8)
            for name, value in alone[row].tensors().items():
                assert torch.allclose(together.tensors()[name][one], value, atol=1e-8), name
    assert together.tokens.tolist() == [28, 22, 5, 12]  # the last has forgotten at 36


@pytest.mark.parametrize("schedule", ["constant", "uniform", "logarithmic"])
def test_an_empty_signal_is_read_as_exactly_nothing(schedule):
    memory = make(double=False, schedule=schedule)
    q, x = inputs(2, 0, 3, dtype=torch.float32)
    out, _, _ = memory(q, x, memory.initial_state(2))
    assert out.abs().max() == 0


@pytest.mark.parametrize("kind", ["gaussian", "gibbs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("schedule", ["constant", "uniform", "logarithmic"])
def test_a_long_stream_stays_finite_and_bounded(kind, dtype, schedule):
    memory = make(kind, double=False, schedule=schedule).to(dtype)
    state, sizes = memory.initial_state(1), []
    t = torch.linspace(0, 1, 200)
    for segment in range(400):
        q, x = inputs(1, 16, 4, seed=segment, dtype=dtype)
        with torch.no_grad():
            out, _, state = memory(q, x, state, key=state.tokens)
        assert torch.isfinite(out).all() and state.coefficients.dtype == torch.float32
        sizes.append((memory.store.basis.evaluate(t) @ state.coefficients[0]).norm(dim=-1).max())
    assert max(sizes[100:]) < 2 * max(sizes[:100])


def test_a_gibbs_density_points_at_a_content():
    """Of 32 stored vectors the one that the query is has the most mass, and comes back."""
    torch.manual_seed(0)
    memory = continuous(32, 1, 64, (1 / 64,), "gibbs", "uniform").eval()
    for linear in (memory.reader.key, memory.reader.value, memory.output):
        torch.nn.init.eye_(linear.weight)
    x = torch.randn(1, 32, 32)
    for wanted in (0, 13, 31):
        query = 8 * x[:, None, wanted : wanted + 1]
        out, density, _ = memory(query, x, memory.initial_state(1))
        at = density.masses()[0, 0, 0].argmax() / 64
        assert abs(at - (wanted + 0.5) / 32) < 1 / 32
        similar = torch.cosine_similarity(out[0, 0], x[0], dim=-1)
        assert similar.argmax() == wanted and similar[wanted] > 0.8


def test_the_architectures_of_the_paper_have_its_memory_and_the_default_one_remembers():
    default = InfiniteFormerConfig()
    assert (default.ltm_schedule, default.ltm_density) == ("uniform", "gibbs")
    for suffix, widths in (
        ("wt103", "0.01,0.05"),
        ("sorting", "0.01,0.05"),
        ("gpt2", "0.005,0.01"),
    ):
        arch = f"infinite_former_lm_{suffix}"
        args = ARCH_MODEL_REGISTRY[arch].config()
        chosen = argparse.Namespace()
        ARCH_CONFIG_REGISTRY[arch](chosen)
        vars(args).update(vars(chosen))
        assert (args.ltm_schedule, args.ltm_density) == ("constant", "gaussian")
        assert args.ltm_widths == widths
