"""Functions with a right forward and a wrong backward, at every seed. Half of `WRONG` is in `wrong_kernels.py`."""

import itertools
import math

import torch
import torch.nn.functional as F

from gradient_check.problem import Case, Problem
from gradient_check.wrong_kernels import KERNELS, layer_norm, randint, randn, registrar, row_mean, wrong

WRONG: list[Case] = list(KERNELS)
case = registrar(WRONG)


def rand(g, *shape):
    return torch.rand(*shape, generator=g, dtype=torch.float64)


def sine(backward):
    """Return the sine with another backward, in the old style. The right gradient is v * x.cos()."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, v):
            return backward(v, *ctx.saved_tensors)

    return Sine.apply


# formula


@case("formula")
def silu_without_the_inner_derivative(g):
    """The term x s (1 - s) is absent."""
    return Problem(wrong(F.silu, lambda v, y, x: v * x.sigmoid()), (randn(g, 20),))


@case("formula")
def tanh_from_the_input_instead_of_the_output(g):
    """1 - y² is right, 1 - x² is not."""
    return Problem(wrong(torch.tanh, lambda v, y, x: v * (1 - x**2)), (randn(g, 20),))


@case("formula")
def quotient_with_the_wrong_sign(g):
    """The divisor's gradient is negative."""
    return Problem(wrong(torch.div, lambda v, y, a, b: (v / b, v * a / b**2)), (randn(g, 10), 1 + rand(g, 10)))


@case("formula")
def cumulative_sum_in_the_forward_order(g):
    """The gradient is a cumulative sum from the end."""
    return Problem(wrong(lambda x: x.cumsum(0), lambda v, y, x: v.cumsum(0)), (randn(g, 16),))


@case("formula")
def power_with_the_same_exponent(g):
    """The exponent has to fall by one."""
    return Problem(wrong(lambda x: x**3, lambda v, y, x: v * 3 * x**3), (randn(g, 20),))


# branch


@case("branch")
def leaky_relu_without_its_slope(g):
    """Negative inputs get a gradient of 0 instead of 0.1."""
    return Problem(wrong(lambda x: F.leaky_relu(x, 0.1), lambda v, y, x: v * (x > 0)), (randn(g, 50),))


@case("branch")
def huber_with_a_quadratic_tail(g):
    """The linear part still has the quadratic part's gradient."""
    fn = wrong(lambda x: F.huber_loss(x, torch.zeros_like(x), reduction="none"), lambda v, y, x: v * x)
    return Problem(fn, (3 * randn(g, 40),))


@case("branch")
def rare_saturation_with_a_wrong_slope(g):
    """Above 6 the function flattens. One element of 400 is there, and gets the gradient of the others."""
    x = rand(g, 400)
    x[randint(g, 0, 400)] = 7.5
    fn = wrong(lambda x: torch.where(x > 6, 6 + 0.05 * (x - 6), x), lambda v, y, x: v.clone())
    return Problem(fn, (x,))


@case("branch")
def clipped_norm_taken_for_constant(g):
    """Vectors longer than 1 are rescaled, and backward forgets that the length depends on them."""
    fn = wrong(lambda x: x / x.norm().clamp(min=1), lambda v, y, x: v / x.norm().clamp(min=1))
    return Problem(fn, (1 + randn(g, 20).abs(),))


# state


@case("state")
def input_saved_on_the_class(g):
    """Another forward before the backward replaces what was saved."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            Sine.saved = x.clone()
            return x.sin()

        @staticmethod
        def backward(ctx, v):
            return v * Sine.saved.cos()

    return Problem(Sine.apply, (randn(g, 15),))


@case("state")
def buffer_that_is_not_zeroed(g):
    """Every backward adds to what the earlier ones have left."""
    x = randn(g, 15)
    total = torch.zeros_like(x)
    return Problem(sine(lambda v, x: total.add_(v * x.cos()).clone()), (x,))


@case("state")
def workspace_shared_by_all_calls(g):
    """Backward reads the output from a workspace that the next forward fills anew."""
    x = randn(g, 4, 6)
    workspace = torch.empty_like(x)
    fn = wrong(lambda x: workspace.copy_(x.tanh()).clone(), lambda v, y, x: v * (1 - workspace**2))
    return Problem(fn, (x,))


@case("state")
def batch_norm_backward_with_running_statistics(g):
    """Forward divides by the batch's deviation, backward by the running one."""
    running = torch.ones(4, dtype=torch.float64)

    def forward(x):
        running.mul_(0.99).add_(0.01 * x.var(0))
        return layer_norm(x.T).T

    def backward(v, y, x):
        return (running + 1e-5).rsqrt() * (v - v.mean(0) - y * (v * y).mean(0))

    return Problem(wrong(forward, backward), (2 * randn(g, 9, 4),))


# missing path


@case("missing path")
def bias_without_a_gradient(g):
    """None is returned for an input that matters."""
    fn = wrong(lambda x, w, b: x @ w + b, lambda v, y, x, w, b: (v @ w.T, x.T @ v, None))
    return Problem(fn, (randn(g, 5, 4), randn(g, 4, 3), randn(g, 3)))


@case("missing path")
def second_output_ignored(g):
    """The gradient that arrives at the cell's state is dropped."""

    class Cell(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, c):
            state = c * x.sigmoid()
            ctx.save_for_backward(x, c, state)
            return state.tanh(), state

        @staticmethod
        def backward(ctx, v, v_state):
            x, c, state = ctx.saved_tensors
            d = v * (1 - state.tanh() ** 2)
            return d * c * x.sigmoid() * (1 - x.sigmoid()), d * x.sigmoid()

    return Problem(Cell.apply, (randn(g, 10), randn(g, 10)))


@case("missing path")
def residual_branch_without_a_gradient(g):
    """The direct path from input to output is forgotten."""

    def backward(v, y, x, w):
        d = v * (1 - (y - x) ** 2)
        return d @ w.T, x.T @ d

    return Problem(wrong(lambda x, w: x + (x @ w).tanh(), backward), (randn(g, 6, 5), randn(g, 5, 5)))


@case("missing path")
def scale_read_out_as_a_number(g):
    """The largest element leaves the graph as a Python number."""
    return Problem(lambda x: (x / x.abs().max().item()).sin(), (randn(g, 20),))


# non-determinism


@case("non-determinism")
def every_third_backward_too_large(g):
    """One call of three is off by a hundredth."""
    factors = itertools.cycle((1.0, 1.0, 1.01))
    return Problem(sine(lambda v, x: v * x.cos() * next(factors)), (randn(g, 25),))


@case("non-determinism")
def updates_lost_in_every_other_backward(g):
    """As in a race, repeated indices are accumulated in one call and overwritten in the next."""
    ids = torch.randint(6, (20,), generator=g)
    accumulate = itertools.cycle((True, False))

    def backward(v, y, x):
        return torch.zeros_like(x).index_put_((ids,), v, accumulate=next(accumulate))

    return Problem(wrong(lambda x: x[ids], backward), (randn(g, 6),))


@case("non-determinism")
def last_row_counted_twice_in_every_fourth_backward(g):
    """The partial sum of the last block is now and then added twice."""
    twice = itertools.cycle((0, 0, 0, 1))
    fn = wrong(lambda x, s: x * s, lambda v, y, x, s: (v * s, (v * x).sum(0) + next(twice) * (v * x)[-1]))
    return Problem(fn, (randn(g, 8, 5), randn(g, 5)))


# cotangent handling


@case("cotangent handling")
def cotangent_clamped(g):
    """Gradients above 1 are cut off on their way in."""
    return Problem(sine(lambda v, x: v.clamp(-1, 1) * x.cos()), (randn(g, 60),))


@case("cotangent handling")
def cotangent_taken_for_one_value(g):
    """Right after .sum() or .mean() only, where all entries are equal."""
    return Problem(sine(lambda v, x: v.mean() * x.cos()), (randn(g, 20),))


@case("cotangent handling")
def cotangent_without_its_sign(g):
    """Right for positive cotangents only."""
    return Problem(sine(lambda v, x: v.abs() * x.cos()), (randn(g, 20),))


@case("cotangent handling")
def small_cotangents_dropped(g):
    """Entries below 0.05 are taken for zero, to save work."""
    return Problem(sine(lambda v, x: v * (v.abs() > 0.05) * x.cos()), (randn(g, 1000),))


@case("cotangent handling")
def cotangent_scaled_to_unit_length(g):
    """Only the direction of the gradient passes through."""
    return Problem(sine(lambda v, x: v / v.norm() * x.cos()), (randn(g, 20),))


@case("cotangent handling")
def weight_decay_added_in_backward(g):
    """A multiple of the input is added, which does not depend on the cotangent."""
    return Problem(sine(lambda v, x: v * x.cos() + 1e-3 * x), (randn(g, 20),))


# layout


def read(x, strides):
    """Read the memory of x with other strides, as a kernel does with a bare pointer. Past its end are zeros."""
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())[x.storage_offset() :]
    return torch.cat([memory, memory.new_zeros(x.numel())]).as_strided(x.shape, strides)


@case("layout")
def cotangent_taken_for_dense(g):
    """The strides of the cotangent are ignored."""
    return Problem(sine(lambda v, x: read(v, x.stride()) * x.cos()), (randn(g, 4, 7),))


@case("layout")
def rows_of_the_cotangent_taken_for_dense(g):
    """The row stride is used, and the elements of a row are taken for neighbours."""
    return Problem(sine(lambda v, x: read(v, (v.stride(0), 1)) * x.cos()), (randn(g, 6, 8),))


@case("layout")
def expanded_cotangent_with_a_shortcut(g):
    """If the cotangent is one expanded number, a fast path returns it and forgets the derivative."""
    return Problem(sine(lambda v, x: v.clone() if not any(v.stride()) else v * x.cos()), (randn(g, 5, 6),))


@case("layout")
def saved_input_taken_for_dense(g):
    """The input is a transposed matrix, and backward reads it row by row."""
    return Problem(sine(lambda v, x: v * read(x, (x.shape[1], 1)).cos()), (randn(g, 8, 6).T,))


# contract and mutation


@case("contract")
def softmax_that_shifts_its_input_in_place(g):
    """Forward subtracts the maximum from the caller's tensor. The gradients are right."""

    def backward(v, y, x):
        return y * (v - (v * y).sum(1, keepdim=True))

    return Problem(wrong(lambda x: x.sub_(x.amax(1, keepdim=True)).softmax(1), backward), (randn(g, 4, 6),))


@case("contract")
def no_gradient_if_one_output_is_unused(g):
    """If only one of two outputs is used, its gradient is thrown away as well."""

    class SineCosine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            ctx.set_materialize_grads(False)
            return x.sin(), x.cos()

        @staticmethod
        def backward(ctx, v, w):
            (x,) = ctx.saved_tensors
            return None if v is None or w is None else v * x.cos() - w * x.sin()

    return Problem(SineCosine.apply, (randn(g, 12),))


@case("contract")
def gradient_buffer_returned_to_every_caller(g):
    """All backwards write to one tensor and return it: the next call changes the earlier result."""
    x = randn(g, 12)
    buffer = torch.empty_like(x)
    return Problem(sine(lambda v, x: buffer.copy_(v * x.cos())), (x,))


@case("mutation")
def cotangent_overwritten(g):
    """The gradient is built in the memory of the cotangent, unless that is not dense and has to be copied first."""
    return Problem(sine(lambda v, x: v.contiguous().mul_(x.cos())), (randn(g, 20),))


@case("mutation")
def input_overwritten_by_its_gradient(g):
    """To save memory, the gradient is written over the input."""
    return Problem(sine(lambda v, x: x.data.copy_(v * x.cos()).clone()), (randn(g, 20),))


@case("mutation")
def output_overwritten_by_the_gradient(g):
    """The gradient is built in the memory of the output."""
    return Problem(wrong(torch.exp, lambda v, y, x: y.data.mul_(v).clone()), (randn(g, 20),))


# precision


@case("precision")
def backward_in_float32(g):
    """Everything is computed in float32 and returned as float64."""
    return Problem(sine(lambda v, x: (v.float() * x.float().cos()).double()), (randn(g, 50),))


@case("precision")
def weight_gradient_in_float32(g):
    """One of two products runs in float32."""
    fn = wrong(torch.matmul, lambda v, y, x, w: (v @ w.T, (x.float().T @ v.float()).double()))
    return Problem(fn, (randn(g, 9, 6), randn(g, 6, 5)))


@case("precision")
def hard_sigmoid_with_a_float32_constant(g):
    """One sixth is rounded to float32."""
    sixth = torch.tensor(1 / 6, dtype=torch.float32).item()
    return Problem(wrong(F.hardsigmoid, lambda v, y, x: v * sixth), (5 * rand(g, 30) - 2.5,))


@case("precision")
def statistics_saved_in_float32(g):
    """The reciprocal deviation is stored in float32, as a fused layer norm may do."""

    def backward(v, y, x):
        scale = (x.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt().float().double()
        return scale * (v - row_mean(v) - y * row_mean(v * y))

    return Problem(wrong(layer_norm, backward), (randn(g, 5, 12),))


@case("precision")
def activation_saved_in_bfloat16(g):
    """The output is compressed until backward needs it."""

    def backward(v, y, x):
        y = y.bfloat16().double()
        return v * y * (1 - y)

    return Problem(wrong(torch.sigmoid, backward), (randn(g, 50),))


# approximation


@case("approximation")
def gelu_with_a_short_constant(g):
    """The root of 2 / π is given with four digits."""

    def backward(v, y, x, c=0.7978):
        t = (c * (x + 0.044715 * x**3)).tanh()
        return v * (0.5 * (1 + t) + 0.5 * x * (1 - t**2) * c * (1 + 3 * 0.044715 * x**2))

    return Problem(wrong(lambda x: F.gelu(x, approximate="tanh"), backward), (randn(g, 40),))


@case("approximation")
def exact_gelu_with_the_tanh_gradient(g):
    """Forward uses the error function, backward the approximation by tanh."""

    def backward(v, y, x):
        return torch.ops.aten.gelu_backward(v, x, approximate="tanh")

    return Problem(wrong(F.gelu, backward), (randn(g, 40),))


@case("approximation")
def power_of_two_with_a_short_logarithm(g):
    """ln 2 is given with four digits."""
    return Problem(wrong(torch.exp2, lambda v, y, x: v * y * 0.6931), (randn(g, 30),))


@case("approximation")
def one_sided_difference_for_a_derivative(g):
    """The derivative is a difference quotient with a step of 1e-4."""
    return Problem(sine(lambda v, x: v * ((x + 1e-4).sin() - x.sin()) / 1e-4), (randn(g, 30),))


# tiny gradients


@case("tiny gradients")
def tiny_gradients_with_the_wrong_sign(g):
    """Everything is of size 1e-12."""
    return Problem(wrong(lambda x: 1e-12 * x.sin(), lambda v, y, x: -1e-12 * v * x.cos()), (randn(g, 30),))


@case("tiny gradients")
def tiny_loss_without_the_factor_two(g):
    """The mean square of many tiny residuals; the gradient lacks the factor 2."""
    fn = wrong(lambda x: x.square().mean(), lambda v, y, x: v * x / x.numel())
    return Problem(fn, (1e-7 * randn(g, 500),))


@case("tiny gradients")
def tiny_ones_among_large_ones_doubled(g):
    """Every other gradient is of size 1e-6, and too large by a factor of 2."""
    weight = torch.tensor([1.0, 1e-6] * 15, dtype=torch.float64)
    factor = torch.tensor([1.0, 2.0] * 15, dtype=torch.float64)
    return Problem(wrong(lambda x: weight * x.sin(), lambda v, y, x: v * weight * x.cos() * factor), (randn(g, 30),))


# complex


def complex_randn(g, *shape):
    return randn(g, *shape, dtype=torch.complex128)


@case("complex")
def complex_product_without_the_conjugate(g):
    """Each factor's gradient needs the conjugate of the other."""
    fn = wrong(torch.mul, lambda v, y, a, b: (v * b, v * a))
    return Problem(fn, (complex_randn(g, 12), complex_randn(g, 12)))


@case("complex")
def squared_magnitude_with_a_conjugate_too_many(g):
    """The gradient of |z|² points along z, not along its conjugate."""
    fn = wrong(lambda z: z.real**2 + z.imag**2, lambda v, y, z: 2 * v * z.conj())
    return Problem(fn, (complex_randn(g, 12),))


@case("complex")
def complex_matmul_transposed_without_conjugates(g):
    """The transposes must be conjugate transposes."""
    fn = wrong(torch.matmul, lambda v, y, a, b: (v @ b.T, a.T @ v))
    return Problem(fn, (complex_randn(g, 4, 5), complex_randn(g, 5, 3)))


@case("complex")
def real_scale_of_a_complex_signal(g):
    """The real input's gradient is the real part of v times the conjugate, which is forgotten."""
    fn = wrong(lambda s, z: s * z, lambda v, y, s, z: ((v * z).real, v * s))
    return Problem(fn, (randn(g, 10), complex_randn(g, 10)))


# NaN


@case("NaN")
def square_root_hidden_behind_a_condition(g):
    """Left of 0 the function is constant, but 0 times the derivative of the root is NaN."""
    x = randn(g, 20)
    x[randint(g, 0, 20)] = -0.5
    return Problem(lambda x: torch.where(x > 0, x.sqrt(), 0.0), (x,))


@case("NaN")
def sinc_divided_by_zero(g):
    """sin(x) / x has the derivative 0 at 0, where backward computes 0 / 0."""
    x = randn(g, 15)
    x[randint(g, 0, 15)] = 0
    return Problem(wrong(lambda x: torch.sinc(x / math.pi), lambda v, y, x: v * (x.cos() - y) / x), (x,))


@case("NaN")
def product_divided_by_a_zero_factor(g):
    """Without one factor the product is y / x, unless that factor is zero."""
    x = randn(g, 6)
    x[randint(g, 0, 6)] = 0
    return Problem(wrong(torch.prod, lambda v, y, x: v * y / x), (x,))


# kink


def with_zeros(g):
    return randn(g, 20).masked_fill(torch.arange(20) % 5 == randint(g, 0, 5), 0)


@case("kink")
def relu_with_gradient_two_at_zero(g):
    """At 0 any value from 0 to 1 is allowed."""
    return Problem(wrong(torch.relu, lambda v, y, x: v * ((x > 0) + 2.0 * (x == 0))), (with_zeros(g),))


@case("kink")
def absolute_value_with_gradient_three_at_zero(g):
    """At 0 any value from -1 to 1 is allowed."""
    return Problem(wrong(torch.abs, lambda v, y, x: v * (x.sign() + 3 * (x == 0))), (with_zeros(g),))


@case("kink")
def leaky_relu_with_both_slopes_at_zero(g):
    """x >= 0 and x <= 0 both hold at 0, so that the slopes add up to 1.25."""
    fn = wrong(lambda x: F.leaky_relu(x, 0.25), lambda v, y, x: v * ((x >= 0) + 0.25 * (x <= 0)))
    return Problem(fn, (with_zeros(g),))
