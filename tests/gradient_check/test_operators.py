"""A sample of PyTorch's own operator database: none is flagged without a reason, planted errors are caught."""

import os
import warnings

import pytest
import torch

import gradguard as gg
import gradient_check.operators as database

pytestmark = pytest.mark.slow

STRIDE = int(os.environ.get("OPERATOR_STRIDE", "5"))
"""A sample of every so many-th operator is looked at; ``OPERATOR_STRIDE=1`` takes three of each, and minutes."""

WRONG_IN_PYTORCH = {
    "as_strided": "reads the memory of its input, wherever that lies",
    "as_strided_copy": "reads the memory of its input, wherever that lies",
    "as_strided.partial_views": "reads the memory of its input, wherever that lies",
    "as_strided_scatter": "wrong where elements overlap",
    "nn.functional.max_unpool1d": "wrong with duplicate indices (pytorch#67658)",
    "nn.functional.max_unpool2d": "wrong with duplicate indices (pytorch#67658)",
    "nn.functional.max_unpool3d": "wrong with duplicate indices (pytorch#67660)",
    "nn.functional.hardsigmoid": "one sixth is rounded to float32",
    "__rpow__": "NaN",
    "normal": "random, without a gradient to its parameters",
    "half": "cotangents below the range of float16 are flushed",
}

UNDECIDED = {
    "as_strided": "one element at one place, where it jumps",
    "as_strided_copy": "one element at one place, where it jumps",
    "as_strided_scatter": "one element at one place, where it jumps",
    "nn.functional.hinge_embedding_loss": "the labels are inputs here, and the loss jumps at each of them",
    "half": "rounds to float16 on its way",
}

NO_POWER = {"corrcoef": "of one variable: constantly 1, its gradient is rounding"}


@pytest.fixture(scope="module")
def samples():
    return list(database.samples(per_operator=1 if STRIDE > 1 else 3, every=STRIDE))


def checked(sample: database.Sample) -> gg.results.GradientReport:
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some operators are deprecated
        torch.manual_seed(0)
        return gg.gradcheck(sample.fn, *sample.inputs)


@pytest.mark.exhaustive
def test_no_operator_is_flagged_without_a_reason(samples):
    assert len({sample.operator for sample in samples}) > 500 // STRIDE
    reports = {sample.name: (sample.operator, checked(sample)) for sample in samples}
    flagged = {name: str(report) for name, (operator, report) in reports.items() if report.verdict == "FAIL"}
    assert {name: said for name, said in flagged.items() if name.rpartition("#")[0] not in WRONG_IN_PYTORCH} == {}
    undecided = {name: str(report) for name, (_, report) in reports.items() if report.verdict == "INCONCLUSIVE"}
    assert {name: said for name, said in undecided.items() if name.rpartition("#")[0] not in UNDECIDED} == {}


def test_a_defect_of_pytorch_is_found():
    flagged = [checked(sample).verdict for sample in database.samples(only="nn.functional.hardsigmoid")]
    assert "FAIL" in flagged


@pytest.mark.exhaustive
@pytest.mark.parametrize("plant", ["one element +10 %", "all × (1 + 1e-4)"])
def test_planted_errors_are_caught(samples, plant):
    missed, planted = {}, 0
    for number, sample in enumerate(samples[:: 3 if STRIDE > 1 else 1]):
        if plant.startswith("one"):
            wrong = database.planted_one_element(sample, number)
        else:
            wrong = database.planted_factor(sample, 1 + 1e-4)
        if wrong is None or sample.operator in {*WRONG_IN_PYTORCH, *UNDECIDED, *NO_POWER}:
            continue
        planted += 1
        report = checked(wrong)
        if report.verdict != "FAIL":
            missed[wrong.name] = str(report)
    assert planted > (20 if STRIDE > 1 else 300)
    assert missed == {}


def test_a_planted_element_is_the_one_that_is_named():
    sample = next(database.samples(only="nn.functional.silu"))
    gradient = torch.autograd.grad(sample.fn(*sample.inputs).sum(), sample.inputs[0])[0]
    wrong = database.planted_one_element(sample, 0)
    report = checked(wrong)
    assert gradient.shape == sample.inputs[0].shape
    (found,) = report.findings
    assert found.analytical / found.numerical == pytest.approx(1.1, rel=1e-6)
