"""The random numbers that a forward of a batch draws, given to the forward of each of its samples.

A sample that runs by itself draws other numbers than in its batch, so the two could not be compared, nor could one be
repeated for the other. Here the numbers of the batch are recorded, and each sample gets its own share of them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.rerun import generators, restore_generators
from gradguard.torch_private import arguments_of, each_operation

_RRELU = ("aten::rrelu_with_noise", "aten::rrelu_with_noise_functional")
"""What it draws is in its second argument."""


class Draws:
    """Records every random tensor that is drawn in a block, and how precisely the block computes.

    Attributes:
        drawn: The operation's name and its tensor, in order.
        precision: Machine epsilon of the coarsest dtype that was computed in.
    """

    def __init__(self) -> None:
        self.drawn: list[tuple[str, Tensor]] = []
        self.precision = torch.finfo(torch.float64).eps
        self._generators = generators()

    def __enter__(self) -> "Draws":
        self._block = each_operation(self._record)
        self._block.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._block.__exit__(*error)

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if (
                isinstance(tensor, Tensor)
                and tensor.numel() > 1
                and (tensor.is_floating_point() or tensor.is_complex())
            ):
                self.precision = max(self.precision, torch.finfo(tensor.dtype).eps)
        if is_draw(func, args, kwargs):
            drawn = _random_part(func, args, result)
            # Masks are kept as bits; others are copied, because code scales them in place.
            copied = drawn.bool() if "bernoulli" in func.name() and drawn.dtype != torch.bool else drawn.clone()
            self.drawn.append((func.name(), copied))
        return result

    @contextmanager
    def of_sample(self, sample: int, batch_size: int, last: bool = False) -> Iterator[None]:
        """Draw the share of one sample in a block.

        Args:
            sample: Which.
            batch_size: Number of samples that drew together.
            last: Where a dimension holds several entries for each sample, the samples vary fastest in it.

        Raises:
            UnsupportedGradientError: If the sample by itself draws other numbers than in the batch.
        """
        now = generators()
        restore_generators(self._generators)
        replay = _Share(self.drawn, sample, batch_size, last)
        try:
            with each_operation(replay.draw):
                yield
        finally:
            restore_generators(now)
        replay.finish()


class _Share:
    """Gives each draw the part of a recorded one that belongs to one sample."""

    def __init__(self, drawn: list[tuple[str, Tensor]], sample: int, batch_size: int, last: bool) -> None:
        self._drawn, self._sample, self._batch_size, self._last = iter(drawn), sample, batch_size, last

    def draw(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Do one operation."""
        if not is_draw(func, args, kwargs):
            return func(*args, **kwargs)
        name, recorded = next(self._drawn, ("", None))
        if recorded is None or name != func.name():
            raise UnsupportedGradientError(
                "a sample by itself draws other random numbers than in the batch: how many, or in which order, depends "
                "on the batch."
            )
        result = func(*args, **kwargs)
        own = _random_part(func, args, result)
        own.copy_(self._share_of(recorded, own.shape))
        if func.name().startswith("aten::native_dropout"):  # its values follow from the mask
            result[0].copy_(args[0] * own.to(args[0].dtype) / max(1.0 - args[1], 1e-30))
        elif func.name() in _RRELU:
            result.copy_(args[0] * own)
        return result

    def _share_of(self, recorded: Tensor, shape: torch.Size) -> Tensor:
        if recorded.shape == shape:
            return recorded
        dims = [d for d in range(len(shape)) if recorded.dim() == len(shape) and recorded.shape[d] != shape[d]]
        if len(dims) != 1 or recorded.shape[dims[0]] != shape[dims[0]] * self._batch_size:
            raise UnsupportedGradientError(
                f"random numbers of shape {tuple(recorded.shape)} are drawn for {self._batch_size} samples and "
                f"{tuple(shape)} for one, so each sample's share cannot be told."
            )
        dim, own = dims[0], shape[dims[0]]
        if self._last and own > 1:
            return recorded.unflatten(dim, (own, self._batch_size)).select(dim + 1, self._sample)
        return recorded.narrow(dim, self._sample * own, own)

    def finish(self) -> None:
        """Check that all was drawn."""
        if next(self._drawn, None) is not None:
            raise UnsupportedGradientError("a sample by itself draws fewer random numbers than in the batch.")


def is_draw(func: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether an operation draws random numbers; attention and recurrent layers without dropout draw none."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = {argument.name: argument.default_value for argument in arguments_of(func)}
    given |= dict(zip(given, args, strict=False)) | kwargs
    rates = [given[name] for name in ("dropout_p", "dropout", "train", "training") if name in given]
    return all(rate is None or bool(rate) for rate in rates)


def _random_part(func: Any, args: Any, result: Any) -> Tensor:
    """The tensor among an operation's results, or arguments, that holds what was drawn."""
    if func.name() in _RRELU:
        return args[1]
    hidden = any(a.alias_info is not None and a.alias_info.is_write for a in arguments_of(func)[1:])
    if isinstance(result, Tensor) and not hidden:
        return result
    if func.name().startswith("aten::native_dropout"):
        return result[1]
    raise UnsupportedGradientError(
        f"{func.name()} draws random numbers that cannot be given to each sample: set its dropout to 0, or use "
        "torch.nn.Dropout in its place."
    )
