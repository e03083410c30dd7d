"""`get_numerical_gradient` and the names of `check_grad`: the interface of the design of 2017."""

import collections
import dataclasses
import inspect

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradient_check.seed_operators import COMPLEX, Tied, X, Y, noise, two

Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Both:
    first: torch.Tensor
    second: torch.Tensor
    count: int = 3


def analytical(fn, *inputs, wrt=0):
    """Autograd's gradient of the sum."""
    leaves = [torch.as_tensor(i).clone().requires_grad_() for i in inputs]
    return torch.autograd.grad(fn(*leaves).real.sum(), leaves[wrt])[0].numpy()


OUTPUTS = {
    "a key": (two, "b", 2.0),
    "a position": (lambda x, y: (x * y, x + 2 * y), 1, 2.0),
    "a position in digits": (lambda x, y: [x * y, x + 2 * y], "1", 2.0),
    "a namedtuple": (lambda x, y: Pair(x * y, x + 2 * y), "second", 2.0),
    "its position": (lambda x, y: Pair(x * y, x + 2 * y), 1, 2.0),
    "a dataclass": (lambda x, y: Both(x * y, x + 2 * y), "second", 2.0),
    "a tensor has any name": (lambda x, y: x + 2 * y, "whatever", 2.0),
    "an integer key": (lambda x, y: {7: x + 2 * y}, 7, 2.0),
    "without names": (torch.add, "out", 1.0),
    "by position only": (lambda a, b, /: a + 2 * b, "out", 2.0),
    "positional only, in another order": (lambda y, x, /: 2 * y + x, "out", 2.0),
    "any number": (lambda *xs: xs[0] + 2 * xs[1], "out", 2.0),
    "any name": (lambda **xs: xs["x"] + 2 * xs["y"], "out", 2.0),
    "keyword only": (lambda *, y, x: x + 2 * y, "out", 2.0),
    "a default in between": (lambda x, z=1.0, y=None: x * z + 2 * y, "out", 2.0),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_inputs_and_outputs_go_by_name(case):
    fn, output, expected = OUTPUTS[case]
    found = gg.get_numerical_gradient(fn, {"x": X, "y": Y}, output, "y")
    np.testing.assert_allclose(found, np.full((2, 3), expected), rtol=1e-9)


def test_an_attribute_of_torchs_own_tuples():
    found = gg.get_numerical_gradient(lambda x: x.max(1), {"x": X}, "values", "x")
    np.testing.assert_allclose(found, X.max(1, keepdims=True) == X, atol=1e-9)


VALUES = {
    "float64": (torch.tanh, X, 1e-4),
    "float32": (torch.tanh, X.astype(np.float32), 1e-4),
    "a tensor": (torch.tanh, torch.from_numpy(X), 1e-4),
    "0-dim": (torch.tanh, np.array(0.3), 1e-4),
    "a NumPy number": (torch.tanh, np.float32(0.3), 1e-4),
    "empty": (torch.tanh, np.zeros((0, 3)), 0.0),
    "every second": (torch.tanh, noise(6)[::2], 1e-4),
    "backwards": (torch.tanh, noise(6)[::-1], 1e-4),
    "transposed": (torch.tanh, X.T, 1e-4),
    "expanded": (torch.tanh, torch.tensor(0.3, dtype=torch.float64).expand(2, 2), 1e-4),
    "complex": (lambda x: (x * x).abs(), COMPLEX, 1e-4),
    "complex to complex": (torch.exp, COMPLEX, 1e-4),
    "complex conjugate": (torch.exp, torch.from_numpy(COMPLEX).conj(), 1e-4),
    "complex64": (torch.exp, COMPLEX.astype(np.complex64), 1e-3),
    "read-only": (torch.tanh, np.broadcast_to(np.float64(0.3), (2,)), 1e-4),
    "in place": (lambda x: x.mul_(3), X, 1e-9),
    "the input itself": (lambda x: x, X, 1e-9),
}


@pytest.mark.parametrize("case", VALUES)
def test_the_gradient_of_the_sum(case):
    fn, value, tolerance = VALUES[case]
    found = gg.get_numerical_gradient(fn, {"x": value}, "out", "x")
    expected = analytical(lambda x: fn(x.clone()), value.copy() if isinstance(value, np.ndarray) else value)
    assert isinstance(found, np.ndarray)
    assert found.dtype == (np.complex128 if np.iscomplexobj(expected) else np.float64)
    assert found.shape == tuple(value.shape)
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("value", [0.5, 0.5 + 0.25j])
def test_a_python_number(value):
    found = gg.get_numerical_gradient(lambda x: x * x, {"x": value}, "out", "x")
    assert found.shape == ()
    assert found == pytest.approx(2 * np.conj(value))


def test_numbers_that_are_not_checked_stay_numbers():
    found = gg.get_numerical_gradient(torch.sum, {"x": X, "dim": 1}, "out", "x")
    np.testing.assert_allclose(found, np.ones((2, 3)))


def test_the_step_after_rounding_is_the_divisor():
    """At 1000 in float32 a step of .005 is another: 2·delta would be wrong by a part in a thousand."""
    value = np.full(1, 1000.0, dtype=np.float32)
    found = gg.get_numerical_gradient(lambda x: x.double(), {"x": value}, "out", "x")
    np.testing.assert_allclose(found, 1.0, rtol=1e-12)


def test_leaving_the_domain_gives_nan():
    found = gg.get_numerical_gradient(torch.sqrt, {"x": np.array([1e-3, 4.0])}, "out", "x")
    assert np.isnan(found[0])
    assert found[1] == pytest.approx(0.25)


def test_parameters_and_buffers_of_a_module():
    layer = nn.BatchNorm1d(3, dtype=torch.float64).eval()
    weight = noise(3)
    values = {"input": X, "weight": weight, "running_mean": np.ones(3)}
    np.testing.assert_allclose(
        gg.get_numerical_gradient(layer, values, "out", "weight"), (X - 1).sum(0) / (1 + 1e-5) ** 0.5, rtol=1e-9
    )
    np.testing.assert_allclose(gg.get_numerical_gradient(layer, values, "out", "bias"), np.full(3, 2.0))
    np.testing.assert_allclose(
        gg.get_numerical_gradient(layer, values, "out", "running_mean"), -2 * weight / (1 + 1e-5) ** 0.5
    )


def test_tied_weights_move_together():
    model = Tied()
    expected = torch.autograd.grad(model(torch.from_numpy(X))["loss"].sum(), model.encoder.weight)[0]
    found = gg.get_numerical_gradient(model, {"x": X}, "loss", "encoder.weight")
    np.testing.assert_allclose(found, expected, rtol=1e-3)
    gg.check_grad(model, {"x": X}, ["encoder.weight"], "loss", only_cpu=True)
    with pytest.raises(
        InvalidValueError, match=r"has 'decoder.weight', which is not among the inputs: \['x', 'encoder"
    ):
        gg.get_numerical_gradient(model, {"x": X}, "loss", "decoder.weight")
    with pytest.raises(InvalidValueError, match=r"unexpected keyword argument 'decoder\.weight'"):
        gg.get_numerical_gradient(model, {"x": X, **model.state_dict()}, "loss", "x")


def test_a_frozen_parameter_can_be_checked():
    layer = nn.Linear(3, 2, dtype=torch.float64).requires_grad_(False)
    gg.check_grad(layer, {"input": X}, ["weight", "bias"], "out", only_cpu=True)
    assert not layer.weight.requires_grad


def test_nothing_that_the_caller_passed_is_changed():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh()).double()
    before = {n: v.clone() for n, v in model.state_dict().items()}
    value, random = X.copy(), torch.get_rng_state()
    numerical = gg.get_numerical_gradient(model, {"input": value}, "out", "0.weight")
    gg.check_grad(lambda x: model(x).square(), {"x": value}, "x", "out", only_cpu=True, max_relative_error=0.5)
    np.testing.assert_array_equal(value, X)
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert numerical.shape == (4, 3)


def test_dropout_draws_one_mask():
    found = gg.get_numerical_gradient(lambda x: F.dropout(x, 0.5), {"x": np.ones(50)}, "out", "x")
    np.testing.assert_allclose(np.sort(np.unique(found.round(6))), [0.0, 2.0])


def test_local_scope_gives_further_values():
    found = gg.get_numerical_gradient(torch.mul, {"x": X}, "out", "x", 0.005, {"y": Y})
    np.testing.assert_allclose(found, Y, rtol=1e-9)


VALID = {"op": torch.mul, "input_values": {"x": X, "y": Y}, "output_name": "out", "input_to_check": "x"}
BAD_CALLS = {
    "an unknown input": ({"input_to_check": "z"}, InvalidValueError, r"'z', .* among the inputs: \['x', 'y'\]"),
    "an unknown input of a module": (
        {"op": nn.Linear(3, 3).double(), "input_values": {"input": X}, "input_to_check": "w"},
        InvalidValueError,
        r"\['input', 'weight', 'bias'\]",
    ),
    "a value of the scope": (
        {"input_values": {"x": X}, "local_scope": {"y": Y}, "input_to_check": "y"},
        InvalidValueError,
        r"input_to_check has 'y', which is not among the inputs: \['x'\]",
    ),
    "in both": ({"local_scope": {"y": Y}}, InvalidValueError, r"\['y'\] are in input_values and in local_scope"),
    "an unknown output": ({"op": two, "output_name": "c"}, InvalidValueError, r"no output 'c'.*\['a', 'b'\]"),
    "a position too far": (
        {"op": lambda x, y: (x, y), "output_name": 2},
        InvalidValueError,
        r"no output 2: expected one of \['0', '1'\]",
    ),
    "an unknown attribute": (
        {"op": lambda x, y: Both(x, y), "output_name": "third"},
        InvalidValueError,
        r"\['first', 'second', 'count'\]",
    ),
    "an output that is a number": (
        {"op": lambda x, y: Both(x, y), "output_name": "count"},
        InvalidTypeError,
        "output 'count' of <lambda> is int, which has no gradient",
    ),
    "an integer output": ({"op": lambda x, y: (x * y).long()}, InvalidTypeError, "is torch.int64, which has no"),
    "no tensor": ({"op": lambda x, y: 3.0}, InvalidTypeError, "<lambda> returned float without a tensor"),
    "None": ({"op": lambda x, y: None}, InvalidTypeError, "returned NoneType without a tensor"),
    "integers": ({"input_values": {"x": np.arange(3), "y": 2.0}}, InvalidTypeError, r"astype\('float64'\)"),
    "a list": ({"input_values": {"x": [1.0], "y": 2.0}}, InvalidTypeError, "'x' is list, which has no gradient"),
    "text": ({"input_values": {"x": np.array(["a"]), "y": 2.0}}, InvalidTypeError, "'x' is an array of <U1"),
    "sparse": (
        {"input_values": {"x": torch.eye(2).to_sparse(), "y": 2.0}},
        InvalidTypeError,
        r"torch.sparse_coo: expected a dense tensor, such as x.to_dense\(\)",
    ),
    "NaN in the input": (
        {"input_values": {"x": np.array([[1.0, np.nan]]), "y": 2.0}},
        InvalidValueError,
        r"input 'x' is nan at index \[0, 1\]",
    ),
    "infinite at the point": (
        {"op": torch.log, "input_values": {"x": np.array([1.0, 0.0])}},
        InvalidValueError,
        r"output 'out' of log is -inf at index \[1\]",
    ),
    "no dict": ({"input_values": X}, InvalidTypeError, "input_values is ndarray: expected a dict"),
    "no function": ({"op": 3}, InvalidTypeError, "the operator is int: expected a function or a module"),
    "a name that the function lacks": (
        {"op": two, "input_values": {"x": X, "z": Y}},
        InvalidValueError,
        r"two cannot be called with \['x', 'z'\]: missing .*'y'. Its arguments are \['x', 'y'\]",
    ),
    "a name that the module lacks": (
        {"op": nn.Linear(3, 3).double(), "input_values": {"x": X}},
        InvalidValueError,
        r"Its arguments are \['input'\], its parameters and buffers \['bias', 'weight'\]",
    ),
    "two dtypes": (
        {"op": nn.Linear(3, 3), "input_values": {"input": X}, "input_to_check": "input"},
        InvalidTypeError,
        r"'weight': 'torch.float32'.*Convert them to one dtype",
    ),
    "delta 0": ({"delta": 0.0}, InvalidValueError, r"delta=0.0: expected a finite number above 0, such as 0.005"),
    "delta NaN": ({"delta": float("nan")}, InvalidValueError, "delta=nan: expected"),
    "delta below 0": ({"delta": -1}, InvalidValueError, "delta=-1: expected"),
    "delta of another type": ({"delta": "small"}, InvalidTypeError, "delta='small': expected a number"),
    "a step that rounds away": (
        {"op": torch.exp, "input_values": {"x": torch.tensor([0.0, 3.0], dtype=torch.bfloat16)}},
        InvalidValueError,
        r"x\[1\] = 3 in torch.bfloat16 is not changed by delta=0.005",
    ),
    "a complex step that rounds away": (
        {"op": torch.abs, "input_values": {"x": torch.tensor([1, 1e9j], dtype=torch.complex64)}},
        InvalidValueError,
        r"x\[1\] = 1e\+09 in torch.complex64",
    ),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_errors_say_what_to_type(case):
    change, error, words = BAD_CALLS[case]
    with pytest.raises(error, match=words):
        gg.get_numerical_gradient(**{**VALID, **change})


def test_an_error_of_the_operator_itself_comes_through():
    with pytest.raises(RuntimeError, match="must match the size"):
        gg.get_numerical_gradient(torch.mul, {"x": X, "y": noise(5)}, "out", "x")


def test_names_and_positions_are_those_of_the_design():
    first = "op input_values output_name input_to_check delta local_scope"
    second = "forward_op input_vars inputs_to_check output_name no_grad_set only_cpu max_relative_error"
    for function, names in ((gg.get_numerical_gradient, first), (gg.check_grad, second)):
        assert list(inspect.signature(function).parameters) == names.split()
