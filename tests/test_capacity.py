import csv
import math
import sys

import pytest
import torch

from fairseq_inf.analysis import capacity
from fairseq_inf.analysis.capacity import ages, retention, schedule_operators
from fairseq_inf.memory import GaussianBasis, ridge_operator
from fairseq_inf.memory.schedule import STEPS, Constant, Logarithmic, Uniform, write_operators

SCHEDULES = [Constant(0.75), Uniform(), Uniform(0.8), Logarithmic(60, 5)]


def auto(schedule, num_basis=64):
    basis = GaussianBasis(num_basis, [1 / num_basis])
    return schedule_operators(schedule, basis, 2 * num_basis, 0.5)


@pytest.mark.parametrize("held", [0, 5])
def test_the_constant_schedule_is_the_papers_write(held):
    schedule, basis = Constant(0.7), GaussianBasis(10, [0.05, 0.2])
    carry, past, fit = write_operators(basis, schedule.design(schedule.step(held, 6), 6, 12), 0.5)
    new = torch.arange(1, 7, dtype=torch.float64) / 6
    if not held:
        assert carry is past is None
        assert torch.allclose(fit, ridge_operator(basis, new, 0.5).T, rtol=1e-12)
        return
    even = torch.arange(1, 13, dtype=torch.float64) / 12
    g = ridge_operator(basis, torch.cat([0.7 * even, 0.7 + 0.3 * new]), 0.5).T
    assert torch.allclose(torch.cat([past, fit], dim=1), g, rtol=1e-12)
    assert torch.allclose(carry, g[:, :12] @ basis.evaluate(even), rtol=1e-12)


def test_in_a_uniform_memory_every_vector_has_the_same_room():
    """Followed through writes of odd sizes: the places are even, but for the rounded steps."""
    schedule, places = Uniform(), torch.zeros(0, dtype=torch.float64)
    for new in (7, 3, 64, 1, 20, 33, 5, 5, 5):
        write = schedule.design(schedule.step(len(places), new), new, 16)
        ratio = schedule.step(len(places), new)
        places = torch.cat([ratio * places, write.new])
    even = (torch.arange(len(places)) + 0.5) / len(places)
    assert (places - even).abs().max() < 0.5 / STEPS
    assert places.diff().min() > 0
    assert write.weights[-5:].tolist() == [1] * 5
    assert write.weights[:16].sum() == pytest.approx(len(places) - 5, rel=1 / STEPS)


def test_a_uniform_memory_stops_at_its_ceiling():
    schedule = Uniform(0.9)
    assert schedule.step(0, 64) == 0 and schedule.step(64, 64) == 0.5
    assert schedule.step(64 * 1000, 64) == 0.9


def test_steps_are_shared_by_ages_that_are_near():
    steps = {Uniform().step(64 * writes, 64) for writes in range(1024, 2049)}
    assert len(steps) == STEPS + 1


def test_in_a_logarithmic_memory_a_place_is_an_age():
    schedule = Logarithmic(4000, 16)
    write = schedule.design(schedule.step(0, 8), 8, 32)
    assert torch.allclose(write.new, schedule.place(torch.arange(8).flip(0) + 0.5).double())
    # what stood at an age stands at that age and 8 more
    age = 16 * (torch.exp((1 - write.sampled) * math.log1p(4000 / 16)) - 1)
    assert torch.allclose(write.moved, schedule.place(age + 8))
    assert schedule.place(torch.tensor(4000.0)).abs() < 1e-6


def test_the_first_write_of_a_logarithmic_memory_is_zero_where_nothing_is_yet():
    schedule, basis = Logarithmic(4096, 64), GaussianBasis(64, [1 / 64])
    _, _, fit = write_operators(basis, schedule.design(None, 64, 128), 0.5)
    t = torch.linspace(0, 1, 200, dtype=torch.float64)
    signal = basis.evaluate(t) @ fit.sum(dim=1)
    empty = t < schedule.place(torch.tensor(64.0)) - 0.1
    assert signal[empty].abs().max() < 0.05
    assert 0.5 < signal[~empty].abs().max() < 2


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{type(s).__name__}{vars(s)}")
def test_the_closed_form_equals_least_squares_on_random_streams(schedule):
    torch.manual_seed(0)
    length, segments, streams = 4, 6, 40_000
    operators = schedule_operators(schedule, GaussianBasis(8, [1 / 8]), 16, 0.5)
    x = torch.randn(segments, length, streams, dtype=torch.float64)
    b = torch.zeros(8, streams, dtype=torch.float64)
    for number in range(segments):
        carry, fit = operators(number * length, length)
        b = fit @ x[number] + (0 if carry is None else carry @ b)
    kept = retention(operators, length, segments)
    newest_first = x.flip(0)
    for wanted, stored in (
        (kept.tokens.flatten(), newest_first.flatten(0, 1)),
        (kept.means, newest_first.mean(dim=1)),
    ):
        decoder = torch.linalg.lstsq(b.T, stored.T).solution
        left = (stored.T - b.T @ decoder).square().mean(dim=0)
        assert torch.allclose(1 - left / stored.square().mean(dim=1), wanted, atol=0.02)
    assert kept.capacity == pytest.approx(8, abs=0.1)


@pytest.mark.parametrize("num_basis,length", [(16, 64), (64, 64), (64, 7), (128, 32)])
def test_the_capacity_is_spent_and_a_uniform_memory_keeps_every_segment(num_basis, length):
    segments = num_basis // 2
    kept = retention(auto(Uniform(), num_basis), length, segments)
    assert kept.capacity > 0.95 * num_basis and kept.means.min() > 0.88
    if length >= num_basis:  # else fewer vectors come than the newest functions could keep
        for schedule in (Constant(0.5), Constant(0.75), Logarithmic(length * segments, length)):
            kept = retention(auto(schedule, num_basis), length, segments)
            assert kept.capacity > 0.95 * num_basis


def test_what_float32_loses_is_seen():
    """Functions far wider than their distance need differences that float32 does not have."""
    operators = schedule_operators(Uniform(), GaussianBasis(64, [4 / 64]), 128, 0.5)
    assert retention(operators, 64, 32).capacity < 0.6 * 64


@pytest.mark.parametrize("ceiling", [1.0, 0.98])
def test_a_uniform_memory_never_grows(ceiling):
    """Writes of one vector, too, for which the newest functions are too many."""
    operators, basis = auto(Uniform(ceiling)), GaussianBasis(64, [1 / 64])
    signal = basis.evaluate(torch.linspace(0, 1, 129, dtype=torch.float64))
    covariance, held = torch.zeros(64, 64, dtype=torch.float64), 0
    for number in range(3000):
        new = (64, 1, 7, 30)[number % 4]
        carry, fit = operators(held, new)
        if carry is not None:
            covariance = carry @ covariance @ carry.T
        covariance, held = covariance + fit @ fit.T, held + new
        if number > 20:
            assert ((signal @ covariance) * signal).sum(dim=1).max() < 5


def test_ages_are_powers_of_two_and_the_oldest():
    assert ages(1) == [0] and ages(2) == [0, 1] and ages(9) == [0, 1, 2, 4, 8]
    assert ages(12) == [0, 1, 2, 4, 8, 11]


def command(monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["fairseq-inf-capacity", *map(str, args)])
    capacity.main()


def test_the_command_prints_a_table_and_writes_csv_and_figure(monkeypatch, capsys, tmp_path):
    command(monkeypatch, "--basis", 16, "--segments", 5, "--output", tmp_path / "kept")
    printed = capsys.readouterr().out
    assert (
        "| constant: mean | token | uniform: mean | token | logarithmic: mean | token |" in printed
    )
    assert "\nuniform: capacity spent 16.0 of 16\n" in printed
    with open(tmp_path / "kept.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["age"] for r in rows if r["schedule"] == "uniform"] == list("01234")
    assert all(0 <= float(r["token"]) <= float(r["mean"]) <= 1 + 1e-9 for r in rows)
    assert (tmp_path / "kept.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "args,said",
    [
        (("--basis", 0), "--basis must be at least 1, got 0"),
        (("--tau", 1), "--tau must be strictly between 0 and 1, got 1.0"),
        (("--ridge", 0), "--ridge must be positive, got 0.0"),
        (("--basis", 5, "--widths", "0.1,0.2"), "--widths 0.1,0.2 must be auto, or positive"),
        (("--widths", "wide"), "--widths wide must be auto, or positive numbers"),
        (("--segments", 1, "--output", "no/folder/x"), "no/folder/x.csv cannot be written"),
    ],
)
def test_bad_settings_of_the_command_name_their_flag(monkeypatch, capsys, args, said):
    with pytest.raises(SystemExit) as stopped:
        command(monkeypatch, *args)
    assert said in capsys.readouterr().err + str(stopped.value.code)
