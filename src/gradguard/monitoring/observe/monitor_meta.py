"""The first line of a monitor's record: versions, the machine, and the parameters."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradguard.monitoring.observe.environment import describe, git_state
from gradguard.monitoring.observe.names import described
from gradguard.monitoring.record.file import SCHEMA


def meta_of(
    optimizer: Optimizer, clipper: object | None, parameters: Sequence[Tensor], names: Sequence[str]
) -> dict[str, Any]:
    """Return the ``meta`` line.

    Args:
        optimizer: What is monitored.
        clipper: What clips its gradients, if a guard is monitored.
        parameters: All its parameters.
        names: Their names.
    """
    fields = {
        "t": "meta",
        "version": getattr(sys.modules.get("gradguard"), "__version__", None),
        "schema": SCHEMA,
        "argv": list(sys.argv),
        "clip": None if clipper is None else type(clipper).__name__,
        "torch": torch.__version__,
        "git": git_state(),
        **describe(parameters),
        "optimizers": [type(optimizer).__name__],
        "params": described(names, parameters, [optimizer]),
    }
    return {key: value for key, value in fields.items() if value is not None}
