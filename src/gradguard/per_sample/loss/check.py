"""Looks at the loss of a step that is to be verified, before its backward frees the graph; and judges it afterwards."""

import warnings
from collections.abc import Callable, Sequence

from torch import Tensor

from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.per_sample.layers.call import BatchAxis
from gradguard.per_sample.loss.graph import BackwardRoots, Root, structure
from gradguard.per_sample.loss.separation import Outputs, of_several
from gradguard.per_sample.loss.terms import NO_PART, LossParts, explain, loss_parts

_NOT_SEEN = (
    "its backward was not seen to begin from what the module returned. Was torch.autograd.backward looked up before "
    "the forward, or given a GradientEdge, or run in another thread, or was a view that it returned changed in place? "
    "Call loss.backward() after the forward, and compute with output * 2 rather than output.mul_(2)"
)

_MOST_CALLS = 16
"""Calls whose outputs are kept, and so their graphs, until a backward begins from one of them."""


_MOST_KNOWN_CALLS = 4
"""The same once a loss has been verified, so that calls without a backward hold little."""

_MOST_STRUCTURES = 10_000
"""Makes of losses that are remembered."""


class LossCheck:
    """Whether each sample's part in the loss is its own loss.

    Args:
        reduction: What the loss is said to be over samples, ``"mean"`` or ``"sum"``.
        batch_first: Whether the batch is the first dimension of what the module is called with.
        scale: Gives what a GradScaler multiplies the loss by.
        only_warn: Warn of a loss that is another.
    """

    def __init__(self, reduction: str, batch_first: bool, scale: Callable[[], float], only_warn: bool) -> None:
        self._reduction, self._batch_first, self._scale, self._only_warn = reduction, batch_first, scale, only_warn
        self._roots = BackwardRoots(self._look)
        self._calls: list[Outputs] = []
        self._too_many = False
        self._verifying = False
        self._structure: bytes | None = None  # of the loss that was looked at
        self._known: set[bytes] = set()  # structures of losses that were found to be right
        self._parts: LossParts | None = None
        self._conclusive = True
        self._divided_by = 1.0

    def start(self, batch_size: int, output_axes: Sequence[BatchAxis | None], verifying: bool) -> None:
        """Look at the next backward.

        Args:
            batch_size: Number of samples.
            output_axes: Where they are in what the module returned.
            verifying: Read its loss in any case; else only if none that is computed like it has been verified.
        """
        axes = {axis.dim == 0 and not axis.last for axis in output_axes if axis is not None}
        most = _MOST_CALLS if verifying else _MOST_KNOWN_CALLS
        self._verifying = verifying or (self._verifying and bool(self._calls))
        self._too_many = self._too_many or len(self._calls) >= most
        self._calls = [
            *self._calls[1 - most :],
            Outputs(batch_size, axes.pop() if len(axes) == 1 else self._batch_first),
        ]
        self._parts = None
        self._roots.start()

    def add_outputs(self, tensors: Sequence[Tensor], axes: Sequence[BatchAxis | None]) -> None:
        """Learn what a call returned, if the next backward is looked at.

        Args:
            tensors: The tensors.
            axes: Where the samples are in each.
        """
        if self._calls:
            self._calls[-1].add(tensors, axes)

    def stop(self) -> None:
        """Look no more."""
        self._roots.stop()
        self._calls, self._too_many, self._verifying = [], False, False  # calls keep their graphs alive

    def judge(self) -> bool:
        """Judge the loss that was looked at.

        Returns:
            Whether it could be seen; False where gradients were not finite or all zero: look at the next one, too.

        Raises:
            UnsupportedGradientError: If it is not what it is said to be.
        """
        waits = bool(self._calls)
        self.stop()
        parts, self._parts = self._parts, None
        seen, self._structure = self._structure, None
        conclusive, self._conclusive = self._conclusive, True
        if parts is None and waits:
            parts = LossParts("unverified", _NOT_SEEN)
        if parts is None:
            return True
        self._divided_by = 1.0 if parts.divided_by == parts.terms else parts.divided_by
        if parts.verdict in {"wrong", "unverified"}:
            words = explain(parts, self._reduction)
            if not self._only_warn:
                raise UnsupportedGradientError(words)
            warnings.warn(words, stacklevel=5)
        if conclusive and seen is not None:
            if len(self._known) == _MOST_STRUCTURES:  # one that changes at each step is read at each step
                self._known.clear()
            self._known.add(seen)
        return conclusive

    def refuse_divided(self, mini_batches: int, known: float) -> None:
        """Check that the losses of a step are not divided by the number of its mini-batches.

        Args:
            mini_batches: Their number.
            known: What a trainer divides each loss by, which its adapter undoes in backward.

        Raises:
            InvalidValueError: If they are: their average would be divided by it twice.
        """
        if known == 1 and mini_batches > 1 and self._divided_by == mini_batches and self._reduction == "mean":
            words = (
                f"each loss was divided by {mini_batches}, and {mini_batches} mini-batches were accumulated: norms "
                "were compared, and gradients averaged, as so many times too small, because the clipper averages over "
                "all samples by itself. Call backward on the loss as it is, without the division; discard() begins the "
                "step again. (check='warn' accepts it.)"
            )
            if not self._only_warn:
                raise InvalidValueError(words)
            warnings.warn(words, stacklevel=4)

    def _look(self, roots: list[Root]) -> None:
        calls = [call for call in self._calls if call.are_behind(roots)]
        if not calls:  # another model's loss, or a trial of this one
            return
        self._structure = structure(roots, set().union(*[call.values | call.numbers for call in calls]))
        if not self._verifying and self._structure in self._known:
            self.stop()
            return
        outputs = of_several(calls)
        if self._too_many:
            most = _MOST_CALLS if self._verifying else _MOST_KNOWN_CALLS
            found = LossParts("unverified", f"it comes after more than {most} calls of the module")
        elif outputs is None:
            found = LossParts("unverified", "it is computed from calls with different numbers of samples")
        else:
            try:
                found = loss_parts(roots, outputs, self._reduction, scale=self._scale())
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
                found = LossParts("unverified", f"reading its graph failed ({str(error).split('.')[0]})")
        self._parts = found
        self._conclusive = outputs is None or outputs.conclusive
        if found.reason != NO_PART:
            self.stop()
