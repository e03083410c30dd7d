"""Computes each sample's loss from its own rows alone, by a function that the user gives.

What the graph of a loss cannot show (targets that were transposed, a mask made of another sample's numbers) cannot
happen then, for the function gets no other sample's rows. What it takes from elsewhere is looked at: each value must
depend on its own sample's outputs, and a tensor that the function was not given may be made of the batch.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.per_sample.call_arguments import Skeleton, tensor_leaves
from gradguard.torch_private import tree_flatten


def own_losses(
    loss_fn: Callable[..., Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    batch_size: int,
    batch_first: bool,
    watched: int = -1,
) -> list[Tensor]:
    """Return each sample's loss, a scalar each.

    Args:
        loss_fn: Called once for each sample.
        args: Positional arguments; of each tensor the function gets one sample's row, with the dimension kept.
        kwargs: Keyword arguments, likewise.
        batch_size: Number of samples B.
        batch_first: Whether they are the first dimension of tensors, or the second of those that have two.
        watched: The sample in whose loss is looked at what the function takes from elsewhere; -1 for none.

    Raises:
        InvalidTypeError: If the function returns no tensor.
        InvalidValueError: If a tensor has not B rows, or a loss is not one number.
        UnsupportedGradientError: If the function takes a tensor that may be made of the batch.
    """
    given = Skeleton((tuple(args), dict(kwargs)))
    rows = [_rows(tensor, batch_size, batch_first) for tensor in given.tensors]
    losses: list[Tensor] = []
    for sample in range(batch_size):
        own = [row[sample] for row in rows]
        own_args, own_kwargs = given.fill(own)
        if sample == watched and batch_size > 1:
            with _Watch([*own, *_declared(loss_fn)], batch_size, 0 if batch_first else 1):
                loss = loss_fn(*own_args, **own_kwargs)
        else:
            loss = loss_fn(*own_args, **own_kwargs)
        if not isinstance(loss, Tensor):
            raise InvalidTypeError(
                f"per_sample_losses: expected a tensor from the function, got {type(loss).__name__}."
            )
        if loss.numel() != 1:
            raise InvalidValueError(
                "per_sample_losses: expected one number from the function, the loss of the one sample that it was "
                f"given, got a tensor of shape {list(loss.shape)}. Reduce it there, as by .mean()."
            )
        losses.append(loss.reshape(()))
    return losses


def _rows(tensor: Tensor, batch_size: int, batch_first: bool) -> Sequence[Tensor]:
    dim = 0 if batch_first or tensor.dim() < 2 else 1
    if not tensor.dim() or tensor.shape[dim] != batch_size:
        raise InvalidValueError(
            f"per_sample_losses: expected tensors with {batch_size} samples along dimension {dim}, got one of shape "
            f"{list(tensor.shape)}. Bind what is the same for all samples to the function, as by "
            "functools.partial(loss_fn, weight=weight)."
        )
    return tensor.split(1, dim)


def _declared(loss_fn: Any) -> Iterator[Tensor]:
    """Yield what is bound to a function: a module's parameters and buffers, what `functools.partial` gives."""
    if isinstance(loss_fn, functools.partial):
        yield from _declared(loss_fn.func)
        for leaf in tree_flatten((loss_fn.args, loss_fn.keywords))[0]:
            yield from _declared(leaf)
    elif isinstance(loss_fn, nn.Module):
        yield from loss_fn.parameters()
        yield from loss_fn.buffers()
    elif isinstance(loss_fn, Tensor):
        yield loss_fn


class _Watch(TorchFunctionMode):
    """Refuses tensors that a function neither was given nor has made, if they may be made of the batch.

    Args:
        known: What it was given.
        batch_size: Number of samples, more than 1.
        dim: Where they are in tensors that have such a dimension.
    """

    def __init__(self, known: Sequence[Tensor], batch_size: int, dim: int) -> None:
        super().__init__()
        self._known = {id(tensor): tensor for tensor in known}  # held, so that no other gets their identities
        self._batch_size, self._dim = batch_size, dim

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Look at what a function of torch takes, and call it."""
        for tensor in tensor_leaves((tuple(args), dict(kwargs or {}))):
            if id(tensor) not in self._known and not isinstance(tensor, nn.Parameter):
                self._refuse(tensor)
        result = func(*args, **(kwargs or {}))
        self._known.update((id(made), made) for made in tensor_leaves(result))
        return result

    def _refuse(self, tensor: Tensor) -> None:
        number = not tensor.dim() and tensor.is_floating_point()
        if number or self._batch_size in tensor.shape[: self._dim + 1]:
            raise UnsupportedGradientError(
                f"per_sample_losses: the function takes a tensor of shape {list(tensor.shape)} that it was not given, "
                f"and that may be made of the {self._batch_size} samples. Give it as an argument, which is cut into "
                "rows. If it is the same for all batches, bind it: functools.partial(loss_fn, weight=weight), or call "
                ".item() on a number."
            )
