"""One call of a layer by hand, and its per-sample gradients from a loop of single samples."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradguard.per_sample.contributions import Contribution
from gradguard.per_sample.layers.call import BatchAxis, LayerCall

FACTORS = (0.25, 1.0, 0.0, 0.5, 2.0, 0.125)


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def randomised(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with random parameters and statistics, so that no default of 0 or 1 hides a mistake."""
    module = module.to(dtype)
    with torch.no_grad():
        for value in (*module.parameters(), *module.buffers()):
            if value.is_floating_point():
                value.uniform_(0.5, 1.5).mul_(torch.randn_like(value).sign() if value.requires_grad else 1)
    return module


def layer_call(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    axis: BatchAxis = BatchAxis(0),  # noqa: B008
    batch_size: int | None = None,
) -> LayerCall:
    """The call of ``module`` with random gradients of its output, all parameters wanted."""
    kwargs = kwargs or {}
    with torch.no_grad():
        out = module(*args, **kwargs)
    leaves = tensors((args, kwargs))
    return LayerCall(
        module=module,
        args=args,
        kwargs=kwargs,
        outputs=[None],
        grads=[torch.randn_like(out)],
        batch_size=leaves[0].shape[axis.dim] if batch_size is None else batch_size,
        axes=[axis] * len(leaves),
        grad_axes=[axis],
        wanted=frozenset(name for name, _ in module.named_parameters()),
    )


def part(values: Any, axis: BatchAxis, batch_size: int, i: int) -> Any:
    """Sample i's part of a tensor, dimensions kept; anything else as it is."""
    if not isinstance(values, Tensor):
        return values
    count = values.shape[axis.dim] // batch_size
    index = torch.arange(count) * batch_size + i if axis.last else torch.arange(i * count, (i + 1) * count)
    return values.index_select(axis.dim, index)


def looped(call: LayerCall) -> dict[str, Tensor]:
    """Each wanted parameter's gradients ``[B, *shape]``, by autograd of one sample at a time."""
    axis, size = call.grad_axes[0], call.batch_size
    if not call.wanted:
        return {}
    found = {name: [] for name in call.wanted}
    for i in range(size):
        call.module.zero_grad()
        args = [part(value, axis, size, i) for value in call.args]
        kwargs = {name: part(value, axis, size, i) for name, value in call.kwargs.items()}
        call.module(*args, **kwargs).backward(part(call.grads[0], axis, size, i))
        for name in call.wanted:
            grad = call.module.get_parameter(name).grad
            found[name].append(grad.to_dense().clone() if grad.is_sparse else grad.clone())
    return {
        name: torch.stack(rows) if rows else torch.zeros(0, *call.module.get_parameter(name).shape)
        for name, rows in found.items()
    }


def assert_matches(contribution: Contribution, truth: Tensor, tolerance: float) -> None:
    """Compare rows, squared norms and weighted sums with ``truth``, ``[B, *shape]``, relative to its largest entry."""
    size = len(truth)
    scale = float(truth.abs().max()) if truth.numel() else 1.0
    factors = torch.tensor(FACTORS, dtype=torch.float64).repeat(size // len(FACTORS) + 1)[:size]
    wide = torch.float64 if truth.dtype is torch.float64 else torch.float32

    def close(actual: Tensor, expected: Tensor, size: float) -> None:
        torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance * (size or 1.0))

    assert contribution.shape == truth.shape[1:]
    assert contribution.batch_size == size
    rows = contribution.rows(0, size)
    assert rows.dtype is wide
    close(rows, truth, scale)
    close(contribution.rows(size // 3, size - size // 3), truth[size // 3 : size - size // 3], scale)
    squares = contribution.with_recomputed(contribution.squared_norms())
    assert squares.dtype is torch.float64
    close(squares, truth.double().flatten(1).square().sum(1), 0.0 if size == 0 else scale**2)
    total = contribution.weighted_sum(factors)
    assert total.dtype is wide
    close(total, torch.tensordot(factors, truth.double(), 1), scale)


def poisoned(call: LayerCall, i: int) -> LayerCall:
    """The same with NaN in every floating-point tensor of sample i."""

    def poison(values: Any) -> Any:
        if not isinstance(values, Tensor) or not values.is_floating_point():
            return values
        axis, count = call.grad_axes[0], values.shape[call.grad_axes[0].dim] // call.batch_size
        index = torch.arange(count) * call.batch_size + i if axis.last else torch.arange(i * count, (i + 1) * count)
        return values.index_fill(axis.dim, index, float("nan"))

    return LayerCall(
        **{
            **vars(call),
            "args": tuple(poison(value) for value in call.args),
            "kwargs": {name: poison(value) for name, value in call.kwargs.items()},
            "grads": [poison(call.grads[0])],
        }
    )


def assert_rule_exact(rule: Callable[[LayerCall], dict[str, Contribution]], call: LayerCall, tolerance: float) -> None:
    """Compare a rule with the loop; then the sum, where one sample is NaN and counts as nothing."""
    truth, found = looped(call), rule(call)
    assert set(found) == set(call.wanted)
    for name, contribution in found.items():
        assert_matches(contribution, truth[name], tolerance)
    if call.batch_size < 2:
        return
    bad = torch.zeros(call.batch_size, dtype=torch.bool)
    bad[1] = True
    factors = torch.linspace(0.5, 1.5, call.batch_size, dtype=torch.float64)
    for name, contribution in rule(poisoned(call, 1)).items():
        assert not contribution.squared_norms()[1].isfinite(), f"{name} hides the NaN of a sample"
        assert contribution.squared_norms()[~bad].isfinite().all(), f"{name} spreads a NaN to other samples"
        expected = torch.tensordot(factors * ~bad, truth[name].double(), 1)
        scale = float(truth[name].abs().max())
        actual = contribution.weighted_sum(factors, bad).double()
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * (scale or 1.0))
