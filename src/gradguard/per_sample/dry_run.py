"""Dry runs: find the batch axes of a module's layers by running it on two samples and on three.

The dimension of a layer's input or output that grows with the number of samples is the batch axis, wherever a transpose
or a view has put it. A tensor with equal shapes in both runs (a table of position ids, for example) belongs to no
sample. No axis is guessed from sizes that may be equal by chance, such as in a batch of 16 samples of 16 tokens.
"""

import math
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.call_arguments import (
    Arguments,
    Batch,
    Slot,
    Versions,
    is_inexact,
    tensor_leaves,
    versions_of,
    written,
)
from gradguard.per_sample.layers.call import BatchAxis
from gradguard.per_sample.operations import ObservedOperation, operation_of, stays
from gradguard.per_sample.origins import Origins, name_of, tensors_given
from gradguard.per_sample.refusals import KEEPS_STATE, own_failure, rows_are_chosen
from gradguard.per_sample.rerun import (
    TOO_RARE,
    coarseness,
    frozen,
    is_draw,
    seed_generators,
    undisturbed,
    without_graph,
)
from gradguard.per_sample.row_choices import RowChoices, SafeSelections
from gradguard.state.generators import generator_states, have_drawn
from gradguard.torch_private import each_operation, never_compiled, parameter_slots

SIZES = (2, 3)

RESULT = "()"
"""Stands in a slot, instead of a parameter's name, for the result of an embedding of ids that belong to no sample."""

_DROPOUTS = {
    F.dropout, F.alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout, torch.dropout,
}  # fmt: skip

_NO_VALUES = {"detach", "requires_grad_"}
"""Functions whose result is a tensor, through which no gradient flows to their arguments."""


@dataclass
class ObservedCall:
    """One call of a module, in one run.

    Attributes:
        module: The module.
        caller: Index of the call that made this one; -1 for the outermost.
        inputs: Shapes of its input tensors.
        outputs: Shapes of its output tensors.
        uses: Trained parameters that its own code used.
        operations: Its operations with these parameters, in order; None for an unknown one.
        values: Copies of inputs, then of outputs, if the observer stores values.
        in_place: Whether its own code wrote into outputs of the modules that it called.
        draws: Whether its own code drew random numbers, or would have with dropout enabled.
    """

    module: nn.Module
    caller: int
    inputs: list[torch.Size]
    outputs: list[torch.Size] = field(default_factory=list)
    uses: set[Slot] = field(default_factory=set)
    operations: list[ObservedOperation | None] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    in_place: bool = False
    draws: bool = False


class CallObserver(TorchFunctionMode):
    """Record the calls of modules, and the parameters that each call uses, while a module runs without dropout.

    Args:
        slots: The modules and attributes that hold trained parameters.
        keep_values: Whether to store copies of inputs and outputs.
        without_samples: Indices of the calls of embeddings whose results belong to no sample; None to guess them.

    Attributes:
        calls: The calls, in the order in which they began.
        alike: Indices of the calls that were treated as embeddings whose results belong to no sample.
        rows: The operations that select rows.
        precision: Machine epsilon of the coarsest dtype of the computation.
    """

    def __init__(
        self, slots: Set[Slot], keep_values: bool = False, without_samples: Set[int] | None = frozenset()
    ) -> None:
        super().__init__()
        self._without_samples, self._results = without_samples, list[Tensor]()
        self.alike: set[int] = set()
        self.precision = torch.finfo(torch.float64).eps
        self._origins = Origins()
        self.rows = RowChoices(self._origins)
        self.calls: list[ObservedCall] = []
        self._trained, self._keep_values = slots, keep_values
        self._slots = {id(parameter_slots(module)[slot]): (module, slot) for module, slot in slots}
        self._running: list[int] = []
        self._returned: list[Versions] = []

    def enter(self, module: nn.Module, arguments: Arguments) -> None:
        """Record that ``module`` starts; FSDP2 may just have given it other parameters."""
        for slot, parameter in parameter_slots(module).items():
            if (module, slot) in self._trained:
                self._slots[id(parameter)] = (module, slot)
        self.rows.paused = False
        tensors = tensor_leaves(arguments)
        caller = self._running[-1] if self._running else -1
        call = ObservedCall(module, caller, [t.shape for t in tensors])
        if self._keep_values:
            call.values += [t.clone() for t in tensors]
        self._running.append(len(self.calls))
        self._returned.append([])
        self.calls.append(call)

    def is_outermost(self, module: nn.Module) -> bool:
        """Return whether ``module`` is the only module that is running."""
        return len(self._running) == 1 and self.calls[0].module is module

    def leave(self, module: nn.Module, output: Any) -> None:
        """Record that ``module`` ends, unless one of its hooks failed before it started."""
        if not self._running or self.calls[self._running[-1]].module is not module:
            return
        number = self._running.pop()
        call, tensors = self.calls[number], tensor_leaves(output)
        known = self._without_samples
        if _may_have_no_samples(call) if known is None else number in known:
            self.alike.add(number)
            self._slots[id(output)] = module, RESULT
            self._results.append(output)  # keeps its id from being reused
        call.outputs = [t.shape for t in tensors]
        call.in_place = bool(written(self._returned.pop()))
        if self._returned:
            self._returned[-1] += versions_of(tensors)
        if self._keep_values:
            call.values += [t.clone() for t in tensors]

    @never_compiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drops = kwargs.get("dropout_p")
        if func in _DROPOUTS:
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            drops = given.get("training", given.get("train", True)) and given.get("p", 0.5)
        if drops:
            self._drawn()
        name = name_of(func)
        self.rows.look_at(name, args, kwargs)
        given = [*tensors_given(args, kwargs)]
        run = lambda *args, **kwargs: without_dropout(func, args, kwargs)  # noqa: E731
        result = self._origins.follow(name, run, args, kwargs, list(map(self._origins.of, given)))
        if stays(func, args, kwargs, result):
            return result
        if id(result) in self._slots:  # dropout of a parameter returned the parameter itself: make another tensor
            result = result.view_as(result)
        used = [slot for tensor in given if (slot := self._slots.get(id(tensor)))]
        if used and self._running and name not in _NO_VALUES and any(map(is_inexact, tensor_leaves(result))):
            call = self.calls[self._running[-1]]
            call.uses.update(used)
            call.operations.append(self._known(call.module, func, args, kwargs, result))
        return result

    def _known(self, module: nn.Module, func: Any, args: Any, kwargs: Any, result: Any) -> ObservedOperation | None:
        """Return the known operation that a function did with parameters of ``module``; None if it is unknown."""
        found = operation_of(func, args, kwargs, lambda value: id(value) in self._slots)
        slots = tuple([self._slots[id(parameter)] for parameter in found.parameters.values()]) if found else ()
        if found is None or any(holder is not module and name != RESULT for holder, name in slots):
            return None
        return ObservedOperation(found.kind, slots, found.operand.shape, result.shape)

    def __enter__(self) -> Any:
        def look_at(func: Any, args: Any, kwargs: Any) -> Any:
            if is_draw(func, args, kwargs):
                self._drawn()
            result = func(*args, **kwargs)
            if self._keep_values:
                self.precision = max(
                    [self.precision, *map(coarseness, result if isinstance(result, list | tuple) else [result])]
                )
            return result

        self._operations = each_operation(look_at)
        self._operations.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operations.__exit__(*error)

    def _drawn(self) -> None:
        if self._running:
            self.calls[self._running[-1]].draws = True


ObservedBy = Callable[[CallObserver], AbstractContextManager[None]]
"""Returns a block in which an observer gets the calls of modules."""


class WithoutDropout(TorchFunctionMode):
    """Switch off the dropout of torch's functions in a block."""

    @never_compiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return without_dropout(func, args, kwargs or {})


def without_dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of torch without its dropout."""
    if func in _DROPOUTS:
        return args[0] if args else kwargs["input"]
    if kwargs.get("dropout_p"):
        kwargs = {**kwargs, "dropout_p": 0.0}
    return func(*args, **kwargs)


def _may_have_no_samples(call: ObservedCall) -> bool:
    """Guess whether a call of an embedding looks up ids that belong to no sample, such as positions ``[1, T]``."""
    ids = call.inputs[0] if call.inputs else torch.Size()
    is_one_row = ids[0] not in SIZES if len(ids) == 1 else ids[:1] == (1,)
    return isinstance(call.module, nn.Embedding) and bool(call.uses) and is_one_row


class DryRun:
    """Run ``module`` on two and on three of the samples of a batch.

    Args:
        module: The outermost module.
        batch: The arguments of one real call.
        slots: The modules and attributes that hold trained parameters.
        observed_by: Makes a block in which a `CallObserver` gets the calls of modules.
        seed: The seed of the random numbers that the module draws.
        structure: Whether the layers inside are followed; otherwise only the module's own inputs and outputs count.

    Attributes:
        draws: Whether the module drew random numbers, other than for dropout.
        changes_buffers: Whether the module changed its buffers.
        selections: The operations that select rows.
        untold: Why the samples in an output of the outermost call cannot be distinguished, by position of the output.
    """

    def __init__(
        self,
        module: nn.Module,
        batch: Batch,
        slots: Set[Slot],
        observed_by: ObservedBy,
        seed: int,
        structure: bool = True,
    ) -> None:
        self._seed, self.draws, self.changes_buffers, self._structure = seed, False, False, structure
        self.untold: dict[int, str] = {}
        self._module, self._batch = module, batch
        self._slots, self._observed_by = slots, observed_by
        self._attributes = frozen(module, buffers=False).tensors
        observers = [self._run(samples, without_samples=None if structure else frozenset()) for samples in SIZES]
        self.runs = [observer.calls for observer in observers]
        self.selections = SafeSelections(*[observer.rows.selections for observer in observers])
        embeddings = [i for i, call in enumerate(self.calls) if isinstance(call.module, nn.Embedding) and call.uses]
        alike = {i for i in embeddings if not self.grows(i)} if structure else set[int]()
        if any(observer.alike != alike for observer in observers):  # a wrong guess
            self.runs = [self._run(samples, without_samples=alike).calls for samples in SIZES]
        if structure and self.selections.choosing:
            raise UnsupportedGradientError(rows_are_chosen(module, self.selections.choosing))
        called = [[id(call.module) for call in run] for run in self.runs]
        if structure and called[0] != called[1]:
            raise UnsupportedGradientError(
                f"{type(module).__name__} calls other layers for {SIZES[0]} samples than for {SIZES[1]}, so gradguard "
                "cannot find the samples in the layers' inputs. Let the module call the same layers for every batch "
                "size."
            )
        self._values: list[list[ObservedCall]] | None = None
        self._precision = 0.0

    @property
    def calls(self) -> Sequence[ObservedCall]:
        """The calls of the first run."""
        return self.runs[0]

    def grows(self, call: int) -> bool:
        """Return whether call number ``call`` returns a tensor of another shape for three samples than for two."""
        two, three = (run[call] for run in self.runs)
        return two.outputs != three.outputs

    def axes(self, call: int) -> tuple[list[BatchAxis | None], list[BatchAxis | None]]:
        """Return the batch axis of each input tensor of call number ``call``, and of each output tensor."""
        two, three = self.runs[0][call], self.runs[1][call]
        start = len(two.inputs)
        if len(two.outputs) != len(three.outputs):
            raise UnsupportedGradientError(
                f"{type(two.module).__name__} returns {len(two.outputs)} tensors for two samples and "
                f"{len(three.outputs)} for three. Expected the same number for every batch size: put the samples into "
                "one tensor, as torch.stack does."
            )
        if start == len(three.inputs):
            inputs = [self._axis(call, i, *pair) for i, pair in enumerate(zip(two.inputs, three.inputs, strict=True))]
        elif two.caller < 0 and not (self._structure and two.uses):
            inputs = []  # a list with a tensor for each sample
        else:
            raise UnsupportedGradientError(
                f"{type(two.module).__name__} gets {start} tensors for two samples and {len(three.inputs)} for three, "
                "so gradguard cannot find the samples in them. Put the samples into one tensor, as torch.stack does."
            )
        outputs: list[BatchAxis | None] = []
        for i, pair in enumerate(zip(two.outputs, three.outputs, strict=True)):
            try:
                outputs.append(self._axis(call, start + i, *pair))
            except UnsupportedGradientError as error:
                if two.caller >= 0:
                    raise
                self.untold[i] = str(error)  # e.g. scores of pairs of samples; only a gradient of it is refused
                outputs.append(None)
        if two.caller < 0 and self.untold and not any(outputs):
            raise UnsupportedGradientError(next(iter(self.untold.values())))
        return inputs, outputs

    def _axis(self, call: int, leaf: int, two: torch.Size, three: torch.Size) -> BatchAxis | None:
        if two == three:
            return None
        dims = [d for d in range(len(two)) if len(two) == len(three) and two[d] != three[d]]
        if len(dims) != 1 or two[dims[0]] % 2 or two[dims[0]] // 2 * 3 != three[dims[0]]:
            name = type(self.calls[call].module).__name__
            raise UnsupportedGradientError(
                f"{name} works on a tensor of shape {tuple(two)} for two samples and {tuple(three)} for three, so its "
                "samples cannot be told apart. Expected one dimension that grows with the number of samples."
            )
        dim = dims[0]
        if two[dim] == SIZES[0]:
            return BatchAxis(dim)
        return BatchAxis(dim, self._samples_vary_fastest(call, leaf, dim), flattened=True)

    def _samples_vary_fastest(self, call: int, leaf: int, dim: int) -> bool:
        """Return whether samples vary fastest in ``dim``, by comparing values: both runs begin with the same two."""
        if self._values is None:
            observers = [self._run(samples, keep_values=True) for samples in SIZES]
            self._values = [observer.calls for observer in observers]
            self._precision = max([observer.precision for observer in observers])
        two, three = (run[call].values[leaf].movedim(dim, 0) for run in self._values)
        stretches = _close(two, three[: len(two)], self._precision)
        strided = _close(two.unflatten(0, (-1, 2)), three.unflatten(0, (-1, 3))[:, :2], self._precision)
        if stretches == strided:
            name = type(self.calls[call].module).__name__
            raise UnsupportedGradientError(
                f"{name} works on samples that were flattened into dimension {dim}, and their order cannot be "
                "determined: all its rows are alike, or the module mixes samples or draws random numbers. Give it a "
                "tensor with a batch dimension of its own, [batch, ..., features]."
            )
        return strided

    def _run(
        self, samples: int, keep_values: bool = False, without_samples: Set[int] | None = frozenset()
    ) -> CallObserver:
        last = min(1, self._batch.size - 1)
        chosen = [0, last, last][:samples]  # in order, because a module may need sorted lengths
        args, kwargs = self._batch.samples(chosen)
        observer = CallObserver(self._slots, keep_values, without_samples)
        with (
            self._observed_by(observer),
            undisturbed(self._module, TOO_RARE),
            torch.enable_grad() if samples == SIZES[0] else without_graph(self._module),
            observer,
        ):
            seed_generators(self._seed)
            before = generator_states([])
            buffers, parameters = versions_of(self._module.buffers()), versions_of(self._module.parameters())
            attributes = versions_of(self._attributes)
            try:
                self._module(*args, **kwargs)
            except UnsupportedGradientError:
                raise
            except Exception as error:
                raise UnsupportedGradientError(own_failure(error) or self._failed(samples, error)) from error
            self.draws |= have_drawn(before)
            for changed in written(parameters):
                name = next(name for name, parameter in self._module.named_parameters() if parameter is changed)
                raise UnsupportedGradientError(
                    f"forward writes into its parameter {name}, and this change, which depends on the samples, is "
                    "not clipped. Is it an Embedding with max_norm? Set max_norm=None. Is it a moving average of other "
                    "weights (the key encoder of MoCo, the target of BYOL)? Update it after optimizer.step(), outside "
                    "of forward."
                )
            if changed := written(attributes):
                raise UnsupportedGradientError(
                    f"forward writes into a tensor of shape {tuple(changed[0].shape)} that is an attribute of "
                    f"{type(self._module).__name__} or of a layer in it, so no sample can be run again from the state "
                    "before. Hold it in a buffer (register_buffer), which is put back."
                )
            self.changes_buffers |= bool(written(buffers))
        return observer

    def _failed(self, samples: int, error: Exception) -> str:
        if "does not require grad" in str(error):
            return (
                f"{type(self._module).__name__} differentiates its own parameters in forward (as the inner step of "
                "MAML does), which gradguard cannot follow. Take the inner gradient of each sample by itself, by "
                "torch.func.grad on a function of the weights, in torch.vmap over samples."
            )
        batch = self._batch
        shapes = ", ".join([str(tuple(tensor.shape)) for tensor, _ in batch.dims])
        links = [
            tensor for tensor, _ in batch.dims if not is_inexact(tensor) and tensor.dim() == 2 and len(tensor) == 2
        ]
        other = (
            " Does an argument of shape [2, links] link the nodes of graphs that follow one another in one dimension, "
            "as a loader of torch_geometric returns them? Pass nodes [graphs, nodes, ...] and the links within each "
            "graph, and flatten them inside the module."
            if links
            else " Nor could it be run with the samples in the second dimension of a tensor: transpose it to "
            "[batch, ...]."
            if batch.batch_first
            and any(dim is None and tensor.shape[1:2] == (batch.size,) for tensor, dim in batch.dims)
            else ""
        )
        return (
            f"{type(self._module).__name__} raised {type(error).__name__} when gradguard ran it on {samples} of its "
            f"{batch.size} samples, to find which of its inputs (shapes {shapes}) belong to samples: {error}.{other} "
            f"Every input whose batch dimension has size {batch.size} is assumed to have one entry for each sample; "
            "make a constant of that size a buffer of the module. With batch_first=False, a mask [batch, time] is "
            f"recognised by its shape: pad this batch to another length than {batch.size}. {KEEPS_STATE}"
            f"{batch.words_on_divided}"
        )


def run_quietly(module: nn.Module, batch: Batch, observed_by: ObservedBy) -> None:
    """Run ``module`` once on the whole batch, for the error that it may raise, and put its state back."""
    args, kwargs = batch.samples(range(batch.size))
    with observed_by(CallObserver(set())), undisturbed(module, None), torch.enable_grad():
        module(*args, **kwargs)


def _close(a: Tensor, b: Tensor, precision: float) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    scale = float(b.abs().max()) if b.numel() else 0.0
    tolerance = 1e3 * max(precision, torch.finfo(a.dtype).eps) * (scale if math.isfinite(scale) else 0.0)
    return torch.allclose(a, b, rtol=0, atol=tolerance)
