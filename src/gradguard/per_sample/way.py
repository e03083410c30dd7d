"""One way of calling a module: which samples are where in it, and how its per-sample gradients are found."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from gradguard.per_sample.layers.call import BatchAxis
from gradguard.per_sample.plan import Plans


@dataclass
class Way:
    """What is known of one way of calling a module.

    Attributes:
        module: What is called.
        whole: Positions of tensors, among its arguments, that belong to no sample though their size fits.
        plans: What to do at each call of each layer; none where samples are run one by one.
        output_axes: Batch axis of each tensor that it returns.
        changes_buffers: It changes its buffers.
        reason: Why samples are run one by one; "" where they are not.
        sizes: Batch sizes that it was verified with.
        precision: Machine epsilon of the coarsest dtype that is computed in.
        unowned: What to say when a gradient comes to one of the tensors that it returns, by position.
    """

    module: nn.Module
    whole: frozenset[int]
    plans: list[Plans]
    output_axes: Sequence[BatchAxis | None]
    changes_buffers: bool
    reason: str = ""
    sizes: set[int] = field(default_factory=set)
    precision: float = 2.0**-23
    unowned: dict[int, str] = field(default_factory=dict)

    @property
    def looped(self) -> bool:
        """Whether samples are run one by one."""
        return bool(self.reason)
