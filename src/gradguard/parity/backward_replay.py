"""Rerun a step unchanged, or with weights that differ by rounding, and restore the state bit for bit."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.distributed.placements import gradient_of
from gradguard.errors import InvalidValueError
from gradguard.parity.shards import LocalParameter, LocalParameters
from gradguard.parity.summation import backwards
from gradguard.state.frozen import Frozen
from gradguard.state.generators import generator_states
from gradguard.state.weight_watch import checksum
from gradguard.tensors.matmul_precision import TF32_EPSILON, Kind, is_tf32_allowed
from gradguard.tensors.sketch import CHUNK, hashed
from gradguard.torch_private import is_compiled

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


# Weights.


def flip_weights(parameters: LocalParameters, epsilon: float, run: int, *, back: bool = False) -> None:
    r"""Change each weight by up to 2 ``epsilon`` of itself; its position in the parameter and ``run`` set the change.

    The change is its own inverse, bit for bit and without a copy. It flips two bits of the number, worth ``epsilon``
    and 2 ``epsilon``, in blocks of four numbers around the powers of 2. Zeros stay zero.

    Args:
        parameters: The shards whose weights change, in place.
        epsilon: The relative size of the change.
        run: The number of the change, which selects its pattern.
        back: Whether to undo the change of the same ``epsilon`` and ``run``.
    """
    for parameter in reversed(parameters) if back else parameters:  # two parameters may share memory
        part, weights = parameter.weights()
        shift = _shift(weights.dtype, epsilon)
        if shift is not None:
            for at, chunk in _slices(weights):
                places = part.places(at, chunk.numel(), weights.device)
                chunk.copy_(_flipped(chunk, shift, (hashed(places) >> (32 + 2 * run)) & 3))


def add_signs(parameters: LocalParameters, sizes: Mapping[str, float], which: int) -> None:
    """Add ``sizes[name]`` to or subtract it from each gradient element; the element's position decides the sign.

    Args:
        parameters: The shards whose gradients change, in place.
        sizes: The size for each parameter, by name; a negative size reverses all signs.
        which: The number of the pattern of signs.
    """
    for parameter in parameters:
        if (found := parameter.gradient()) is not None:
            part, gradient = found
            for at, chunk in _slices(gradient):
                bits = hashed(part.places(at, chunk.numel(), gradient.device)) >> (7 + which % 50)
                signs = (1 - 2 * (bits & 1)).view(chunk.shape).to(torch.float64)
                chunk.copy_(chunk.double() + sizes[parameter.name] * signs)


def scale_gradients(parameters: LocalParameters, times: float) -> None:
    """Multiply gradients in place."""
    for parameter in parameters if times != 1 else ():
        if (found := parameter.gradient()) is not None:
            found[1].mul_(times)


def _shift(dtype: torch.dtype, epsilon: float) -> int | None:
    """Return the lowest bit to flip, counted from the last; None for a dtype whose weights are not changed."""
    if not dtype.is_floating_point or dtype.itemsize not in _INTEGERS:
        return None
    unit, shift = torch.finfo(dtype).eps, 0
    while unit * 2 ** (shift + 1) <= epsilon and unit * 2 ** (shift + 3) <= 1:
        shift += 1
    return shift


def _flipped(values: Tensor, shift: int, which: Tensor) -> Tensor:
    kind = _INTEGERS[values.dtype.itemsize]
    bits, low, high = values.reshape(-1).view(kind), torch.iinfo(kind).min, torch.iinfo(kind).max
    size, half = bits & high, 2 << shift
    infinity = int(torch.tensor(torch.inf, dtype=values.dtype, device="cpu").view(kind))
    # Both bounds are borders of blocks, so a flip crosses neither: no zero becomes NaN, and no number infinity.
    inside = (size >= half) & (size < infinity - half)
    new = ((size + half) ^ (which.to(kind) << shift)) - half
    return (torch.where(inside, new, size) | (bits & low)).view(values.dtype).view(values.shape)


def _slices(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield views of about 65,536 elements in order, each with the position of its first element."""
    values = values.view(-1) if values.is_contiguous() else values
    rows = CHUNK if values.dim() == 1 else max(1, CHUNK // max(1, values[:1].numel()))
    at = 0
    for part in values.split(rows) if values.dim() else [values]:
        yield at, part
        at += part.numel()


def digest(parameters: Iterable[LocalParameter]) -> int:
    """Return a checksum of the weights, which changes with the last bit of any weight."""
    return checksum(parameter.weights()[1] for parameter in parameters)


# Everything else that a step reads and changes.


def again(step: Callable[[], Any], scale: float = 1.0) -> int:
    """Run ``step()`` from the current state, and return the number of its backward passes."""
    with torch.enable_grad(), backwards(scale) as watched:
        step()
    return watched.count


class Replay:
    """The state that a step reads besides its weights: buffers, random generators and gradients.

    Args:
        model: The model.
        parameters: This process's shards of the model's parameters.
        put_back: A function that restores the weights after a run that updates them; None if no run does.

    Attributes:
        generators: The states of the random generators before each run.
    """

    def __init__(
        self, model: nn.Module, parameters: LocalParameters, put_back: Callable[[], None] | None = None
    ) -> None:
        self._put_back, self._parameters = put_back, parameters
        self._tensors = [p for p in model.parameters() if p.requires_grad]
        self.generators = generator_states()
        self._frozen = Frozen([model], self.generators)

    def restore(self) -> None:
        """Restore buffers and generators, set gradients to None, and zero Megatron's ``main_grad`` buffers."""
        with torch.no_grad():
            for tensor in self._tensors:
                tensor.grad = None
                if (kept := gradient_of(tensor)) is not None:
                    kept.zero_()
        self._frozen.restore()

    @contextmanager
    def perturbed(self, epsilon: float, run: int) -> Iterator[None]:
        """Change the weights by rounding inside the block, and undo the change at its end."""
        flip_weights(self._parameters, epsilon, run)
        try:
            yield
        finally:
            if self._put_back is None:
                flip_weights(self._parameters, epsilon, run, back=True)
            else:
                self._put_back()


# The precision of the computation.


@contextmanager
def precision_of(model: nn.Module) -> Iterator[set[torch.dtype]]:
    """Yield a set that collects the floating dtypes of the outputs of ``model``'s layers inside the block.

    Layers inside compiled code have no hooks. For a model with compiled code, the set contains the dtypes that the
    outermost module returns, and autocast's dtype.
    """
    dtypes: set[torch.dtype] = set()
    compiled = any(is_compiled(module) for module in model.modules())
    hooked = [model] if compiled else list(model.modules())
    hooks = [module.register_forward_hook(lambda _m, _i, output: _collect(output, dtypes)) for module in hooked]
    try:
        yield dtypes
    finally:
        for hook in hooks:
            hook.remove()


def _collect(output: Any, dtypes: set[torch.dtype]) -> None:
    if torch.compiler.is_compiling():
        return
    for value in output if isinstance(output, tuple | list) else (output,):
        if isinstance(value, Tensor) and value.is_floating_point():
            dtypes.add(value.dtype)
            if torch.is_autocast_enabled(value.device.type):
                dtypes.add(torch.get_autocast_dtype(value.device.type))


def epsilon_of(dtypes: Iterable[torch.dtype], device: torch.device, kinds: Iterable[Kind]) -> float:
    """Return the machine epsilon of the coarsest of ``dtypes``, or of TF32 if it is on and coarser.

    Args:
        dtypes: The dtypes of the computation.
        device: The device of the computation.
        kinds: The kinds of operations on the device; TF32 is on by default for convolutions and recurrent layers.

    Raises:
        InvalidValueError: If no dtype is floating.
    """
    known = [torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point]
    if not known:
        raise InvalidValueError("no trained parameter is of a floating dtype, so there is no gradient to save.")
    return max([*known, TF32_EPSILON if is_tf32_allowed(device, *kinds) else 0.0])
