"""What is measured each step, and what now and then, against the slow way."""

import math
import sys

import pytest
import torch
from torch import nn

from gradguard.monitoring.observe.measure import gradient_norms, measure_diagnostics, measure_update
from gradguard.monitoring.observe.schedule import EVERY, SHARE, Schedule

TENSORS = {
    "short": lambda: torch.randn(2**14),
    "medium": lambda: torch.rand(2**14 + 1),
    "long": lambda: torch.full((2**20 + 1,), 0.1),
    "zeros": lambda: torch.zeros(5),
    "empty": lambda: torch.zeros(0),
    "0-dim": lambda: torch.tensor(-3.0),
    "squares overflow": lambda: torch.full((7,), 1e30),
    "squares overflow, medium": lambda: torch.full((2**14 + 1,), 1e30),
    "squares underflow": lambda: torch.full((7,), 1e-30),
    "half": lambda: torch.full((100, 100), 900.0, dtype=torch.float16),
    "bfloat16": lambda: torch.randn(50, 50).bfloat16(),
    "float64": lambda: torch.randn(9, dtype=torch.float64) * 1e100,
    "transposed": lambda: torch.randn(5, 4).t(),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "complex": lambda: torch.randn(6, dtype=torch.complex64),
}


def exact(tensor: torch.Tensor) -> float:
    wide = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return float(torch.linalg.vector_norm(wide.to(torch.complex128 if wide.is_complex() else torch.float64)))


@pytest.mark.parametrize("name", TENSORS)
def test_norms_are_right_to_the_digits_of_a_record(name, kernels):
    tensors = [TENSORS[name](), TENSORS["short"]()]
    assert gradient_norms(tensors) == pytest.approx([exact(t) for t in tensors], rel=3e-5, abs=0)


ALIKE = {
    "as most models": [(16, 16), (16,), (16, 16), (16,), (300, 70)],
    "many": [(64, 64)] * 67,
    "0-dim": [(), (), ()],
    "nothing": [(0, 3), (0, 3), (2,), (2,)],
    "long": [(4097,), (4097,)],
}


@pytest.mark.parametrize("name", ALIKE)
def test_norms_of_tensors_of_one_shape(name, kernels):
    tensors = [torch.randn(shape) * 10.0 ** (k % 7) for k, shape in enumerate(ALIKE[name])]
    assert gradient_norms(tensors) == pytest.approx([exact(t) for t in tensors], rel=3e-5, abs=0)


CHANGES = {
    "another shape in the middle": lambda t: t.reshape(2, 8),
    "another number of elements": lambda t: torch.ones(5),
    "half precision": lambda t: torch.full((16,), 60000.0).half(),
    "all that is in the middle in half precision": None,
    "float64": lambda t: t.double() * 1e100,
    "squares overflow": lambda t: t * 1e30,
    "squares underflow": lambda t: t * 1e-30,
    "sparse": lambda t: t.to_sparse(),
    "complex": lambda t: t * 1j,
    "not contiguous": lambda t: torch.randn(16, 2)[:, 1],
    "not a number": lambda t: t * math.nan,
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_list_of_tensors_that_has_changed_since(name, kernels):
    tensors = [torch.randn(16) for _ in range(6)]
    gradient_norms(tensors)
    change = CHANGES[name]
    for k in (2,) if change else (1, 2, 3, 4):
        tensors[k] = change(tensors[k]) if change else torch.full((16,), 60000.0).half()
    assert gradient_norms(tensors) == pytest.approx([exact(t) for t in tensors], rel=3e-5, abs=0, nan_ok=True)


@pytest.mark.parametrize(("bad", "shown"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "inf")])
def test_a_bad_element_shows_in_its_own_norm_only(bad, shown, kernels):
    first, other = gradient_norms([torch.tensor([1.0, bad]), torch.tensor([3.0, 4.0])])
    assert (str(first), other) == (shown, 5.0)


def test_on_a_device_nothing_is_read():
    norms = gradient_norms([torch.empty(3, device="meta"), torch.empty(4, 5, device="meta")])
    assert isinstance(norms, torch.Tensor)
    assert norms.device.type == "meta"
    assert norms.shape == (2,)


def test_extras_of_a_step():
    parameters = [nn.Parameter(torch.tensor([3.0, 4.0])), nn.Parameter(torch.ones(2, 2))]
    parameters[0].grad = torch.tensor([0.0, -0.02])
    parameters[1].grad = torch.full((2, 2), 5.0)
    extras = measure_diagnostics(parameters)
    with torch.no_grad():
        parameters[0].add_(torch.tensor([0.0, 0.5]))
    extras = measure_update(extras)
    assert extras.weight == [5.0, 2.0]
    assert extras.update == [0.5, 0.0]
    assert extras.before == ()


def test_extras_without_a_copy_of_weights_that_are_too_large(monkeypatch):
    monkeypatch.setattr(sys.modules["gradguard.monitoring.observe.measure"], "MOST_BYTES", 7)
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    extras = measure_diagnostics([p])
    extras = measure_update(extras)
    assert extras.update is None


def due(schedule: Schedule, steps: range, seconds: float, cost: float) -> list[int]:
    found = []
    for step in steps:
        if schedule.due(step, 1 + step * seconds):
            found.append(step)
            schedule.spent(cost)
    return found


def test_what_is_cheap_is_measured_on_schedule():
    assert due(Schedule(), range(201), seconds=0.1, cost=0.001) == [0, 50, 100, 150, 200]


def test_a_slow_measurement_is_made_at_distances_that_double():
    assert due(Schedule(), range(1000), seconds=0.001, cost=9.0) == [0, 50, 100, 200, 400, 800]
    assert due(Schedule(30), range(300), seconds=0.001, cost=9.0) == [0, 30, 60, 120, 240]


def test_what_is_dear_is_spaced_by_what_it_costs():
    steps, seconds, cost = 40_000, 0.01, 0.02
    found = due(Schedule(), range(steps), seconds, cost)
    assert len(found) * cost <= SHARE * (1 + steps * seconds)
    assert len(found) > 0.8 * SHARE * steps * seconds / cost
    assert all(step % EVERY == 0 for step in found)


def test_no_extras_where_nobody_wants_them():
    assert due(Schedule(0), range(100), 0.1, 0.0) == []
