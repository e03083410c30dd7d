"""Copies of everything that a step of an optimizer changes, restored in place; also its plain attributes."""

from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer

from gradguard.errors import UnsupportedGradientError
from gradguard.state.copies import Copier, Restorer, is_plain
from gradguard.torch_private import hook_tables

NOT_ATTRIBUTES = ("state", "param_groups", "defaults")
"""Attributes that are copied separately, or never change."""


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's plain attributes, also those in ``__slots__``, without torch's tables of hooks."""
    held: Any = object.__getstate__(optimizer)  # the optimizer's own __getstate__ omits attributes
    own, slots = held if isinstance(held, tuple) else (held, {})
    others = {*NOT_ATTRIBUTES, *hook_tables(optimizer)}
    return {name: value for name, value in {**own, **slots}.items() if name not in others and is_plain(value)}


SCHEDULED = ("lr", "momentum", "betas", "weight_decay", "initial_lr", "max_lr", "min_lr")
SCHEDULED += ("base_momentum", "max_momentum")
"""Numbers of a group that schedulers write; the optimizer owns the others."""


class OptimizerCopy:
    """A copy of everything that a step of one optimizer changes: parameters, state, numbers of groups, attributes.

    Args:
        optimizer: The optimizer.

    Attributes:
        parameters: Its parameters when they were copied, by group and position in the group.
        keys: The keys of its state then.
        kept: The copies.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters: dict[str, Tensor] = {}
        self.keys: list[Any] = []
        self.kept: Any = None

    def named(self) -> dict[str, Tensor]:
        """Return the present parameters, by group and position in the group."""
        groups = [group["params"] for group in self.optimizer.param_groups]
        return {f"group {i}, parameter {k}": p for i, group in enumerate(groups) for k, p in enumerate(group)}

    def groups(self) -> list[dict[str, Any]]:
        """Return the present content of the groups, without parameters."""
        groups = self.optimizer.param_groups
        return [{key: value for key, value in group.items() if key != "params"} for group in groups]

    def take(self, copier: Copier) -> None:
        """Copy the optimizer.

        Raises:
            UnsupportedGradientError: If a container contains itself.
        """
        self.parameters, self.keys = self.named(), list(self.optimizer.state)
        copier.known = self._by_reference()
        try:
            content = {
                "parameters": self.parameters,
                "groups": self.groups(),
                "state": list(self.optimizer.state.values()),
                "attributes": attributes_of(self.optimizer),
            }
            self.kept = copier.copy(content)
        except RecursionError as error:
            raise UnsupportedGradientError(
                f"{type(self.optimizer).__name__} keeps a list or dict that contains itself, or a very deep nest of "
                "them, in its state, groups or attributes, which cannot be copied: keep flat ones."
            ) from error
        finally:
            copier.known = None

    def _by_reference(self) -> dict[int, Any]:
        """Return the objects, by ids, that copies refer to instead of copying them."""
        return {id(one): one for one in (self.optimizer, *self.parameters.values())}

    def restore(self, restorer: Restorer, rewind_schedule: bool = True) -> None:
        """Restore the copy, each number into the existing tensors, dicts and lists.

        Args:
            restorer: Writes the copies.
            rewind_schedule: Whether the numbers of groups that schedulers write are restored, too.
        """
        restorer.known = self._by_reference()
        for name, parameter in self.parameters.items():
            restorer.write(self.kept["parameters"][name], parameter)
        state = self.optimizer.state
        copied = zip(self.keys, self.kept["state"], strict=True)
        contents = {key: restorer.restored(one, state.get(key)) for key, one in copied}
        state.clear()
        state.update(contents)
        stays = {"params"} if rewind_schedule else {"params", *SCHEDULED}
        for group, numbers in zip(self.optimizer.param_groups, self.kept["groups"], strict=True):
            for key in group.keys() - numbers.keys() - stays - {"initial_lr"}:
                del group[key]
            for key in numbers.keys() - stays:
                group[key] = restorer.restored(numbers[key], group.get(key))
        now = attributes_of(self.optimizer)
        for name in now.keys() - self.kept["attributes"].keys():  # a step may have set them for the first time
            delattr(self.optimizer, name)
        for name, value in restorer.restored(self.kept["attributes"], now).items():
            setattr(self.optimizer, name, value)
        restorer.known = None
