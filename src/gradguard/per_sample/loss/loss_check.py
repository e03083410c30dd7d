"""Looks at the loss of a step that is to be verified, before its backward frees the graph; and judges it afterwards."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.per_sample.call_arguments import Batch, Gradients
from gradguard.per_sample.capture import tap
from gradguard.per_sample.layers.call import Axes, BatchAxis
from gradguard.per_sample.loss.ledger import Ledger
from gradguard.per_sample.loss.loss_graph import BackwardRoots, Make, Root, Unreadable, Value, make_of
from gradguard.per_sample.loss.rows import by_sample, has_label
from gradguard.per_sample.loss.separation import Outputs, of_several
from gradguard.per_sample.loss.shared import LossConstants, SharedValue, SharedValues, bound_values
from gradguard.per_sample.loss.terms import NO_PART, LossParts, explain, loss_parts
from gradguard.tensors.host_copy import DeviceEvent, copy_to_host

_NOT_SEEN = (
    "its backward was not seen to begin from what the module returned. Was torch.autograd.backward looked up before "
    "the forward, or given a GradientEdge, or run in another thread, or was a view that it returned changed in place? "
    "Call loss.backward() after the forward, and compute with output * 2 rather than output.mul_(2)"
)

_MOST_CALLS = 16
"""Calls whose outputs are kept, and so their graphs, until a backward begins from one of them."""


_MOST_KNOWN_CALLS = 4
"""Calls that are kept once a loss has been verified, so that calls without a backward hold little."""

_MOST_STRUCTURES = 10_000
"""Makes of losses that are remembered."""


_READING_ERRORS = RuntimeError, ValueError, TypeError, IndexError, AttributeError


def is_read_at_once(tensor: Tensor) -> bool:
    """Whether nothing waits where the host reads ``tensor``."""
    return tensor.is_cpu


def _pass(saved: Sequence[Tensor], gradients: Gradients, task: int) -> None:
    """Let gradients pass a tap that is there for who reads the graph."""


def _failed(error: Exception) -> str:
    return f"reading its graph failed ({str(error).split('.')[0]})"


@dataclass
class _Known:
    """A loss that was found to be right.

    Attributes:
        numbers: The scalars in it.
        parts: The verdict.
        label_owners: The samples of each operation's labels, where it takes their mean; else None.
        complete: Whether no label was missing.
    """

    numbers: tuple[float, ...]
    parts: LossParts
    label_owners: list[Tensor | None]
    complete: bool


@dataclass(frozen=True)
class _SeenLoss:
    """A loss that was looked at.

    Attributes:
        make: How it is computed.
        parts: The verdict.
        complete: Whether no label was missing.
        conclusive: Whether gradients could show that samples meet.
    """

    make: Make
    parts: LossParts
    complete: bool = True
    conclusive: bool = True


class LossCheck:
    """Whether each sample's part in the loss is its own loss.

    Args:
        reduction: The loss over samples as the user has said it: ``"mean"``, ``"sum"`` or ``"token_mean"``.
        batch_first: Whether the batch is the first dimension of what the module is called with.
        scale: Gives what a GradScaler multiplies the loss by.
        reads: Look at losses at all; else every one is accepted.

    Attributes:
        reads: As it was given.
        factors: Each sample's part in the loss that was judged last, as a multiple of its own loss, ``[B]``; NaN for a
            sample without a row; None where it is not known.
        labels_agree: A bool on the device: whether each sample has as many labels as the others, as the verdict takes
            for granted; None where it was looked at. It is read before the next forward.
    """

    def __init__(self, reduction: str, batch_first: bool, scale: Callable[[], float], reads: bool = True) -> None:
        self._reduction, self._batch_first, self._scale, self.reads = reduction, batch_first, scale, reads
        self._roots = BackwardRoots(self._look)
        self._calls: list[Outputs] = []
        self._exceeded = 0  # how many calls were kept where there were more; 0 where there were not
        self._verifying = False
        self._known: dict[bytes, _Known] = {}  # losses that were found to be right, by their structure
        self._ledger = Ledger()
        self._declared: list[float] = []
        self._shared = SharedValues()
        self._own_operations: set[frozenset[str]] = set()
        self._between: dict[Hashable, LossCheck] = {}  # by the module and the place among the tensors it is given
        self._constant_sizes: dict[tuple[str, ...], set[int]] = defaultdict(set)
        self.factors: Tensor | None = None
        self.labels_agree: Tensor | None = None
        self._unread: tuple[Tensor, DeviceEvent | None] | None = None
        self._seen: _SeenLoss | None = None
        self._divided_by = 1.0

    def start(self, batch_size: int, output_axes: Axes, verifying: bool, pulls: bool = True) -> None:
        """Look at the next backward.

        Args:
            batch_size: Number of samples.
            output_axes: Where they are in what the module returned.
            verifying: Read its loss in any case; else only if none that is computed like it has been verified.
            pulls: Whether backwards may be run to see whether samples meet.

        Raises:
            UnsupportedGradientError: If samples had different numbers of labels in the mini-batch before.
        """
        if not self.reads:
            return
        unread, self._unread = self._unread, None  # what nobody waited for
        if unread is not None and unread[1] is not None:
            unread[1].synchronize()
        if unread is not None and not bool(unread[0]):
            raise UnsupportedGradientError(
                "the loss is the mean over labels, and in the mini-batch before this one samples had different numbers "
                "of them, so that each sample's part depended on the others: nothing of it was added. Average within "
                "each sample first, and then over samples, or say loss_reduction='token_mean'"
            )
        self.factors = self.labels_agree = None
        axes = {axis.dim == 0 and not axis.last for axis in output_axes if axis is not None}
        most = _MOST_CALLS if verifying else _MOST_KNOWN_CALLS
        self._verifying = verifying or (self._verifying and bool(self._calls))
        self._exceeded = self._exceeded or (most if len(self._calls) >= most else 0)
        self._calls = [
            *self._calls[1 - most :],
            Outputs(batch_size, axes.pop() if len(axes) == 1 else self._batch_first, pulls),
        ]
        self._seen = None
        self._roots.start()

    def add_outputs(self, tensors: Sequence[Tensor], axes: Axes) -> None:
        """Learn what a call returned, if the next backward is looked at.

        Args:
            tensors: The tensors.
            axes: Where the samples are in each.
        """
        if self._calls:
            self._calls[-1].add(tensors, axes)

    def look_between(self, module: nn.Module, batch: Batch, verifying: bool) -> None:
        """Check what a call is given that was computed from what earlier calls returned: rows stay their samples' own.

        Args:
            module: The module that is called.
            batch: The arguments that it is given.
            verifying: Read them in any case; else only what is computed like nothing that has been verified.

        Raises:
            UnsupportedGradientError: If a row depends on other samples, or may.
        """
        if not self._calls:
            return
        for place, (tensor, dim) in enumerate(batch.dims):
            if not tensor.requires_grad:
                continue
            given = Value.of(tensor)
            returned = {value: axis for call in self._calls for value, axis in call.axes.items()}
            if dim is not None and returned.get(given) == BatchAxis(dim):
                continue
            calls = [call for call in self._calls if call.are_behind(given)]
            if not calls:
                continue
            check = self._between.setdefault((module, place), LossCheck("mean", self._batch_first, lambda: 1.0))
            check._ledger.strict = check._shared.strict = self._ledger.strict
            check._shared.declared, check._declared = [*self._shared.declared], [*self._declared]
            check._calls, check._verifying = calls, verifying
            if words := check._objection_to_input(tensor, dim):
                raise UnsupportedGradientError(
                    f"samples may meet between two calls of the module: what {type(module).__name__} is given is "
                    f"computed from what an earlier call returned, and {words}. Nothing was clipped. Compute it in the "
                    "forward of one module, which is tried with samples alone."
                )

    def _objection_to_input(self, tensor: Tensor, dim: int | None) -> str:
        """Say why rows of a tensor may not be their samples' own, by a mean of something of each; "" if they are."""
        outputs = of_several(self._calls)
        if outputs is None:
            return "the calls had different numbers of samples"
        if dim is None or tensor.shape[dim] != outputs.batch_size:
            return "it has no dimension of the samples"
        samples = torch.arange(outputs.batch_size, device=tensor.device).view(-1, *[1] * (tensor.dim() - dim - 1))
        try:
            if not outputs.are_separate(Value.of(tensor), samples):
                return "a row depends on other samples, or rows are in another order"
        except Unreadable as error:
            return str(error)
        with torch.enable_grad(), torch.autocast(tensor.device.type, enabled=False):
            value = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            mean = value.asinh().mean()  # whose derivative is never 0, and which keeps the values
        self._look([Root(Value.of(mean), torch.ones_like(mean))])
        parts = None if self._seen is None else self._seen.parts
        if parts is not None and parts.verdict != "right" and parts.reason != NO_PART:
            self._seen = None
            self._shared.end(accepted=False)
            self.stop()
            return parts.reason
        self.judge()
        return ""

    def own_losses(self, losses: Sequence[Tensor], watched: int, due: bool) -> Tensor:
        """Take the samples' own losses for something that the module has returned: their graph is not read.

        Args:
            losses: The loss of each sample, computed from its own rows.
            watched: The sample whose loss is looked at: must it depend on its own outputs only? All where the step is
                verified.
            due: Look at it; else only where it comes from the outputs by other operations than any before.

        Returns:
            The losses [B].

        Raises:
            UnsupportedGradientError: If a sample's loss depends on the outputs of another.
        """
        joined = torch.stack([*losses])
        outputs = of_several(self._calls) if self._calls else None
        if outputs is None or not joined.requires_grad:
            return joined
        everyone = torch.arange(len(losses), device=joined.device)
        operations = outputs.operations_behind(losses[watched]) if losses[watched].requires_grad else frozenset()
        due, separate = due or operations not in self._own_operations, None
        self._own_operations.add(operations)
        if self._verifying:
            separate = outputs.are_separate(Value.of(joined), everyone)
        elif due and operations:
            separate = outputs.are_separate(Value.of(losses[watched]), everyone[watched])
        if separate is False:
            raise UnsupportedGradientError(
                "per_sample_losses: the loss of one sample depends on the outputs of another. Does the function use "
                "the outputs of the whole batch, instead of the rows that it is given? Or do samples lie along another "
                "dimension of what it is given?"
            )
        [joined] = tap(_pass, (), torch.zeros((), device=joined.device, requires_grad=True), [joined])
        self._calls[-1].add([joined], [BatchAxis(0)])
        return joined

    def end(self) -> None:
        """Look no more."""
        self.stop()
        self._roots.stop()

    def stop(self) -> None:
        """Look at no backward until `start`."""
        self._calls, self._exceeded, self._verifying = [], 0, False  # calls keep their graphs alive

    @property
    def is_private(self) -> bool:
        """Whether numbers that may be others in the next batch are refused."""
        return self._ledger.strict

    def refuse_ambiguous(self) -> None:
        """Refuse numbers that may be others in the next batch, instead of waiting for it."""
        self._ledger.strict = self._shared.strict = self.reads

    def declare(self, value: Tensor | float) -> None:
        """Take a value in the loss for one that is not computed from the batch, until the next loss is judged."""
        self._shared.declared.append(value)
        if not isinstance(value, Tensor):
            self._declared.append(float(value))

    def look_at_bound(self, loss_fn: Callable[..., Tensor], batch_size: int) -> None:
        """Check that what is bound to a function of one sample's loss is what it was in the batches before.

        Raises:
            UnsupportedGradientError: If something is not, or may be another in the next batch where that counts.
        """
        bound = [SharedValue(p, one) for p, one in bound_values(loss_fn) if not isinstance(one, nn.Parameter)]
        if words := self._shared.objection(bound, batch_size):  # weights of layers are trained
            raise UnsupportedGradientError(f"per_sample_losses: {words}.")

    def judge(self) -> bool:
        """Judge the loss that was looked at.

        Returns:
            Whether it could be seen; False where gradients were not finite or all zero: look at the next one, too.

        Raises:
            UnsupportedGradientError: If it is not what it is said to be.
        """
        seen, self._seen = self._seen, None
        if seen is None and self._calls:
            seen = _SeenLoss(Make(), LossParts("unverified", _NOT_SEEN))
        self._declared.clear()
        self._shared.end(seen is None or seen.parts.verdict == "right")
        self.stop()
        if seen is None:
            return True
        parts, make = seen.parts, seen.make
        self._divided_by = 1.0 if parts.divided_by == parts.terms else parts.divided_by
        if parts.verdict != "right" and parts.reason != NO_PART:
            raise UnsupportedGradientError(explain(parts, self._reduction))
        self.factors = parts.factors
        if self.labels_agree is not None:
            self._unread = copy_to_host(self.labels_agree)
        if parts.page is not None:
            self._ledger.add(parts.page)
            self._constant_sizes[make.kind] |= parts.repeated
        known = self._known.get(make.structure) if make.structure is not None else None
        if seen.conclusive and make.structure is not None and (known is None or known.parts is not parts):
            if len(self._known) == _MOST_STRUCTURES:  # one that changes at each step is read at each step
                self._known.clear()
            owners = [parts.label_owners.get(node) for node in make.labelled]
            parts = replace(parts, label_owners={}, page=None)  # nodes would keep the graph alive
            self._known[make.structure] = _Known(make.numbers, parts, owners, seen.complete)
        return seen.conclusive

    def refuse_divided(self, mini_batches: int, known: float) -> None:
        """Check that the losses of a step are not divided by the number of its mini-batches.

        Args:
            mini_batches: Their number.
            known: The number that a trainer divides each loss by, which its adapter undoes in backward.

        Raises:
            InvalidValueError: If they are: their average would be divided by it twice.
        """
        if known == 1 and mini_batches > 1 and self._divided_by == mini_batches and self._reduction == "mean":
            raise InvalidValueError(
                f"each loss was divided by {mini_batches}, and {mini_batches} mini-batches were accumulated: norms "
                "were compared, and gradients averaged, as so many times too small, because the clipper averages over "
                "all samples by itself. Call backward on the loss as it is, without the division; discard() begins the "
                "step again."
            )

    def _look(self, roots: list[Root]) -> None:
        calls = [call for call in self._calls if any(call.are_behind(root.value) for root in roots)]
        if not calls:  # another model's loss, or a trial of this one
            return
        make = make_of(roots, set().union(*[call.values for call in calls]))
        outputs = of_several(calls)
        if outputs is not None:
            outputs.declared = self._shared.declared
        words = ""
        if outputs is not None:  # which constant in the loss is another than in the batches before
            try:
                constants = LossConstants(roots, outputs)
                shared = itertools.chain(constants.given() if self._shared.strict else (), constants.shared())
                words = constants.hidden() or self._shared.objection(shared, outputs.batch_size, make.kind)
            except _READING_ERRORS as error:
                words = _failed(error)
        if words:
            self._seen = _SeenLoss(make, LossParts("unknown", words))
            self.stop()
            return
        known = None if self._verifying or make.structure is None else self._known.get(make.structure)
        if (
            known is not None
            and not known.parts.weighted
            and known.numbers == make.numbers
            and self._labels(make, known)
        ):
            self._seen = _SeenLoss(make, known.parts)
            self.stop()
            return
        complete = all(bool(has_label(node).all()) for node in make.labelled)
        if self._exceeded:
            found = LossParts(
                "unverified",
                f"it comes after more than {self._exceeded} calls of the module whose outputs may be in it. Run calls "
                "that no backward follows, as of a validation, under torch.no_grad()",
            )
        elif outputs is None:
            found = LossParts("unverified", "it is computed from calls with different numbers of samples")
        else:
            try:
                found = loss_parts(
                    roots,
                    outputs,
                    self._reduction,
                    scale=self._scale(),
                    known=None if known is None else known.parts,
                    ledger=self._ledger,
                    constant_sizes=self._constant_sizes[make.kind],
                    declared=self._declared,
                )
            except _READING_ERRORS as error:
                found = LossParts("unverified", _failed(error))
        self._seen = _SeenLoss(make, found, complete, outputs is None or outputs.conclusive)
        if found.reason != NO_PART:
            self.stop()

    def _labels(self, make: Make, known: _Known) -> bool:
        """Whether each sample has as many labels as before, or it will be read later from `labels_agree`."""
        agreeing: list[Tensor] = []
        for node, owner in zip(make.labelled, known.label_owners, strict=True):
            there = has_label(node)
            if owner is not None and not is_read_at_once(there) and self._reduction != "token_mean":
                counts = by_sample(owner, there.double(), self._calls[0].batch_size)
                agreeing.append(((counts == counts[0]) & (counts > 0)).all())
            elif not known.complete or not bool(there.all()):
                return False
        self.labels_agree = torch.stack(agreeing).all() if agreeing else None
        return True
