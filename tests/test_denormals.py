"""Numbers too small to be normal, each of which a CPU takes many times as long for."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from zoo import learn, make_model, text

from fairseq_inf.memory import Constant, GaussianBasis, Logarithmic, Uniform
from fairseq_inf.memory.basis import normal_pdf
from fairseq_inf.memory.signal import update_operators

NARROW = {"ltm_basis": 64, "ltm_sticky": False}
KINDS = {
    "paper": ("infinite_former", {"ltm_widths": "0.01,0.05", "ltm_sticky": True}),
    "constant": ("infinite_former", {"ltm_widths": "0.01,0.05"}),
    "gibbs": ("gibbs", {}),
    "logarithmic": ("logarithmic", {"ltm_oldest": 5000}),
}


def denormal(x):
    return int(((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny)).sum())


class Denormals(TorchDispatchMode):
    """The operations that give any, forward and backward.  What has no values yet gives none."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        if "empty" not in operation.name() and not operation.is_view:
            floats = (x for x in tree_leaves(out) if isinstance(x, torch.Tensor))
            if any(x.is_floating_point() and denormal(x) for x in floats):
                self.found.add(operation.name())
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_no_operation_gives_a_number_too_small_to_be_normal(kind):
    """In training and evaluation, with basis functions that are narrow."""
    name, settings = KINDS[kind]
    model = make_model(name, **{**NARROW, **settings})
    with Denormals() as seen:
        for training in (True, False):
            model.train(training)
            for i in range(4):
                out, losses = learn(model, text(2, 5, seed=i), i == 0)
                if training:
                    (out.square().mean() + 1e-3 * sum(losses.values())).backward()
    assert not seen.found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_tails_that_are_left_out_are_far_below_rounding(dtype):
    t = torch.linspace(-0.5, 1.5, 4001, dtype=dtype)
    basis = GaussianBasis(64, (0.002, 0.02))
    fast = basis.evaluate(t)
    centers, widths = basis.tensors(t)
    x = (t[:, None] - centers) / widths
    slow = torch.exp(-0.5 * x**2) / (widths * math.sqrt(2 * math.pi))
    assert not denormal(fast)
    assert torch.allclose(fast, slow, rtol=1e-3 if dtype == torch.float else 1e-9, atol=1e-16)
    assert not denormal(normal_pdf(t, torch.tensor(1e-6, dtype=dtype)))


@pytest.mark.parametrize("schedule", [Constant(), Uniform(), Logarithmic(64, 9999)], ids=str)
def test_the_operators_of_a_write_have_no_number_too_small_to_be_normal(schedule):
    for held in (0, 4096):
        operators = update_operators(
            512, (1 / 512,), schedule, 512, 0.5, 64, schedule.step(held, 64), True,
            torch.float32, torch.device("cpu"),
        )  # fmt: skip
        assert not any(denormal(x) for x in operators if x is not None)
