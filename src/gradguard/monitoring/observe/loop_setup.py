"""Find faults in the set-up of a training loop: parameters in no optimizer, and optimizers without gradients.

Each fault is reported once it is certain. The checks cost a few microseconds on each of the first steps, and one search
for other optimizers if a parameter outside the known ones has a gradient.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradguard.distributed.wrappers import named_parameters
from gradguard.monitoring.judge.detectors.loop_faults import NO_GRADIENT, NO_OPTIMIZER
from gradguard.monitoring.observe.meta import all_optimizers
from gradguard.monitoring.observe.shared_norms import are_spread, is_captured
from gradguard.monitoring.observe.step import Event, setup_event
from gradguard.monitoring.record.record_lines import without_none
from gradguard.optimizer_hooks import parameters_of
from gradguard.torch_private import version_of

LOOKS = 20
"""The number of steps on which gradients are checked; half of them must bring a new gradient."""

PATIENCE = 200
"""The number of steps after which a missing optimizer is reported; the script may create an optimizer late."""

IDLE_STEPS = 10
"""The number of steps without any gradient after which an optimizer is reported."""

_SAMPLE = 64
_FEWEST_ROWS, _SIDE = 4, 256  # the smallest side of a tested matrix, and the side of the tested part of a larger one
_ABOVE_EDGE = 1.1  # the largest singular value of an untrained matrix, relative to that of noise
_WRITES_OF_A_START = 4  # an initialisation writes once or twice, and each step of an optimizer once


@dataclass(slots=True)
class _Candidate:
    """A parameter in no optimizer.

    Attributes:
        name: The name of the parameter.
        parameter: A weak reference to the parameter.
        version: The parameter's version counter at the beginning.
        is_forgotten: Whether the parameter should probably be trained: its module is in training mode, and most of its
            model is in optimizers or none of it was ever trained.
        gradient: A weak reference to the gradient at the last check.
        gradient_version: The gradient's version counter at the last check.
        fresh: The number of checks that found a new gradient.
        sample: Some elements of the parameter at its first gradient.
        unchanged: Whether these elements were unchanged at the last comparison, as a 0-dim tensor.
    """

    name: str
    parameter: weakref.ref
    version: int
    is_forgotten: bool
    gradient: weakref.ref | None = None
    gradient_version: int = -1
    fresh: int = 0
    sample: Tensor | None = None
    unchanged: Tensor | None = None

    def look(self) -> None:
        """Count a new gradient, if there is one."""
        parameter = self.parameter()
        gradient = None if parameter is None else parameter.grad
        if parameter is None or gradient is None or is_captured(parameter):
            return
        last = None if self.gradient is None else self.gradient()
        if last is not gradient or version_of(gradient) != self.gradient_version:
            self.gradient, self.gradient_version = weakref.ref(gradient), version_of(gradient)
            self.fresh += 1
            if self.sample is None:
                self.sample = _sample(parameter).clone()

    def is_untouched(self) -> bool:
        """Return whether the parameter received gradients and its version counter did not change.

        The call also compares the sample on the device, because a write through ``.data`` does not raise the counter.
        """
        parameter = self.parameter()
        if parameter is None or self.sample is None or 2 * self.fresh < LOOKS:
            return False
        self.unchanged = (_sample(parameter) == self.sample).all()
        return version_of(parameter) == self.version


class Unowned:
    """Find parameters that receive gradients at every step but are in no optimizer.

    **Guarantees**: A parameter that is written to, in any way, is not reported. Nothing is reported if the optimizers
    hold parameters outside all modules with at least as many elements as the candidates: they are master copies of
    these parameters.

    Args:
        modules: All root modules.
        optimized: The parameters of all known optimizers.
        reached: The tensors that the first backwards wrote a gradient to.
    """

    def __init__(
        self, modules: Sequence[nn.Module], optimized: Sequence[Tensor], reached: Sequence[Tensor] = ()
    ) -> None:
        self._candidates: dict[int, _Candidate] = {}
        self._sizes: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # parameters of each
        self._looks = self._steps = 0
        if optimized and not are_spread(optimized):
            loose: dict[int, Tensor] = {id(p): p for p in reached if isinstance(p, nn.Parameter)}
            self._find(modules, {id(p): p for p in optimized}, loose)

    @property
    def is_over(self) -> bool:
        """Whether no candidate is left."""
        return not self._candidates

    def before_step(self, optimizer: Optimizer, parameters: Sequence[Tensor], index: int) -> Iterator[Event]:
        """Check the gradients at one step of any optimizer; yield the faults that are certain."""
        if self._sizes.get(optimizer) != len(parameters):
            self._sizes[optimizer] = len(parameters)
            self._own(parameters)
        self._steps += 1
        if self._looks < LOOKS:
            self._looks += 1
            for candidate in self._candidates.values():
                candidate.look()
            if self._looks == LOOKS:
                self._compare()
        elif self._steps == PATIENCE:
            yield from self.end(index)

    def end(self, index: int) -> Iterator[Event]:
        """Yield the remaining faults; the model may already be deleted."""
        if self._looks < LOOKS:
            self._compare()
        left = self._candidates.values()
        for forgotten in (True, False):
            yield from _events_of([one for one in left if one.is_forgotten is forgotten], index, not forgotten)
        self._candidates = {}

    def _compare(self) -> None:
        """Keep only the candidates that had gradients and were not written to."""
        if any(2 * candidate.fresh >= LOOKS for candidate in self._candidates.values()):
            for optimizer in all_optimizers():
                self._own(parameters_of(optimizer))
        self._candidates = {key: one for key, one in self._candidates.items() if one.is_untouched()}

    def _own(self, parameters: Sequence[Tensor]) -> None:
        for parameter in parameters:
            self._candidates.pop(id(parameter), None)

    def _find(self, modules: Sequence[nn.Module], optimized: dict[int, Tensor], loose: dict[int, Tensor]) -> None:
        unnamed = dict(optimized)
        for module in modules:
            named = {name: p for name, p in named_parameters(module) if not is_lazy(p)}
            trained = [p for p in named.values() if p.requires_grad]
            others = {name: p for name, p in named.items() if p.requires_grad and id(p) not in optimized}
            trains = _in_training(module) if others else set()
            front = "" if len(others) < len(trained) else f"{type(module).__name__}."
            begins = are_untrained(trained) if len(others) == len(trained) else 2 * len(others) <= len(trained)
            for name, p in named.items():
                unnamed.pop(id(p), None)
                loose.pop(id(p), None)
                if name in others:
                    forgotten = begins and id(p) in trains
                    new = _Candidate(front + name, weakref.ref(p), version_of(p), forgotten)
                    its = self._candidates.setdefault(id(p), new)
                    its.is_forgotten = its.is_forgotten and forgotten  # a parameter may be in several modules
        for key in loose.keys() - optimized.keys():  # an nn.Parameter outside any module is meant to be trained
            name, p = f"nn.Parameter of shape {tuple(loose[key].shape)}", loose[key]
            self._candidates[key] = _Candidate(name, weakref.ref(p), version_of(p), is_forgotten=True)
        # a parameter without a gradient is no master copy: it belongs to a replaced part of a model
        elements = sum(one.numel() for one in unnamed.values() if not is_lazy(one) and one.grad is not None)
        known: list[Tensor] = without_none(candidate.parameter() for candidate in self._candidates.values())
        if elements and elements >= sum(p.numel() for p in known):
            self._candidates = {}


class IdleOptimizers:
    """Find optimizers that step but never have a gradient.

    Attributes:
        alive: The ids of the optimizers that had a gradient.
    """

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self._idle = Counter[int | None]()  # steps by the optimizer's index; the optimizer itself may be deleted
        self._reported = set[int | None]()

    @property
    def steps(self) -> int:
        """The number of steps of optimizers that never had a gradient."""
        return self._idle.total()

    def before_step(
        self,
        optimizer: Optimizer,
        place: int | None,
        parameters: Sequence[Tensor],
        has_gradients: bool,
        sure: bool,
        index: int,
    ) -> Iterator[Event]:
        """Count a step; yield the fault that is certain.

        Args:
            optimizer: The optimizer.
            place: The index of the optimizer; None if it is the only one.
            parameters: The optimizer's parameters.
            has_gradients: Whether one of them has a gradient.
            sure: Whether at least `IDLE_STEPS` backwards have run: their gradients went elsewhere.
            index: The number of the last step.

        Yields:
            The event of an optimizer without gradients, if no optimizer has had a gradient so far.
        """
        if has_gradients:
            self.alive.add(id(optimizer))
            del self._idle[place]
            self._reported.discard(place)
        elif any(p.requires_grad for p in parameters):
            self._idle[place] += 1
            if self._idle[place] >= IDLE_STEPS and sure and place not in self._reported and not self.alive:
                self._reported.add(place)
                yield setup_event(NO_GRADIENT, index, self._idle[place], place, harmless=False)

    def end(self, index: int) -> Iterator[Event]:
        """Yield the remaining faults at the end of the run; until then, a later phase might have brought gradients."""
        for place, steps in self._idle.items():
            if steps >= IDLE_STEPS and place not in self._reported:
                yield setup_event(NO_GRADIENT, index, steps, place, harmless=True)


def _events_of(found: Sequence[_Candidate], index: int, harmless: bool) -> Iterator[Event]:
    names = Counter(one.name for one in found)  # layers of one class in a plain list share a name
    counts, same = Counter[str](), dict[str, Tensor]()
    for one in found:
        counts[one.name] += 1
        if one.unchanged is not None:
            numbered = f" ({counts[one.name]} of {names[one.name]})" if names[one.name] > 1 else ""
            same[one.name + numbered] = one.unchanged
    if same:
        device = next(iter(same.values())).device
        named = {name: one.to(device, non_blocking=device.type != "cpu") for name, one in same.items()}
        count = max(one.fresh for one in found)
        yield setup_event(NO_OPTIMIZER, index, count, named=named, harmless=harmless)


def _sample(parameter: Tensor) -> Tensor:
    return parameter.detach().reshape(-1)[:: max(1, parameter.numel() // _SAMPLE)]  # the first rows may be padding


def are_untrained(parameters: Sequence[Tensor]) -> bool:
    """Return whether all matrices among the parameters look random and were hardly written to.

    The largest singular value of a random matrix is about the root mean square of its elements times the sum of the
    square roots of its two sides. A trained weight has a larger one.

    Args:
        parameters: The parameters.

    Returns:
        Whether all matrices look untrained; False if none has at least `_FEWEST_ROWS` rows and columns.
    """
    large = [
        matrix[:_SIDE, :_SIDE].float()
        for p in parameters
        if p.dim() > 1 and min((matrix := p.detach().flatten(1)).shape) >= _FEWEST_ROWS
    ]
    few_writes = all(version_of(p) <= _WRITES_OF_A_START for p in parameters)
    return bool(large) and few_writes and all(_is_noise(one) for one in large)


def _is_noise(matrix: Tensor) -> bool:
    rows, columns = matrix.shape
    edge = float(matrix.square().mean().sqrt()) * (rows**0.5 + columns**0.5)
    return 0 < float(torch.linalg.matrix_norm(matrix, 2)) <= _ABOVE_EDGE * edge


def _in_training(module: nn.Module) -> set[int]:
    """Return the ids of the parameters whose own submodule is in training mode."""
    return {id(p) for part in module.modules() if part.training for p in part.parameters(recurse=False)}
