"""`check_grad`: autograd's gradients against the numerical one, by the rule that the design of 2017 meant."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradguard as gg
from gradguard.check import seed_api
from gradguard.errors import GradientCheckError, InvalidTypeError, InvalidValueError
from gradient_check.seed_operators import COMPLEX, NAN, OnlyFloat32, Scaled, X, Y, noise, two

RIGHT = {
    "a square of both signs": (Scaled.apply, {"x": X}, ["x"], {}),
    "all negative": (lambda x: -x.square(), {"x": np.array([1.0, 2.0])}, ["x"], {}),
    "two inputs": (torch.mul, {"x": X, "y": Y}, ["x", "y"], {}),
    "one name": (torch.mul, {"x": X, "y": Y}, "y", {}),
    "float32": (Scaled.apply, {"x": X.astype(np.float32)}, ["x"], {}),
    "float32 only": (OnlyFloat32.apply, {"x": X.astype(np.float32)}, ["x"], {}),
    "bfloat16": (Scaled.apply, {"x": torch.from_numpy(X).bfloat16()}, ["x"], {"max_relative_error": 0.02}),
    "complex": (lambda z: (z * z).abs(), {"z": COMPLEX}, ["z"], {}),
    "complex64": (torch.exp, {"z": COMPLEX.astype(np.complex64)}, ["z"], {}),
    "empty": (torch.sin, {"x": np.zeros((0, 2))}, ["x"], {}),
    "0-dim": (torch.sin, {"x": 0.3}, ["x"], {}),
    "a module in float32": (nn.Linear(3, 2), {"input": X.astype(np.float32)}, ["weight", "bias", "input"], {}),
    "an input without a path": (lambda x, y: x.square() + 0 * y.detach(), {"x": X, "y": Y}, ["x", "y"], {}),
    "an output of one input": (lambda x, y: {"out": x.square()}, {"x": X, "y": Y}, ["y"], {}),
    "a constant": (torch.mul, {"x": X, "y": Y}, ["x"], {"no_grad_set": {"y"}}),
    "in place": (lambda x: x.mul_(3), {"x": X}, ["x"], {}),
    "infinite numbers that are not checked": (
        lambda x, mask: x.masked_fill(mask < 0, 2.0),
        {"x": X, "mask": np.array([-np.inf, 0.0, np.nan])},
        ["x"],
        {},
    ),
    "a sparse tensor that is not checked": (
        lambda x, weight: torch.sparse.mm(weight, x),
        {"x": X, "weight": torch.eye(2, dtype=torch.float64).to_sparse()},
        ["x"],
        {},
    ),
    "a list": (lambda x, factors: x * factors[0], {"x": X, "factors": [torch.ones(3)]}, ["x"], {}),
    "sparse gradients": (
        lambda weight, i: F.embedding(i, weight, sparse=True),
        {"weight": noise(4, 2), "i": np.array([0, 2, 2])},
        ["weight"],
        {},
    ),
    "a batch norm in a closure, eval": (nn.BatchNorm1d(3).double().eval().forward, {"input": X}, ["input"], {}),
}


@pytest.mark.parametrize("case", RIGHT)
def test_right_gradients_pass(case):
    fn, values, names, options = RIGHT[case]
    assert gg.check_grad(fn, values, names, "out", only_cpu=True, **options) is None


WRONG = {
    "a factor": (
        lambda x: Scaled.apply(x, 1.01),
        np.array([1.0, 2.0]),
        r"x\[\d\] on the CPU: analytical .*, numerical .*: relative error 0.01, above max_relative_error=0.005; 2 of 2",
    ),
    "a sign": (lambda x: Scaled.apply(x, -1.0), np.array([-2.0]), r"analytical 4, numerical -4: relative error 2,"),
    "zero": (lambda x: Scaled.apply(x, 0.0), np.array([[1.0, 3.0]]), r"relative error 1, .*2 of 2"),
    "NaN": (lambda x: Scaled.apply(x, NAN), np.array([1.0]), "analytical nan, numerical 2: relative error inf"),
    "infinite": (lambda x: Scaled.apply(x, float("inf")), np.array([1.0]), "analytical inf"),
    "0-dim": (lambda x: Scaled.apply(x, 2.0), np.array(1.0), r"^x on the CPU: analytical 4, numerical 2:"),
    "complex": (lambda x: Scaled.apply(x, 2.0).real, np.array([1 + 1j]), r"x\[0\] on the CPU: analytical"),
    "no graph to one input": (lambda x: x.detach() * x, np.array([3.0]), "analytical 3, numerical 6"),
    "a wrong 1 at a zero": (
        lambda x: Scaled.apply(x) + (x - x.detach()),
        np.array([0.0]),
        "numerical 0: absolute error 1,",
    ),
    "only the numerical value is NaN": (torch.sqrt, np.array([1e-3]), "numerical nan: relative error inf"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_gradients_raise(case):
    fn, value, words = WRONG[case]
    with pytest.raises(GradientCheckError, match=words):
        gg.check_grad(fn, {"x": value}, ["x"], "out", only_cpu=True)


def test_the_worst_element_is_named():
    weight = torch.ones(2, 3, dtype=torch.float64)
    weight[1, 2] = 1.5
    with pytest.raises(AssertionError, match=r"x\[1, 2\] on the CPU: .* relative error 0.5, .*; 1 of 6 elements are"):
        gg.check_grad(lambda x: Scaled.apply(x, weight), {"x": np.ones((2, 3))}, ["x"], "out", only_cpu=True)


def test_every_name_is_checked():
    with pytest.raises(GradientCheckError, match=r"^y\[.*analytical 1, numerical 2"):
        gg.check_grad(lambda x, y: x + y + y.detach(), {"x": X, "y": Y}, ["x", "y"], "out", only_cpu=True)


def test_a_constant_of_no_grad_set_needs_no_gradient():
    def refuses(x, y):
        assert not y.requires_grad
        return x * y

    gg.check_grad(refuses, {"x": X, "y": Y}, ["x"], "out", {"y"}, True)


@pytest.mark.parametrize(
    "fn", [lambda x: torch.softmax(x, -1), lambda x: x.square().mean() / 1e4], ids=["softmax", "mean"]
)
def test_a_gradient_below_the_floor_is_warned_about(fn):
    with pytest.warns(UserWarning, match=r"gradient of x lies below 0.001.*use gradguard.gradcheck") as caught:
        gg.check_grad(fn, {"x": X}, ["x"], "out", only_cpu=True)
    assert caught[0].filename == __file__


def test_exact_zeros_are_no_reason_to_warn():
    value = np.array([-1.0, -2.0, -3.0, 1.0])
    gg.check_grad(torch.relu, {"x": value}, ["x"], "out", only_cpu=True)


BAD_CHECKS = {
    "in both": ({"no_grad_set": ["x"]}, InvalidValueError, r"\['x'\] are in inputs_to_check and in no_grad_set"),
    "an unknown constant": ({"no_grad_set": "z"}, InvalidValueError, r"no_grad_set has 'z', .*\['x', 'y'\]"),
    "an unknown input": ({"inputs_to_check": ["z"]}, InvalidValueError, r"inputs_to_check has 'z', .*\['x', 'y'\]"),
    "nothing to check": ({"inputs_to_check": []}, InvalidValueError, r"is empty: expected some of \['x', 'y'\]"),
    "no graph": ({"forward_op": lambda x, y: (x * y).detach()}, InvalidValueError, "has no graph: .*detach"),
    "a tolerance of NaN": ({"max_relative_error": NAN}, InvalidValueError, "max_relative_error=nan: expected"),
    "a negative tolerance": ({"max_relative_error": -1}, InvalidValueError, "max_relative_error=-1: expected"),
    "integers": ({"input_vars": {"x": np.arange(3), "y": 2.0}}, InvalidTypeError, "'x' is torch.int64"),
    "an unknown output": ({"forward_op": two, "output_name": "c"}, InvalidValueError, r"\['a', 'b'\]"),
}


@pytest.mark.parametrize("case", BAD_CHECKS)
def test_errors_of_check_grad(case):
    change, error, words = BAD_CHECKS[case]
    valid = {"forward_op": torch.mul, "input_vars": {"x": X, "y": Y}, "inputs_to_check": ["x"], "output_name": "out"}
    with pytest.raises(error, match=words):
        gg.check_grad(**{**valid, "only_cpu": True, **change})


@pytest.fixture
def second_device(monkeypatch):
    """Let the CPU play the GPU, whose gradient comes out ``factor`` times as large."""

    def install(factor):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(
            seed_api,
            "_on_gpu",
            lambda *call: {n: g * factor for n, g in seed_api._analytical(*call).items()},
        )

    return install


def test_the_gpu_is_compared_with_the_numerical_gradient_and_with_the_cpu(second_device):
    second_device(1.0)
    gg.check_grad(torch.mul, {"x": X, "y": Y}, ["x"], "out")
    second_device(1.006)
    with pytest.raises(GradientCheckError, match=r"on the GPU: .*, numerical"):
        gg.check_grad(torch.mul, {"x": X, "y": Y}, ["x"], "out")
    gg.check_grad(torch.mul, {"x": X, "y": Y}, ["x"], "out", only_cpu=True)
    with pytest.raises(GradientCheckError, match=r"on the GPU: .*, on the CPU"):  # each within .5 %, not together
        gg.check_grad(lambda x: Scaled.apply(x, 0.997), {"x": np.ones(2)}, ["x"], "out")


def test_the_two_differ_by_less_than_the_sum(second_device):
    second_device(1.003)
    gg.check_grad(lambda x: Scaled.apply(x, 0.999), {"x": np.ones(2)}, ["x"], "out")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_real_gpu():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()
    gg.check_grad(model, {"input": X}, ["input", "0.weight", "0.bias"], "out")
    with pytest.raises(GradientCheckError, match="on the GPU"):
        gg.check_grad(lambda x: Scaled.apply(x, 2.0 if x.is_cuda else 1.0), {"x": X}, ["x"], "out")
    held = torch.ones(2, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="same device") as caught:
        gg.check_grad(lambda x: x + held, {"x": X}, ["x"], "out")
    assert "only_cpu=True" in " ".join(caught.value.__notes__)
