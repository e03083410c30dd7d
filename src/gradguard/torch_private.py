"""Every private name of torch that gradguard reads: a table, and one function for each use. No other file has one.

Any release of torch may drop such a name. Importing gradguard still works if a name in `NEEDS` is missing: the function
that reads it raises an explanation when it is called. Names that torch itself and its extensions rely on, such as
``_parameters`` of a module or ``_version`` of a tensor, are read without a check.

Checked: torch 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0, on Linux without a GPU, have every name of `NEEDS`. Names that
an object may lack are read with a default: marks that torch leaves on some objects, and two that FSDP2 has since 2.12.
`tests/test_torch_private.py` checks all names in the installed torch.
"""

import ctypes
import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import chain
from operator import attrgetter, methodcaller
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from gradguard.errors import UnsupportedVersionError
from gradguard.replacements import Replacement, once

_F = TypeVar("_F", bound=Callable[..., Any])


class Need(NamedTuple):
    """Private names of torch that one function cannot do without.

    Attributes:
        holder: The module, class or object that has the names.
        names: The names, separated by spaces.
        feature: The feature of gradguard that reads them.
        instead: A workaround for the user.
    """

    holder: str
    names: str
    feature: str
    instead: str = ""


_TREE = "keystr tree_flatten tree_flatten_with_path tree_leaves tree_map tree_unflatten"
_STACK = "_len_torch_function_stack _pop_torch_function_stack _push_on_torch_function_stack"
_EVERY = "_global_forward_pre_hooks _global_forward_hooks _global_backward_pre_hooks _global_backward_hooks"
_FLAT = "_handle flat_param _params _fqns _shapes _shard_param_infos _use_orig_params"
_UNSCALED = "Clip after scaler.unscale_(optimizer) with gg.clip_grad_norm_ meanwhile. "

# fmt: off
NEEDS = {

    "is_alone": Need("torch._C", "_storage_Use_Count", "using the memory of gradients again"),
    "are_operations_watched": Need("torch._C", "_len_torch_dispatch_stack", "noticing who sees each operation"),
    "tree": Need("torch.utils._pytree", _TREE, "looking into nested arguments"),

    "current_graph_task": Need("torch._C", "_current_graph_task_id", "telling one backward from the next"),
    "call_before_backwards": Need("torch.autograd", "_engine_run_backward", "noticing that a backward begins"),
    "call_after_backward": Need("torch.autograd.Variable._execution_engine", "queue_callback",
                                "noticing the end of a backward"),
    "gradients_of": Need("torch.autograd.Variable._execution_engine", "run_backward", "checking gradients"),
    "next_sequence_number": Need("torch.autograd", "_get_sequence_nr",
                                 "naming the module of an operation", "Leave out model=. "),

    "each_operation": Need("torch.utils._python_dispatch", "TorchDispatchMode",
                           "giving each sample the random numbers that it had in its batch"),
    "pop_function_mode": Need("torch._C", _STACK, "noting which functions a forward calls"),
    "decompositions": Need("torch._decomp", "get_decompositions", "bounding what fused operations round"),

    "global_hook_tables": Need("torch.nn.modules.module", _EVERY, "looking at the hooks of all modules"),
    "compiled_module": Need("torch._dynamo.eval_frame", "OptimizedModule", "telling whether a module is compiled"),
    "stop_compiling": Need("a compiled module", "_orig_mod", "running a compiled module as it was before"),

    "gradients_are_scaled": Need("torch.amp", "GradScaler._per_optimizer_states grad_scaler.OptState",
                                 "a Guard under GradScaler", _UNSCALED),
    "scaler_states_of": Need("torch.amp.GradScaler", "_per_optimizer_states",
                             "putting a GradScaler back as it was"),
    "overflows_of": Need("torch.amp.GradScaler", "_per_optimizer_states",
                         "telling whether a GradScaler skipped a step"),
    "loss_scale_of": Need("torch.amp.GradScaler", "_scale", "reading the scale of a loss"),
    "traced_scale_of": Need("torch.amp.GradScaler", "_enabled _init_scale _scale",
                            "a GradScaler as scale= in compiled code", "Pass a tensor. "),

    "is_within_compiled_code": Need("torch._dynamo.convert_frame", "output_codes", "noticing a graph break"),
    "traced_inputs": Need("torch._dynamo.symbolic_convert.tls", "current_tx", "noticing a graph break"),

    "grads_of": Need("torch._C", "DisableTorchFunctionSubclass", "reading gradients"),
    "has_usual_shard_order": Need("torch.distributed.tensor.DTensor._spec", "shard_order compute_default_shard_order",
                                  "telling which elements a process holds"),
    "process_groups": Need("torch.distributed.distributed_c10d", "_world.pg_group_ranks", "a norm over processes"),
    "device_types_of": Need("torch.distributed.ProcessGroup", "_device_types", "a norm over processes"),
    "default_store": Need("torch.distributed.distributed_c10d", "_get_default_store",
                          "telling which process is missing"),
    "root_mesh_of": Need("torch.distributed.DeviceMesh", "_get_root_mesh", "a norm over processes"),

    "flattened_by_fsdp1": Need("torch.distributed.fsdp._common_utils", "FSDP_FLATTENED",
                               "telling that FSDP1 holds a parameter"),
    "is_silent_fsdp1": Need("FullyShardedDataParallel", "_sync_gradients _handle flat_param",
                            "telling that FSDP1 is inside no_sync()"),
    "flat_part_of": Need("FullyShardedDataParallel", _FLAT, "the norm of what FSDP1 holds",
                         "Use fully_shard(model). "),
    "meshes_of_fsdp2": Need("FSDPModule", "_get_fsdp_state()._fsdp_param_group",
                            "per-sample clipping of what fully_shard holds"),
    "let_fsdp2_only_cast": Need("FSDPModule", "_get_fsdp_state()._training_state _modules_to_run_forward",
                                "comparing samples of a sharded model with samples alone", "Or pass check=False. "),
}
"""Rows by the name of the function that reads them; `tree` and `compiled_module` serve several functions."""

# fmt: on


def _refuse(row: str, *_: Any, **__: Any) -> NoReturn:
    holder, names, feature, instead = NEEDS[row]
    raise UnsupportedVersionError(
        f"{feature} needs {holder}.{names.replace(' ', ', ')}, which torch {torch.__version__} does not have. {instead}"
        "Install an older torch, or a newer gradguard."
    )


def _find(row: str, name: str = "") -> Any:
    """Return the object that a row names, in a module that torch imports itself; ``name`` selects one of several."""
    path = f"{NEEDS[row].holder}.{name or NEEDS[row].names}"
    try:
        return attrgetter(path.removeprefix("torch."))(torch)
    except AttributeError:
        _refuse(row)


def _bind(row: str, name: str = "") -> Callable[..., Any]:
    """Return the function that a row names; if torch lacks it, a function that raises an explanation."""
    try:
        return _find(row, name)
    except UnsupportedVersionError:
        return functools.partial(_refuse, row)


def _needs(function: _F, row: str = "") -> _F:
    """Let ``function`` raise an explanation if a name of its row is gone. It must not call users' code."""
    row = row or function.__name__

    def call(*args: Any) -> Any:
        try:
            return function(*args)
        except (AttributeError, ImportError, KeyError):
            _refuse(row)

    functools.update_wrapper(call, function).__name__ = row
    call.__code__ = call.__code__.replace(co_name=row)  # torch.compile counts recompilations by code object
    return call  # type: ignore[return-value]


# Arithmetic over many tensors at once.

foreach_norm = torch._foreach_norm
"""Return the norm of each tensor."""
foreach_mul_ = torch._foreach_mul_
"""Multiply each tensor by a 0-dim factor."""
foreach_copy_ = torch._foreach_copy_
"""Write each source into the tensor at its place."""
assert_async = torch._assert_async
"""Let the device fail with a message unless a condition is true."""


def foreach_clamp_(tensors: list[Tensor], low: float, high: float) -> None:
    """Clamp each tensor."""
    torch._foreach_clamp_min_(tensors, low)
    torch._foreach_clamp_max_(tensors, high)


# Tensors.

version_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return how often a tensor has been written in place. A change of the number shows that other code wrote to it."""
base_of: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""Return the base of a view; None for a tensor that is not a view."""
sparse_values: Callable[[Tensor], Tensor] = methodcaller("_values")
"""Return the values of a sparse COO tensor, coalesced or not, without a copy."""
sparse_indices: Callable[[Tensor], Tensor] = methodcaller("_indices")
"""Return the indices of a sparse COO tensor, coalesced or not."""


_uses_of_storage = _bind("is_alone")


def is_alone(tensor: Tensor) -> bool:
    """Tell whether nothing else refers to the memory of a tensor on the CPU: no view, array, storage or process."""
    lone = torch.empty(1, device="cpu")  # nothing else refers to its memory, however this interpreter counts
    counts = [
        (_uses_of_storage(storage._cdata), sys.getrefcount(storage))
        for storage in (tensor.untyped_storage(), lone.untyped_storage())
    ]
    return counts[0] == counts[1] and not tensor.is_shared()


def versions_of(tensors: Iterable[Tensor]) -> list[int]:
    """Return the `version_of` each tensor."""
    return list(map(version_of, tensors))


def hooks_of_tensor(tensor: Any) -> list[Any]:
    """Return the hooks on a tensor's gradient, and the hooks that run after the gradient was added to ``.grad``."""
    return [*(tensor._backward_hooks or {}).values(), *(tensor._post_accumulate_grad_hooks or {}).values()]


def loader_has_begun(loader: Any) -> bool:
    """Tell whether a DataLoader holds workers or a position in its data; False if that cannot be read."""
    return getattr(loader, "_iterator", None) is not None


# Addresses of C functions, for the compiled kernels.


def exchange_table() -> int | None:
    """Return the address of DLPack's table of functions, by which C code reads a tensor; None if torch has none."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    open_ = ctypes.pythonapi.PyCapsule_GetPointer
    open_.restype, open_.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return open_(capsule, b"dlpack_exchange_api")


def parallel_for() -> int | None:
    """Return the address of the C function that runs a loop on torch's own threads; None if torch has none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = ctypes.CDLL(str(library)).torch_parallel_for
    except (OSError, AttributeError):
        return None
    return ctypes.cast(found, ctypes.c_void_p).value


_modes = _bind("are_operations_watched")


def are_operations_watched() -> bool:
    """Tell whether a `TorchDispatchMode` intercepts the operations of this thread."""
    return _modes() > 0


# Nested arguments and results. Only torch's own functions handle the containers that other packages have registered.

keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten = [
    _bind("tree", name) for name in _TREE.split()
]


# Autograd.

current_graph_task = _bind("current_graph_task")
"""Return the number of the backward that runs in this thread, or -1; a hook has no other way to identify it."""
next_sequence_number = _bind("next_sequence_number")
"""Return the number that autograd will give to this thread's next node; the nodes of a module form a range of them."""
sequence_number_of: Callable[[Node], int] = methodcaller("_sequence_nr")
"""Return the number that autograd gave to a node in the thread that made it; leaves have the largest number."""
input_metadata_of: Callable[[Node], Sequence[Any]] = attrgetter("_input_metadata")
"""Return shape, dtype and device of each gradient that a node will receive."""
call_after_backward: Callable[[Callable[[], None]], None] = _bind("call_after_backward")
"""Call a function once the backward that runs in this thread is complete."""


class Backward(NamedTuple):
    """A backward that begins.

    Attributes:
        roots: The tensors or edges that it starts from.
        gradients: The initial gradient of each root; None for a root that needs no gradient, which the engine refuses.
        accumulates: Whether it adds to ``.grad``; `torch.autograd.grad` does not.
    """

    roots: Sequence[Any]
    gradients: Sequence[Tensor | None]
    accumulates: bool


_before_backwards: list[Callable[[Backward], Callable[[], object] | None]] = []


def _tell_and_run(original: Callable, roots: Any, gradients: Any = (), *args: Any, **kwargs: Any) -> Any:
    backward = Backward(roots, gradients, kwargs.get("accumulate_grad", True))
    ends = [end for tell in tuple(_before_backwards) if (end := tell(backward)) is not None]
    result = original(roots, gradients, *args, **kwargs)
    for end in ends:
        end()
    return result


_engine = Replacement("torch.autograd", "_engine_run_backward", _tell_and_run, decorate=lambda f: never_compiled(f))


def call_before_backwards(tell: Callable[[Backward], Callable[[], object] | None]) -> Callable[[], None]:
    """Call ``tell`` with each backward that begins, and its result when that backward ends; return a way to stop."""
    _find("call_before_backwards")
    heard = lambda backward: tell(backward)  # noqa: E731  # a new object: each access to a bound method makes another
    _before_backwards.append(heard)
    return once(lambda: _before_backwards.remove(heard), _engine.use())


_run_backward = _bind("gradients_of")


def gradients_of(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor], keep: bool
) -> Sequence[Tensor | None]:
    """Return the result of `torch.autograd.grad`, with None for an input that is not used.

    `torch.autograd.grad` imports the compiler's symbolic shapes, half a second, to compare the shapes of
    ``grad_outputs``. Plain tensors of equal shapes and dtypes do not need that.
    """
    is_usual = {*map(type, outputs), *map(type, inputs)} == {Tensor}
    for one, v in zip(outputs, grad_outputs, strict=True):
        is_usual = is_usual and one.shape == v.shape and one.dtype == v.dtype
    if not is_usual:
        return torch.autograd.grad(outputs, inputs, grad_outputs, retain_graph=keep, allow_unused=True)
    return _run_backward(tuple(outputs), tuple(grad_outputs), keep, False, tuple(inputs), True, accumulate_grad=False)


def recorded_stack(node: Node) -> Sequence[str]:
    """Return the stack frames that recorded ``node``, outermost first; empty unless anomaly detection was on."""
    metadata: Any = node.metadata  # a property, which torch annotates as a method
    return metadata.get("traceback_", ())


def saved_constant(node: Node, name: str) -> Any:
    """Return the constant ``name`` that ``node`` saved; NaN, which satisfies no comparison, if torch does not tell."""
    return _signed(getattr(node, f"_saved_{name}", math.nan))


def saved_value(node: Node, name: str) -> Any:
    """Return the value that ``node`` saved as ``name``; AttributeError if it has none, RuntimeError if it is freed."""
    return _signed(getattr(node, f"_saved_{name}"))


def _signed(value: Any) -> Any:
    """Return a saved value with its sign: nodes store negative whole numbers as unsigned 64-bit ones."""
    if type(value) is int:
        return value - (1 << 64) if value >= 1 << 63 else value
    return type(value)(map(_signed, value)) if type(value) in (list, tuple) else value


@functools.cache
def _saved(kind: type) -> dict[str, bool]:
    """Return the names of the values that nodes of a class save, and for each whether it is a tensor."""
    names = [name for name in dir(kind) if name.startswith("_saved_")]
    return {name.removeprefix("_saved_"): hasattr(kind, f"_raw{name}") for name in names}


def saved_tensors_of(node: Node) -> dict[str, Tensor]:
    """Return by name the tensors that ``node`` saved and no hook has packed; empty if torch does not expose them."""
    raw = {name: getattr(node, f"_raw_saved_{name}") for name, is_tensor in _saved(type(node)).items() if is_tensor}
    plain = {name: getattr(one, "data", None) for name, one in raw.items() if getattr(one, "unpack_hook", one) is None}
    return {name: data for name, data in plain.items() if isinstance(data, Tensor)}


def saved_tensors(node: Node) -> list[Tensor]:
    """Return the tensors that ``node`` saved, with their graph; skip those that were freed or changed in place."""
    found = []
    for name in _saved(type(node)):
        with suppress(RuntimeError):
            found.append(getattr(node, f"_saved_{name}"))
    return [one for one in found if isinstance(one, Tensor)]


def saved_all(node: Node, names: Sequence[str]) -> list[Any] | None:
    """Return the values that ``node`` saved under all of ``names``; None if one is missing, freed or changed."""
    try:
        return [saved_value(node, name) for name in names]
    except (AttributeError, RuntimeError):
        return None


_FACTORS = frozenset(["other", "self", "alpha", "value", "beta"])


def saved_settings(node: Node) -> dict[str, Any]:
    """Return the settings that ``node`` saved: dimensions, reductions, and numbers that are not factors.

    Tensors are not read, because a hook may have moved them elsewhere. The result is empty if torch exposes nothing.
    """
    settings = [name for name, is_tensor in _saved(type(node)).items() if not (is_tensor or name in _FACTORS)]
    return {name: _signed(getattr(node, f"_saved_{name}", None)) for name in settings}


def is_freed(node: Node) -> bool:
    """Tell whether the values that ``node`` saved are freed; False if torch saves them under unknown names."""
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                getattr(node, name)
            except RuntimeError:
                return True
    return False


# Operations, below autograd.


@functools.cache
def _operation_mode() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __init__(self, call: Callable[[Any, tuple, dict], Any]) -> None:
            super().__init__()
            self._call = call

        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            return self._call(func, args, kwargs or {})

    return Mode


@_needs
def each_operation(call: Callable[[Any, tuple, dict], Any]) -> AbstractContextManager[Any]:
    """Return a context in which ``call(operation, args, kwargs)`` replaces each operation that reaches the kernels."""
    return _operation_mode()(call)


@_needs
def pop_function_mode(mode: TorchFunctionMode) -> None:
    """Remove ``mode`` from the stack of function modes, and keep the modes that were pushed above it."""
    above: list[TorchFunctionMode] = []
    while torch._C._len_torch_function_stack() and (top := torch._C._pop_torch_function_stack()) is not mode:
        above.append(top)
    while above:
        torch._C._push_on_torch_function_stack(above.pop())


arguments_of: Callable[[Any], Sequence[Any]] = attrgetter("_schema.arguments")
"""Return the arguments in the schema of an operation: name, default value, whether the operation writes to it."""
changes_its_arguments: Callable[[Any], bool] = attrgetter("_schema.is_mutable")
"""Tell whether an operation writes to an argument, by its schema."""


def returns_a_view(operation: Any) -> bool:
    """Tell whether an operation returns a view of an argument, by its schema."""
    return any(one.alias_info is not None for one in operation._schema.returns)


@_needs
def decompositions(names: Sequence[str]) -> Mapping[Any, Callable[..., Any]]:
    """Return the decompositions of the ATen operations with these names, with a leading underscore or without."""
    from torch._decomp import get_decompositions

    both = [spelt for name in names for spelt in (name, f"_{name}")]
    packets = [getattr(torch.ops.aten, spelt) for spelt in both if hasattr(torch.ops.aten, spelt)]
    return {op: made for op, made in get_decompositions(packets).items() if "." not in op.name()}


# Modules. No public method returns these dicts, which hold None entries too and define the order.


parameter_slots: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""Return a module's own parameters by attribute name: the dict that the module reads, open to writing."""


def parameters_at(places: Iterable[tuple[nn.Module, str]]) -> list[nn.Parameter | None]:
    """Return the parameters at many places, None where the module has none."""
    return [module._parameters.get(slot) for module, slot in places]


def parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter | None]:
    """Return the own parameters of many modules, one module after the other."""
    return [*chain.from_iterable([module._parameters.values() for module in modules])]


buffer_slots: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""Return a module's own buffers by attribute name: the dict that the module reads, open to writing."""
layer_slots: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""Return a module's own layers by attribute name: the dict that the module reads."""


_every_table = attrgetter(*_EVERY.split())

hook_tables_of: Callable[[nn.Module], tuple[Mapping[int, Any], ...]] = attrgetter(
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
)
"""Return the dicts that hold the forward and backward hooks of one module."""


@_needs
def global_hook_tables() -> tuple[Mapping[int, Any], ...]:
    """Return the dicts that hold the forward and backward hooks on all modules."""
    return _every_table(nn.modules.module)


def hook_order(module: nn.Module) -> tuple[int, int] | None:
    """Return the ids of the first forward hook and of the last forward pre-hook of ``module``.

    None if the module lacks either, or if a hook on all modules runs before its first one.
    """
    before, after, _, _ = hook_tables_of(module)
    _, everywhere, _, _ = global_hook_tables()
    if not after or not before or everywhere:
        return None
    return next(iter(after)), next(reversed(before))


def call_slot() -> str:
    """Return the attribute that a call of a module goes through, hooks included; a replacement there is called."""
    return "_call_impl"


def is_compiled(part: Any) -> bool:
    """Tell whether ``part`` is a compiled module, by `torch.compile` or by its own ``compile()``."""
    return _is_compiled_module(part) or (isinstance(part, nn.Module) and part._compiled_call_impl is not None)


def _is_compiled_module(part: Any) -> bool:
    """Tell whether ``part`` is a wrapper that `torch.compile` made."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(part, compiler.OptimizedModule)


_is_compiled_module = _needs(_is_compiled_module, "compiled_module")


def stop_compiling(part: nn.Module) -> Callable[[], None]:
    """Let a compiled module run uncompiled; return a function that lets it run compiled again."""
    if not is_compiled(part):
        return lambda: None
    held = vars(part)
    slot, instead = "_compiled_call_impl", None
    if "_orig_mod" in (held.get("_modules") or {}):
        slot, instead = "forward", held["_modules"]["_orig_mod"].__call__
    if slot not in held:
        _refuse("stop_compiling")
    before, held[slot] = held[slot], instead

    def resume() -> None:
        held[slot] = before

    return resume


def renew_recurrent_weights(layer: nn.RNNBase) -> None:
    """Let ``layer`` compute with the tensors in its `parameter_slots`."""
    layer._flat_weights = [getattr(layer, name, None) for name in layer._flat_weights_names]


Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
InstanceNormalization = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
_Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d

batch_norms: Callable[[], type[nn.Module]] = functools.partial(attrgetter("batchnorm._BatchNorm"), nn.modules)
"""Return the base class of batch normalization in torch and other packages."""
instance_norms: Callable[[], type[InstanceNormalization]] = functools.partial(
    attrgetter("instancenorm._InstanceNorm"), nn.modules
)
"""Return the base class of instance normalization."""
dropouts: Callable[[], type[nn.Dropout]] = functools.partial(attrgetter("dropout._DropoutNd"), nn.modules)
"""Return the base class of dropout."""
transposed_convolutions: Callable[[], type[_Transposed]] = functools.partial(
    attrgetter("conv._ConvTransposeNd"), nn.modules
)
"""Return the base class of transposed convolutions."""


def wrapper_slots() -> tuple[str, ...]:
    """Return the attributes that wrappers hold a model in, which therefore appear in the names of its parameters.

    They belong to FSDP1, ``torch.compile(model)``, PyTorch's checkpoint wrapper and Lightning Fabric; DDP's is
    ``module``. A name that torch has dropped does no harm.
    """
    return "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"


# Optimizers and GradScaler.


def capturable_warning_mark() -> str:
    """Return the attribute that an optimizer reads before its warning about capture; harmless if torch dropped it."""
    return "_warned_capturable_if_run_uncaptured"


def hook_tables(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the attributes of ``optimizer`` that hold hooks on its steps and state dicts."""
    return [name for name in vars(optimizer) if name.startswith("_optimizer_")]


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a scheduler of torch drives ``optimizer``; False if torch marks none."""
    return getattr(optimizer.step, "_wrapped_by_lr_sched", False)


@_needs
def gradients_are_scaled(scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether the gradients of ``optimizer`` are still multiplied by the scale of ``scaler``."""
    from torch.amp.grad_scaler import OptState

    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY


@_needs
def scaler_states_of(scaler: Any) -> dict[int, Any]:
    """Return the dict in which an enabled ``scaler`` keeps each optimizer's progress since the last update."""
    return scaler._per_optimizer_states


@_needs
def overflows_of(scaler: Any, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
    """Return the overflow flags of ``scaler`` for ``optimizer``, one 0-dim tensor a device: nonzero for an overflow.

    The list is empty before ``scaler.unscale_`` or ``scaler.step``, and after ``scaler.update``.
    """
    states = scaler._per_optimizer_states
    return list(states[id(optimizer)]["found_inf_per_device"].values()) if id(optimizer) in states else []


@_needs
def loss_scale_of(scaler: Any) -> Tensor | None:
    """Return the scale on its device: 1 if torch's scaler is disabled, None if nothing was scaled or there is none."""
    is_of_torch = isinstance(scaler, torch.amp.GradScaler)
    if is_of_torch and not scaler.is_enabled():  # a disabled scaler has no `_scale`
        return torch.tensor(1.0, device="cpu")
    scale = scaler._scale if is_of_torch else getattr(scaler, "_scale", None)
    return scale if isinstance(scale, Tensor) else None


@_needs
def traced_scale_of(scaler: Any) -> float | Tensor:
    """Return the scale of ``scaler`` in code that is being compiled: its methods cannot be traced."""
    if not scaler._enabled:
        return 1.0
    return scaler._init_scale if scaler._scale is None else scaler._scale


RECORDED_SIZE = "_sym_"
"""In the name of an autograd node's attribute: a size of the operation's input, recorded for the backward."""

PACKING = "_pack_padded_sequence"
"""The function behind ``torch.nn.utils.rnn.pack_padded_sequence``."""

# The compiler.


def constant_when_traced(function: _F) -> _F:
    """Return ``function``, marked so that the compiler calls it while tracing instead of tracing into it."""
    # As `torch.compiler.assume_constant_result`, without importing the compiler. If the compiler ignores the mark, it
    # traces into the function, and raises its own error if it cannot.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_compiled(function: _F) -> _F:
    """Return ``function``, marked so that compiled code calls it uncompiled, with everything that it calls.

    `torch.compiler.disable` does the same, but imports the compiler and adds a Python frame that is compiled. If torch
    has no such marks, the compiler traces into the function.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    with suppress(AttributeError):
        code: Any = torch._C._dynamo.eval_frame  # type: ignore[attr-defined]
        skip = code._FrameAction.SKIP
        code.set_code_exec_strategy(function.__code__, code._FrameExecStrategy(skip, skip))  # type: ignore[attr-defined]
    return function


@never_compiled
def is_within_compiled_code() -> bool:
    """Tell whether compiled code is on the call stack; during tracing, that is code before a graph break."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    if compiler is None:
        return False
    made, frame = getattr(compiler, "output_codes", None), sys._getframe()
    if made is None:
        _refuse("is_within_compiled_code")
    while frame is not None and frame.f_code not in made:
        frame = frame.f_back
    return frame is not None


@never_compiled
def traced_inputs() -> list[tuple[Tensor, Tensor]]:
    """Return the tensors that enter the current trace of the compiler, each with its stand-in in the trace."""
    compiler = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        tracer = None if compiler is None else getattr(compiler.tls, "current_tx", None)
        if tracer is None:
            return []
        held = [(node.meta["grapharg"].example, node.meta["example_value"]) for node in tracer.output.placeholders]
    except (AttributeError, KeyError):
        _refuse("traced_inputs")
    return [(given, stand_in) for given, stand_in in held if isinstance(given, Tensor)]


def is_of_the_compiler(frame: FrameType) -> bool:
    """Tell whether ``frame`` is one that the compiler puts between a call and the called function."""
    return frame.f_globals.get("__name__", "").startswith("torch._dynamo")


# DTensor.


without_overrides = _bind("grads_of")
_not_overridden = getattr(torch._C, "_disabled_torch_function_impl", None)
_ORDINARY, _grad_of = {Tensor, nn.Parameter}, attrgetter("grad")


def grads_of(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return ``.grad`` of each tensor, without looking for overrides of DTensor: that would take half as long again."""
    kinds = set(map(type, tensors)) - _ORDINARY
    if kinds and any(kind.__torch_function__ is not _not_overridden for kind in kinds):
        return list(map(_grad_of, tensors))
    with without_overrides():
        return list(map(_grad_of, tensors))


local_tensor_of: Callable[[Any], Tensor] = attrgetter("_local_tensor")
"""Return this rank's shard of a DTensor; ``to_local()`` takes microseconds (benchmarks/LOG.md)."""


def local_tensors(tensors: Sequence[Tensor | None], missing: Sequence[Tensor]) -> list[Tensor]:
    """Return each DTensor's local tensor, plain tensors unchanged, and the entry of ``missing`` in place of None."""
    with suppress(AttributeError):  # the usual case: all are DTensors. Checking each of them takes twice as long.
        return list(map(local_tensor_of, tensors))  # type: ignore[arg-type]
    return [m if t is None else getattr(t, "_local_tensor", t) for t, m in zip(tensors, missing, strict=True)]


spec_of: Callable[[Any], Any] = attrgetter("_spec")
"""Return the spec of a DTensor (mesh and placements); the object stays the same until the tensor is redistributed."""


def specs_of(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Return each tensor's DTensorSpec: False for a plain tensor, None for a missing one."""
    with suppress(AttributeError):
        return list(map(spec_of, tensors))
    return [None if t is None else getattr(t, "_spec", False) for t in tensors]


def layouts_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Return each DTensor's spec, which includes shape and dtype; for a plain tensor its dtype."""
    with suppress(AttributeError):
        return list(map(spec_of, tensors))
    return [getattr(t, "_spec", None) or t.dtype for t in tensors]


@_needs
def has_usual_shard_order(tensor: Any) -> bool:
    """Tell whether several placements cut one dimension from left to right; True if torch records no other order."""
    spec = tensor._spec
    return spec.shard_order is None or spec.shard_order == spec.compute_default_shard_order(spec.placements)


# Process groups and device meshes.


@_needs
def process_groups() -> Mapping[Any, Mapping[int, int]]:
    """Return every live process group with its ranks, in the order of creation."""
    return torch.distributed.distributed_c10d._world.pg_group_ranks


@_needs
def device_types_of(group: Any) -> list[str]:
    """Return the device types on which ``group`` can reduce; if the group lists none, those of its backends."""
    known = [device.type for device in group._device_types]
    return known or [pair.partition(":")[0] for pair in torch.distributed.get_backend_config(group).split(",")]


@_needs
def default_store() -> Any:
    """Return the store of the default process group; a process that waits in a collective can still write to it."""
    return torch.distributed.distributed_c10d._get_default_store()


@_needs
def root_mesh_of(mesh: Any) -> Any:
    """Return the root mesh of ``mesh``: the mesh that it is a slice of, or itself."""
    return mesh._get_root_mesh()


# FSDP1.


def _fsdp1() -> Any:
    """Return FSDP1's wrapper class, or () if it is not imported, for `isinstance`."""
    return getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())


def is_fsdp1(module: nn.Module) -> bool:
    """Tell whether ``module`` is an FSDP1 wrapper, without importing FSDP1."""
    return isinstance(module, _fsdp1())


@_needs
def flattened_by_fsdp1(tensors: Sequence[Tensor | None]) -> list[bool]:
    """Tell for each tensor whether FSDP1 has flattened it: then the tensor is only this rank's shard."""
    if not _fsdp1():
        return [False] * len(tensors)
    mark = sys.modules["torch.distributed.fsdp._common_utils"].FSDP_FLATTENED
    return [getattr(tensor, mark, False) for tensor in tensors]


@_needs
def is_silent_fsdp1(module: nn.Module) -> bool:
    """Tell whether ``module`` is an FSDP1 wrapper with unreduced gradients: inside ``no_sync()``, or after it."""
    if not is_fsdp1(module) or not module._sync_gradients:
        return is_fsdp1(module)
    flat: Any = getattr(module._handle, "flat_param", None)
    return flat is not None and flat.grad is not None and flat.grad.numel() > flat.numel()


class FlatShard(NamedTuple):
    """The position of one original parameter in this rank's shard of FSDP1's flat parameter.

    Attributes:
        name: Relative to the wrapped module.
        shape: The shape of the whole original parameter.
        tensor: The parameter that holds weights and gradient: the flat parameter, or with ``use_orig_params=True`` the
            original one.
        offset: The index in ``tensor`` of the first element.
        numel: How many elements of the original parameter this rank holds.
        start: The index of the first of them in the whole parameter, flattened.
    """

    name: str
    shape: tuple[int, ...]
    tensor: Tensor
    offset: int
    numel: int
    start: int


class FlatPart(NamedTuple):
    """The shards that one FSDP1 wrapper holds on this rank.

    Attributes:
        process_group: The ranks that hold the shards; for an unsharded wrapper, the ranks that should hold equal
            replicas.
        is_sharded: Whether each rank holds only a shard.
        parameters: The flat parameter, and the original parameters.
        shards: The position of each original parameter.
    """

    process_group: Any
    is_sharded: bool
    parameters: tuple[Tensor, ...]
    shards: Sequence[FlatShard]


@_needs
def flat_part_of(module: nn.Module) -> FlatPart | None:
    """Return what an FSDP1 wrapper holds; None for any other module, and for a wrapper without own parameters."""
    handle: Any = module._handle if is_fsdp1(module) else None
    if handle is None:
        return None
    flat, shards = handle.flat_param, []
    originals = flat._params if handle._use_orig_params else [None] * len(flat._fqns)
    for name, shape, at, own in zip(flat._fqns, flat._shapes, flat._shard_param_infos, originals, strict=True):
        begin, numel, start = at[1:4] if at[0] else (0, 0, 0)
        shards.append(FlatShard(name, tuple(shape), *((flat, begin) if own is None else (own, 0)), numel, start))
    group: Any = module.process_group  # type: ignore[attr-defined]
    if not handle.uses_sharded_strategy:  # HYBRID_SHARD with a sharding group of one rank: replicas across nodes
        group = getattr(module, "_inter_node_pg", group)
    return FlatPart(group, handle.uses_sharded_strategy, (flat, *(flat._params or ())), shards)


# FSDP2.


@_needs
def meshes_of_fsdp2(modules: Iterable[Any]) -> dict[int, Any]:
    """Return the mesh over which ``fully_shard`` has sharded each parameter that it manages.

    Args:
        modules: The modules that ``fully_shard`` was applied to.

    Returns:
        The mesh by the id of the parameter; None if that mesh is part of a larger mesh that the parameter uses.
    """
    states = [module._get_fsdp_state() for module in modules]
    groups = [g for s in states for g in getattr(s, "_fsdp_param_groups", None) or [s._fsdp_param_group] if g]
    held = [(p.sharded_param, getattr(p, "mesh_info", g.mesh_info)) for g in groups for p in g.fsdp_params]
    return {id(p): None if getattr(info, "is_spmd_mesh", False) else info.mesh for p, info in held}


@_needs
def let_fsdp2_only_cast(modules: Iterable[Any]) -> Callable[[], None]:
    """Let the hooks of ``fully_shard`` neither gather nor reshard, as while a checkpoint repeats a forward.

    They still cast arguments and outputs as a `MixedPrecisionPolicy` says.

    Args:
        modules: The modules that ``fully_shard`` was applied to, all gathered.

    Returns:
        A function that lets the hooks work as before.
    """
    state_of = {module: module._get_fsdp_state() for module in modules}
    states = list({id(state): state for state in state_of.values()}.values())
    before = [(state, state._training_state, set(state._modules_to_run_forward)) for state in states]
    replaced: list[tuple[dict[int, Any], int, Any]] = []
    for module, state in state_of.items():
        if not _casts_in_repeated_forwards(state):
            ids = {one.id for handle in _hook_handles_of(state) for one in getattr(handle, "handles", (handle,))}
            tables = zip((module._forward_pre_hooks, module._forward_hooks), _casts_of(state._mp_policy), strict=True)
            for table, cast in tables:
                for key in ids & table.keys():
                    replaced.append((table, key, table[key]))
                    table[key] = cast

    def restore() -> None:
        for table, key, hook in replaced:
            table[key] = hook
        for state, phase, waiting in before:
            state._training_state = phase
            state._modules_to_run_forward.clear()
            state._modules_to_run_forward.update(waiting)

    for state in states:
        state._training_state = type(state._training_state).PRE_BACKWARD
    return restore


def _casts_in_repeated_forwards(state: Any) -> bool:
    """Return whether the hooks of ``fully_shard`` cast while a checkpoint repeats a forward, as since torch 2.13."""
    return hasattr(state, "_cast_forward_inputs")


def _hook_handles_of(state: Any) -> tuple[Any, Any]:
    return state._pre_forward_hook_handle, state._post_forward_hook_handle


@functools.cache
def _casts_of(policy: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return hooks that cast the arguments and the outputs of a module as a ``MixedPrecisionPolicy`` says."""

    def cast(tree: Any, dtype: torch.dtype | None) -> Any:
        def one(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        return tree if dtype is None else tree_map(one, tree)

    def before(module: Any, args: Any, kwargs: Any) -> Any:
        del module
        return cast((args, kwargs), policy.param_dtype if policy.cast_forward_inputs else None)

    def after(module: Any, args: Any, output: Any) -> Any:
        del module, args
        return cast(output, policy.output_dtype)

    return before, after
