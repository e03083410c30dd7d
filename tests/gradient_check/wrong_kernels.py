"""Functions with a wrong backward: kernels that work on rows, matrices and indices. `wrong.py` has the others."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gradient_check.problem import Case, Problem

KERNELS: list[Case] = []


def registrar(cases: list[Case]) -> Callable[[str], Callable[..., Any]]:
    """Return a decorator `@case(category)` which adds a case that is named after the function below it."""

    def case(category: str) -> Callable[..., Any]:
        def add(make):
            cases.append(Case(make.__name__, category, make))
            return make

        return add

    return case


def wrong(forward: Callable[..., Tensor], backward: Callable[..., Any]) -> Callable[..., Tensor]:
    """Return a function whose gradients are `backward(v, y, *inputs)`: v is the cotangent, y the output."""

    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(*inputs):
            return forward(*inputs)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output, *inputs)

        @staticmethod
        def backward(ctx, v):
            return backward(v, *ctx.saved_tensors)

    return Wrong.apply


def randn(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=dtype)


def randint(g: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high, (), generator=g))


def row_mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


case = registrar(KERNELS)


# reduction


@case("reduction")
def bias_gradient_summed_over_the_features(g):
    """The batch is the axis to sum over; as the input is square, the shape does not tell."""
    return Problem(wrong(lambda x, b: x + b, lambda v, y, x, b: (v, v.sum(1))), (randn(g, 6, 6), randn(g, 6)))


@case("reduction")
def scale_gradient_averaged_over_the_batch(g):
    """The gradient of a parameter is a sum over the batch, not a mean."""
    fn = wrong(lambda x, s: x * s, lambda v, y, x, s: (v * s, (v * x).mean(0)))
    return Problem(fn, (randn(g, randint(g, 5, 12), 7), randn(g, 7)))


@case("reduction")
def softmax_gradient_mixes_the_rows(g):
    """The inner product belongs to one row; here all rows share it."""
    fn = wrong(lambda x: x.softmax(-1), lambda v, y, x: y * (v - (v * y).sum()))
    return Problem(fn, (randn(g, 5, 8),))


@case("reduction")
def outer_product_with_the_sums_swapped(g):
    """Each factor gets the sum over its own axis instead of the other's."""
    fn = wrong(lambda a, b: a[:, None] * b, lambda v, y, a, b: ((v * b).sum(0), (v * a[:, None]).sum(1)))
    return Problem(fn, (randn(g, 9), randn(g, 9)))


# linear algebra


@case("linear algebra")
def matmul_without_the_transpose(g):
    """The gradient of the left factor is v @ b.T, not v @ b."""
    return Problem(wrong(torch.matmul, lambda v, y, a, b: (v @ b, a.T @ v)), (randn(g, 8, 8), randn(g, 8, 8)))


@case("linear algebra")
def inverse_without_transposes(g):
    """The gradient is -yᵀ v yᵀ, not -y v y."""
    return Problem(wrong(torch.inverse, lambda v, y, a: -y @ v @ y), (randn(g, 5, 5) + 6 * torch.eye(5).double(),))


@case("linear algebra")
def log_determinant_without_the_transpose(g):
    """The gradient is the transpose of the inverse."""
    fn = wrong(lambda a: a.slogdet().logabsdet, lambda v, y, a: v * a.inverse())
    return Problem(fn, (randn(g, 6, 6) + 7 * torch.eye(6).double(),))


@case("linear algebra")
def quadratic_form_taken_for_symmetric(g):
    """(a + aᵀ) x is the gradient; 2 a x holds for symmetric matrices only."""
    fn = wrong(lambda x, a: x @ a @ x, lambda v, y, x, a: (2 * v * (a @ x), v * torch.outer(x, x)))
    return Problem(fn, (randn(g, 7), randn(g, 7, 7)))


# attention


def attention(q, k, t):
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ t


def attention_gradients(v, q, k, t):
    """Return the right gradients, which the cases then spoil."""
    p = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    dp = v @ t.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return ds @ k, ds.mT @ q, p.mT @ v


@case("attention")
def attention_without_the_scale_of_the_keys(g):
    """The keys' gradient is not divided by the root of the head size."""

    def backward(v, y, q, k, t):
        dq, dk, dt = attention_gradients(v, q, k, t)
        return dq, dk * math.sqrt(q.shape[-1]), dt

    return Problem(wrong(attention, backward), (randn(g, 2, 6, 8), randn(g, 2, 6, 8), randn(g, 2, 6, 8)))


@case("attention")
def attention_without_the_row_sum(g):
    """The softmax's backward must subtract the row sum of gradient times weight."""

    def backward(v, y, q, k, t):
        p = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        ds = p * (v @ t.mT) / math.sqrt(q.shape[-1])
        return ds @ k, ds.mT @ q, p.mT @ v

    return Problem(wrong(attention, backward), (randn(g, 5, 4), randn(g, 9, 4), randn(g, 9, 4)))


@case("attention")
def grouped_attention_with_one_head_for_the_group(g):
    """Two query heads share a key head: its gradient is that of the first one instead of the sum."""

    def forward(q, k, t):
        return attention(q, k.repeat_interleave(2, 0), t.repeat_interleave(2, 0))

    def backward(v, y, q, k, t):
        dq, dk, dt = attention_gradients(v, q, k.repeat_interleave(2, 0), t.repeat_interleave(2, 0))
        return dq, dk[::2], dt[::2]

    return Problem(wrong(forward, backward), (randn(g, 4, 5, 3), randn(g, 2, 5, 3), randn(g, 2, 5, 3)))


# mask


@case("mask")
def dropout_without_rescaling(g):
    """Forward divides by the probability to keep, backward does not."""
    keep = torch.arange(30) % 4 > 0
    return Problem(wrong(lambda x: x * keep / 0.75, lambda v, y, x: v * keep), (randn(g, 30),))


@case("mask")
def masked_mean_divided_by_the_full_length(g):
    """The mean is over the valid entries; backward divides by the number of all."""
    valid = torch.arange(12) < randint(g, 4, 9)
    fn = wrong(
        lambda x: (x.tanh() * valid).sum(1) / valid.sum(), lambda v, y, x: v[:, None] * (1 - x.tanh() ** 2) / 12 * valid
    )
    return Problem(fn, (randn(g, 3, 12),))


@case("mask")
def masked_fill_that_lets_the_gradient_through(g):
    """The filled places do not depend on the input: their gradient is 0."""
    hidden = torch.triu(torch.ones(6, 6, dtype=torch.bool), 1)
    return Problem(wrong(lambda x: x.masked_fill(hidden, -9.0), lambda v, y, x: v.clone()), (randn(g, 2, 6, 6),))


# single element


@case("single element")
def one_entry_of_many_slightly_off(g):
    """One of 3000 gradients is too large by a thousandth."""
    factor = torch.ones(3000, dtype=torch.float64)
    factor[randint(g, 0, 3000)] = 1.001
    return Problem(wrong(torch.exp, lambda v, y, x: v * y * factor), (randn(g, 3000),))


@case("single element")
def one_weight_with_the_wrong_sign(g):
    """One entry of the weight's gradient has the wrong sign."""
    sign = torch.ones(12, 16, dtype=torch.float64)
    sign[randint(g, 0, 12), randint(g, 0, 16)] = -1
    fn = wrong(lambda x, w: x @ w.T, lambda v, y, x, w: (v @ w, v.T @ x * sign))
    return Problem(fn, (randn(g, 10, 16), randn(g, 12, 16)))


@case("single element")
def one_entry_zero(g):
    """A thread that ran past its bounds zeroes one gradient of a dense layer's input."""
    place = randint(g, 0, 1024)

    def backward(v, y, x, w):
        dx = (v * (1 - y**2)) @ w.T
        dx.view(-1)[place] = 0
        return dx, x.T @ (v * (1 - y**2))

    return Problem(wrong(lambda x, w: (x @ w).tanh(), backward), (randn(g, 32, 32), randn(g, 32, 8) / 8))


# boundary


@case("boundary")
def convolution_with_an_unwritten_last_column(g):
    """The loop over columns ends one too early."""

    def backward(v, y, x, w):
        dx = torch.nn.grad.conv1d_input(x.shape, w, v)
        dx[..., -1] = 0
        return dx, torch.nn.grad.conv1d_weight(x, w.shape, v)

    return Problem(wrong(F.conv1d, backward), (randn(g, 2, 3, 17), randn(g, 4, 3, 3)))


@case("boundary")
def blocks_without_their_tail(g):
    """The kernel works in blocks of 64 and leaves the rest at zero."""
    n = 64 * 3 + randint(g, 1, 64)
    whole = torch.arange(n) < n // 64 * 64
    return Problem(wrong(torch.sin, lambda v, y, x: v * x.cos() * whole), (randn(g, n),))


@case("boundary")
def replicated_border_not_accumulated(g):
    """Each edge value is copied into the padding, whose gradients are lost."""
    fn = wrong(lambda x: F.pad(x, (2, 2), mode="replicate"), lambda v, y, x: v[:, 2:-2].clone())
    return Problem(fn, (randn(g, 3, 10),))


@case("boundary")
def average_pool_edges_with_the_full_window(g):
    """Windows at the edges hold two values, and backward divides by three everywhere."""

    def backward(v, y, x):
        return F.avg_pool1d(v, 3, 1, padding=1)

    fn = wrong(lambda x: F.avg_pool1d(x, 3, 1, padding=1, count_include_pad=False), backward)
    return Problem(fn, (randn(g, 2, 3, 11),))


@case("boundary")
def circular_difference_without_the_wrap(g):
    """y[i] = x[i + 1] - x[i] on a circle: the first element misses the last one's gradient."""
    fn = wrong(lambda x: x.roll(-1) - x, lambda v, y, x: torch.cat([-v[:1], v[:-1] - v[1:]]))
    return Problem(fn, (randn(g, 20),))


# off-by-eps and normalisation


def layer_norm(x, eps=1e-5):
    return (x - row_mean(x)) * (x.var(-1, correction=0, keepdim=True) + eps).rsqrt()


@case("off-by-eps")
def layer_norm_with_another_eps(g):
    """Forward adds 1e-5 to the variance, backward 1e-6."""

    def backward(v, y, x):
        h, scale = layer_norm(x, 1e-6), (x.var(-1, correction=0, keepdim=True) + 1e-6).rsqrt()
        return scale * (v - row_mean(v) - h * row_mean(v * h))

    return Problem(wrong(layer_norm, backward), (randn(g, 4, 16),))


@case("off-by-eps")
def unit_vector_without_eps(g):
    """Forward has a small constant under the root, backward none."""

    def backward(v, y, x):
        h, norm = x / x.norm(), x.norm()
        return (v - h * (v * h).sum()) / norm

    return Problem(wrong(lambda x: x * (x.square().sum() + 1e-5).rsqrt(), backward), (randn(g, 12),))


@case("off-by-eps")
def logarithm_without_eps(g):
    """log(x + 1e-6) has the gradient 1 / (x + 1e-6)."""
    fn = wrong(lambda x: (x + 1e-6).log(), lambda v, y, x: v / x)
    return Problem(fn, (torch.rand(40, generator=g, dtype=torch.float64) + 0.01,))


@case("normalisation")
def layer_norm_without_the_mean_of_the_gradient(g):
    """The mean's own dependence on the input is dropped."""

    def backward(v, y, x):
        return (x.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt() * (v - y * row_mean(v * y))

    return Problem(wrong(layer_norm, backward), (randn(g, 4, randint(g, 8, 20)),))


@case("normalisation")
def rms_norm_with_a_constant_scale(g):
    """The root mean square depends on the input, but backward treats it as a constant."""

    def backward(v, y, x, w):
        scale = (row_mean(x**2) + 1e-6).rsqrt()
        return v * w * scale, (v * x * scale).sum(0)

    fn = wrong(lambda x, w: x * (row_mean(x**2) + 1e-6).rsqrt() * w, backward)
    return Problem(fn, (randn(g, 5, 8), randn(g, 8)))


@case("normalisation")
def batch_norm_that_miscounts(g):
    """Forward divides the variance by n, the backward's last term by n - 1."""

    def backward(v, y, x):
        scale = (x.var(0, correction=0) + 1e-5).rsqrt()
        return scale * (v - v.mean(0) - y * (v * y).sum(0) / (len(x) - 1))

    return Problem(wrong(lambda x: layer_norm(x.T).T, backward), (randn(g, 24, 5),))


@case("normalisation")
def cosine_similarity_with_constant_norms(g):
    """The norms of both vectors are taken for constants."""

    def backward(v, y, a, b):
        scale = (v / (a.norm(dim=-1) * b.norm(dim=-1)))[:, None]
        return scale * b, scale * a

    return Problem(wrong(lambda a, b: F.cosine_similarity(a, b, dim=-1), backward), (randn(g, 4, 6), randn(g, 4, 6)))


# indexing


@case("indexing")
def embedding_that_overwrites_repeated_rows(g):
    """Rows that are looked up twice keep the last gradient only."""
    ids = torch.randint(7, (15,), generator=g)

    def backward(v, y, table):
        grad = torch.zeros_like(table)
        grad[ids] = v
        return grad

    return Problem(wrong(lambda table: table[ids], backward), (randn(g, 7, 4),))


@case("indexing")
def gather_that_scatters_without_adding(g):
    """Places that are gathered more than once keep one of their gradients."""
    ids = torch.randint(5, (3, 9), generator=g)
    fn = wrong(lambda x: x.gather(1, ids), lambda v, y, x: torch.zeros_like(x).scatter_(1, ids, v))
    return Problem(fn, (randn(g, 3, 5),))


@case("indexing")
def maximum_routed_to_the_neighbour(g):
    """The stored index is off by one."""

    def backward(v, y, x):
        index = (x.argmax(1, keepdim=True) + 1) % x.shape[1]
        return torch.zeros_like(x).scatter_(1, index, v[:, None])

    return Problem(wrong(lambda x: x.amax(1), backward), (randn(g, 6, 10),))


@case("indexing")
def sort_with_the_permutation_instead_of_its_inverse(g):
    """The gradient has to go back to where the values came from."""
    return Problem(wrong(lambda x: x.sort().values, lambda v, y, x: v[x.argsort()]), (randn(g, 25),))
