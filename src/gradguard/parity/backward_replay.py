"""Run a step again as it was, or with weights that differ by rounding; then all is as before, to the last bit."""

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
    r"""Change each weight by up to 2 ``epsilon`` of itself, up or down by its place in the whole and by ``run``.

    It is its own inverse, to the last bit and without a copy: of the number's bit pattern, two bits worth
    ``epsilon`` and twice that are flipped, in blocks of four that lie around the powers of 2. Zeros stay zero.

    Args:
        parameters: Parts whose weights change, in place.
        epsilon: The relative size.
        run: Which of several changes.
        back: Undo the change of the same ``epsilon`` and ``run``.
    """
    for parameter in reversed(parameters) if back else parameters:  # two may share memory
        part, weights = parameter.weights()
        shift = _shift(weights.dtype, epsilon)
        if shift is not None:
            for at, chunk in _slices(weights):
                places = part.places(at, chunk.numel(), weights.device)
                chunk.copy_(_flipped(chunk, shift, (hashed(places) >> (32 + 2 * run)) & 3))


def add_signs(parameters: LocalParameters, sizes: Mapping[str, float], which: int) -> None:
    """Add to each element of each gradient the size of its parameter, up or down by its place in the whole.

    Args:
        parameters: Whose gradients, in place.
        sizes: By name; negative ones turn the signs round.
        which: Which of several patterns of signs.
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
    """The lowest bit to flip, counted from the last; None where a dtype is left alone."""
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
    # Both bounds are borders of blocks, so that nothing leaves or enters: no zero becomes NaN, no number infinity.
    inside = (size >= half) & (size < infinity - half)
    new = ((size + half) ^ (which.to(kind) << shift)) - half
    return (torch.where(inside, new, size) | (bits & low)).view(values.dtype).view(values.shape)


def _slices(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Views of some 65,536 elements in order, each with where it begins."""
    values = values.view(-1) if values.is_contiguous() else values
    rows = CHUNK if values.dim() == 1 else max(1, CHUNK // max(1, values[:1].numel()))
    at = 0
    for part in values.split(rows) if values.dim() else [values]:
        yield at, part
        at += part.numel()


def digest(parameters: Iterable[LocalParameter]) -> int:
    """Return a number that changes if any weight does, in its last bit."""
    return checksum(parameter.weights()[1] for parameter in parameters)


# Everything else that a step reads and changes.


def again(step: Callable[[], Any], scale: float = 1.0) -> int:
    """Run ``step()`` from the state that is there, and return how many backward passes it has."""
    with torch.enable_grad(), backwards(scale) as watched:
        step()
    return watched.count


class Replay:
    """The state that a step reads besides its weights, so that it runs again as it did.

    Args:
        model: The model.
        parameters: This process' parts of its parameters.
        put_back: Puts weights back after a run that updates them.

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
        """Let buffers and generators be as they were, and gradients None; Megatron's ``main_grad``, a buffer, zero."""
        with torch.no_grad():
            for tensor in self._tensors:
                tensor.grad = None
                if (kept := gradient_of(tensor)) is not None:
                    kept.zero_()
        self._frozen.restore()

    @contextmanager
    def perturbed(self, epsilon: float, run: int) -> Iterator[None]:
        """Let the weights differ by rounding inside the block."""
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
    """Yield the set of floating dtypes that layers of ``model`` compute in inside the block, as it fills.

    Layers inside compiled code cannot tell: there it is what the outermost module returns, and autocast.
    """
    seen: set[torch.dtype] = set()
    compiled = any(is_compiled(module) for module in model.modules())
    watched = [model] if compiled else list(model.modules())
    hooks = [module.register_forward_hook(lambda _m, _i, output: _note(output, seen)) for module in watched]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _note(output: Any, seen: set[torch.dtype]) -> None:
    if torch.compiler.is_compiling():
        return
    for value in output if isinstance(output, tuple | list) else (output,):
        if isinstance(value, Tensor) and value.is_floating_point():
            seen.add(value.dtype)
            if torch.is_autocast_enabled(value.device.type):
                seen.add(torch.get_autocast_dtype(value.device.type))


def epsilon_of(dtypes: Iterable[torch.dtype], device: torch.device, kinds: Iterable[Kind]) -> float:
    """Return the distance from 1 to the next number in the coarsest of ``dtypes``, and of TF32 where it is on.

    Args:
        dtypes: Dtypes of the computation.
        device: Where.
        kinds: Kinds of operations there; for convolutions and recurrent layers TF32 is on by default.

    Raises:
        InvalidValueError: If none is a floating dtype.
    """
    known = [torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point]
    if not known:
        raise InvalidValueError("no trained parameter is of a floating dtype, so there is no gradient to save.")
    return max([*known, TF32_EPSILON if is_tf32_allowed(device, *kinds) else 0.0])
