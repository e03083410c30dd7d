"""Kinds of functions and tensors beyond the ordinary: each has the right verdict, or one refusal in words."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.masked import masked_tensor
from torch.utils.checkpoint import checkpoint

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.testing import assert_grad

ROWS = torch.tensor([0, 2, 2, 1])


def real(*shape):
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def complex_numbers(*shape):
    return torch.complex(real(*shape), real(*shape).sin())


def sparse():
    return torch.sparse_coo_tensor(torch.tensor([[0, 1, 1], [2, 0, 2]]), real(3), (2, 3), check_invariants=True)


def nested(layout=torch.strided):
    return torch.nested.nested_tensor([real(2, 3), real(4, 3)], layout=layout)


def quantized():
    return torch.quantize_per_tensor(torch.tensor([0.5, -1.0, 2.0]), 0.1, 0, torch.qint8)


def given(inputs):
    """Return the inputs of a row: what warns when it is made is made by a function."""
    return inputs() if callable(inputs) else inputs


def twice(x):
    x.mul_(2)
    return x


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * gradient * x * x


class Dirty(torch.autograd.Function):
    FACTOR = 2

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @classmethod
    def backward(cls, ctx, gradient):
        return cls.FACTOR * gradient


class WrongDirty(Dirty):
    FACTOR = 3


class Unmaterialized(torch.autograd.Function):
    """The gradient of an output that is not used comes as None."""

    FACTOR = 1

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @classmethod
    def backward(cls, ctx, of_sine, of_cosine):
        (x,) = ctx.saved_tensors
        found = 0 if of_sine is None else of_sine * x.cos()
        return found if of_cosine is None else found - cls.FACTOR * of_cosine * x.sin()


class WrongUnmaterialized(Unmaterialized):
    FACTOR = 2


class Pairs(torch.autograd.Function):
    """`torch.view_as_real`, with a backward that takes only what `torch.view_as_complex` takes."""

    @staticmethod
    def forward(ctx, z):
        return torch.view_as_real(z).clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.view_as_complex(gradient)


class Product(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, input):
        return self.weight @ input


class Embedding(nn.Embedding):
    def __init__(self):
        super().__init__(4, 3, sparse=True, dtype=torch.float64)
        nn.init.orthogonal_(self.weight)


PASS = {
    "sparse gradient": (lambda w: F.embedding(ROWS, w, sparse=True), (real(4, 3),)),
    "sparse gradient of a parameter": (Embedding(), (ROWS,)),
    "sparse constant": (lambda s, x: torch.sparse.mm(s, x), (sparse(), real(3, 2).requires_grad_())),
    "sparse in between": (lambda x: torch.sparse.sum(x.to_sparse() * 2), (real(2, 3),)),
    "view_as_real": (torch.view_as_real, (complex_numbers(3),)),
    "view_as_real in complex64": (torch.view_as_real, (complex_numbers(3).to(torch.complex64),)),
    "view_as_real of one number": (torch.view_as_real, (complex_numbers(),)),
    "view_as_complex": (torch.view_as_complex, (real(3, 2),)),
    "real": (torch.real, (complex_numbers(3),)),
    "imag": (torch.imag, (complex_numbers(3),)),
    "resolve_conj": (torch.resolve_conj, (complex_numbers(3).conj(),)),
    "nested in between": (
        lambda a, b: torch.nested.to_padded_tensor(torch.nested.as_nested_tensor([a, b]).sin(), 0.0),
        (real(2, 3), real(4, 3)),
    ),
    "quantized constant": (lambda q, x: q.dequantize() * x, lambda: (quantized(), real(3))),
    "the input itself": (lambda x: x, (real(3),)),
    "views of the input": (lambda x: (x, x.t(), x.view(-1)), (real(2, 3),)),
    "other things beside": (lambda x: {"y": x * 2, "n": 3, "i": x.argmax(), "none": None}, (real(3),)),
    "dicts": (lambda q: q["a"] * q["b"]["c"], ({"a": real(3), "b": {"c": real(3)}},)),
    "no element": (torch.sin, (real(0),)),
    "no element between": (torch.matmul, (real(3, 0), real(0, 2))),
    "one number": (torch.mul, (real(), real(3))),
    "integers beside": (lambda x, i: x[i], (real(3), ROWS)),
    "one tensor twice": (lambda a, b: a * b, (real(3),) * 2),
    "vmap": (torch.func.vmap(lambda x: x.sin().sum()), (real(2, 3),)),
    "jacrev": (torch.func.jacrev(torch.sin), (real(3),)),
    "a jvp": (lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1], (real(3),)),
    "once_differentiable": (Once, (real(3),)),
    "mark_dirty": (Dirty, (real(3),)),
    "in place": (twice, (real(3),)),
    "set_materialize_grads(False)": (Unmaterialized, (real(3),)),
    "checkpoint": (lambda x: checkpoint(torch.sin, x, use_reentrant=False), (real(3),)),
    "compiled": (torch.compile(lambda x: x.sin() * 2, backend="aot_eager"), (real(3),)),
}
TWICE = {
    "sparse gradient": (lambda w: F.embedding(ROWS, w, sparse=True) ** 2, (real(4, 3),)),
    "sparse gradient of a parameter": (Embedding(), (ROWS,)),
    "view_as_real": (torch.view_as_real, (complex_numbers(3),)),
    "imag": (torch.imag, (complex_numbers(3),)),
    "grad": (torch.func.grad(lambda x: (x**3).sum()), (real(3),)),
    "in place": (twice, (real(3),)),
    "set_materialize_grads(False)": (Unmaterialized, (real(3),)),
}
FAIL = {
    "mark_dirty": (WrongDirty, (real(3),), 1, "ratio 1.5"),
    "set_materialize_grads(False)": (WrongUnmaterialized, (real(3),), 1, "mismatch"),
    "once_differentiable": (Once, (real(3),), 2, "cannot be differentiated: it is marked once_differentiable"),
    "view_as_complex of grad_output": (Pairs, (complex_numbers(3),), 1, "layout: grad_output .*: the backward raises"),
}
REFUSED = {
    "sparse input": (lambda s: s.to_dense(), (sparse(),), r"input 's' is torch.sparse_coo: .* s.to_dense\(\)"),
    "csr input": (
        lambda s: s.to_dense(),
        lambda: (sparse().to_sparse_csr(),),
        "'s' is torch.sparse_csr: expected a dense",
    ),
    "sparse parameter": (Product(sparse()), (real(3, 2),), "input 'weight' is torch.sparse_coo: expected a dense"),
    "sparse output": (lambda x: x.to_sparse(), (real(2, 3),), "the output of .* is torch.sparse_coo: expected a dense"),
    "one sparse output": (lambda x: (x, x.to_sparse()), (real(2),), "output 1 of .* is torch.sparse_coo: expected"),
    "nested input": (lambda n: n, lambda: (nested(),), r"'n' is nested: expected .*to_padded_tensor\(n, 0.0\)"),
    "jagged input": (
        lambda n: n,
        lambda: (nested(torch.jagged),),
        r"'n' is nested: expected .*to_padded_tensor\(n, 0.0\)",
    ),
    "nested output": (lambda x: torch.nested.as_nested_tensor([x]), (real(2),), "the output of .* is nested: expected"),
    "complex32 input": (
        lambda z: z * z,
        lambda: (complex_numbers(3).to(torch.complex32),),
        "is torch.complex32: expected",
    ),
    "complex32 output": (
        lambda z: z.to(torch.complex32),
        (complex_numbers(3),),
        "is torch.complex32: expected",
    ),
    "float8 output": (lambda x: x.to(torch.float8_e5m2), (torch.ones(3),), "is torch.float8_e5m2: expected one of"),
    "meta input": (torch.sin, (torch.ones(3, device="meta"),), "on the meta device, which holds no numbers"),
    "meta parameter": (nn.Linear(3, 3, device="meta"), (real(2, 3),), "'weight' is on the meta device, which holds no"),
    "meta output": (lambda x: x.to("meta"), (real(3),), "the output of .* is on the meta device, which holds no"),
    "lazy parameter": (nn.LazyLinear(2), (real(1, 2),), "'weight' has no shape before the first call"),
    "masked output": (lambda x: masked_tensor(x, x > 0), (real(3),), r"is a MaskedTensor: .* output.to_tensor\(0\)"),
    "mkldnn input": (lambda x: x.to_dense(), (torch.ones(2, 2).to_mkldnn(),), r"is torch._mkldnn: .* x.to_dense\(\)"),
    "quantized input": (
        lambda q: q.dequantize(),
        lambda: (quantized(),),
        "there is nothing to check",
    ),
}


@pytest.mark.filterwarnings("ignore")  # PyTorch says that some of these are prototypes
@pytest.mark.parametrize("name", PASS)
def test_a_right_gradient_passes(name):
    fn, inputs = PASS[name]
    assert_grad(fn, *given(inputs))


@pytest.mark.parametrize("name", TWICE)
def test_a_right_gradient_of_the_gradient_passes(name):
    fn, inputs = TWICE[name]
    assert_grad(fn, *inputs, order=2)


@pytest.mark.parametrize("name", FAIL)
def test_a_wrong_gradient_fails(name):
    fn, inputs, order, message = FAIL[name]
    with pytest.raises(gg.errors.GradientCheckError, match=message):
        assert_grad(fn, *inputs, order=order)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_holds_no_plain_numbers_is_refused(name):
    fn, inputs, message = REFUSED[name]
    with pytest.raises(InvalidTypeError, match=message):
        gg.gradcheck(fn, *given(inputs))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in REFUSED if "quantized" not in name and "one sparse" not in name])
def test_check_grad_refuses_it_too(name):
    fn, inputs, message = REFUSED[name]
    code = getattr(fn, "__code__", None)
    values = {"input" if code is None else code.co_varnames[0]: given(inputs)[0]}
    chosen = "weight" if isinstance(fn, nn.Module) else next(iter(values))
    with pytest.raises(InvalidTypeError, match=message.replace("the output of", "output 'out' of")):
        gg.check_grad(fn, values, [chosen], "out", only_cpu=True)


def test_an_input_of_another_kind_may_be_left_out():
    x, scale = real(3), torch.tensor([0.5, 1.0, 2.0]).to(torch.float8_e5m2)
    assert gg.gradcheck(lambda x, scale: x * scale.double(), x, scale, inputs_to_check="x").verdict == "PASS"
    with pytest.raises(InvalidTypeError, match=r"input 'scale' is torch.float8_e5m2: expected one of"):
        gg.gradcheck(lambda x, scale: x * scale.double(), x, scale)


def test_a_reentrant_checkpoint_is_refused():
    with pytest.raises(InvalidValueError, match=r"has a reentrant checkpoint, .* use_reentrant=False"):
        gg.gradcheck(lambda x: checkpoint(torch.sin, x, use_reentrant=True), real(3))
