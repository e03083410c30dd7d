"""Base classes of rules that choose their own threshold: state on the device, changed in place, without a host sync.

The arithmetic is in `gradguard.threshold_formulas`, which also replays records.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from gradguard.arguments import check_order, check_threshold
from gradguard.clip.clipper import Clipper, Decision, describe
from gradguard.clip.gradients import Gradients, norms_of, total_of
from gradguard.clip.lock_in import LockIn
from gradguard.errors import InvalidValueError
from gradguard.tensors.host_copy import refuse_capture
from gradguard.tensors.layout import move_state
from gradguard.tensors.number_operations import TENSORS, median_of_stored
from gradguard.threshold_formulas import Memory, coefficient_of


class StatefulClipper(Clipper):
    """A clipper with state: ``state`` maps names to tensors, float64 if the device supports it.

    **Guarantees.** The state is changed in place and on the device, so there is no host sync, and a CUDA graph can
    capture the change. The state moves to the gradients' device by itself, or by `to`. A run that is resumed from
    `state_dict` continues bit by bit like the uninterrupted one.

    Attributes:
        state: The tensors that change during training, and the counters.
        lock_in: The alarm.
    """

    def __init__(self, **state: Tensor) -> None:
        self.state: dict[str, Tensor] = {"counts": torch.zeros(3, dtype=torch.int64, device="cpu"), **state}
        self.lock_in = LockIn()

    @property
    def steps(self) -> Tensor:
        """The number of steps so far, 0-dim."""
        return self.state["counts"][0].clone()

    @property
    def clipped_steps(self) -> Tensor:
        """The number of steps on which the clip bound, 0-dim."""
        return self.state["counts"][1].clone()

    @property
    def nonfinite_steps(self) -> Tensor:
        """The number of steps on which a gradient held NaN or infinity, 0-dim."""
        return self.state["counts"][2].clone()

    def to(self, device: torch.device | str) -> Self:
        """Move the state to ``device`` and return the clipper; the state also follows the gradients by itself."""
        move_state(self.state, device)
        self.lock_in.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state."""
        return {name: tensor.clone() for name, tensor in self.state.items()} | {"lock_in": self.lock_in.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned; training continues as if it had not been interrupted.

        Raises:
            InvalidValueError: If the state belongs to another rule, or to one with other windows.
        """
        self._take(state_dict)

    def _take(self, state_dict: Mapping[str, Any], **lengths: int) -> None:
        """Load a state; the vectors named in ``lengths`` may differ in length from the present ones."""
        shapes = {name: tuple(tensor.shape) for name, tensor in self.state.items()}
        shapes |= {name: (length,) for name, length in lengths.items()}
        given = {name: tuple(value.shape) for name, value in state_dict.items() if isinstance(value, Tensor)}
        if shapes != given or "lock_in" not in state_dict:
            raise InvalidValueError(
                f"the state is not of this {type(self).__name__}: expected tensors of shapes {shapes}, came {given}. "
                "Construct the clipper with the arguments it had when the state was saved."
            )
        self.lock_in.load_state_dict(state_dict["lock_in"])
        for name, length in lengths.items():
            self.state[name] = self.state[name].new_zeros(length)
        for name, tensor in self.state.items():  # in place: a captured graph keeps using this memory
            tensor.copy_(state_dict[name])

    def _follow(self, device: torch.device) -> None:
        if self.state["counts"].device != device:
            refuse_capture(device, f"the state of {type(self).__name__}")
            self.to(device)

    def _count(self, clipped: Tensor, nonfinite: Tensor) -> None:
        self.state["counts"].add_(torch.stack([torch.ones_like(clipped), clipped, nonfinite]))


class ThresholdClipper(StatefulClipper):
    r"""A rule that chooses a threshold c for the norm n of all gradients; the base class of rules of your own.

    .. math:: g \leftarrow g \cdot \min\Bigl(1, \frac{c}{n}\Bigr)

    A rule of your own implements `choose`, and passes its state to ``super().__init__`` as tensors.

    **Guarantees.** Everything is decided on the gradients' device, without a host sync. Non-finite norms never enter
    the state. Neither does a norm of 0, which carries no information about the scale. ``strict_paper=True`` of a
    published rule lets both in, as its paper does. The clip binds (``result.clipped``) exactly if n > c, and the norm
    after it is then c: no :math:`10^{-6}` is added to n, which would clip everything when norms are that small.
    ``result.locked_in`` (`LockIn`) is true if the clip bound on more than half of the last 100 steps at one threshold,
    where thresholds within 1 % of each other count as one: the rule then no longer follows the run.

    **Edge cases.**

    ================================  ==========================================================================
    input                             result
    ================================  ==========================================================================
    no gradients                      norm 0, coefficient 1; the state is unchanged
    zero norm                         coefficient 1; the threshold's state is unchanged
    NaN or inf among the gradients    handled by ``nonfinite``; only the counters change
    no threshold yet                  ``result.threshold`` is inf, and nothing is written
    ================================  ==========================================================================

    Args:
        norm_type: Order of the norm, above 0 or infinite.
        state: The tensors of the rule's state, by name.

    Raises:
        InvalidValueError: If ``norm_type`` is not above 0.

    Example:
        >>> import torch
        >>> class HoldToLast(ThresholdClipper):
        ...     def __init__(self):
        ...         super().__init__(last=torch.tensor(torch.inf, dtype=torch.float64))
        ...     def choose(self, norm, enters):
        ...         threshold = self.state["last"].clone()
        ...         self.state["last"].copy_(torch.where(enters, norm, threshold))
        ...         return threshold
        >>> p, clipper = torch.nn.Parameter(torch.zeros(2)), HoldToLast()
        >>> for size in (1.0, 4.0):
        ...     p.grad = torch.tensor([size, 0.0])
        ...     float(clipper([p]).coefficient)
        1.0
        0.25
    """

    strict_paper = False

    def __init__(self, norm_type: float = 2.0, **state: Tensor) -> None:
        super().__init__(**state)
        self.norm_type = check_order(norm_type)

    @abstractmethod
    def choose(self, norm: Tensor, enters: Tensor) -> Tensor:
        """Return the threshold of this step, 0-dim, infinite for none, and update the state in place.

        Args:
            norm: The norm of all gradients, 0-dim float64 (float32 on MPS).
            enters: Whether the norm may enter the state, 0-dim bool: use `torch.where`, not ``if``.
        """

    def choose_for(self, grads: Gradients, norm: Tensor, enters: Tensor) -> Tensor:
        """Return the threshold of this step; override this if the rule needs more than the norm, else `choose`.

        Args:
            grads: The gradients, with their parameters.
            norm: As for `choose`.
            enters: As for `choose`.
        """
        del grads
        return self.choose(norm, enters)

    def _advance(
        self, rule: Callable[..., tuple[Tensor, Memory]], norm: Tensor, enters: Tensor, **memory: Any
    ) -> Tensor:
        """Return the next threshold of a `ThresholdRule`, and store its changes; ``memory`` overrides state entries."""
        threshold, changed = rule(TENSORS, {**self.state, **memory}, norm, enters)
        for name, value in changed.items():
            self.state[name].copy_(value)
        return threshold

    def coefficient(self, norm: Tensor, threshold: Tensor) -> Tensor:
        """Return the factor for gradients of ``norm``."""
        return coefficient_of(TENSORS, norm, threshold)

    @torch.no_grad()
    def decide(self, grads: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure the gradients, choose the threshold, and update the state; write to no gradient."""
        norms = norms_of(grads, scale, self.norm_type)
        norm = total_of(norms, self.norm_type)
        if not grads.gradients:
            one = torch.ones_like(norm)
            return Decision(grads, describe(grads, norms, one, one < 1, order=self.norm_type), one)
        self._follow(norm.device)
        finite = norm.isfinite()
        enters = torch.ones_like(finite) if self.strict_paper else finite & (norm > 0)
        threshold = self.choose_for(grads, norm, enters)
        coefficient = self.coefficient(norm, threshold)
        clipped = coefficient < 1
        locked_in = self.lock_in.follow(clipped, threshold, finite)
        self._count(clipped, ~finite)
        found_out = {"order": self.norm_type, "norm": norm, "threshold": threshold, "locked_in": locked_in}
        return Decision(grads, describe(grads, norms, coefficient, clipped, **found_out), coefficient)


def scalar(value: float) -> Tensor:
    """Return a 0-dim state tensor."""
    return torch.full((), value, dtype=torch.float64, device="cpu")


def counter() -> Tensor:
    """Return a 0-dim count of 0."""
    return torch.zeros((), dtype=torch.int64, device="cpu")


def ceiling_of(ceiling: float | None) -> float:
    """Return ``ceiling`` as a float; infinity for None.

    Raises:
        InvalidValueError: If it is negative or NaN.
        InvalidTypeError: If the argument is not a number.
    """
    return math.inf if ceiling is None else float(check_threshold("ceiling", ceiling))


def check(condition: bool, expected: str, given: Callable[[], str]) -> None:
    """Raise unless ``condition`` is true.

    Raises:
        InvalidValueError: If it is false; the message holds the value and the expectation.
    """
    if not condition:
        raise InvalidValueError(f"{given()}: expected {expected}.")


def empty_history(length: int) -> Tensor:
    """Return a history with room for ``length`` numbers; empty entries hold inf."""
    return torch.full((length,), torch.inf, dtype=torch.float64, device="cpu")


class RingHistory:
    """The last values, in a tensor that is changed in place, without a host sync.

    Args:
        values: The tensor, as from `empty_history`.
    """

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def put(self, count: Tensor, value: Tensor, enters: Tensor) -> None:
        """Write ``value`` over the oldest value where ``enters`` is true."""
        length = len(self.values)
        places = torch.arange(length, device=self.values.device)
        self.values.copy_(torch.where((places == count % length) & enters, value, self.values))

    def median(self, count: Tensor) -> Tensor:
        """Return the median, infinite if there are no values."""
        return median_of_stored(self.values, count.clamp(max=len(self.values)))

    def median_distance(self, count: Tensor, middle: Tensor) -> Tensor:
        """Return the median distance from ``middle``."""
        return median_of_stored((self.values - middle).abs(), count.clamp(max=len(self.values)))

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and variance of a full history."""
        # On the CPU cumsum adds from left to right, as ZClip's published code does; sum does not.
        mean = self.values.cumsum(0)[-1] / len(self.values)
        return mean, ((self.values - mean) ** 2).cumsum(0)[-1] / len(self.values)

    def last(self, count: Tensor) -> Tensor:
        """Return the rank of the largest value, counted from 0; 0 if there are none."""
        return count.clamp(min=1, max=len(self.values)) - 1

    def neighbours(self, place: Tensor, last: Tensor) -> tuple[Tensor, ...]:
        """Return the value of rank ``place`` and the next larger one."""
        place = place.long()
        return self.ordered().index_select(0, torch.stack([place, (place + 1).minimum(last)])).unbind()

    def ordered(self) -> Tensor:
        """Return the values, ascending."""
        return self.values.sort().values


class WholeHistory(RingHistory):
    """All values, ascending, in a tensor with room for one more."""

    def put(self, count: Tensor, value: Tensor, enters: Tensor) -> None:
        """Insert ``value`` where ``enters`` is true."""
        del count
        places = torch.arange(len(self.values), device=self.values.device)
        place = (self.values <= value).sum()
        shifted = torch.where(places == place, value, self.values.roll(1))
        self.values.copy_(torch.where((places < place) | ~enters, self.values, shifted))

    def ordered(self) -> Tensor:
        """Return the values, which are stored in ascending order."""
        return self.values
