"""Read the loss of a step before its backward frees the graph, and judge the loss after the backward."""

import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.per_sample.call_arguments import Batch, Gradients
from gradguard.per_sample.capture import Keep, tap
from gradguard.per_sample.layers.call import Axes, BatchAxis
from gradguard.per_sample.loss.ledger import Ledger
from gradguard.per_sample.loss.loss_graph import BackwardRoots, Make, Refused, Root, Unreadable, Value, make_of
from gradguard.per_sample.loss.rows import by_sample, has_label
from gradguard.per_sample.loss.separation import Outputs, of_several
from gradguard.per_sample.loss.shared import LossConstants, SharedValue, SharedValues, bound_values
from gradguard.per_sample.loss.terms import NO_PART, LossParts, explain, loss_parts
from gradguard.tensors.host_copy import DeviceEvent, copy_to_host

_NOT_SEEN = (
    "no backward was observed that begins from the module's outputs. Was torch.autograd.backward looked up before the "
    "forward, or given a GradientEdge, or run in another thread, or was a view that the module returned changed in "
    "place? Call loss.backward() after the forward, and compute with output * 2 rather than output.mul_(2)"
)

_NOT_LINEAR = (
    "the backward between the module's outputs and the loss is not linear: twice the incoming gradient does not give "
    "twice the outgoing one. Does a hook or an autograd.Function clamp, normalize or mask gradients there? Then a "
    "sample's gradient depends on the size of the batch. Leave it out: each sample's norm is bounded anyway"
)

_LINEAR_ON = frozenset([1, 8, 64])
"""Which losses of each kind are tried for a linear backward, besides the first of each batch size and one in 1,000."""

_MOST_CALLS = 16
"""Calls whose outputs, and so whose graphs, are kept alive until a backward begins from one of them."""


_MOST_KNOWN_CALLS = 4
"""Calls that are kept alive once a loss has been verified, so that calls without a backward hold little memory."""

_MOST_STRUCTURES = 10_000
"""Number of accepted structures of losses that are remembered."""


_READING_ERRORS = RuntimeError, ValueError, TypeError, IndexError, AttributeError


def is_read_at_once(tensor: Tensor) -> bool:
    """Tell whether the host can read ``tensor`` without a host sync."""
    return tensor.is_cpu


def _pass(saved: Sequence[Tensor], gradients: Gradients, task: int) -> None:
    """Do nothing: the backward of a tap that only marks a place in the graph."""


def _failed(error: Exception) -> str:
    """Return the reason for a loss whose reading raised an error."""
    return f"reading its graph failed ({str(error).split('.')[0]})"


@dataclass
class _Known:
    """An accepted loss.

    Attributes:
        numbers: The scalars in the loss.
        parts: The verdict.
        label_owners: The samples of each operation's labels where the operation takes the labels' mean; else None.
        complete: Whether no label was missing.
    """

    numbers: tuple[float, ...]
    parts: LossParts
    label_owners: list[Tensor | None]
    complete: bool


@dataclass(frozen=True)
class _SeenLoss:
    """A loss that was read.

    Attributes:
        make: How the loss is computed.
        parts: The verdict.
        complete: Whether no label was missing.
        conclusive: Whether the gradients of this batch could have shown samples that meet.
    """

    make: Make
    parts: LossParts
    complete: bool = True
    conclusive: bool = True


class LossCheck:
    """Checks whether each sample's part in the loss is the sample's own loss.

    Args:
        reduction: The reduction over samples that the user declared: ``"mean"``, ``"sum"`` or ``"token_mean"``.
        batch_first: Whether the samples lie along the first dimension of the module's arguments.
        scale: Returns the factor by which a GradScaler multiplies the loss.
        reads: Read losses; if False, every loss is accepted.

    Attributes:
        reads: As passed.
        factors: Each sample's part in the last judged loss, as a multiple of the sample's own loss, ``[B]``; NaN for a
            sample without a row; None if unknown.
        keep: Keeps an error until all processes of a sharded model can raise one; None to raise it.
        labels_agree: A bool on the device: whether all samples have the same number of labels, which the verdict
            assumes; None if there is nothing to read later. It is read before the next forward.
    """

    def __init__(self, reduction: str, batch_first: bool, scale: Callable[[], float], reads: bool = True) -> None:
        self._reduction, self._batch_first, self._scale, self.reads = reduction, batch_first, scale, reads
        self.keep: Keep | None = None
        self._roots = BackwardRoots(self._look)
        self._calls: list[Outputs] = []
        self._exceeded = 0  # the limit of kept calls, if more calls were made; else 0
        self._verifying = False
        self._known: dict[bytes, _Known] = {}  # accepted losses, by their structure
        self._ledger = Ledger()
        self._declared: list[float] = []
        self._shared = SharedValues()
        self._own_operations: set[frozenset[str]] = set()
        self._times: Counter[tuple[str, ...]] = Counter()  # how often each kind of loss was read
        self._between: dict[Hashable, LossCheck] = {}  # by the module and the position of the argument
        self._constant_sizes: dict[tuple[str, ...], set[int]] = defaultdict(set)
        self.factors: Tensor | None = None
        self.labels_agree: Tensor | None = None
        self._unread: tuple[Tensor, DeviceEvent | None] | None = None
        self._seen: _SeenLoss | None = None
        self._divided_by = 1.0

    def start(self, batch_size: int, output_axes: Axes, verifying: bool) -> None:
        """Begin to watch for the next backward.

        Args:
            batch_size: Number of samples.
            output_axes: The axis of the samples in each tensor that the module returned.
            verifying: Read the loss of that backward in any case; else only if no loss of the same structure was
                verified.

        Raises:
            UnsupportedGradientError: If samples had different numbers of labels in the previous mini-batch.
        """
        if not self.reads:
            return
        unread, self._unread = self._unread, None  # the comparison of label counts, copied without a host sync
        if unread is not None and unread[1] is not None:
            unread[1].synchronize()
        if unread is not None and not bool(unread[0]):
            raise UnsupportedGradientError(
                "the loss is the mean over labels, and in the mini-batch before this one samples had different numbers "
                "of labels, so each sample's part depended on the others: nothing of that mini-batch was added. "
                "Average within each sample first, and then over samples, or pass loss_reduction='token_mean'"
            )
        self.factors = self.labels_agree = None
        axes = {axis.dim == 0 and not axis.last for axis in output_axes if axis is not None}
        most = _MOST_CALLS if verifying else _MOST_KNOWN_CALLS
        self._verifying = verifying or (self._verifying and bool(self._calls))
        self._exceeded = self._exceeded or (most if len(self._calls) >= most else 0)
        self._calls = [
            *self._calls[1 - most :],
            Outputs(batch_size, axes.pop() if len(axes) == 1 else self._batch_first),
        ]
        self._seen = None
        self._roots.start()

    def add_outputs(self, tensors: Sequence[Tensor], axes: Axes) -> None:
        """Record the tensors that a call returned, if the next backward is watched.

        Args:
            tensors: The tensors.
            axes: The axis of the samples in each tensor.
        """
        if self._calls:
            self._calls[-1].add(tensors, axes)

    def look_between(self, module: nn.Module, batch: Batch, verifying: bool) -> None:
        """Check a call's arguments that were computed from the outputs of earlier calls: no row may mix samples.

        Args:
            module: The module that is called.
            batch: The call's arguments.
            verifying: Read the arguments in any case; else only those of a structure that was not verified.

        Raises:
            UnsupportedGradientError: If a row depends on other samples, or may depend on them.
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
                    f"samples may meet between two calls of the module: an argument of {type(module).__name__} is "
                    f"computed from the outputs of an earlier call, and {words}. Nothing was clipped. Compute it in "
                    "the forward of one module, which is tried with samples alone."
                )

    def _objection_to_input(self, tensor: Tensor, dim: int | None) -> str:
        """Return why rows of a tensor may depend on other samples; "" if they do not.

        The tensor is judged as the loss ``tensor.asinh().mean()``, after a check of each row's derivatives.
        """
        outputs = of_several(self._calls)
        if outputs is None:
            return "the calls had different numbers of samples"
        if dim is None or tensor.shape[dim] != outputs.batch_size:
            return "no dimension of that argument holds the samples"
        samples = torch.arange(outputs.batch_size, device=tensor.device).view(-1, *[1] * (tensor.dim() - dim - 1))
        try:
            if not outputs.are_separate(Value.of(tensor), samples):
                return "a row depends on other samples, or rows are in another order"
        except Unreadable as error:
            return str(error)
        with torch.enable_grad(), torch.autocast(tensor.device.type, enabled=False):
            value = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            mean = value.asinh().mean()  # asinh has no derivative of 0, and saves its input in the graph
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
        """Stack the samples' own losses, and treat the result as an output of the module: their graph is not read.

        Args:
            losses: The loss of each sample, computed from the sample's own rows.
            watched: Index of the sample whose loss is checked to depend on its own outputs only. On a verified step all
                samples are checked.
            due: Check the watched loss; if False, check it only where operations compute it that no earlier one had.

        Returns:
            The losses [B].

        Raises:
            UnsupportedGradientError: If a sample's loss depends on the outputs of another, or may depend on them.
        """
        joined = torch.stack([*losses])
        outputs = of_several(self._calls) if self._calls else None
        if outputs is None or not joined.requires_grad:
            return joined
        everyone = torch.arange(len(losses), device=joined.device)
        operations = outputs.operations_behind(losses[watched]) if losses[watched].requires_grad else frozenset()
        by_function = any(name.endswith("Backward") for name in operations)  # PyTorch's own have a number
        due = due or by_function or operations not in self._own_operations
        separate, is_scaled = None, True
        if due:
            self._own_operations.discard(operations)
        try:
            some = joined if self._verifying else losses[watched]
            if self._verifying or (due and operations):
                is_scaled = outputs.is_scaled(Value.of(some), torch.ones_like(some), self.keep is not None)
                separate = is_scaled and outputs.are_separate(
                    Value.of(some), everyone if self._verifying else everyone[watched]
                )
        except Unreadable as error:
            raise UnsupportedGradientError(
                f"per_sample_losses: cannot verify that each sample's loss depends on its own outputs only: {error}. "
                "Write the loss without that operation."
            ) from error
        if not is_scaled:
            raise UnsupportedGradientError(f"per_sample_losses: {_NOT_LINEAR}.")
        if separate is False:
            raise UnsupportedGradientError(
                "per_sample_losses: the loss of one sample depends on the outputs of another. Does the function use "
                "the outputs of the whole batch instead of the rows that it is given? Or do the samples lie along "
                "another dimension of the outputs?"
            )
        self._own_operations.add(operations)
        anchor = torch.zeros((), device=joined.device, requires_grad=True)
        [joined] = tap(_pass, (), anchor, [joined], self.keep)
        self._calls[-1].add([joined], [BatchAxis(0)])
        return joined

    def end(self) -> None:
        """Stop watching, and remove the listener for backwards."""
        self.stop()
        self._roots.stop()

    def stop(self) -> None:
        """Watch no backward until `start`."""
        self._calls, self._exceeded, self._verifying = [], 0, False  # calls keep their graphs alive

    def drop(self) -> None:
        """Forget the values of a loss that is not judged, and what was declared for it."""
        self._declared.clear()
        self._shared.end(accepted=False)

    @property
    def is_private(self) -> bool:
        """True if numbers that the next batch may change are refused, as in private training."""
        return self._ledger.strict

    def refuse_ambiguous(self) -> None:
        """Refuse numbers that the next batch may change, instead of waiting for the next batch."""
        self._ledger.strict = self._shared.strict = self.reads

    def declare(self, value: Tensor | float) -> None:
        """Declare that a value in the loss is not computed from the batch, until the next loss is judged."""
        self._shared.declared.append(value)
        if not isinstance(value, Tensor):
            self._declared.append(float(value))

    def look_at_bound(self, loss_fn: Callable[..., Tensor], batch_size: int) -> None:
        """Check that the values bound to a function of one sample's loss are those of the earlier batches.

        Parameters are left out, because they are trained.

        Raises:
            UnsupportedGradientError: If a bound value has changed or, in private training, if the next batch may change
                it.
        """
        found = bound_values(loss_fn)
        bound = [SharedValue(p, one, of_all=True) for p, one in found if not isinstance(one, nn.Parameter)]
        if words := self._shared.objection(bound, batch_size):
            raise UnsupportedGradientError(f"per_sample_losses: {words}.")

    def judge(self) -> bool:
        """Judge the loss that was read.

        Returns:
            Whether the batch was conclusive; False where gradients were not finite or all zero: the next loss must be
            read, too.

        Raises:
            UnsupportedGradientError: If the loss does not have the declared reduction, or that cannot be decided.
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
            if len(self._known) == _MOST_STRUCTURES:  # a loss whose structure changes at each step fills the cache
                self._known.clear()
            owners = [parts.label_owners.get(node) for node in make.labelled]
            parts = replace(parts, label_owners={}, page=None)  # nodes would keep the graph alive
            self._known[make.structure] = _Known(make.numbers, parts, owners, seen.complete)
        return seen.conclusive

    def refuse_divided(self, mini_batches: int, known: float) -> None:
        """Check that the losses of a step are not divided by the number of the step's mini-batches.

        Args:
            mini_batches: Number of mini-batches.
            known: The number by which a trainer divides each loss; the trainer's adapter undoes it in backward.

        Raises:
            InvalidValueError: If the losses are divided by it: the gradients' average would be divided twice.
        """
        if known == 1 and mini_batches > 1 and self._divided_by == mini_batches and self._reduction == "mean":
            raise InvalidValueError(
                f"each loss was divided by {mini_batches}, and {mini_batches} mini-batches were accumulated. The "
                f"clipper averages over all samples by itself, so norms and gradients were {mini_batches} times too "
                "small. Call backward on the loss without the division; discard() begins the step again."
            )

    def _look(self, roots: list[Root]) -> None:
        """Read the loss of a backward that is about to begin, and store the verdict for `judge`."""
        try:
            self._read(roots)
        except Refused as error:
            self._seen = _SeenLoss(Make(), LossParts("unverified", str(error)))
            self.stop()
        except Exception as error:
            if self.keep is None:
                raise
            self.keep(error)

    def _read(self, roots: list[Root]) -> None:
        """Read a loss, and store the verdict.

        Raises:
            Refused: If the loss cannot be read.
        """
        calls = [call for call in self._calls if any(call.are_behind(root.value) for root in roots)]
        if not calls:  # the loss of another model, or of a trial run of this one
            return
        make = make_of(roots, set().union(*[call.values for call in calls]), calls[0].depends)
        outputs = of_several(calls)
        if outputs is not None:
            outputs.declared = self._shared.declared
        words = ""
        if outputs is not None:  # compare the constants in the loss with those of earlier batches
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
        times = self._times[make.kind] = self._times[make.kind] + 1
        is_due = times in _LINEAR_ON or times % 1000 == 0
        if outputs is not None and (self._verifying or is_due):
            is_linear = True
            with contextlib.suppress(Unreadable):  # a loss that cannot be read is refused below
                nearest = self.keep is not None
                is_linear = all(outputs.is_scaled(root.value, root.gradient, nearest) for root in roots)
            if not is_linear:
                self._times[make.kind] -= 1
                self._seen = _SeenLoss(make, LossParts("unknown", _NOT_LINEAR))
                self.stop()
                return
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
                "without a backward, such as a validation, under torch.no_grad()",
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
        """Tell whether a known verdict holds for this batch's labels, or will be settled later by `labels_agree`."""
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
