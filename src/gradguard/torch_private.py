"""Every private name of torch that gradguard uses: one function each, and no other file has one (a test sees to it).

A name may go with any release of torch. Then the function falls back to public ones where they do the same, more
slowly; else it raises, when it is called: importing gradguard never fails for want of a name.
"""

import ctypes
import functools
import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from operator import attrgetter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gradguard.errors import InvalidValueError, UnsupportedVersionError

_F = TypeVar("_F", bound=Callable[..., Any])


def _refuse(feature: str, name: str, instead: str = "") -> NoReturn:
    raise UnsupportedVersionError(
        f"{feature} needs {name}, which torch {torch.__version__} does not have. {instead}"
        "Install an older torch, or a newer gradguard."
    )


def _bound(holder: Any, name: str, feature: str) -> Callable[..., Any]:
    """Return a function that is called too often to be looked for each time; where it is gone, one that refuses."""
    found = getattr(holder, name.rpartition(".")[2], None)
    return found if found is not None else lambda *_, **__: _refuse(feature, name)


# Arithmetic over many tensors at once: a public function for each tensor does the same, in more kernels.

_foreach_norm = getattr(torch, "_foreach_norm", None)
vector_norm = torch.linalg.vector_norm


def foreach_norm(
    tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor] | tuple[Tensor, ...]:
    """Return the norm of each tensor. Where torch has no `_foreach_norm`: a call of `vector_norm` for each."""
    if _foreach_norm is None:
        return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]
    return _foreach_norm(tensors, ord, dtype)


def replace_norms(foreach: Callable[..., Any] | None, vector: Callable[..., Any] | None) -> None:
    """Let torch's own clip take the norms of gradients with ``foreach``, and the norm of these with ``vector``.

    None: as it did. Where one is gone, torch calls it no more. Not `foreach_norm` and `vector_norm`, which stay what
    they are.
    """
    if _foreach_norm is not None:
        torch._foreach_norm = _foreach_norm if foreach is None else foreach
    torch.linalg.vector_norm = vector_norm if vector is None else vector


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by a 0-dim ``factor``. Where torch has no `_foreach_mul_`: a call of `mul_` for each."""
    multiply = getattr(torch, "_foreach_mul_", None)
    if multiply is not None:
        multiply(tensors, factor)
        return
    for tensor in tensors:
        tensor.mul_(factor)


def foreach_copy_(tensors: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Write each of ``sources`` into the tensor at its place. Without `_foreach_copy_` in torch: a `copy_` for each."""
    copy = getattr(torch, "_foreach_copy_", None)
    if copy is not None:
        copy(tensors, sources)
        return
    for tensor, source in zip(tensors, sources, strict=True):
        tensor.copy_(source)


def foreach_clamp_(tensors: Sequence[Tensor], low: float, high: float) -> None:
    """Clamp each tensor. Where torch has no `_foreach_clamp_min_` or `..._max_`: a call of `clamp_` for each."""
    raise_to, lower_to = getattr(torch, "_foreach_clamp_min_", None), getattr(torch, "_foreach_clamp_max_", None)
    if raise_to is not None and lower_to is not None:
        raise_to(tensors, low)
        lower_to(tensors, high)
        return
    for tensor in tensors:
        tensor.clamp_(low, high)


def assert_async(condition: Tensor, message: str) -> None:
    """Let the device fail unless ``condition`` holds. Where torch has no `_assert_async`: the host waits and looks.

    Raises:
        InvalidValueError: If it does not hold, where the host looks.
    """
    check = getattr(torch, "_assert_async", None)
    if check is not None:
        check(condition, message)
    elif not bool(condition):
        raise InvalidValueError(message)


def largest_in_bags(table: Tensor, ids: Tensor, offsets: Tensor, padding: int) -> Tensor:
    """Return which id each column of ``embedding_bag(..., mode="max")`` came from; the public one leaves that out."""
    find = getattr(torch, "_embedding_bag", None)
    if find is None:
        _refuse('nn.EmbeddingBag(mode="max")', "torch._embedding_bag", 'Use mode="sum" or "mean". ')
    return find(table, ids, offsets, False, 2, False, None, False, padding)[3]


# Tensors.


def version_of(tensor: Tensor) -> int:
    """Return how often ``tensor`` has been written in place: what changed without us is not what we measured."""
    try:
        return tensor._version
    except AttributeError:
        _refuse("noticing that a tensor was changed in place", "torch.Tensor._version")


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return `version_of` each of ``tensors``."""
    try:
        return list(map(_version, tensors))
    except AttributeError:
        _refuse("noticing that a tensor was changed in place", "torch.Tensor._version")


_version = attrgetter("_version")


def base_of(tensor: Tensor) -> Tensor | None:
    """Return what ``tensor`` is a view of: those in one buffer have one norm. Where it is gone: None."""
    return getattr(tensor, "_base", None)


def loader_has_begun(loader: Any) -> bool:
    """Tell whether a DataLoader holds workers or a place in its data; where that cannot be seen: no."""
    return getattr(loader, "_iterator", None) is not None


def sparse_values(tensor: Tensor) -> Tensor:
    """Return the values of a sparse COO tensor, coalesced or not, in its memory."""
    try:
        return tensor._values()
    except AttributeError:
        _refuse("clipping sparse gradients", "torch.Tensor._values")


def sparse_indices(tensor: Tensor) -> Tensor:
    """Return the indices of a sparse COO tensor, coalesced or not."""
    try:
        return tensor._indices()
    except AttributeError:
        _refuse("clipping sparse gradients", "torch.Tensor._indices")


# Addresses, for the compiled kernels.


def exchange_table() -> int | None:
    """Return where the table is by which C code looks at a tensor: DLPack's. None: look at each from Python."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    open_ = ctypes.pythonapi.PyCapsule_GetPointer
    open_.restype, open_.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return open_(capsule, b"dlpack_exchange_api")


def parallel_for() -> int | None:
    """Return where the C function is that runs a loop on torch's own threads; None if torch has none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = ctypes.CDLL(str(library)).torch_parallel_for
    except (OSError, AttributeError):
        return None
    return ctypes.cast(found, ctypes.c_void_p).value


_modes = getattr(torch._C, "_len_torch_dispatch_stack", None)


def are_operations_watched() -> bool:
    """Tell whether somebody sees or replaces each operation of this thread (`TorchDispatchMode`): to be played safe."""
    return _modes is None or _modes() > 0


# Nested arguments and results: the containers that other packages have registered are known to torch only.

try:
    from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten
except ImportError:

    def _refuse_nested(*_: Any, **__: Any) -> NoReturn:
        _refuse("looking into nested arguments", "torch.utils._pytree")

    keystr = tree_flatten = tree_flatten_with_path = tree_leaves = tree_map = tree_unflatten = _refuse_nested


# Autograd.

current_graph_task: Callable[[], int] = _bound(
    torch._C, "torch._C._current_graph_task_id", "telling one backward from the next"
)
"""Return the number of the backward that runs in this thread, or -1: a hook has no other way to tell."""


_before_backwards: dict[object, Callable[[Any], None]] = {}
_before_backwards_lock = threading.Lock()


def call_before_backwards(function: Callable[[Any], None]) -> Callable[[], None] | None:
    """Call ``function`` with the roots of each backward that begins, tensors or gradient edges.

    Returns:
        What ends that. None where torch has no `_engine_run_backward`, which whatever begins a backward goes through.
    """
    if not hasattr(torch.autograd, "_engine_run_backward"):
        return None
    key = object()

    def tell_and_run(roots: Any, *args: Any, **kwargs: Any) -> Any:
        for one in list(_before_backwards.values()):
            one(roots)
        return original(roots, *args, **kwargs)

    def unsubscribe() -> None:
        with _before_backwards_lock:
            _before_backwards.pop(key, None)
            current: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
            if not _before_backwards and hasattr(current, "tells_gradguard"):
                torch.autograd._engine_run_backward = current.tells_gradguard  # type: ignore[attr-defined]

    with _before_backwards_lock:
        _before_backwards[key] = function
        original: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
        if not hasattr(original, "tells_gradguard"):
            tell_and_run.tells_gradguard = original  # type: ignore[attr-defined]
            torch.autograd._engine_run_backward = tell_and_run  # type: ignore[attr-defined]
    return unsubscribe


_register_hook_lock = threading.Lock()


def register_prehooks(hooks: Iterable[tuple[Node, Callable[..., Any]]]) -> Callable[[], None]:
    """Put a prehook on each node: as `Node.register_prehook`, without a handle for each, which costs more than it does.

    Where torch makes its handles elsewhere: with them.

    Returns:
        What takes all of them out.
    """
    tables: list[OrderedDict[int, Any]] = []
    handles: list[Any] = []
    function, name, thread = torch.autograd.Function, "_register_hook", threading.get_ident()
    original: Any = getattr(function, name, None)

    def register(table: Any, hook: Callable[..., Any]) -> tuple[Any, Any]:
        if table is not None or threading.get_ident() != thread:
            return original(table, hook)
        table = OrderedDict([(-1, hook)])  # a table of its own, to which others add; the keys of handles begin at 0
        tables.append(table)
        return table, None

    with _register_hook_lock:
        before = vars(function).get(name)
        if original is not None:
            setattr(function, name, staticmethod(register))
        try:
            for node, hook in hooks:
                if (handle := node.register_prehook(hook)) is not None:
                    handles.append(handle)
        finally:
            if before is not None:
                setattr(function, name, before)
            elif original is not None:
                delattr(function, name)

    def remove() -> None:
        for table in tables:
            table.pop(-1, None)
        for handle in handles:
            handle.remove()

    return remove


def gradients_of(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor], keep: bool
) -> Sequence[Tensor | None]:
    """Return what `torch.autograd.grad` returns, None for an input that is not used.

    That function imports the compiler's symbolic shapes, half a second, to compare the shapes of ``grad_outputs``.
    """
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    is_usual = all(type(one) is Tensor for one in (*outputs, *inputs))
    for one, v in zip(outputs, grad_outputs, strict=True):
        is_usual = is_usual and one.shape == v.shape and one.is_complex() == v.is_complex()
    if engine is None or not is_usual:
        return torch.autograd.grad(outputs, inputs, grad_outputs, retain_graph=keep, allow_unused=True)
    return engine.run_backward(
        tuple(outputs), tuple(grad_outputs), keep, False, tuple(inputs), True, accumulate_grad=False
    )


def call_after_backward(function: Callable[[], None]) -> None:
    """Call ``function`` once the backward that runs in this thread is complete."""
    try:
        queue = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
    except AttributeError:
        _refuse("noticing the end of a backward", "torch.autograd.Variable._execution_engine.queue_callback")
    queue(function)


def next_sequence_number() -> int:
    """Return the number that autograd gives to the next node that this thread makes: modules are ranges of them."""
    try:
        return torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    except AttributeError:
        _refuse("naming the module of an operation", "torch.autograd._get_sequence_nr", "Leave out model=. ")


def sequence_number_of(node: Node) -> int:
    """Return the number that autograd gave to ``node`` in the thread that made it; leaves have the largest of all."""
    try:
        return node._sequence_nr()
    except AttributeError:
        _refuse("naming the module of an operation", "torch.autograd.graph.Node._sequence_nr", "Leave out model=. ")


def input_metadata_of(node: Node) -> Sequence[Any]:
    """Return shape, dtype and device of what each gradient that ``node`` takes belongs to, before there are any."""
    try:
        return node._input_metadata  # type: ignore[attr-defined]
    except AttributeError:
        _refuse("reading the graph of a backward", "torch.autograd.graph.Node._input_metadata")


def recorded_stack(node: Node) -> Sequence[str]:
    """Return the frames that recorded ``node``, outermost first, if that was under anomaly detection; else nothing."""
    metadata: Any = node.metadata  # a property, which torch annotates as a method
    return metadata.get("traceback_", ())


def saved_constant(node: Node, name: str) -> Any:
    """Return the constant ``name`` that ``node`` saved. Where it is not told: NaN, which fulfils no condition."""
    return getattr(node, f"_saved_{name}", math.nan)


def saved_value(node: Node, name: str) -> Any:
    """Return what ``node`` saved under ``name``: AttributeError where it saved none, RuntimeError where it is freed."""
    return getattr(node, f"_saved_{name}")


def saved_tensors_of(node: Node) -> dict[str, Tensor]:
    """Return by name the tensors that ``node`` saved and no hook has packed; nothing where torch does not tell."""
    raw = {name: getattr(node, f"_raw_saved_{name}") for name in _names_of_tensors(type(node))}
    plain = {name: getattr(one, "data", None) for name, one in raw.items() if getattr(one, "unpack_hook", one) is None}
    return {name: data for name, data in plain.items() if isinstance(data, Tensor)}


@functools.cache
def _names_of_tensors(kind: type) -> tuple[str, ...]:
    return tuple(name.removeprefix("_raw_saved_") for name in dir(kind) if name.startswith("_raw_saved_"))


def saved_settings(node: Node) -> dict[str, Any]:
    """Return what ``node`` saved that is no tensor: dimensions, reductions, and numbers that are no factors.

    Tensors are not read, which may have been taken elsewhere. Where torch does not tell: nothing.
    """
    return {name: getattr(node, f"_saved_{name}", None) for name in _names_of_settings(type(node))}


@functools.cache
def _names_of_settings(kind: type) -> tuple[str, ...]:
    names = [name.removeprefix("_saved_") for name in dir(kind) if name.startswith("_saved_")]
    factors = {"other", "self", "alpha", "value", "beta"}
    return tuple(name for name in names if name not in factors and not hasattr(kind, f"_raw_saved_{name}"))


def is_freed(node: Node) -> bool:
    """Tell whether the values that ``node`` saved are freed. Where they have other names: False."""
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
    try:
        from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError:
        _refuse("giving each sample the random numbers that it had in its batch", "torch.utils._python_dispatch")

    class Mode(TorchDispatchMode):
        def __init__(self, call: Callable[[Any, tuple, dict], Any]) -> None:
            super().__init__()
            self._call = call

        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            return self._call(func, args, kwargs or {})

    return Mode


def each_operation(call: Callable[[Any, tuple, dict], Any]) -> AbstractContextManager[Any]:
    """Return a block in which ``call(operation, args, kwargs)`` stands in for each operation that kernels compute."""
    return _operation_mode()(call)


def arguments_of(operation: Any) -> Sequence[Any]:
    """Return what the schema of an operation says of its arguments: name, default value, whether it is written to."""
    try:
        return operation._schema.arguments
    except AttributeError:
        _refuse("telling which operations draw random numbers", "OpOverload._schema")


def returns_a_view(operation: Any) -> bool:
    """Tell whether an operation returns other views of what it was given, by its schema."""
    try:
        return any(one.alias_info is not None for one in operation._schema.returns)
    except AttributeError:
        _refuse("telling which operations compute something", "OpOverload._schema")


def changes_its_arguments(operation: Any) -> bool:
    """Tell whether an operation writes to what it was given, by its schema."""
    try:
        return operation._schema.is_mutable
    except AttributeError:
        _refuse("telling which operations compute something", "OpOverload._schema")


def custom_operator_name(fn: Any) -> str | None:
    """Return the qualified name of an operator that is not torch's own, None if ``fn`` is nothing of the kind."""
    name = getattr(fn, "_qualname", None) or getattr(fn, "_qualified_op_name", None)
    if name is None and hasattr(fn, "_schema"):
        name = getattr(fn._schema, "name", None)
    is_other = isinstance(name, str) and "::" in name and name.partition("::")[0] not in _OWN_NAMESPACES
    return name if is_other else None


_OWN_NAMESPACES = ("aten", "prim", "prims", "quantized", "_c10d_functional")


def decompositions(names: Sequence[str]) -> Mapping[Any, Callable[..., Any]]:
    """Return of what ATen's operations of these names consist, with a leading underscore or without.

    Where torch does not tell: of themselves, so nothing.
    """
    try:
        from torch._decomp import get_decompositions
    except ImportError:
        return {}
    both = [spelt for name in names for spelt in (name, f"_{name}")]
    packets = [getattr(torch.ops.aten, spelt) for spelt in both if hasattr(torch.ops.aten, spelt)]
    return {op: made for op, made in get_decompositions(packets).items() if "." not in op.name()}


# Modules. What their dicts hold by name, None included, and in which order, no public method tells.


def parameter_slots(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of ``module`` itself by attribute name: the dict that it reads, also to be written."""
    try:
        return module._parameters
    except AttributeError:
        _refuse("looking at the parameters of one layer", "torch.nn.Module._parameters")


def buffer_slots(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers of ``module`` itself by attribute name: the dict that it reads, also to be written."""
    try:
        return module._buffers
    except AttributeError:
        _refuse("looking at the buffers of one layer", "torch.nn.Module._buffers")


def layer_slots(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the layers of ``module`` itself by attribute name: the dict that it reads."""
    try:
        return module._modules
    except AttributeError:
        _refuse("looking at the layers of one module", "torch.nn.Module._modules")


def hook_tables_of(module: nn.Module) -> list[Mapping[int, Any]]:
    """Return the dicts that hold the hooks of one module on its forward and backward."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return [getattr(module, name) for name in names if hasattr(module, name)]


def global_hook_tables() -> list[Mapping[int, Any]]:
    """Return the dicts that hold the hooks on the forward and backward of all modules."""
    of = nn.modules.module
    names = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks",
             "_global_backward_hooks")  # fmt: skip
    return [getattr(of, name) for name in names if hasattr(of, name)]


def call_slot() -> str:
    """Return the attribute that a call of a module goes through, hooks included: what stands there is called."""
    if not hasattr(nn.Module, "_call_impl"):
        _refuse("running a module's own code again for each sample", "torch.nn.Module._call_impl")
    return "_call_impl"


def is_compiled(part: Any) -> bool:
    """Tell whether ``part`` is a module that was compiled, by `torch.compile` or its own ``compile()``."""
    compiler = sys.modules.get("torch._dynamo")
    if compiler is not None:
        kind = getattr(compiler, "OptimizedModule", None) or getattr(
            getattr(compiler, "eval_frame", None), "OptimizedModule", None
        )
        if kind is None:
            _refuse("telling whether a module is compiled", "torch._dynamo.OptimizedModule")
        if isinstance(part, kind):
            return True
    if not isinstance(part, nn.Module):
        return False
    if not hasattr(nn.Module, "_compiled_call_impl"):
        _refuse("telling whether a module is compiled", "torch.nn.Module._compiled_call_impl")
    return part._compiled_call_impl is not None


def stop_compiling(part: nn.Module) -> Callable[[], None]:
    """Let a module that was compiled run as it was before; return what lets it run compiled again."""
    if not is_compiled(part):
        return lambda: None
    held = vars(part)
    slot, instead = "_compiled_call_impl", None
    if "_orig_mod" in (held.get("_modules") or {}):
        slot, instead = "forward", held["_modules"]["_orig_mod"].__call__
    if slot not in held:
        _refuse("running a compiled module as it was before", f"an attribute {slot} of compiled modules")
    before, held[slot] = held[slot], instead

    def resume() -> None:
        held[slot] = before

    return resume


def hook_order(module: nn.Module) -> tuple[int, int] | None:
    """Return the ids of the forward hook of ``module`` that runs first and of the pre-hook that runs last.

    None where hooks on all modules run before the first, or where torch does not tell: then it may be any.
    """
    after, before = getattr(module, "_forward_hooks", None), getattr(module, "_forward_pre_hooks", None)
    everywhere = getattr(nn.modules.module, "_global_forward_hooks", None)
    if not after or not before or everywhere is None or everywhere:
        return None
    return next(iter(after)), next(reversed(before))


def renew_recurrent_weights(layer: nn.RNNBase) -> None:
    """Let ``layer`` compute with the tensors in its `parameter_slots`; where it keeps no list, it does anyway."""
    names = getattr(layer, "_flat_weights_names", None)
    if names is not None:
        layer._flat_weights = [getattr(layer, name, None) for name in names]


Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
InstanceNormalization = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d


def batch_norms() -> tuple[type, ...]:
    """Return the classes of batch normalization. Other packages' derive from a private one, if it is there."""
    private = getattr(nn.modules.batchnorm, "_BatchNorm", None)
    lazy = nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d
    public = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, *lazy)
    return public if private is None else (*public, private)


def instance_norms() -> tuple[type[InstanceNormalization], ...]:
    """Return the classes of instance normalization, likewise."""
    private = getattr(nn.modules.instancenorm, "_InstanceNorm", None)
    lazy: Any = nn.LazyInstanceNorm1d, nn.LazyInstanceNorm2d, nn.LazyInstanceNorm3d
    public = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, *lazy)
    return public if private is None else (*public, private)


def dropouts() -> tuple[type[nn.Dropout], ...]:
    """Return the classes of dropout, likewise."""
    private = getattr(nn.modules.dropout, "_DropoutNd", None)
    public: Any = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
    return public if private is None else (*public, private)


def convolutions() -> tuple[type[Convolution], ...]:
    """Return the classes of convolution, transposed ones too, likewise."""
    private = getattr(nn.modules.conv, "_ConvNd", None)
    public = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *transposed_convolutions())
    return public if private is None else (*public, private)


def transposed_convolutions() -> tuple[type[nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d], ...]:
    """Return the classes of transposed convolution, likewise."""
    private = getattr(nn.modules.conv, "_ConvTransposeNd", None)
    public = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    return public if private is None else (*public, private)


def wrapper_slots() -> tuple[str, ...]:
    """Return the attributes under which wrappers hold a model, which they put into the names of its parameters.

    FSDP1's, that of ``torch.compile(model)``, of PyTorch's checkpoint wrapper and of Lightning Fabric; DDP's is
    ``module``. One that is gone puts nothing in.
    """
    return "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module", "_forward_module"


# Optimizers and GradScaler.


def capturable_warning_mark() -> str:
    """Return the attribute that an optimizer reads before it warns that it is captured; where gone, it is not read."""
    return "_warned_capturable_if_run_uncaptured"


def hook_tables(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the attributes of ``optimizer`` that hold the hooks of its steps and state dicts."""
    return [name for name in vars(optimizer) if name.startswith("_optimizer_")]


def has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a scheduler of torch drives ``optimizer``; False where torch leaves no mark of it."""
    return getattr(optimizer.step, "_wrapped_by_lr_sched", False)


def gradients_are_scaled(scaler: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether the gradients of ``optimizer`` are still multiplied by the scale of ``scaler``."""
    try:
        from torch.amp.grad_scaler import OptState

        return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    except (ImportError, AttributeError, KeyError):
        _refuse(
            "a Guard under GradScaler",
            "torch.amp.GradScaler._per_optimizer_states or torch.amp.grad_scaler.OptState",
            "Clip after scaler.unscale_(optimizer) with gg.clip_grad_norm_ meanwhile. ",
        )


def overflows_of(scaler: Any, optimizer: torch.optim.Optimizer) -> Sequence[Tensor]:
    """Return what ``scaler`` has found for ``optimizer``, 0-dim on each device: not 0 where a gradient is infinite.

    None of it before ``scaler.unscale_`` or ``scaler.step``, and after ``scaler.update``.
    """
    try:
        states = scaler._per_optimizer_states
        return list(states[id(optimizer)]["found_inf_per_device"].values()) if id(optimizer) in states else []
    except (AttributeError, KeyError):
        _refuse("telling whether a GradScaler skipped a step", "torch.amp.GradScaler._per_optimizer_states")


def loss_scale_of(scaler: Any) -> Tensor | None:
    """Return the scale of ``scaler`` on its device; None if it has scaled nothing. Where it is gone: it waits."""
    try:
        scale = scaler._scale
    except AttributeError:
        return torch.tensor(scaler.get_scale()) if isinstance(scaler, torch.amp.GradScaler) else None
    return scale if isinstance(scale, Tensor) else None


def traced_scale_of(scaler: Any) -> float | Tensor:
    """Return the scale of ``scaler`` in code that is being compiled, into which none of its methods can be traced."""
    try:
        if not scaler._enabled:
            return 1.0
        return scaler._init_scale if scaler._scale is None else scaler._scale
    except AttributeError:
        _refuse("a GradScaler as scale= in compiled code", "torch.amp.GradScaler._scale", "Pass a tensor. ")


# The compiler.


def constant_when_traced(function: _F) -> _F:
    """Return ``function``, which the compiler calls while it traces, rather than look into it."""
    # As `torch.compiler.assume_constant_result`, which imports the compiler. One that does not read the mark looks into
    # the function, and says so if it cannot.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_compiled(function: _F) -> _F:
    """Return ``function``, which compiled code is to call as it is written, with all that it calls itself.

    As `torch.compiler.disable`, which imports the compiler and leaves a Python frame around the function that is
    compiled. Where torch has no such marks the compiler traces into the function.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    code: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(code, "set_code_exec_strategy"):
        skip = code._FrameAction.SKIP
        code.set_code_exec_strategy(function.__code__, code._FrameExecStrategy(skip, skip))  # type: ignore[attr-defined]
    return function


@never_compiled
def is_within_compiled_code() -> bool:
    """Tell whether code that the compiler made called the caller; while it traces: the code before a graph break."""
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    if compiler is None:
        return False
    made, frame = getattr(compiler, "output_codes", None), sys._getframe()
    if made is None:
        _refuse("noticing a graph break", "torch._dynamo.convert_frame.output_codes")
    while frame is not None and frame.f_code not in made:
        frame = frame.f_back
    return frame is not None


@never_compiled
def traced_inputs() -> list[tuple[Tensor, Tensor]]:
    """Return the tensors that enter what the compiler traces now, each with the one that stands for it in the trace."""
    compiler = sys.modules.get("torch._dynamo.symbolic_convert")
    try:
        tracer = None if compiler is None else getattr(compiler.tls, "current_tx", None)
        if tracer is None:
            return []
        held = [(node.meta["grapharg"].example, node.meta["example_value"]) for node in tracer.output.placeholders]
    except (AttributeError, KeyError):
        _refuse("noticing a graph break", "torch._dynamo.symbolic_convert.tls.current_tx.output.placeholders")
    return [(given, stand_in) for given, stand_in in held if isinstance(given, Tensor)]


def is_of_the_compiler(frame: FrameType) -> bool:
    """Tell whether ``frame`` is one that the compiler puts between a call and the function that was called."""
    return frame.f_globals.get("__name__", "").startswith("torch._dynamo")


# DTensor.


def grads_of(tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return ``.grad`` of each; DTensors are not asked whether they override that, which takes twice as long."""
    guard = getattr(torch._C, "DisableTorchFunctionSubclass", None)
    not_overridden = getattr(torch._C, "_disabled_torch_function_impl", None)
    kinds = set(map(type, tensors)) - {Tensor}
    if guard is None or any(kind.__torch_function__ is not not_overridden for kind in kinds):
        return [t.grad for t in tensors]
    with guard():
        return [t.grad for t in tensors]


def local_tensor_of(tensor: Any) -> Tensor:
    """Return what this process holds of a DTensor; ``to_local()``, its replacement, takes twenty times as long."""
    try:
        return tensor._local_tensor
    except AttributeError:
        return tensor.detach().to_local()


def local_tensors(tensors: Sequence[Tensor | None], missing: Sequence[Tensor]) -> list[Tensor]:
    """Return the same for each, ordinary ones as they are; of ``missing`` where there is none.

    Where it is gone DTensors stay as they are, which the caller must look for.
    """
    with suppress(AttributeError):  # all are DTensors, and there: looking for what may be missing takes twice as long
        return [t._local_tensor for t in tensors]  # type: ignore[union-attr]
    return [m if t is None else getattr(t, "_local_tensor", t) for t, m in zip(tensors, missing, strict=True)]


def spec_of(tensor: Any) -> Any:
    """Return mesh and placements of a DTensor as one object: the same one as long as nobody lays it out anew."""
    try:
        return tensor._spec
    except AttributeError:
        _refuse("a norm over processes", "torch.distributed.tensor.DTensor._spec")


def specs_of(tensors: Sequence[Tensor | None]) -> list[Any]:
    """Return the same for each tensor, False for ordinary ones, None where there is none."""
    with suppress(AttributeError):
        return [t._spec for t in tensors]  # type: ignore[union-attr]
    return [None if t is None else getattr(t, "_spec", False) for t in tensors]


def layouts_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Return mesh, placements, shape and dtype of each DTensor as one object; of ordinary tensors the dtype."""
    with suppress(AttributeError):
        return [t._spec for t in tensors]  # type: ignore[attr-defined]
    return [getattr(t, "_spec", None) or t.dtype for t in tensors]


def has_usual_shard_order(tensor: Any) -> bool:
    """Tell whether placements tell how a dimension is cut: from the left to the right. Without an order, they do."""
    spec = spec_of(tensor)
    order = getattr(spec, "shard_order", None)
    return order is None or order == spec.compute_default_shard_order(spec.placements)


# Process groups and device meshes.


def process_groups() -> Mapping[Any, Mapping[int, int]]:
    """Return every process group that is not destroyed, in the order in which they were made, with its ranks."""
    try:
        return torch.distributed.distributed_c10d._world.pg_group_ranks
    except AttributeError:
        _refuse("a norm over processes", "torch.distributed.distributed_c10d._world.pg_group_ranks")


def device_types_of(group: Any) -> list[str]:
    """Return the types of devices that ``group`` can add up on. Where it does not tell: from its configuration."""
    known = [device.type for device in getattr(group, "_device_types", ())]
    if known:
        return known
    pairs = torch.distributed.get_backend_config(group).split(",")
    return [pair.partition(":")[0] for pair in pairs]


def default_store() -> Any:
    """Return the store in which the processes met: those that wait for one another can still write there."""
    try:
        return torch.distributed.distributed_c10d._get_default_store()
    except AttributeError:
        _refuse("telling which process is missing", "torch.distributed.distributed_c10d._get_default_store")


def root_mesh_of(mesh: Any) -> Any:
    """Return the mesh that ``mesh`` is a slice of, or itself; where no mesh can tell, slices do not fit together."""
    find = getattr(mesh, "_get_root_mesh", None)
    return mesh if find is None else find()


# FSDP1.


def is_fsdp1(module: nn.Module) -> bool:
    """Tell whether ``module`` is FSDP1's wrapper, without importing it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    return kind is not None and isinstance(module, kind)


def flattened_by_fsdp1(tensors: Sequence[Tensor | None]) -> list[bool]:
    """Tell of each tensor whether FSDP1 has made it a part of a flat one: its norm is that of this process' part."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(fsdp, "FullyShardedDataParallel"):
        return [False] * len(tensors)
    mark = getattr(sys.modules.get("torch.distributed.fsdp._common_utils"), "FSDP_FLATTENED", None)
    if mark is None:
        _refuse("telling that FSDP1 holds a parameter", "torch.distributed.fsdp._common_utils.FSDP_FLATTENED")
    return [getattr(tensor, mark, False) for tensor in tensors]


def is_silent_fsdp1(module: nn.Module) -> bool:
    """Tell whether ``module`` is FSDP1's and inside ``no_sync()``: its gradients are this process' own."""
    if not is_fsdp1(module):
        return False
    try:
        return not module._sync_gradients
    except AttributeError:
        _refuse("telling that FSDP1 is inside no_sync()", "FullyShardedDataParallel._sync_gradients")


class FlatPart(NamedTuple):
    """What one wrapper of FSDP1 holds.

    Attributes:
        process_group: Over which processes.
        is_sharded: Whether each holds a part; else all of it.
        parameters: The flat one, and those it stands for.
    """

    process_group: Any
    is_sharded: bool
    parameters: tuple[Tensor, ...]


def flat_part_of(module: nn.Module) -> FlatPart | None:
    """Return what a wrapper of FSDP1 holds; None of any other module, and of one that holds nothing itself."""
    if not is_fsdp1(module):
        return None
    try:
        handle: Any = module._handle
        if handle is None:
            return None
        flat = handle.flat_param
        group: Any = module.process_group
        return FlatPart(group, handle.uses_sharded_strategy, (flat, *(flat._params or ())))
    except AttributeError:
        _refuse("the norm of what FSDP1 holds", "FullyShardedDataParallel._handle", "Use fully_shard(model). ")


def padding_of_flat(parameter: Tensor) -> int:
    """Return how many elements at the end of this process' part of an FSDP1 parameter are padding.

    Where they are not told, there are none: of the parameters that a flat one stands for, and of one that is not split.
    """
    return getattr(parameter, "_shard_numel_padded", 0)


# FSDP2.


class FlatShard(NamedTuple):
    """Where one original parameter lies in what this process holds of FSDP1's flat one.

    Attributes:
        name: Relative to the wrapped module.
        shape: Of the whole original parameter.
        tensor: What has weights and gradient: the flat parameter, or the original one with ``use_orig_params=True``.
        offset: Where in ``tensor`` it begins.
        numel: How many of its elements are here.
        start: The first of them in the whole, flattened.
    """

    name: str
    shape: tuple[int, ...]
    tensor: Tensor
    offset: int
    numel: int
    start: int


def flat_shards_of(module: nn.Module) -> list[FlatShard]:
    """Return the original parameters of a wrapper of FSDP1; none if it holds nothing itself."""
    if not is_fsdp1(module):
        return []
    try:
        handle: Any = module._handle
        if handle is None:
            return []
        flat, found = handle.flat_param, []
        originals = flat._params if handle._use_orig_params else [None] * len(flat._fqns)
        for name, shape, at, own in zip(flat._fqns, flat._shapes, flat._shard_param_infos, originals, strict=True):
            begin, numel, start = at[1:4] if at[0] else (0, 0, 0)
            found.append(FlatShard(name, tuple(shape), *((flat, begin) if own is None else (own, 0)), numel, start))
        return found
    except (AttributeError, TypeError):
        _refuse("the shards of FullyShardedDataParallel (FSDP1)", "FlatParamHandle.flat_param._shard_param_infos")


def meshes_of_fsdp2(modules: Iterable[Any]) -> dict[int, Any]:
    """Return the mesh over which ``fully_shard`` has spread each parameter that it holds.

    Args:
        modules: Those that it was applied to.

    Returns:
        Meshes by the identity of parameters; None where that mesh is a part of one that parameters lie on otherwise.
    """
    try:
        states = [module._get_fsdp_state() for module in modules]
        groups = [g for s in states for g in getattr(s, "_fsdp_param_groups", None) or [s._fsdp_param_group] if g]
        held = [(p.sharded_param, getattr(p, "mesh_info", g.mesh_info)) for g in groups for p in g.fsdp_params]
        return {id(p): None if getattr(info, "is_spmd_mesh", False) else info.mesh for p, info in held}
    except AttributeError:
        _refuse("per-sample clipping of what fully_shard holds", "FSDPModule._get_fsdp_state()._fsdp_param_groups")
