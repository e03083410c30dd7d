"""Each probe of the contract by itself: a function broken in that way alone is found by it, a sound one passes all."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import gradguard as gg
from gradguard.check.contract import Contract
from gradguard.check.function import Function
from gradient_check.correct_modules import only
from gradient_check.wrong import sine
from gradient_check.wrong_kernels import wrong

D = torch.float64


def normal(*shape, dtype=D, seed=1):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def probed(fn, *inputs) -> Contract:
    """Run the probes alone: nothing here takes differences."""
    function = Function(fn, inputs, {}, wide=False)
    function.learn_outputs(function.record(function.leaves()))
    generator = torch.Generator().manual_seed(5)
    contract = Contract(function, torch.randn(function.size, generator=generator, dtype=D), generator)
    contract.probe()
    return contract


def right(v, x):
    return v * x.cos()


def every_nth(n, factor):
    factors = itertools.cycle([1.0] * (n - 1) + [factor])
    return lambda v, x: v * x.cos() * next(factors)


class Remembering(torch.autograd.Function):
    """Keeps its input on the class, not in the context."""

    @staticmethod
    def forward(ctx, x):
        Remembering.saved = x.clone()
        return x.sin()

    @staticmethod
    def backward(ctx, v):
        return v * Remembering.saved.cos()


class Overwriting(torch.autograd.Function):
    """Returns what it saved, multiplied in place: the second backward of a graph multiplies it again."""

    @staticmethod
    def forward(ctx, x):
        ctx.factor = x.cos()
        return x.sin()

    @staticmethod
    def backward(ctx, v):
        return ctx.factor.mul_(v)


class Pair(torch.autograd.Function):
    """Two outputs; what arrives for the second alone is dropped."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, v, w):
        (x,) = ctx.saved_tensors
        if v is None:
            return torch.zeros_like(x)
        return v * x.cos() - (0 if w is None else w * x.sin())


class SoundPair(Pair):
    @staticmethod
    def backward(ctx, v, w):
        (x,) = ctx.saved_tensors
        return (0 if v is None else v * x.cos()) - (0 if w is None else w * x.sin())


def is_transposed(v):
    return v.dim() > 1 and v.stride(0) < v.stride(-1)


def is_sparse_in_memory(v):
    return v.stride(-1) == 2


BROKEN = {
    "non-determinism, every call": ("non-determinism", "run again", sine(every_nth(2, 1.01))),
    "non-determinism, every fifth call": ("non-determinism", "run again", sine(every_nth(5, 1.01))),
    "saved tensor overwritten": ("non-determinism", "run again", Overwriting.apply),
    "strided": ("layout", "every second", sine(lambda v, x: right(v, x) * (2 if is_sparse_in_memory(v) else 1))),
    "transposed": ("layout", "transposed", sine(lambda v, x: right(v, x) * (2 if is_transposed(v) else 1))),
    "stride 0": ("layout", "stride 0", sine(lambda v, x: right(v, x) * (1 if any(v.stride()) else 2))),
    "sign": ("linearity", "times -1", sine(lambda v, x: right(v.abs(), x))),
    "affine": ("linearity", "times -1", sine(lambda v, x: right(v, x) + 0.01 * x)),
    "tiny": ("linearity", "times 2^-20", sine(lambda v, x: right(v * (v.abs() > 1e-5), x))),
    "large": ("linearity", "times 2^10", sine(lambda v, x: right(v.clamp(-9, 9), x))),
    "zeros": ("linearity", "zeros", sine(lambda v, x: right(v, x) if bool(v.any()) else x.cos())),
    "normalised": ("linearity", "times 2^", sine(lambda v, x: right(v / v.norm(), x))),
    "one of two outputs": ("outputs", "only output 1 used", Pair.apply),
    "stale state": ("state", "another forward", Remembering.apply),
    "float32 inside": ("precision", "float32 numbers", sine(lambda v, x: (v.float() * x.float().cos()).double())),
    "cotangent overwritten": ("mutation", "overwrites grad_output of output 0", sine(lambda v, x: v.mul_(x.cos()))),
    "input overwritten by backward": (
        "mutation",
        "the backward overwrites input",
        sine(lambda v, x: x.data.copy_(right(v, x)).clone()),
    ),
    "input overwritten by forward": (
        "mutation",
        "the forward overwrites input",
        wrong(lambda x: x.data.mul_(2).div(2).sin(), lambda v, y, x: right(v, x / 2)),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_promise_is_found_by_its_probe(name):
    kind, words, fn = BROKEN[name]
    contract = probed(fn, normal(5, 6))
    assert {found.kind for found in contract.findings} <= {kind, "non-determinism" if kind == "mutation" else kind}
    assert any(words in found.message for found in contract.findings)


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_promise_fails_the_check(name):
    kind, _, fn = BROKEN[name]
    report = gg.gradcheck(fn, normal(5, 6))
    assert report.verdict == "FAIL"
    assert kind in {found.kind for found in report.findings}


SOUND = {
    "sine": (sine(right), normal(5, 6)),
    "tiny numbers": (sine(lambda v, x: 1e-250 * right(v, x)), normal(9)),
    "large numbers": (sine(lambda v, x: 1e250 * right(v, x)), normal(9)),
    "gradient 0": (sine(lambda v, x: 0 * v), normal(9)),
    "a few that cancel to 0": (
        wrong(lambda x: x.softmax(-1), lambda v, y, x: y * (v - (v * y).sum(-1, True))),
        normal(9),
    ),
    "batch norm, summed to nothing": (lambda x: F.batch_norm(x, None, None, training=True), normal(6, 3)),
    "less the mean, summed to nothing": (lambda x: x - x.mean(), normal(7)),
    "two outputs": (SoundPair.apply, normal(9)),
    "no gradient for the first output": (lambda x: (x.detach(), x.sin()), normal(9)),
    "a number": (torch.sin, normal()),
    "no elements": (torch.sin, normal(0)),
    "complex": (torch.exp, normal(9, dtype=torch.complex128)),
    "one half": (lambda x: x / 2, normal(9)),
    "constant": (lambda x: x.round() * 0.1 + x, normal(9)),
    "transposed input": (torch.sin, normal(4, 6).T),
    "float32": (only(torch.float32, torch.sin), normal(9, dtype=torch.float32)),
    "bfloat16": (only(torch.bfloat16, torch.sin), normal(90, dtype=torch.bfloat16)),
    "float16": (only(torch.float16, torch.sin), normal(90, dtype=torch.float16)),
    "a log outside of whose domain the permuted point may lie": (
        lambda x: (x * torch.arange(1, 10)).log(),
        normal(9).abs(),
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_backward_keeps_every_promise(name):
    fn, x = SOUND[name]
    contract = probed(fn, x)
    assert contract.findings == []
    assert contract.notes == []


def test_the_last_bits_may_differ_between_equal_backwards():
    contract = probed(sine(every_nth(2, 1 + 2**-52)), normal(40))
    assert contract.findings == []
    assert [note.kind for note in contract.notes] == ["non-determinism"]


@pytest.mark.parametrize(("factor", "is_found"), [(1 + 1e-8, True), (1 + 1e-12, False)])
def test_how_much_equal_backwards_may_differ_in_float64(factor, is_found):
    assert bool(probed(sine(every_nth(2, factor)), normal(40)).findings) == is_found


@pytest.mark.parametrize(("factor", "is_found"), [(1 + 1e-3, True), (1 + 1e-6, False)])
def test_how_much_equal_backwards_may_differ_in_float32(factor, is_found):
    assert bool(probed(sine(every_nth(2, factor)), normal(40, dtype=torch.float32)).findings) == is_found


def test_the_element_that_differs_most_is_named():
    factors = torch.ones(5, 6, dtype=D)
    factors[3, 1] = 3.0
    fn = sine(lambda v, x: right(v, x) * (factors if is_sparse_in_memory(v) else 1))
    (found,) = probed(fn, normal(5, 6)).findings
    assert found.place == f"{found.input}[3, 1]"
    assert "1 of 30 elements differ" in found.message


def test_the_point_is_not_changed_by_probing():
    x = normal(5, 6)
    before = x.clone()
    probed(BROKEN["input overwritten by backward"][2], x)
    probed(BROKEN["input overwritten by forward"][2], x)
    torch.testing.assert_close(x, before, rtol=0, atol=0)


@pytest.mark.parametrize("count", [3, 4, 50])
def test_gradients_that_happen_to_be_short_are_not_taken_for_float32(count):
    assert probed(lambda x: x * 3, normal(count)).findings == []
    exact = torch.arange(1.0, count + 1, dtype=D)
    assert probed(lambda x: (x * x).sum(), exact).findings == []


# where inputs and grad_output lie in memory, which of them need a gradient, and other sizes


def softmax_backward(v, y, x):
    """Wrong for a grad_output expanded along dimension 0, of which ones, whose gradient is 0, show nothing."""
    return y * (v - (v * y).sum(-1, keepdim=True)) * (2 if v.stride()[0] == 0 else 1)


def test_a_grad_output_that_is_expanded_along_one_dimension():
    (found,) = probed(wrong(lambda x: x.softmax(-1), softmax_backward), normal(4, 5)).findings
    assert found.kind == "layout"
    assert "of stride 0 along dimension 0, as sum(0) makes" in found.message


def dense(x):
    """Read memory as if the tensor were contiguous."""
    return torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride())


def from_the_beginning(x):
    return torch.as_strided(x, x.shape, x.stride(), 0)


INPUTS = {
    "every second element": (wrong(torch.sin, lambda v, y, x: v * dense(x).cos()), normal(7), "every second element"),
    "transposed": (
        wrong(torch.sin, lambda v, y, x: v * (dense(x) if x.stride() == (1, 3) else x).cos()),
        normal(3, 4),
        "transposed inputs",
    ),
    "from the beginning of the buffer": (
        wrong(torch.sin, lambda v, y, x: v * from_the_beginning(x).cos()),
        normal(7),
        "inputs within a buffer",
    ),
    "stride 0": (
        wrong(torch.sin, lambda v, y, x: v * x.cos() * (0.5 if 0 in x.stride() else 1.0)),
        normal(3, 4),
        "inputs of stride 0",
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_a_backward_that_takes_its_inputs_to_lie_otherwise(name):
    fn, x, words = INPUTS[name]
    (found,) = probed(fn, x).findings
    assert (found.kind, words in found.message) == ("layout", True)


def test_a_forward_that_takes_its_inputs_to_lie_otherwise():
    found = probed(lambda x: dense(x) * 1.0, normal(3, 4)).findings
    assert [(one.kind, "the forward gives" in one.message) for one in found] == [("layout", True)] * len(found) != []


def test_a_function_may_refuse_inputs_that_are_not_contiguous():
    assert probed(lambda x: x.view(-1).sin(), normal(3, 4)).findings == []


class Product(torch.autograd.Function):
    """x · y · 3, where what each input needs is mixed up."""

    @staticmethod
    def forward(ctx, x, y, how):
        ctx.save_for_backward(x, y)
        ctx.how = how
        return x * y * 3

    @staticmethod
    def backward(ctx, v):
        x, y = ctx.saved_tensors
        if not ctx.needs_input_grad[0] and ctx.how == "raises":
            raise ValueError("no gradient of x")
        factor = 1 if not ctx.needs_input_grad[0] and ctx.how == "wrong" else 3
        return v * y * 3, v * x * factor, None


@pytest.mark.parametrize(("how", "words"), [("wrong", "only y needs a gradient: "), ("raises", "no gradient of x")])
def test_an_input_that_needs_no_gradient(how, words):
    def product(x, y):
        return Product.apply(x, y, how)

    (found,) = probed(product, normal(3), normal(3, seed=2)).findings
    assert (found.kind, words in found.message) == ("needs_input_grad", True)


def test_inputs_that_need_no_gradient_of_many():
    def many(*tensors):
        return sum(tensors[1:], Product.apply(tensors[0], tensors[1], "wrong"))

    (found,) = probed(many, *(normal(3, seed=i) for i in range(6))).findings
    assert "only tensors[1], tensors[3], tensors[5] need a gradient" in found.message


def keeps_the_smallest():
    kept = []

    def backward(v, y, x):
        if not kept or len(x) < len(kept[0]):
            kept[:] = [torch.ones(len(x), dtype=D)]
        return v * x.cos() * F.pad(kept[0], (0, len(x) - len(kept[0])))

    return wrong(torch.sin, backward)


def test_what_is_kept_from_a_call_with_fewer_rows():
    (found,) = probed(keeps_the_smallest(), normal(5)).findings
    assert (found.kind, found.index) == ("state", (4,))
    assert found.message.startswith("a call with 4 in place of 5 changes the next backward")


def seeded_dropout(x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return F.dropout(x, 0.5)


def test_a_forward_that_gives_nan_after_another_call():
    lengths = []

    def spoilt(x):
        lengths.append(len(x))
        return x.sin() * (float("nan") if min(lengths) < len(x) else 1.0)

    (found,) = probed(spoilt, normal(5)).findings
    assert (found.kind, "the forward gives nan in place of" in found.message) == ("state", True)


@pytest.mark.parametrize("fn", [F.dropout, seeded_dropout])
def test_random_numbers_may_follow_the_order_of_memory(fn):
    assert gg.gradcheck(fn, normal(4, 5)).verdict == "PASS"


def is_cut(x, dim):
    """Whether blocks of all dimensions behind ``dim`` lie apart."""
    dense = torch.empty(x.shape).stride()
    return x.stride()[dim:] == dense[dim:] and x.stride(dim - 1) > dense[dim - 1]


CUT = {
    "grad_output, rows": (lambda v, x: is_cut(v, -1), "grad_output cut out of a longer last dimension"),
    "grad_output, blocks": (lambda v, x: is_cut(v, 1), "grad_output cut out of a longer dimension 1"),
    "inputs, rows": (lambda v, x: is_cut(x, -1), "inputs cut out of a longer last dimension"),
    "inputs, blocks": (lambda v, x: is_cut(x, 1), "inputs cut out of a longer dimension 1"),
}


@pytest.mark.parametrize("shape", [(4, 6, 3), (2, 3, 4, 2)])
@pytest.mark.parametrize("kind", CUT)
def test_a_kernel_that_takes_a_slice_for_dense_is_found(kind, shape):
    is_bad, said = CUT[kind]
    function = wrong(torch.sin, lambda v, y, x: v * x.cos() * (0.5 if is_bad(v, x) else 1.0))
    found = gg.gradcheck(function, normal(*shape))
    assert found.verdict == "FAIL"
    assert said in found.findings[0].message


class SecondWithout(torch.autograd.Function):
    """The gradient of a sine, whose own backward is wrong where grad_output needs none, as in a gradient penalty."""

    @staticmethod
    def forward(ctx, x, v):
        ctx.save_for_backward(x, v)
        return v * x.cos()

    @staticmethod
    def backward(ctx, w):
        x, v = ctx.saved_tensors
        return -w * v * x.sin() * (1.0 if ctx.needs_input_grad[1] else 0.5), w * x.cos()


class FirstWithout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, v):
        return SecondWithout.apply(*ctx.saved_tensors, v)


def test_a_second_order_that_is_wrong_only_without_a_gradient_of_grad_output_is_found():
    found = gg.gradcheck(FirstWithout.apply, normal(4), order=2)
    assert found.verdict == "FAIL"
    assert found.findings[0].message.startswith("second order: only ")
    assert "needs a gradient" in found.findings[0].message  # the input is called args[0]; from torch 2.15 on, input
    assert gg.gradcheck(torch.sin, normal(4), order=2).verdict == "PASS"
