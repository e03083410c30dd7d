"""The plain attributes that an optimizer counts or remembers with, beside its ``state`` and its groups."""

from typing import Any

from torch.optim.optimizer import Optimizer

from gradguard.state.copies import Copier, Restorer, is_plain
from gradguard.torch_private import hook_tables

NOT_ATTRIBUTES = ("state", "param_groups", "defaults")
"""Attributes that are kept apart, or never change."""


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return those that are numbers, text, tensors, or containers of these; torch's tables of hooks are not."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in NOT_ATTRIBUTES and name not in hook_tables(optimizer) and is_plain(value)
    }


class AttributesCopy:
    """The attributes before a step.

    Args:
        optimizer: Whose.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._kept = optimizer, Copier().copy(attributes_of(optimizer))

    def restore(self) -> None:
        """Make them that again, in the same lists, dictionaries and tensors; those that have come since go."""
        now = attributes_of(self._optimizer)
        before = Restorer().restored(self._kept, dict(now))
        for name in now.keys() - before.keys():
            delattr(self._optimizer, name)
        for name, value in before.items():
            setattr(self._optimizer, name, value)
