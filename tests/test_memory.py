import subprocess
import sys

import naive
import pytest
import torch
from zoo import continuous

from fairseq_inf.memory import (
    CompressiveMemory,
    Constant,
    ContinuousMemory,
    GaussianBasis,
    GaussianDensity,
    load_state,
    plan_write,
    ridge_operator,
    save_state,
)
from fairseq_inf.memory.sampling import histogram_quantiles, uniform
from fairseq_inf.memory.signal import update_operators

HEADS, DIM = 2, 8


def make_memory(num_basis=12, double=True, **kwargs):
    torch.manual_seed(0)
    memory = continuous(DIM, HEADS, num_basis, (0.05, 0.2), **kwargs)
    return memory.double() if double else memory


def inputs(rows, new, queries, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, new, DIM, generator=generator, dtype=dtype)
    q = torch.randn(rows, HEADS, queries, DIM // HEADS, generator=generator, dtype=dtype)
    return q, x


def test_memory_needs_torch_only():
    code = (
        "import sys; sys.modules['fairseq'] = None; import fairseq_inf.memory; "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('omegaconf', 'hydra')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_basis_shares_functions_evenly_by_width():
    basis = GaussianBasis(6, (0.1, 0.3))
    assert basis.centers.tolist() == [0, 0.5, 1, 0, 0.5, 1]
    assert basis.widths.tolist() == pytest.approx([0.1] * 3 + [0.3] * 3)
    expected = torch.distributions.Normal(0.5, 0.3).log_prob(torch.tensor(0.7)).exp()
    assert basis.evaluate(torch.tensor([0.7]))[0, 4].item() == pytest.approx(
        expected.item(), rel=1e-6
    )


def test_ridge_operator_solves_the_regression():
    basis = GaussianBasis(10, (0.05, 0.2))
    t = torch.arange(1, 64, dtype=torch.float64) / 63
    x = torch.randn(63, 3, dtype=torch.float64)
    b = (x.T @ ridge_operator(basis, t, 0.5)).T
    f = basis.evaluate(t)
    gradient = f.T @ (f @ b - x) + 0.5 * b  # of the penalised squared error
    assert gradient.abs().max() < 1e-9


@pytest.mark.parametrize("mu,var", [(0.5, 0.04), (0.02, 1e-6), (0.97, 0.5)])
def test_expectations_and_masses_equal_quadrature(mu, var):
    basis = GaussianBasis(8, (0.02, 0.1))
    density = GaussianDensity(*torch.tensor([[mu], [var]], dtype=torch.float64))
    t = torch.linspace(-8, 9, 200_001, dtype=torch.float64)
    p = torch.exp(-0.5 * (t - mu) ** 2 / var) / (2 * torch.pi * var) ** 0.5
    numeric = torch.stack([torch.trapezoid(p * basis.evaluate(t)[:, j], t) for j in range(8)])
    assert torch.allclose(density.expect(basis)[0], numeric, rtol=1e-6, atol=1e-9)

    edges = torch.linspace(0, 1, 6, dtype=torch.float64)
    fine = [
        torch.linspace(a, b, 40_001, dtype=torch.float64)
        for a, b in zip(edges[:-1], edges[1:], strict=True)
    ]
    numeric = torch.stack(
        [
            torch.trapezoid(torch.exp(-0.5 * (s - mu) ** 2 / var) / (2 * torch.pi * var) ** 0.5, s)
            for s in fine
        ]
    )
    assert torch.allclose(density.mass(edges)[0], numeric, rtol=1e-6, atol=1e-9)
    inside = density.cdf(torch.tensor([0.0, 1.0], dtype=torch.float64)).diff()
    assert torch.allclose(density.mass(edges).sum(-1, keepdim=True), inside)


def test_kl_is_the_divergence_and_never_negative():
    var = torch.logspace(-6, 1, 50, dtype=torch.float64)
    kl = GaussianDensity(torch.zeros_like(var), var).kl(0.1)
    normal = torch.distributions.Normal
    zero = torch.tensor(0.0, dtype=torch.float64)
    expected = torch.distributions.kl_divergence(normal(zero, var.sqrt()), normal(zero, 0.1 + zero))
    assert torch.allclose(kl, expected) and (kl >= 0).all()
    assert GaussianDensity(zero, zero + 0.01).kl(0.1).item() == pytest.approx(0, abs=1e-12)


def test_closed_forms_have_right_gradients():
    basis = GaussianBasis(6, (0.05, 0.2))
    mu = torch.rand(5, dtype=torch.float64, requires_grad=True)
    var = (torch.rand(5, dtype=torch.float64) + 0.01).requires_grad_()
    edges = torch.linspace(0, 1, 4, dtype=torch.float64)
    for f in (
        lambda m, v: GaussianDensity(m, v).expect(basis),
        lambda m, v: GaussianDensity(m, v).mass(edges),
        lambda m, v: GaussianDensity(m, v).kl(0.1),
    ):
        assert torch.autograd.gradcheck(f, (mu, var))


@pytest.mark.parametrize("new,queries", [(63, 5), (1, 1), (12, 7)])
@pytest.mark.parametrize("sticky", [False, True])
def test_fast_memory_equals_the_naive_one(new, queries, sticky):
    """Output, density, state and every gradient, over three writes."""
    memory = make_memory(sticky=sticky, samples=9, tau=0.6, bins=16).eval()
    state = memory.initial_state(2)
    slow = [None, None]
    for segment in range(3):
        q, x = inputs(2, new, queries, seed=segment)
        q.requires_grad_()
        histogram, longest = state.histogram, state.longest
        out, density, state = memory(q, x, state)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=out.dtype)
        loss = (out * weight).sum() + density.kl(0.1).sum()
        fast = torch.autograd.grad(loss, [q, *memory.parameters()])

        outs, losses = [], 0
        for row in range(2):
            at = None
            if sticky and segment:
                levels = (torch.arange(9).double() + 0.5)[None] / 9
                at = histogram_quantiles(histogram[row : row + 1], levels)[0]
            old = None if slow[row] is None else slow[row].detach()
            slow[row] = naive.write(memory, x[row], old, at, longest[row])
            z, mu, var = naive.read(memory, q[row], slow[row])
            outs.append(z)
            losses = losses + (z * weight[row]).sum() + GaussianDensity(mu, var).kl(0.1).sum()
            assert torch.allclose(density.mu[row], mu, atol=1e-9)
            assert torch.allclose(density.var[row], var, atol=1e-9)
            assert torch.allclose(state.coefficients[row], slow[row], atol=1e-9)
        assert torch.allclose(out, torch.stack(outs), atol=1e-9)
        naive_grads = torch.autograd.grad(losses, [q, *memory.parameters()])
        for name, a, b in zip(
            ["query", *dict(memory.named_parameters())], fast, naive_grads, strict=True
        ):
            assert torch.allclose(a, b, atol=1e-9 * max(1, b.abs().max())), name
        state = state.detach()


def test_gradcheck_of_a_whole_write_and_read():
    memory = make_memory(6, sticky=True, bins=4).eval()
    q, x = inputs(1, 5, 2)
    _, _, state = memory(q, x, memory.initial_state(1))
    state = state.detach()
    names, values = zip(*memory.named_parameters(), strict=True)

    def f(query, *parameters):
        weights = dict(zip(names, parameters, strict=True))
        out, density, _ = torch.func.functional_call(memory, weights, (query, x, state))
        return out, density.kl(0.1)

    assert torch.autograd.gradcheck(f, (q.requires_grad_(), *values))


def test_gradient_reaches_the_gate_but_not_the_vectors_or_the_past():
    memory = make_memory(double=False)
    q, x = inputs(2, 5, 3, dtype=torch.float32)
    x.requires_grad_()
    _, _, state = memory(q, x, memory.initial_state(2))
    old = state.detach()
    old.coefficients.requires_grad_()
    out, _, _ = memory(q, x, old)
    out.sum().backward()
    assert x.grad is None and old.coefficients.grad is None
    assert memory.store.gate.weight.grad.abs().sum() > 0


def run(memory, segments, rows=3, state=None, key=None, first=0):
    outs = []
    state = memory.initial_state(rows) if state is None else state
    key = torch.arange(rows) if key is None else key
    for segment in range(first, first + segments):
        q, x = inputs(3, 7, 4, seed=segment, dtype=torch.float32)
        out, _, state = memory(q[:rows], x[:rows], state, key=key + segment)
        state = state.detach()
        outs.append(out)
    return outs, state


def assert_same(a, b):
    for name, x in a.tensors().items():
        assert torch.equal(x, b.tensors()[name]), name


def test_an_empty_memory_adds_exactly_nothing():
    memory = make_memory(double=False)
    q, x = inputs(2, 0, 3, dtype=torch.float32)
    out, _, state = memory(q, x, memory.initial_state(2))
    assert out.abs().max() == 0 and state.tokens.tolist() == [0, 0]


@pytest.mark.parametrize("training", [True, False])
def test_a_stream_in_two_calls_equals_one_run(training):
    memory = make_memory(double=False, sticky=True).train(training)
    whole, end = run(memory, 4)
    first, middle = run(memory, 2)
    second, final = run(memory, 2, state=middle, first=2)
    assert all(torch.equal(a, b) for a, b in zip(whole, first + second, strict=True))
    assert_same(end, final)


def test_a_reset_row_equals_a_fresh_row():
    memory = make_memory(double=False, sticky=True)
    _, state = run(memory, 3)
    state = state.reset(torch.tensor([False, True, False]))
    q, x = inputs(3, 7, 4, seed=9, dtype=torch.float32)
    out, _, after = memory(q, x, state, key=torch.arange(3))
    fresh, _, fresh_after = memory(q, x, memory.initial_state(3), key=torch.arange(3))
    assert torch.allclose(out[1], fresh[1], atol=1e-6)
    for a, b in zip(
        after.rows([1]).tensors().values(), fresh_after.rows([1]).tensors().values(), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-6)
    assert not torch.allclose(out[0], fresh[0], atol=1e-4)


def test_a_permuted_batch_gives_permuted_states():
    memory = make_memory(double=False, sticky=True)
    _, state = run(memory, 2)
    order = torch.tensor([2, 0, 1])
    q, x = inputs(3, 7, 4, seed=9, dtype=torch.float32)
    out, _, after = memory(q, x, state, key=torch.arange(3))
    other, _, other_after = memory(
        q[order], x[order], state.rows(order), key=torch.arange(3)[order]
    )
    assert torch.allclose(out[order], other, atol=1e-6)
    for a, b in zip(
        after.rows(order).tensors().values(), other_after.tensors().values(), strict=True
    ):
        assert torch.allclose(a, b, atol=1e-6)


def test_rows_may_write_different_numbers_of_vectors():
    """Each row of a ragged batch ends as it would alone."""
    memory = make_memory(double=False)
    _, state = run(memory, 2)
    state = state.reset(torch.tensor([True, False, False]))
    q, x = inputs(3, 7, 4, seed=9, dtype=torch.float32)
    counts = [5, 7, 0]
    out, _, after = memory(q, x, state, plan_write(counts, state.tokens, memory.store.schedule))
    for row, count in enumerate(counts):
        pick = slice(row, row + 1)
        alone = state.rows(pick)
        expected, _, one = memory(q[pick], x[pick, 7 - count :], alone)
        assert torch.allclose(out[pick], expected, atol=1e-6)
        assert torch.allclose(after.coefficients[pick], one.coefficients, atol=1e-6)
    assert after.tokens.tolist() == [5, 21, 14]


def test_a_threshold_makes_a_row_forget():
    memory = make_memory(double=False, threshold=20)
    _, state = run(memory, 2)
    assert state.tokens.tolist() == [14, 14, 14]
    q, x = inputs(3, 7, 4, seed=5, dtype=torch.float32)
    _, _, after = memory(q, x, state)
    _, _, fresh = memory(q, x, memory.initial_state(3))
    assert torch.equal(after.coefficients, fresh.coefficients) and after.tokens.tolist() == [
        7,
        7,
        7,
    ]


def test_padding_is_left_out_of_the_histogram():
    memory = make_memory(double=False, sticky=True)
    _, state = run(memory, 2)
    q, x = inputs(3, 7, 4, seed=5, dtype=torch.float32)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]).bool()
    _, _, after = memory(q, x, state, mask=mask, key=torch.arange(3))
    _, _, cut = memory(q[:, :, :2], x, state, key=torch.arange(3))
    assert torch.allclose(after.histogram[0], cut.histogram[0], atol=1e-5)
    assert torch.equal(after.histogram[2], state.histogram[2])
    assert torch.allclose(after.histogram.sum(-1), torch.ones(3))


def test_sticky_samples_follow_the_histogram():
    histogram = torch.tensor([[0.0, 0.7, 0.0, 0.3]])
    levels = uniform(torch.tensor([5]), 100_000)
    assert 0 <= levels.min() and levels.max() < 1
    at = histogram_quantiles(histogram, levels)[0]
    counts = torch.histc(at, 4, 0, 1) / len(at)
    assert torch.allclose(counts, histogram[0], atol=0.005)
    inside = (at[(at >= 0.25) & (at < 0.5)] - 0.25) * 4
    assert inside.mean().item() == pytest.approx(0.5, abs=0.01)
    assert inside.var().item() == pytest.approx(1 / 12, abs=0.005)
    even = histogram_quantiles(torch.zeros(1, 4), (torch.arange(8) + 0.5)[None] / 8)
    assert torch.allclose(even, (torch.arange(8) + 0.5)[None] / 8)


def test_random_keys_are_independent_and_repeat():
    a, b = uniform(torch.tensor([1, 2]), 50_000)
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack([a[1:], a[:-1]]))[0, 1]) < 0.02
    assert torch.equal(a, uniform(torch.tensor([1]), 50_000)[0])


def test_a_state_survives_its_file(tmp_path):
    memory = make_memory(double=False, sticky=True)
    _, state = run(memory, 2)
    path = tmp_path / "memory.safetensors"
    save_state(state, path, "me")
    assert_same(state, load_state(path, memory.initial_state(1), "me"))
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_bad_memory_files_are_refused_in_one_sentence(tmp_path):
    memory = make_memory(double=False, sticky=True)
    _, state = run(memory, 2)
    path = tmp_path / "memory.safetensors"
    save_state(state, path, "me")
    template = memory.initial_state(1)
    with pytest.raises(ValueError, match="another model"):
        load_state(path, template, "you")
    with pytest.raises(ValueError, match="coefficients"):
        load_state(path, make_memory(10, double=False, sticky=True).initial_state(1), "me")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_state(tmp_path / "none", template, "me")
    whole = path.read_bytes()
    for cut in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="damaged"):
            load_state(path, template, "me")
    broken = state.map(lambda x: x * float("nan") if x.is_floating_point() else x)
    save_state(broken, path, "me")
    with pytest.raises(ValueError, match="NaN"):
        load_state(path, template, "me")


@pytest.mark.parametrize(
    "kwargs,name",
    [
        ({"num_basis": 13}, "num_basis 13"),
        ({"tau": 1.0}, "tau"),
        ({"tau": 0.0}, "tau"),
        ({"ridge": 0}, "ridge"),
        ({"bins": 0}, "bins"),
        ({"samples": -1}, "samples"),
    ],
)
def test_bad_settings_name_their_argument(kwargs, name):
    with pytest.raises(ValueError, match=name):
        make_memory(**kwargs)


@pytest.mark.parametrize(
    "query,vectors,said",
    [
        (
            (1, HEADS, 5, 3),
            (1, 3, DIM),
            r"query must be 1 x 2 x T x 4 for a state of 1 rows, got 1 x",
        ),
        ((1, 5, DIM), (1, 3, DIM), "query must be 1 x 2 x T x 4 .* got 1 x 5 x 8"),
        ((1, HEADS, 5, 4), (3, DIM), "vectors must be 1 x T x 8 .* got 3 x 8"),
        ((1, HEADS, 5, 4), (2, 3, DIM), "vectors must be 1 x T x 8 .* got 2 x 3 x 8"),
    ],
)
def test_tensors_of_another_shape_are_told_what_they_must_be(query, vectors, said):
    memory = make_memory(double=False)
    with pytest.raises(ValueError, match=said):
        memory(torch.zeros(query), torch.zeros(vectors), memory.initial_state(1))


def test_bad_widths_name_their_argument():
    with pytest.raises(ValueError, match="^widths must be positive"):
        GaussianBasis(4, (0.1, -0.1))


@pytest.mark.parametrize("training", [True, False])
def test_a_sticky_memory_that_always_looks_at_one_place_stays_bounded(training):
    """Samples of a fit are fitted again and again, at the worst places for it."""
    torch.manual_seed(0)
    memory = ContinuousMemory(DIM, HEADS, 64, widths=(0.01, 0.05), sticky=True, bins=64)
    memory.train(training)
    x = torch.randn(1, 64, DIM)
    centers = (torch.arange(64) + 0.5) / 64
    for center, width in ((0.05, 0.01), (0.2, 0.3), (0.0, 0.02), (0.45, 0.05)):
        looked = torch.exp(-0.5 * ((centers - center) / width) ** 2)[None]
        state = memory.initial_state(1)
        for segment in range(400):
            with torch.no_grad():
                _, _, state = memory(
                    torch.randn(1, HEADS, 1, 4), x, state, key=torch.tensor([segment])
                )
            state.histogram = looked / looked.sum()
        t = torch.linspace(0.01, 1, 200)
        signal = memory.store.basis.evaluate(t) @ state.coefficients[0]
        assert signal.norm(dim=-1).max() < 3 * state.longest


def test_an_even_memory_whose_update_would_grow_stays_bounded():
    """tau near 1 and one vector a write: the powers of the linear update grow."""
    torch.manual_seed(0)
    memory = continuous(DIM, HEADS, 64, (0.01, 0.05), tau=0.95).eval()
    state, sizes = memory.initial_state(1), []
    for _ in range(300):
        with torch.no_grad():
            _, _, state = memory(torch.randn(1, HEADS, 1, 4), torch.randn(1, 1, DIM), state)
        sizes.append(state.coefficients.abs().max().item())
    assert max(sizes[100:]) < 2 * max(sizes[:100])


def test_what_is_computed_in_inference_mode_serves_a_training_later():
    with torch.inference_mode():
        memory = make_memory(14, double=False, sticky=True)
        run(memory, 2)
    memory = make_memory(14, double=False, sticky=True)
    outs, _ = run(memory, 2)
    outs[-1].sum().backward()
    assert memory.store.gate.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_stream_stays_finite_and_bounded(dtype):
    memory = make_memory(double=False, sticky=True).to(dtype)
    state = memory.initial_state(1)
    sizes = []
    for segment in range(300):
        q, x = inputs(1, 16, 4, seed=segment, dtype=dtype)
        with torch.no_grad():
            out, _, state = memory(q, x, state, key=state.tokens)
        assert torch.isfinite(out).all() and state.coefficients.dtype == torch.float32
        sizes.append(state.coefficients.abs().max().item())
    assert max(sizes[100:]) < 2 * max(sizes[:100])


@pytest.mark.parametrize("rate,length", [(4, 5), (3, 2), (1, 7), (5, 1)])
def test_compressed_slots_follow_first_in_first_out(rate, length):
    """Marked vectors, in writes of odd lengths and none, row by row differently."""
    torch.manual_seed(0)
    memory = CompressiveMemory(4, length, rate).double()
    cuts = [[3, 0, 7, 1, 13, 2, 9], [5, 5, 5, 5, 5, 5, 5], [0, 0, 0, 4, 0, 1, 17]]
    vectors = [torch.arange(sum(c), dtype=torch.float64)[:, None] + torch.rand(4) for c in cuts]
    expected = [naive.compressive_stream(memory, v, c) for v, c in zip(vectors, cuts, strict=True)]
    state, at = memory.initial_state(3, dtype=torch.float64), [0, 0, 0]
    for step in range(7):
        width = max(c[step] for c in cuts)
        batch = torch.full((3, width, 4), -99.0, dtype=torch.float64)
        for row, c in enumerate(cuts):
            batch[row, width - c[step] :] = vectors[row][at[row] : at[row] + c[step]]
            at[row] += c[step]
        plan = memory.plan([c[step] for c in cuts], state)
        state, (old, new) = memory.write(batch, state, plan)
        for row in range(3):
            wanted = expected[row][step]
            assert state.held[row] == len(wanted)
            assert state.waiting[row] == at[row] % rate
            assert torch.allclose(state.slots[row, length - len(wanted) :], wanted)
            # the compressed vectors are the oldest, in their order
            first = (at[row] - cuts[row][step]) // rate * rate
            groups = int(plan.groups[row])
            assert torch.equal(
                old[row, : groups * rate], vectors[row][first : first + groups * rate]
            )


@pytest.mark.parametrize(
    "basis,widths,count,writes", [(64, (0.01, 0.05), 32, 8), (512, (0.005, 0.01), 512, 12)]
)
def test_without_stickiness_the_mean_of_a_segment_fades_after_some_writes(
    basis, widths, count, writes
):
    cpu = torch.device("cpu")
    carry, _, fit = update_operators(
        basis, widths, Constant(0.5), basis, 0.5, count, 0.5, False, torch.float64, cpu
    )
    signal = GaussianBasis(basis, widths).evaluate(torch.linspace(0, 1, 4001).double())
    coefficients = fit.sum(dim=1)
    left = []
    for _ in range(writes + 1):
        left.append(float((signal @ coefficients).abs().max()))
        coefficients = carry @ coefficients  # as if what comes later were zero
    assert left[0] > 0.9 and left[writes - 1] > 0.1 > left[writes]
