"""Compute each sample's loss from the sample's own rows alone, with a function that the user passes.

The function gets no other sample's rows. So mistakes that the graph of a loss does not show (transposed targets, a mask
made of another sample's numbers) cannot happen. Each loss must depend on its own sample's outputs only. In the call of
one watched sample, a tensor that was neither passed nor bound to the function, and is no parameter, is refused: it may
be made of the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.per_sample.call_arguments import Batch, Skeleton, tensor_leaves
from gradguard.per_sample.loss.shared import bound_values
from gradguard.torch_private import version_of


def own_losses(
    loss_fn: Callable[..., Tensor],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    batch_size: int,
    batch_first: bool,
    watched: int = -1,
    time_first: set[int] | None = None,
) -> list[Tensor]:
    """Return each sample's loss, a scalar each.

    Args:
        loss_fn: Function of one sample's loss, called once for each sample.
        args: Positional arguments; of each tensor the function gets one sample's row, with the dimension kept.
        kwargs: Keyword arguments, cut in the same way.
        batch_size: Number of samples B.
        batch_first: Whether samples lie along the first dimension of a tensor; else along the second, where a tensor
            has two.
        watched: Index of the sample in whose call the tensors that the function takes are checked; -1 for none.
        time_first: Positions of the arguments that were ``[T, B, ...]`` in a batch where T and B differed; new ones are
            added.

    Raises:
        InvalidTypeError: If the function returns no tensor.
        InvalidValueError: If a tensor does not have B rows, a list has B entries, or a loss is not one number.
        UnsupportedGradientError: If the function takes a tensor that may be made of the batch, or changes a tensor that
            is bound to it.
    """
    given = Skeleton((tuple(args), dict(kwargs)))
    bound = _versions(loss_fn)
    seen = set() if time_first is None else time_first
    rows = [_rows(tensor, batch_size, batch_first, place, seen) for place, tensor in enumerate(given.tensors)]
    _refuse_undivided(Batch((tuple(args), dict(kwargs)), batch_first, batch_size))
    losses: list[Tensor] = []
    for sample in range(batch_size):
        own = [row[sample].clone() for row in rows]  # the function may change its arguments in place
        own_args, own_kwargs = given.fill(own)
        if sample == watched:
            known = [*own, *_bound_tensors(loss_fn)]
            with torch.compiler.set_stance("force_eager"), _Watch(known, batch_size):
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
                f"given, got a tensor of shape {list(loss.shape)}. Reduce the loss inside the function, as by .mean()."
            )
        losses.append(loss.reshape(()))
    if batch_size > 1 and _versions(loss_fn) != bound:
        raise UnsupportedGradientError(
            "per_sample_losses: the function changes a tensor that is bound to it, such as a running mean. So the loss "
            "of a sample depends on the samples before it. Change that tensor between steps, outside of the function."
        )
    return losses


def _versions(loss_fn: Any) -> list[tuple[int, int]]:
    """Return the id and the version of each tensor that is bound to a function."""
    return [(id(tensor), version_of(tensor)) for tensor in _bound_tensors(loss_fn)]


def _refuse_undivided(batch: Batch) -> None:
    """Refuse arguments with samples' values that are in no tensor, or in a tensor of an object.

    Raises:
        InvalidValueError: If the function would get the values of all samples for each sample.
        UnsupportedGradientError: If an argument cannot be looked into.
    """
    if batch.size > 1 and batch.divided:
        name, value, _ = batch.divided[0]
        raise InvalidValueError(
            f"per_sample_losses: {value!r:.80} (argument {name}) has one entry for each of the {batch.size} samples, "
            "and only tensors are cut into rows. Make it a tensor; or, if it is the same for all samples, bind it by "
            "functools.partial."
        )
    if len(batch.dims) > len(tensor_leaves(batch.arguments)):
        raise InvalidValueError(
            "per_sample_losses: an argument is an object that holds a tensor, and only tensors in tuples, lists and "
            "dicts are cut into rows. Pass the tensor itself."
        )


def _rows(tensor: Tensor, batch_size: int, batch_first: bool, place: int, time_first: set[int]) -> Sequence[Tensor]:
    """Return one row for each sample of the argument tensor at position ``place``, with the dimension kept.

    Raises:
        InvalidValueError: If the tensor does not have B samples, or its dimension of samples is ambiguous.
        UnsupportedGradientError: If the tensor is nested, sparse, or a transposed view.
    """
    if tensor.is_nested or tensor.layout != torch.strided:
        raise UnsupportedGradientError(
            f"per_sample_losses: a {'nested' if tensor.is_nested else 'sparse'} tensor cannot be cut into rows. Pass a "
            "padded or dense tensor, as by .to_padded_tensor(0.0) or .to_dense()."
        )
    dim = 0 if batch_first or tensor.dim() < 2 else 1
    if dim and not tensor.requires_grad and tensor.shape[1] == batch_size > 1:
        if tensor.shape[0] != batch_size:
            time_first.add(place)
        elif place not in time_first:
            raise InvalidValueError(
                f"per_sample_losses: a tensor of shape {list(tensor.shape)} may be [T, B, ...] or [B, ...]: both sizes "
                f"are {batch_size}. Begin with a batch in which T and B differ."
            )
    if not tensor.dim() or tensor.shape[dim] != batch_size:
        raise InvalidValueError(
            f"per_sample_losses: expected tensors with {batch_size} samples along dimension {dim}, got one of shape "
            f"{list(tensor.shape)}. Bind a tensor that is the same for all samples to the function, as by "
            "functools.partial(loss_fn, weight=weight)."
        )
    square = dim == 0 and tensor.shape[:2] == (batch_size, batch_size) and not tensor.requires_grad
    if square and 0 < tensor.stride(0) < tensor.stride(1):
        raise UnsupportedGradientError(
            f"per_sample_losses: a tensor of shape {list(tensor.shape)} is a transposed view, such as target.T, so its "
            "rows may not be samples. Pass the tensor as the loader returned it; if its rows are samples, copy it by "
            ".contiguous()."
        )
    return tensor.split(1, dim)


def _bound_tensors(loss_fn: Any) -> list[Tensor]:
    """Return the tensors bound to a function: those of a module, and arguments bound by `functools.partial`."""
    return [one for _, one in bound_values(loss_fn) if isinstance(one, Tensor)]


class _Watch(TorchFunctionMode):
    """Refuses tensors that a function neither was passed nor computed: they may be made of the batch.

    Args:
        known: The tensors that the function was passed, or that are bound to it.
        batch_size: Number of samples, for the message.
    """

    def __init__(self, known: Sequence[Tensor], batch_size: int) -> None:
        super().__init__()
        self._known = {id(tensor): tensor for tensor in known}  # keeps the tensors alive, so that no id is reused
        self._batch_size = batch_size

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Check the tensors that a function of torch takes, and call the function.

        Returns:
            The function's result.

        Raises:
            UnsupportedGradientError: If it takes an unknown tensor that is no parameter.
        """
        for tensor in tensor_leaves((tuple(args), dict(kwargs or {}))):
            if id(tensor) not in self._known and not isinstance(tensor, nn.Parameter):
                raise UnsupportedGradientError(
                    f"per_sample_losses: the function takes a tensor of shape {list(tensor.shape)} that it was not "
                    f"given, and that may be made of the {self._batch_size} samples. Pass the tensor as an argument of "
                    "per_sample_losses, which cuts it into rows. If it is the same for all batches, bind it: "
                    "functools.partial(loss_fn, weight=weight), or call .item() on a number."
                )
        result = func(*args, **(kwargs or {}))
        self._known.update((id(made), made) for made in tensor_leaves(result))
        return result
