"""Per-sample gradients of code that uses parameters itself, such as ``x + self.position`` or a layer without a rule.

The code of one module runs again for each sample, under torch.func or, if that fails, in a loop. The layers that the
code calls do not run again. A stub takes the place of each layer: it returns the layer's recorded output, and its
arguments count as results of the code, because backward has computed their gradients. The gradient is exact.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.call_arguments import Gradients, Places, Skeleton, is_inexact, promoted_type
from gradguard.per_sample.contributions import Materialized, wide
from gradguard.per_sample.layers.call import Axes, BatchAxis
from gradguard.per_sample.measured_rounding import movements_of
from gradguard.per_sample.plain_sum import Leaves, dense, magnitude, not_adding_up
from gradguard.per_sample.rerun import Quietly, substituted, undisturbed
from gradguard.tensors.norms import total_norm
from gradguard.torch_private import call_slot

_CHUNK = 64 << 20
"""Bytes of per-sample gradients that torch.func computes at a time."""

_OF_TORCH_FUNC = (
    "vmap", "transform", "torch.func", "doesn't have storage", "match the broadcast shape", "stack expects each tensor",
)  # fmt: skip
"""Words in the errors of code that runs for one sample but not under vmap: a kernel without a batching rule, an index
or a number that depends on the samples' values, a write into a tensor without a batch dimension."""


@dataclass
class NestedCall:
    """A call of a layer by a module's own code.

    Attributes:
        module: The layer.
        tapped: Positions, among the layer's input tensors, of those that the code had computed.
        axes: Batch axis of each of ``tapped``.
        grads: The gradient of each of ``tapped``, set in backward.
        output: The structure of the layer's output.
        output_axes: Batch axis of each output tensor.
    """

    module: nn.Module
    tapped: list[int]
    axes: list[BatchAxis | None]
    grads: Gradients
    output: Skeleton = field(default_factory=lambda: Skeleton(()))
    output_axes: Axes = ()


@dataclass
class VmapFallback:
    """One run of a module's own code, and the gradients of its results.

    Attributes:
        module: The module.
        arguments: The structure of the module's arguments.
        axes: Batch axis of each tensor argument.
        output_axes: Batch axis of each output tensor.
        aliases: The modules and attributes that hold each parameter that the code used.
        values: The values of these parameters.
        autocast: Device type and dtype of the autocast of the run, or None.
        quietly: Makes a block in which the clipper's own hooks do nothing.
        computed: Positions, among the output tensors, of those that the code computed itself.
        batch_size: Number of samples.
        nested_calls: The calls of layers by the code, in order.
        saved: The input tensors, then the outputs of the layers.
        results: Tensors with the shapes and dtypes of the results: first those that the code computed and passed to
            layers, then those that it computed and returned.
        grads: The gradient of each output tensor.
        leaves: Stand-ins for the parameters, with the plain gradients of this run after backward.
        in_place: Whether the code writes into outputs of layers.
    """

    module: nn.Module
    arguments: Skeleton
    axes: Axes
    output_axes: Axes
    aliases: Places
    values: Mapping[str, Tensor]
    autocast: tuple[str, torch.dtype] | None
    quietly: Quietly
    computed: Sequence[int] = ()
    batch_size: int = -1
    nested_calls: list[NestedCall] = field(default_factory=list)
    saved: Sequence[Tensor] = ()
    results: Sequence[Tensor] = ()
    grads: Gradients = ()
    leaves: Leaves | None = None
    in_place: bool = False

    def per_sample_gradients(self) -> dict[str, Tensor]:
        """Return the per-sample gradients ``[B, *shape]`` of each parameter.

        Raises:
            UnsupportedGradientError: If the code cannot run again for one sample, or the samples' gradients do not add
                up to the plain gradient.
            OutOfMemoryError: If memory runs out.
        """
        axes, grads = self._axes()
        pieces = [t.detach() for t in (*self.saved, *grads)]
        dims = [None if axis is None else 0 for axis in axes]
        pieces = [t if axis is None else axis.split(t, self.batch_size) for t, axis in zip(pieces, axes, strict=True)]
        autocast = torch.autocast(self.autocast[0], self.autocast[1]) if self.autocast else nullcontext()
        try:
            with self.quietly(), autocast, undisturbed(self.module, drop_rate=None) as reset:
                values = [self.values[name] for name in self.aliases]
                rows = self._differentiate(values, pieces, dims, reset)
        except (UnsupportedGradientError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:  # a torch function may fail for one sample
            raise UnsupportedGradientError(self._differs(f"it fails ({error})")) from error
        gradients = dict(zip(self.aliases, rows, strict=True))
        self._check(gradients, grads)
        return gradients

    def _axes(self) -> tuple[list[BatchAxis | None], list[Tensor]]:
        """Return the batch axes of the saved tensors and of the results' gradients, and these gradients or zeros."""
        given = [axis for layer in self.nested_calls for axis in layer.output_axes]
        results = [axis for layer in self.nested_calls for axis in layer.axes]
        results += [self.output_axes[i] for i in self.computed]
        grads = [grad for layer in self.nested_calls for grad in layer.grads]
        grads += [self.grads[i] for i in self.computed]
        for axis, grad in zip(results, grads, strict=True):
            if axis is None and grad is not None:
                raise UnsupportedGradientError(
                    f"{type(self.module).__name__} computes a value from its parameters alone, without the samples, so "
                    "the gradient of this value belongs to no single sample. Compute the value in the module that uses "
                    "it."
                )
        filled = [torch.zeros_like(r) if g is None else g for g, r in zip(grads, self.results, strict=True)]
        return [*self.axes, *given, *results], filled

    def _differentiate(
        self, values: list[Tensor], tensors: Sequence[Tensor], dims: Sequence[int | None], reset: Callable[[], None]
    ) -> list[Tensor]:
        def one_sample(parameters: Sequence[Tensor], *pieces: Tensor) -> Tensor:
            return self._surrogate(dict(zip(self.aliases, parameters, strict=True)), [*pieces])

        chunk = max(1, min(self.batch_size, _CHUNK // max(1, sum(v.nbytes for v in values))))
        vectorized = torch.func.vmap(torch.func.grad(one_sample), in_dims=(None, *dims), chunk_size=chunk)
        try:
            return [wide(g) for g in vectorized(values, *tensors)]
        except RuntimeError as error:
            if not any(words in str(error) for words in _OF_TORCH_FUNC):
                raise
        leaves, rows = [value.detach().requires_grad_() for value in values], []
        for i in range(self.batch_size):
            reset()
            own = [t if dim is None else t[i] for t, dim in zip(tensors, dims, strict=True)]
            with torch.enable_grad():
                total = one_sample(leaves, *own)
            rows.append(torch.autograd.grad(total, leaves, materialize_grads=True))
        return [wide(torch.stack(of)) for of in zip(*rows, strict=True)]

    def _surrogate(self, parameters: dict[str, Tensor], tensors: list[Tensor]) -> Tensor:
        """Return the inner product of the results with their gradients."""
        inputs, tensors = tensors[: len(self.axes)], tensors[len(self.axes) :]
        given = []
        for layer in self.nested_calls:
            given.append(tensors[: len(layer.output_axes)])
            tensors = tensors[len(layer.output_axes) :]
        results = self._run(parameters, inputs, given)
        total = torch.zeros((), device=next(iter(parameters.values())).device)
        for result, grad in zip(results, tensors, strict=True):
            if result.shape != grad.shape:
                raise UnsupportedGradientError(self._differs("a result has another shape for one sample"))
            if is_inexact(result):
                total = total + (wide(result) * wide(grad).conj()).sum().real
        return total

    def _run(self, parameters: dict[str, Tensor], inputs: list[Tensor], given: list[list[Tensor]]) -> list[Tensor]:
        """Run the code; return the tensors that it computed and passed to layers, then those that it returned."""
        results: list[Tensor] = []
        remaining = iter(zip(self.nested_calls, given, strict=True))

        def stub(module: nn.Module) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                layer, outputs = next(remaining, (None, []))
                if layer is None or layer.module is not module:
                    raise UnsupportedGradientError(self._differs("it calls other layers for one sample"))
                got = Skeleton((args, kwargs)).tensors
                results.extend(got[i] for i in layer.tapped)
                return layer.output.fill([tensor.clone() for tensor in outputs] if self.in_place else outputs)

            return call

        with ExitStack() as stack:
            for module in dict.fromkeys(layer.module for layer in self.nested_calls):
                stack.enter_context(_attribute(module, call_slot(), stub(module)))  # bypasses hooks, which may gather
            places = {place: value for name, value in parameters.items() for place in self.aliases[name]}
            stack.enter_context(substituted(places))
            inputs = [tensor.clone() for tensor in inputs] if self.in_place else list(inputs)
            args, kwargs = self.arguments.fill(inputs)
            output = self.module.forward(*args, **kwargs)  # without hooks: the arguments are their results already
        if next(remaining, None) is not None:
            raise UnsupportedGradientError(self._differs("it calls fewer layers for one sample"))
        returned = Skeleton(output).tensors
        return [*results, *[returned[i] for i in self.computed]]

    def _again(self, grads: Sequence[Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Return the plain gradients from a second run of the code for all samples, in at least ``dtype`` if given."""

        def converted(tensor: Tensor) -> Tensor:
            return tensor.detach().to(promoted_type(tensor, dtype))

        autocast = torch.autocast(*self.autocast) if self.autocast and dtype is None else nullcontext()
        leaves = {name: converted(self.values[name]).requires_grad_() for name in self.aliases}
        with self.quietly(), autocast, undisturbed(self.module, drop_rate=None), torch.enable_grad():
            total = self._surrogate(leaves, [converted(t) for t in (*self.saved, *grads)])
            found = torch.autograd.grad(total, [*leaves.values()], allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, found, strict=True))

    def _check(self, gradients: Mapping[str, Tensor], filled: Sequence[Tensor]) -> None:
        """Compare the sum of the samples' gradients with the plain gradient, on a step that is to be verified."""
        if self.leaves is None:
            return
        grads = [grad for grad in self.grads if grad is not None]
        dtypes = [t.dtype for t in (*self.saved, *self.results, *grads) if is_inexact(t)]
        precision = max((torch.finfo(dtype).eps for dtype in (*dtypes, *(self.autocast or ())[1:])), default=0.0)
        found = {name: Materialized(gradient) for name, gradient in gradients.items()}
        sizes = [*map(magnitude, found.values()), *(wide(grad).norm() for grad in grads)]
        size = torch.stack([size.double() for size in sizes]).nan_to_num(0.0, 0.0).max()
        summands = max((grad.numel() for grad in grads), default=0)
        again = partial(self._again, filled)
        name = not_adding_up(found, self.leaves, precision, size, again, summands)
        if name and (moved := movements_of(lambda: again(None), lambda one: total_norm([dense(one)]))):
            # The code may compute in a coarser dtype than it gets and returns.
            name = not_adding_up(found, self.leaves, precision, size, rounding=moved)
        if name:
            raise UnsupportedGradientError(
                self._differs(
                    f"the samples' gradients of {name} do not add up to its plain gradient. The code draws random "
                    "numbers, mixes samples, or has a value that reaches the loss other than through its outputs (an "
                    "attribute, a list, a hook)"
                )
            )

    def _differs(self, what: str) -> str:
        return (
            f"the code of {type(self.module).__name__} that uses {', '.join(self.aliases)} cannot be run again sample "
            f"by sample: {what}. Move dropout and other random operations into a layer of their own (nn.Dropout), "
            "write x = x + y in place of x += y, and compute each sample without the others."
        )


@contextmanager
def _attribute(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of one instance in a block."""
    own = vars(module).get(name)
    vars(module)[name] = value
    try:
        yield
    finally:
        if own is None:
            del vars(module)[name]
        else:
            vars(module)[name] = own
