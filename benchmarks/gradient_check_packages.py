"""`gg.gradcheck` on kernels of public packages, on the CPU: prints a report for each function.

pip install torch triton liger-kernel entmax torchlpc
python benchmarks/gradient_check_packages.py [--only swiglu]

Packages that are not installed are skipped. Triton's kernels run in its interpreter, and are compared with the same
function in float64, written here: they compute in float32. Some call functions of the GPU's own library (tanh, rsqrt),
and methods of a number that the interpreter hands over as Python's: both are put in their place below.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import torch
import torch.nn.functional as F
from torch import Tensor

import gradguard as gg

if importlib.util.find_spec("triton") is not None:
    import numpy as np
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    @triton.jit
    def tanh(x):
        return 2 * tl.sigmoid(2 * x) - 1

    @triton.jit
    def rsqrt(x):
        return 1 / tl.sqrt(x)


TARGET = torch.tensor([1, 4, 2, -100, 0])


class Case(NamedTuple):
    """A function of a package at a point, and the same in float64 where it has none of its own."""

    fn: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    reference: Callable[..., Any] | None = None


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def wide(*shape: int) -> Tensor:
    return normal(*shape, dtype=torch.float64)


def help_the_interpreter() -> None:
    """Make Triton's interpreter take what compiled kernels take."""
    as_before = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if type(value) is not float:
            return as_before(value)
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = converted
    for name, module in list(sys.modules.items()):
        for function in (tanh, rsqrt) if name.startswith("liger_kernel") else ():
            if function.fn.__name__ in vars(module):
                setattr(module, function.fn.__name__, function)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def sparsemax(x: Tensor) -> Tensor:
    ordered, counts = x.sort(-1, descending=True).values, torch.arange(1, x.shape[-1] + 1).to(x)
    above = ordered.cumsum(-1) - 1
    support = (counts * ordered > above).sum(-1, keepdim=True)
    return (x - above.gather(-1, support - 1) / support).clamp(min=0)


def jensen_shannon(x: Tensor, y: Tensor, beta: float) -> Tensor:
    mixed = (beta * y.exp() + (1 - beta) * x.exp()).log()
    return (beta * y.exp() * (y - mixed) + (1 - beta) * x.exp() * (x - mixed)).sum() / len(x)


def total_variation(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).abs().sum() / 2 / len(x)


def poly_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    one = torch.ones((), dtype=x.dtype)
    return sum((w * rms_norm(x**power, one) for w, power in zip(weight, (3, 2, 1), strict=True)), bias)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos.to(x) + torch.cat([-second, first], -1) * sin.to(x)

    return turned(q), turned(k)


def attention_nearby(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    places = torch.arange(q.shape[2])
    near = (places[:, None] - places).abs() <= 1
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return scores.masked_fill(~near, -torch.inf).softmax(-1) @ v


def liger_kernel() -> Iterator[tuple[str, Case]]:
    import liger_kernel.transformers.functional as liger

    help_the_interpreter()
    pair, row = (normal(5, 7), normal(5, 8)[:, :7].contiguous()), normal(7)
    log_p, q = normal(5, 7).log_softmax(-1), normal(5, 9)[:, :7].softmax(-1)
    yield "softmax", Case(liger.liger_softmax, pair[:1], lambda x: x.softmax(-1))
    yield "sparsemax", Case(liger.liger_sparsemax, pair[:1], sparsemax)
    yield "relu_squared", Case(liger.liger_relu_squared, pair[:1], lambda x: F.relu(x) ** 2)
    yield "swiglu", Case(liger.liger_swiglu, pair, lambda a, b: F.silu(a) * b)
    yield "geglu", Case(liger.liger_geglu, pair, lambda a, b: F.gelu(a, approximate="tanh") * b)
    yield "rms_norm", Case(lambda x, w: liger.liger_rms_norm(x, w, 1e-6, in_place=False), (pair[0], row), rms_norm)
    yield "rms_norm, in_place", Case(lambda x, w: liger.liger_rms_norm(x, w, 1e-6), (pair[0], row), rms_norm)
    yield (
        "layer_norm",
        Case(
            lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5),
            (pair[0], row, row + 1),
            lambda x, w, b: F.layer_norm(x, (7,), w, b),
        ),
    )
    yield (
        "group_norm",
        Case(
            lambda x, w, b: liger.liger_group_norm(x, w, b, 6, 3, 1e-5),
            (normal(2, 6, 5), normal(6), normal(6) + 1),
            lambda x, w, b: F.group_norm(x, 3, w, b),
        ),
    )
    yield (
        "poly_norm",
        Case(lambda x, w, b: liger.liger_poly_norm(x, w, b, in_place=False), (pair[0], normal(3), normal()), poly_norm),
    )
    yield (
        "fused_add_rms_norm",
        Case(
            lambda x, r, w: liger.liger_fused_add_rms_norm(x, r, w, 1e-6, in_place=False),
            (*pair, row),
            lambda x, r, w: (rms_norm(x + r, w), x + r),
        ),
    )
    for reduction in ("none", "mean"):
        yield (
            f"cross_entropy, {reduction}",
            Case(
                lambda x, reduction=reduction: liger.liger_cross_entropy(x, TARGET, reduction=reduction),
                pair[:1],
                lambda x, reduction=reduction: F.cross_entropy(x, TARGET, reduction=reduction),
            ),
        )
        yield (
            f"fused_linear_cross_entropy, {reduction}",
            Case(
                lambda x, w, reduction=reduction: liger.liger_fused_linear_cross_entropy(
                    x, w, TARGET, reduction=reduction
                ),
                (normal(5, 6), normal(7, 6)),
                lambda x, w, reduction=reduction: F.cross_entropy(x @ w.t(), TARGET, reduction=reduction),
            ),
        )
    for reduction in ("none", "sum", "mean", "batchmean"):
        yield (
            f"kl_div, {reduction}",
            Case(
                lambda x, reduction=reduction: liger.liger_kl_div(x, q, reduction=reduction),
                (log_p,),
                lambda x, reduction=reduction: F.kl_div(x, q.to(x), reduction=reduction),
            ),
        )
    yield (
        "tvd",
        Case(
            lambda x: liger.liger_tvd(x, q, reduction="batchmean"),
            (log_p.exp(),),
            lambda x: total_variation(x, q.to(x)),
        ),
    )
    for beta in (0.1, 0.5):
        yield (
            f"jsd, beta {beta}",
            Case(
                lambda x, beta=beta: liger.liger_jsd(x, q.log(), beta=beta),
                (log_p,),
                lambda x, beta=beta: jensen_shannon(x, q.log().to(x), beta),
            ),
        )
    yield (
        "fused_linear_kl_div",
        Case(
            lambda x, w: liger.liger_fused_linear_kl_div(x, w, q),
            (normal(5, 6), normal(7, 6)),
            lambda x, w: F.kl_div((x @ w.t()).log_softmax(-1), q.to(x), reduction="batchmean"),
        ),
    )
    angles = torch.linspace(0, 3, 20).reshape(1, 5, 4).repeat(1, 1, 2)
    yield (
        "rope",
        Case(
            lambda q, k: liger.liger_rope(q, k, angles.cos(), angles.sin()),
            (normal(2, 4, 5, 8), normal(2, 2, 5, 8)),
            lambda q, k: rotated(q, k, angles[:, None].double().cos(), angles[:, None].double().sin()),
        ),
    )
    yield (
        "fused_neighborhood_attention",
        Case(
            lambda q, k, v: liger.liger_fused_neighborhood_attention(q, k, v, kernel_size=3),
            (normal(1, 2, 6, 8), normal(2, 1, 6, 8).transpose(0, 1).contiguous(), normal(1, 2, 6, 8) + 1),
            attention_nearby,
        ),
    )


def entmax() -> Iterator[tuple[str, Case]]:
    import entmax

    x, target = wide(4, 7), torch.tensor([1, 2, 0, 3])
    alpha = torch.tensor([[1.3], [1.5], [1.7], [2.0]], dtype=torch.float64)
    for name in ("sparsemax", "entmax15", "sparsemax_bisect"):
        yield name, Case(getattr(entmax, name), (x,))
    yield "entmax_bisect", Case(lambda x, alpha: entmax.entmax_bisect(x, alpha=alpha), (x, alpha))
    yield "normmax_bisect", Case(lambda x: entmax.normmax_bisect(x, alpha=2), (x,))
    yield "budget_bisect", Case(lambda x: entmax.budget_bisect(x, budget=2), (x,))
    for name in ("sparsemax_loss", "entmax15_loss"):
        yield name, Case(lambda x, name=name: getattr(entmax, name)(x, target), (x,))
    yield "entmax_bisect_loss", Case(lambda x: entmax.entmax_bisect_loss(x, target, 1.5), (x,))


def torchlpc() -> Iterator[tuple[str, Case]]:
    import torchlpc

    yield "sample_wise_lpc", Case(torchlpc.sample_wise_lpc, (wide(2, 9), 0.2 * wide(2, 9, 3), wide(2, 3)))


PACKAGES = {"liger-kernel": liger_kernel, "entmax": entmax, "torchlpc": torchlpc}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="functions whose names contain this")
    only = parser.parse_args().only
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for package, cases in PACKAGES.items():
        if importlib.util.find_spec(package.replace("-", "_")) is None:
            print(f"{package} is not installed")
            continue
        print(f"{package} {importlib.metadata.version(package)}")
        for name, (fn, inputs, reference) in cases():
            if only in name:
                print(f"{name}\n{gg.gradcheck(fn, *inputs, reference=reference)}", flush=True)


if __name__ == "__main__":
    main()
