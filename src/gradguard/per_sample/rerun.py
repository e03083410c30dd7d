"""Tools to run a module again for a purpose of the clipper's own.

Such a run restores the module's state afterwards, and may substitute tensors for its parameters. A sample that runs
alone gets the random numbers that it had in its batch, so the two runs can be compared.
"""

import itertools
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.call_arguments import Slot, is_inexact
from gradguard.state.frozen import Frozen
from gradguard.state.generators import accelerators_of, device_state, generator_states, have_drawn, restore_generators
from gradguard.torch_private import (
    arguments_of,
    buffer_slots,
    dropouts,
    each_operation,
    parameter_slots,
    renew_recurrent_weights,
)

Quietly = Callable[[], AbstractContextManager[None]]
"""Returns a block in which the clipper's own hooks do nothing."""

TOO_RARE = 1e-30
"""A dropout rate at which nothing is dropped. It is not 0, so code that reads the rate and drops itself still draws."""


@contextmanager
def undisturbed(module: nn.Module, drop_rate: float | None = 0.0) -> Iterator[Callable[[], None]]:
    """Run a block that calls ``module``, then restore random generators, buffers, hooks and attributes.

    Args:
        module: The model.
        drop_rate: The rate, inside the block, of dropout layers whose rate is not 0. Attention and recurrent layers
            then get 0. None leaves all rates unchanged.

    Yields:
        A function that restores the module at once, for several calls from one state.
    """
    before = frozen(module)

    def reset() -> None:
        before.restore()
        _set_drop_rate(module, drop_rate)

    fast_path = torch.backends.mha.get_fastpath_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # a reentrant checkpoint
        torch.backends.mha.set_fastpath_enabled(False)
        _set_drop_rate(module, drop_rate)
        try:
            yield reset
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)
            before.restore()


@contextmanager
def without_graph(module: nn.Module) -> Iterator[None]:
    """Keep parameters out of the autograd graph, in a block that calls ``module`` for its values.

    Gradients stay enabled, because a forward may differentiate its own inputs (such as the forces of a potential).

    Args:
        module: The model.
    """
    hidden = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in hidden:
            parameter.requires_grad_(False)
        with torch.enable_grad():
            yield
    finally:
        for parameter in hidden:
            parameter.requires_grad_(True)


def _set_drop_rate(module: nn.Module, rate: float | None) -> None:
    if rate is None:
        return
    for layer in module.modules():
        if isinstance(layer, nn.MultiheadAttention | nn.RNNBase):
            layer.dropout = 0.0
        elif isinstance(layer, dropouts()) and layer.p:
            layer.p = rate


def frozen(module: nn.Module, buffers: bool = True) -> Frozen:
    """Return a snapshot of the state of ``module``, of its attributes and of the random generators.

    Args:
        module: The module.
        buffers: Whether to copy the values of buffers.
    """
    generators = generator_states(accelerators_of(module.parameters()))
    return Frozen([module], generators, copies=buffers, attributes=True)


def seed_generators(seed: int) -> None:
    """Seed torch's and Python's generators, and NumPy's if NumPy is loaded."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


@contextmanager
def substituted(tensors: Mapping[Slot, Tensor]) -> Iterator[None]:
    """Substitute tensors for the parameters or buffers of modules in a block.

    Args:
        tensors: The tensors, by module and attribute.
    """
    before = [(module, slot, _home(module, slot)[slot]) for module, slot in tensors]
    recurrent = {module for module, _ in tensors if isinstance(module, nn.RNNBase)}
    try:
        for (module, slot), tensor in tensors.items():
            _home(module, slot)[slot] = tensor
        for layer in recurrent:
            renew_recurrent_weights(layer)
        yield
    finally:
        for module, slot, original in before:
            _home(module, slot)[slot] = original
        for layer in recurrent:
            renew_recurrent_weights(layer)


def copied_buffers(module: nn.Module) -> dict[Slot, Tensor]:
    """Return a copy of each buffer in ``module``, by module and attribute."""
    copies = {id(buffer): buffer.detach().clone() for buffer in module.buffers()}
    places = {(m, slot): buffer for m in module.modules() for slot, buffer in buffer_slots(m).items()}
    return {place: copies[id(buffer)] for place, buffer in places.items() if buffer is not None}


def _home(module: nn.Module, slot: str) -> dict[str, Any]:
    """Return the dictionary of ``module`` that holds ``slot``."""
    parameters: dict[str, Any] = parameter_slots(module)
    buffers: dict[str, Any] = buffer_slots(module)
    return parameters if slot in parameters else buffers


_RRELU = ("aten::rrelu_with_noise", "aten::rrelu_with_noise_functional")
"""Operations whose second argument receives the random numbers."""


LAYOUTS = "stretches", "fastest", "one by one"
"""How the samples of a batch may share its random numbers: each sample has a contiguous stretch of a dimension; the
samples vary fastest in a dimension; or similar draws follow one another, the same number for each sample."""


_DRAW_SO = "Draw for the whole batch at once, a row for each sample; or in one loop, the same amount for each sample."


class UntoldDrawsError(UnsupportedGradientError):
    """Raised if a sample's share of the random numbers that its batch drew cannot be determined."""


def coarseness(result: Any) -> float:
    """Return the machine epsilon of a tensor of several numbers that can have a gradient; 0 for anything else."""
    is_several = isinstance(result, Tensor) and result.numel() > 1 and is_inexact(result)
    return torch.finfo(result.dtype).eps if is_several else 0.0


class Draws:
    """Record every random tensor that a block draws, and the precision in which the block computes.

    `of_samples` raises an error if an operation's random numbers cannot be divided among the samples.

    Attributes:
        drawn: The operation's name and its random tensor, in order.
        precision: Machine epsilon of the coarsest dtype of the computation.
        drew_elsewhere: Whether the last block of `of_samples` drew from Python's or NumPy's generator, whose numbers
            cannot be divided among samples.
    """

    def __init__(self) -> None:
        self.drew_elsewhere = False
        self._untold: UntoldDrawsError | None = None
        self.drawn: list[tuple[str, Tensor]] = []
        self.precision = torch.finfo(torch.float64).eps
        self._generators = generator_states([])
        self._replayed: dict[bytes, Tensor] = {}

    def __enter__(self) -> "Draws":
        self._block = each_operation(self._record)
        self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, list | tuple) else [result]:
            self.precision = max(self.precision, coarseness(tensor))
        if is_draw(func, args, kwargs) and self._untold is None:
            try:
                drawn = _random_part(func, args, result)
            except UntoldDrawsError as error:
                self._untold = error
                return result
            # Masks are stored as booleans; other tensors are copied, because the code may scale them in place.
            copied = drawn.bool() if "bernoulli" in func.name() and drawn.dtype != torch.bool else drawn.clone()
            self.drawn.append((func.name(), copied))
        return result

    @contextmanager
    def of_samples(self, samples: Sequence[int], batch_size: int, layout: str = LAYOUTS[0]) -> Iterator[None]:
        """Replace the random numbers drawn in a block by the recorded shares of some samples.

        Args:
            samples: The indices of the samples, in the order in which the block runs them.
            batch_size: Number of samples in the recorded batch.
            layout: How the samples share the recorded tensors, one of `LAYOUTS`.

        Raises:
            UnsupportedGradientError: If the samples alone draw other random numbers than in the batch.
        """
        if self._untold is not None:
            raise self._untold
        now = generator_states([])
        restore_generators(self._generators)
        drawn = self.drawn
        if layout == "one by one":
            drawn = list[tuple[str, Tensor]]()
            for _, alike in itertools.groupby(self.drawn, lambda draw: (draw[0], draw[1].shape)):
                run = list(alike)
                own, rest = divmod(len(run), batch_size)
                drawn += run if rest else [run[i * own + k] for i in samples for k in range(own)]
        replay = _Share(drawn, samples, batch_size, layout == "fastest")
        try:
            with each_operation(replay.draw):
                yield
        finally:
            self.drew_elsewhere = have_drawn({**self._generators, "torch": torch.get_rng_state()})
            restore_generators(now)
        replay.finish()
        self._replayed = replay.given

    @contextmanager
    def again(self) -> Iterator[None]:
        """Replay in a block the numbers of the last `of_samples`, for a checkpoint that repeats its forward."""

        def draw(func: Any, args: Any, kwargs: Any) -> Any:
            given = self._replayed.get(_state_of_generator(args, kwargs)) if is_draw(func, args, kwargs) else None
            return func(*args, **kwargs) if given is None else _draw_as(lambda shape: given, func, args, kwargs)

        with each_operation(draw) if self._replayed else nullcontext():
            yield


class _Share:
    """Replace each drawn tensor by the part of a recorded one that belongs to some samples.

    Attributes:
        given: The replaced tensors, by the state of the generator before the draw.
    """

    def __init__(self, drawn: list[tuple[str, Tensor]], samples: Sequence[int], batch_size: int, last: bool) -> None:
        self._drawn, self._samples, self._batch_size, self._last = iter(drawn), samples, batch_size, last
        self.given: dict[bytes, Tensor] = {}

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do one operation, and replace its random numbers if it draws any."""
        if not is_draw(func, args, kwargs):
            return func(*args, **kwargs)
        name, recorded = next(self._drawn, ("", None))
        if recorded is None or name != func.name():
            raise UntoldDrawsError(
                "a sample alone draws other random numbers than in the batch: their number or order depends on the "
                f"batch. {_DRAW_SO}"
            )
        state = _state_of_generator(args, kwargs)
        result = _draw_as(lambda shape: self._share_of(recorded, shape), func, args, kwargs)
        self.given[state] = _random_part(func, args, result).clone()
        return result

    def _share_of(self, recorded: Tensor, shape: torch.Size) -> Tensor:
        if recorded.shape == shape:
            return recorded
        dims = [d for d in range(len(shape)) if recorded.dim() == len(shape) and recorded.shape[d] != shape[d]]
        count = len(self._samples)
        if len(dims) != 1 or recorded.shape[dims[0]] * count != shape[dims[0]] * self._batch_size:
            raise UntoldDrawsError(
                f"random numbers of shape {tuple(recorded.shape)} are drawn for {self._batch_size} samples and "
                f"{tuple(shape)} for {count}, so each sample's share cannot be determined. {_DRAW_SO}"
            )
        dim, own = dims[0], shape[dims[0]] // count
        chosen = torch.tensor(self._samples, device=recorded.device)
        if self._last and own > 1:
            return recorded.unflatten(dim, (own, self._batch_size)).index_select(dim + 1, chosen).flatten(dim, dim + 1)
        return recorded.unflatten(dim, (self._batch_size, own)).index_select(dim, chosen).flatten(dim, dim + 1)

    def finish(self) -> None:
        """Check that every recorded tensor was used."""
        if next(self._drawn, None) is not None:
            raise UntoldDrawsError(f"a sample alone draws fewer random numbers than in the batch. {_DRAW_SO}")


def _draw_as(choose: Callable[[torch.Size], Tensor], func: Any, args: Any, kwargs: Any) -> Any:
    """Do an operation that draws, and replace its random numbers by what ``choose`` returns for their shape."""
    result = func(*args, **kwargs)
    own = _random_part(func, args, result)
    given = choose(own.shape)
    if given.shape != own.shape:
        raise UntoldDrawsError(
            f"a checkpoint repeats its forward in backward and draws random numbers of shape {tuple(own.shape)}, where "
            f"the forward drew {tuple(given.shape)}."
        )
    own.copy_(given)
    if func.name().startswith("aten::native_dropout"):  # its values follow from the mask
        result[0].copy_(args[0] * own.to(args[0].dtype) / max(1.0 - args[1], 1e-30))
    elif func.name() in _RRELU:
        result.copy_(args[0] * own)
    return result


def _state_of_generator(args: Any, kwargs: Any) -> bytes:
    """Return the state of the generator that an operation draws from."""
    generator = kwargs.get("generator")
    if generator is not None:
        return bytes(generator.get_state().tolist())
    device = kwargs.get("device") or next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))
    device = torch.device(device)
    return bytes(device_state(device).tolist())


def is_draw(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation draws random numbers; attention and recurrent layers without dropout do not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = {argument.name: argument.default_value for argument in arguments_of(func)}
    given |= dict(zip(given, args, strict=False)) | kwargs
    rates = [given[name] for name in ("dropout_p", "dropout", "train", "training") if name in given]
    return all(rate is None or bool(rate) for rate in rates)


def _random_part(func: Any, args: Any, result: Any) -> Tensor:
    """Return the tensor, among an operation's results or arguments, that holds its random numbers."""
    if func.name() in _RRELU:
        return args[1]
    hidden = any(a.alias_info is not None and a.alias_info.is_write for a in arguments_of(func)[1:])
    if isinstance(result, Tensor) and not hidden:
        return result
    if func.name().startswith("aten::native_dropout"):
        return result[1]
    raise UntoldDrawsError(
        f"{func.name()} draws random numbers that cannot be divided among the samples: set its dropout to 0, or use "
        "torch.nn.Dropout in its place."
    )
