"""The state that an optimizer would give a parameter, found by one step of a twin that is thrown away."""

import inspect
from collections import defaultdict
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradguard.distributed.placements import is_sharded
from gradguard.errors import InvalidValueError
from gradguard.state.copies import PlainCopy
from gradguard.state.plain_file import is_stored
from gradguard.state.saved_snapshot import compare_layouts
from gradguard.torch_private import capturable_warning_mark


def compare_states(
    optimizer: Optimizer,
    live: Mapping[str, Tensor],
    groups: list[dict[str, Any]],
    stored: Mapping[Any, Any],
    copies: Mapping[Any, Any],
) -> None:
    """Check that the tensors of a saved state are as a step of the optimizer would have made them, and count steps.

    Optimizers outside of `torch.optim`, LBFGS and sharded parameters are not looked at: their steps may communicate,
    count or need a closure.

    Args:
        optimizer: The optimizer, which is not changed.
        live: Its parameters by their places, group by group.
        groups: The numbers that were saved of each group.
        stored: The entry of the file for each place.
        copies: The copy that was made of each.

    Raises:
        InvalidValueError: If a tensor is missing or has another shape, dtype or device, if a count of steps is none,
            or no step is possible with the numbers.
    """
    if type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
        return
    places = iter(live.items())
    for numbers, group in zip(groups, optimizer.param_groups, strict=True):
        known: dict[Any, list[dict[str, Tensor]]] = {}
        for place, parameter in islice(places, len(group["params"])):
            if not (state := stored.get(place)) or is_sharded(parameter):
                continue
            layout = parameter.shape, parameter.stride(), parameter.dtype, parameter.device
            if layout not in known:
                known[layout] = _expected(optimizer, numbers, group, parameter)
            what = f"the state of {type(optimizer).__name__} for {place}"
            _compare_with_any(what, state, known[layout])
            _check_count(what, copies[place].get("step", 0))


def _check_count(what: str, step: Any) -> None:
    """Refuse a count of steps that is no number of steps."""
    count = step.memory.item() if isinstance(step, PlainCopy) else step
    if type(count) not in (int, float) or not 0 <= count < 2**53:
        raise InvalidValueError(
            f"the snapshot is damaged: {what} has counted {count!a:.40} steps: expected a number from 0 on. Nothing "
            "was changed. Take another one."
        )


def _compare_with_any(what: str, state: Mapping[str, Any], expected: list[dict[str, Tensor]]) -> None:
    """Compare a saved state with each of the expected ones; raise the error of the first if it matches none."""
    wrong: list[InvalidValueError] = []
    for one in expected:
        try:
            compare_layouts(what, {name: state[name] for name in one if is_stored(state.get(name))}, one)
        except InvalidValueError as error:
            wrong.append(error)
    if wrong and len(wrong) == len(expected):
        raise wrong[0]


def _expected(
    optimizer: Optimizer, numbers: dict[str, Any], group: dict[str, Any], parameter: Tensor
) -> list[dict[str, Tensor]]:
    """Return what a step keeps after a dense and after a sparse gradient, as far as the optimizer takes these."""
    found: list[dict[str, Tensor]] = []
    errors: list[Exception] = []
    for sparse in (False, True):
        try:
            found.append(_rehearsed(optimizer, numbers, parameter, sparse=sparse))
        except Exception as error:  # a forged number may raise anything
            errors.append(error)
    if found:
        return found
    try:
        _rehearsed(optimizer, group, parameter)
    except Exception:  # the numbers are not to blame
        return []
    raise InvalidValueError(
        f"the snapshot is of another run: {type(optimizer).__name__} cannot step with the numbers of a group "
        f"({type(errors[0]).__name__}: {errors[0]!s:.80}). Nothing was changed."
    ) from errors[0]


@torch.no_grad()
def _rehearsed(
    optimizer: Optimizer, numbers: dict[str, Any], parameter: Tensor, *, sparse: bool = False
) -> dict[str, Tensor]:
    """Return the tensors that a first step with these numbers keeps for a new parameter of this layout."""
    new = nn.Parameter(torch.zeros_like(parameter), requires_grad=False)
    new.grad = torch.zeros_like(new).to_sparse(1) if sparse else torch.zeros_like(new)
    kind = type(optimizer)
    twin = kind.__new__(kind)
    twin.__setstate__({"defaults": {**optimizer.defaults}, "state": defaultdict(dict), "param_groups": []})
    twin.param_groups.append({**numbers, "params": [new]})
    setattr(twin, capturable_warning_mark(), True)
    inspect.unwrap(kind.step)(twin)  # without the hooks of all optimizers
    return {name: value for name, value in twin.state[new].items() if isinstance(value, Tensor)}
