"""`append_backward` and `minimize`: the calls of PaddlePaddle's error clip design."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradguard.backward_clip.backward_graph import is_leaf, raise_if_freed, refuse_reentrant, root_of, walk
from gradguard.backward_clip.error_clip_rules import BaseErrorClip, apply_rule, are_alike, described
from gradguard.backward_clip.hooks import Gradients, explained
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.listeners import changing_on_the_way

Callback = Callable[[str, Gradients], Gradients | None]
"""A function of an operation's name and the gradients of its inputs; it returns new gradients, or None to keep them."""

Parameters = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]


def append_backward(
    loss: Tensor,
    parameter_list: Parameters | None = None,
    no_grad_set: Iterable[Tensor | str] | None = None,
    callback: Callback | BaseErrorClip | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Run the backward of ``loss`` and call ``callback`` after the backward of each operation.

    The callback receives PyTorch's name of the operation (``"MulBackward0"``) and the gradients that its backward
    returned: one for each input of the operation, or ``None`` for an input without a gradient. It may return other
    gradients of the same shapes and dtypes. As in PaddlePaddle's design, the callback receives the contribution of one
    operation, before contributions to one value are accumulated, and gradients of parameters are among them.
    `error_clip` instead clips each accumulated gradient once, and does not clip parameters.

    The gradients are added to ``.grad`` of the parameters, as in ``loss.backward()``.

    **Guarantees.**

    - The callback is called once for each operation, in the order of the backward.
    - No hook stays in the graph, also after an error.
    - Tensors of ``no_grad_set`` get no gradient, and no gradient passes through them.
    - Gradients whose shape, dtype or device differ from the operation's are refused.

    Args:
        loss: A scalar with a graph behind it.
        parameter_list: The parameters whose gradients are computed; None for all on which the loss depends. A module,
            tensors, ``(name, tensor)`` pairs or a mapping; ``no_grad_set`` may refer to their names.
        no_grad_set: Parameters, tensors or names through which no gradient flows.
        callback: The function to call after each operation, or a rule to apply to each gradient.

    Returns:
        The (parameter, gradient) pairs of the parameters that the loss reaches.

    Raises:
        InvalidValueError: If the loss has no graph or a graph with a reentrant checkpoint, or a name is unknown.
        InvalidTypeError: If an argument has the wrong type, or the callback returns gradients that do not fit.
        FreedGraphError: If an earlier backward has freed the graph.
        RuntimeError: If the backward of PyTorch raises one.

    Example:
        >>> import gradguard as gg, torch
        >>> weight = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> [(parameter, gradient)] = gg.append_backward((weight * 10).sum(), callback=gg.ErrorClipByValue(max=5.0))
        >>> gradient
        tensor([5., 5.])
        >>> pairs = gg.append_backward((weight * 10).sum(), callback=lambda op, gradients: print(op))
        SumBackward0
        MulBackward0

    Reference:
        PaddlePaddle, Error Clip (2018).
    """
    graph = walk([root_of(_checked_loss(loss))])
    listed = None if parameter_list is None else _named(parameter_list)
    blocked = _resolved(no_grad_set, listed or [])
    called = None if callback is None else _as_callback(callback)
    refuse_reentrant(graph)
    variables = [getattr(node, "variable", None) for node in graph.nodes if is_leaf(node)]
    reached = {id(one): one for one in variables if one is not None}
    chosen = [*reached.values()] if listed is None else [parameter for _, parameter in listed]
    without = {*map(id, blocked)}
    wanted = {id(one): one for one in chosen if id(one) in reached and id(one) not in without}
    handles: list[RemovableHandle] = []
    try:
        if called is not None:
            operations = [node for node in graph.nodes if not is_leaf(node)]
            handles += [one.register_hook(partial(_after_operation, called, one.name())) for one in operations]
        handles += [_block(tensor) for tensor in blocked if not tensor.is_leaf]
        with changing_on_the_way("a callback of gg.append_backward") if callback is not None else nullcontext():
            if len(wanted) == len(reached):
                torch.autograd.backward(loss)
            elif wanted:
                torch.autograd.backward(loss, inputs=[*wanted.values()])
    except RuntimeError as error:
        raise_if_freed(error, graph.nodes)
        raise
    finally:
        for handle in handles:
            handle.remove()
    return [(one, one.grad) for one in wanted.values() if one.grad is not None]


def minimize(
    optimizer: Optimizer,
    loss: Tensor,
    startup_program: None = None,
    parameter_list: Parameters | None = None,
    no_grad_set: Iterable[Tensor | str] | None = None,
    error_clip: BaseErrorClip | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Perform a whole training step: zero the gradients, run the backward with ``error_clip``, step the optimizer.

    The clip follows PaddlePaddle's design. It clips every gradient that the backward of an operation returns, before
    contributions to one value are accumulated, including gradients of parameters. `gradguard.error_clip` instead clips
    accumulated gradients, and supports chosen modules and a loss scale.

    **Guarantees.**

    - If the backward raises, every ``.grad`` is the same tensor as before, and the optimizer does not step.
    - Only parameters of the optimizer are updated, and only those in ``parameter_list``.

    Args:
        optimizer: Any optimizer whose ``step`` needs no closure.
        loss: A scalar with a graph behind it.
        startup_program: None. The argument exists for compatibility with PaddlePaddle; other values are refused.
        parameter_list: The parameters to update, a subset of the optimizer's; None for all of them.
        no_grad_set: Parameters, tensors or names through which no gradient flows. Names come from ``parameter_list``,
            or from an optimizer that was created with ``model.named_parameters()``.
        error_clip: The rule, or None.

    Returns:
        The (parameter, gradient) pairs that the step used.

    Raises:
        InvalidValueError: If the loss has no graph, a name is unknown, a parameter does not belong to the optimizer, or
            the optimizer needs a closure.
        InvalidTypeError: If an argument has the wrong type, or a start-up program is given.
        FreedGraphError: If an earlier backward has freed the graph.

    Example:
        >>> import gradguard as gg, torch
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        >>> loss = model(torch.ones(4, 3)).square().mean()
        >>> parameters_and_gradients = gg.minimize(optimizer, loss, error_clip=gg.ErrorClipByValue(max=5.0))
        >>> len(parameters_and_gradients)
        2

    Reference:
        PaddlePaddle, Error Clip (2018).
    """
    if not isinstance(optimizer, Optimizer):
        raise InvalidTypeError(f"optimizer is {type(optimizer).__name__}: expected a torch.optim.Optimizer.")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidValueError("LBFGS evaluates the loss by itself: call its step(closure) with gg.error_clip inside.")
    if error_clip is not None and not isinstance(error_clip, BaseErrorClip):
        raise InvalidTypeError(f"error_clip is {type(error_clip).__name__}: expected a rule or None.")
    if startup_program is not None:
        raise InvalidTypeError(
            f"startup_program is {type(startup_program).__name__}: expected None, because PyTorch initializes "
            f"parameters when they are created. To choose the parameters to update, write parameter_list=..."
        )
    _checked_loss(loss)
    owned: list[tuple[str, Tensor]] = []
    for group in optimizer.param_groups:
        owned += zip(group.get("param_names", [""] * len(group["params"])), group["params"], strict=True)
    listed = owned if parameter_list is None else _named(parameter_list)
    for name, parameter in listed:
        if not any(parameter is one for _, one in owned):
            shown = name or f"a tensor of shape {tuple(parameter.shape)}"
            raise InvalidValueError(f"parameter_list has {shown}, which the optimizer does not update: leave it out.")
    blocked = _resolved(no_grad_set, [*owned, *listed])
    before = [(parameter, parameter.grad) for _, parameter in owned]
    optimizer.zero_grad()
    try:
        pairs = append_backward(loss, [parameter for _, parameter in listed], blocked, error_clip)
    except BaseException:
        for parameter, gradient in before:
            parameter.grad = gradient
        raise
    optimizer.step()
    return pairs


def _checked_loss(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise InvalidTypeError(f"the loss is {type(loss).__name__}: expected a tensor.")
    if loss.grad_fn is None:
        raise InvalidValueError("the loss has no graph behind it: expected the result of differentiable operations.")
    return loss


def _after_operation(callback: Callback, name: str, made: Gradients, taken: Gradients) -> Gradients | None:
    """Call the callback on the gradients ``made``; return the callback's gradients, or None to keep ``made``."""
    changed: Any = callback(name, made)
    if changed is None:
        return None
    if not isinstance(changed, tuple | list) or len(changed) != len(made):
        raise InvalidTypeError(
            f"the callback for {name} returned {type(changed).__name__}: expected {len(made)} gradients."
        )
    for old, new in zip(made, changed, strict=True):
        if not are_alike(old, new):
            raise InvalidTypeError(f"the callback for {name} returned {described(new)}: expected {described(old)}.")
    return tuple(changed)


def _as_callback(callback: Callback | BaseErrorClip) -> Callback:
    if not isinstance(callback, BaseErrorClip):
        if not callable(callback):
            raise InvalidTypeError(f"callback is {type(callback).__name__}: expected a callable or a rule.")
        return callback
    rule = callback

    def clip(name: str, gradients: Gradients) -> Gradients:
        try:
            return tuple(None if grad is None else apply_rule(rule, grad) for grad in gradients)
        except Exception as error:
            raise explained(error, rule, name, "", gradients) from error.__cause__

    return clip


def _block(tensor: Tensor) -> RemovableHandle:
    """Block the gradient of an intermediate value, by a hook that returns None for it."""
    node, number = root_of(tensor)
    return node.register_prehook(lambda grads: tuple(None if i == number else g for i, g in enumerate(grads)))


def _named(parameters: Any) -> list[tuple[str, Tensor]]:
    """Return (name, parameter) pairs of the tensors that require a gradient; a missing name is empty."""
    if isinstance(parameters, nn.Module):
        parameters = parameters.named_parameters()
    if isinstance(parameters, Mapping):
        parameters = parameters.items()
    if isinstance(parameters, Tensor | str) or not isinstance(parameters, Iterable):
        raise InvalidTypeError(
            f"parameter_list is {type(parameters).__name__}: expected a module or a list of tensors."
        )
    named: list[tuple[str, Any]] = [
        one if isinstance(one, tuple) and len(one) == 2 else ("", one) for one in parameters
    ]
    for _, one in named:
        if not isinstance(one, Tensor):
            raise InvalidTypeError(f"parameter_list has {one!r}: expected tensors, because a name alone is ambiguous.")
    return [(name, one) for name, one in named if one.requires_grad]


def _resolved(no_grad_set: Iterable[Tensor | str] | None, named: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
    """Return the tensors of ``no_grad_set`` that require a gradient, with names resolved by ``named``."""
    if isinstance(no_grad_set, Tensor | str):
        raise InvalidTypeError(f"no_grad_set is one {type(no_grad_set).__name__}: expected a list or a set of them.")
    tensors = []
    for one in no_grad_set or ():
        if isinstance(one, str):
            known = {name: tensor for name, tensor in named if name}
            if one not in known:
                among = f"the known ones, {sorted(known)}" if known else "the known ones: no parameter has a name"
                raise InvalidValueError(
                    f"no_grad_set has the name {one!r}, which is not among {among}. Give parameter_list=model, or the "
                    f"tensor itself."
                )
            one = known[one]
        if not isinstance(one, Tensor):
            raise InvalidTypeError(f"no_grad_set has {type(one).__name__}: expected tensors or names of parameters.")
        tensors += [one] if one.requires_grad else []
    return tensors
