"""Let a stock optimizer's step clip, or do nothing at all, without changing the optimizer itself.

`torch.optim` optimizers read everything from ``self``: the parameter groups, and if they are fused also ``grad_scale``
(their kernel divides every gradient by it) and ``found_inf`` (at 1 the kernel writes nothing). For one step a proxy is
``self``: it has the same class, state and groups, and those two attributes. The optimizer never gets them, so nothing
must be removed when a step raises, and no later step divides again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradguard.distributed.placements import any_sharded, local_part
from gradguard.errors import UnsupportedGradientError
from gradguard.optimizer_hooks import optimizers_in, parameters_of
from gradguard.state.copies import Restorer, UndoCopier
from gradguard.state.optimizer_copy import OptimizerCopy
from gradguard.tensors.layout import move
from gradguard.torch_private import capturable_warning_mark

FOLDING = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers whose fused kernel divides the gradients itself."""

_OWN = ("grad_scale", "found_inf", "param_groups")

_NOT_FOLDED = {torch.float64, torch.complex64, torch.complex128}


class OptimizerProxy:
    """Replaces one stock optimizer as ``self`` during its step.

    Args:
        optimizer: Exactly one of the classes in `torch.optim` that evaluate a closure at most once; a subclass may
            store more on ``self``.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._real = optimizer
        self._entered: dict[str, Any] = {}
        self._proxy: Optimizer = object.__new__(type(optimizer))  # one for all steps: compiled steps guard on its id

    @staticmethod
    def serves(optimizer: Optimizer) -> bool:
        """Tell whether a proxy can replace ``optimizer``."""
        kind = type(optimizer)
        stock = getattr(torch.optim, kind.__name__, None) is kind
        return stock and kind is not torch.optim.LBFGS and len(optimizer.param_groups) > 0

    def enter(self) -> Optimizer:
        """Return the proxy that steps instead of the optimizer."""
        attributes = self._proxy.__dict__
        attributes.clear()
        attributes.update(self._real.__dict__)
        self._entered = dict(attributes)
        return self._proxy

    def leave(self) -> None:
        """Copy the attributes that the step has set on the proxy to the optimizer."""
        for name, value in self._proxy.__dict__.items():
            if name not in _OWN and self._entered.get(name, self) is not value:
                setattr(self._real, name, value)
        self._proxy.__dict__.clear()  # else it would keep a replaced state alive
        self._entered = {}

    def is_fused(self) -> bool:
        """Tell whether the optimizer's kernel divides gradients at all."""
        return type(self._real) in FOLDING and all([group.get("fused") for group in self._real.param_groups])

    @torch.no_grad()
    def lay_out(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        """Give each gradient the strides of its parameter: a fused kernel reads both as blocks of memory.

        If the strides differ, PyTorch's own fused step combines wrong elements; if a gradient is expanded, it writes
        beyond the gradient's memory. Backward makes gradients with the right strides; assigned gradients may have
        others.

        Args:
            parameters: The parameters, possibly DTensors.
            gradients: This rank's parts of their gradients.

        Returns:
            The gradients, some possibly copied.

        Raises:
            UnsupportedGradientError: If there are gaps between the elements of a parameter.
        """
        parts = list(map(local_part, parameters)) if any_sharded(parameters) else parameters
        if all(map(Tensor.is_contiguous, gradients)) and all(map(Tensor.is_contiguous, parts)):
            return gradients
        laid = list(gradients)
        for i, (parameter, part, gradient) in enumerate(zip(parameters, parts, gradients, strict=True)):
            both_contiguous = gradient.is_contiguous() and part.is_contiguous()
            if gradient.layout is not torch.strided or both_contiguous or gradient.stride() == part.stride():
                continue
            if torch.empty_like(part).stride() != part.stride():
                raise UnsupportedGradientError(
                    f"a parameter of shape {tuple(part.shape)} has the strides {part.stride()}: there are gaps between "
                    f"its elements, and the fused step of {type(self._real).__name__} would write into them. Expected "
                    "fused=False, or a parameter made of weight.contiguous()."
                )
            if parameter.grad is not None:
                parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
                laid[i] = local_part(parameter.grad)
        return laid

    def can_fold(self, gradients: Sequence[Tensor]) -> bool:
        """Tell whether the optimizer's kernel can divide these gradients by a float32 number."""
        return (
            self.is_fused()
            and len({gradient.device for gradient in gradients}) == 1
            and _NOT_FOLDED.isdisjoint({gradient.dtype for gradient in gradients})
        )

    def skips_safely(self) -> bool:
        """Tell whether ``found_inf`` = 1 leaves no uninitialised state behind."""
        # Fused SGD allocates its momentum buffers in the first step, for the kernel to fill. A skipped kernel leaves
        # them uninitialised, and later steps would read them as momentum.
        if type(self._real) is not torch.optim.SGD:
            return True
        with_momentum = [g["params"] for g in self._real.param_groups if g["momentum"] != 0]
        return all(
            self._real.state.get(p, {}).get("momentum_buffer") is not None
            for group in with_momentum
            for p in group
            if p.grad is not None
        )

    @staticmethod
    def overflows(coefficient: Tensor, scale: Tensor | None) -> Tensor:
        """Tell whether the kernel's divisor overflows float32: 0-dim bool, on the device."""
        return (coefficient > 0) & _divisor(coefficient, scale).isinf()

    def fold(self, coefficient: Tensor, scale: Tensor | None) -> None:
        """Let the kernel multiply every gradient by ``coefficient``, and divide it by the loss scale."""
        divisor = _divisor(coefficient, scale)
        # Dividing by infinity would make the gradient 0, so a nonzero coefficient uses the largest finite divisor.
        largest = torch.where(coefficient == 0, divisor, torch.finfo(torch.float32).max)
        self._proxy.grad_scale = torch.minimum(divisor, largest)  # type: ignore[attr-defined]

    def skip_if(self, bad: Tensor) -> None:
        """Let the kernel write nothing if ``bad`` is true, without a host sync."""
        self._proxy.found_inf = bad.to(torch.float32)  # type: ignore[attr-defined]

    def skip(self) -> None:
        """Let the step change no parameter."""
        self._proxy.param_groups = []
        mark = capturable_warning_mark()  # set: a step without parameters needs no warning
        setattr(self._proxy, mark, True)
        self._entered[mark] = True


def _divisor(coefficient: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return coefficient.reciprocal().to(torch.float32)
    divisor = move(scale, coefficient.device, coefficient.dtype) / coefficient
    return divisor.to(torch.float32)


class OptimizerSnapshot:
    """A copy of an optimizer's weights, state, groups and plain attributes, to restore them after its step.

    Args:
        optimizer: The optimizer, before its step.
    """

    @torch.no_grad()
    def __init__(self, optimizer: Optimizer) -> None:
        self._parameters = parameters_of(optimizer)
        # LBFGS replaces the vectors in its lists and never writes to them, so they need no copies.
        copier = UndoCopier(lists=not isinstance(optimizer, torch.optim.LBFGS))
        self._parts = list(map(OptimizerCopy, optimizers_in(optimizer)))  # ZeroRedundancyOptimizer holds another one
        for part in self._parts:
            part.take(copier)
        self._gradients: list[Tensor | None] | None = None

    def hide_gradients(self) -> None:
        """Set all gradients to None, so that an optimizer finds nothing to do."""
        if self._gradients is None:
            self._gradients = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def restore(self) -> None:
        """Restore weights, state, groups and gradients, bit by bit."""
        restorer = Restorer()
        for part in self._parts:
            part.restore(restorer)
        for parameter, gradient in zip(self._parameters, self._gradients or [], strict=False):
            parameter.grad = gradient
