"""How the loop is set up, as only the watched process can see it: gradients in no optimizer, optimizers without any.

Both are told once they are sure. Looking costs a few microseconds on the first steps, and one search for optimizers
where a gradient was found outside those that are known.
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
"""Steps on which gradients are looked for; half of them must bring a new one."""

PATIENCE = 200
"""Steps after which a parameter that receives gradients should be in an optimizer; one may be made late."""

IDLE_STEPS = 10
"""Steps without any gradient after which an optimizer is told of."""

_SAMPLE = 64
_FEWEST_ROWS, _SIDE = 4, 256  # of a matrix that is judged, and of the part of a larger one
_ABOVE_EDGE = 1.1  # times the largest singular value of noise
_WRITES_OF_A_START = 4  # an initialisation writes once or twice, and each step of an optimizer once


@dataclass(slots=True)
class _Candidate:
    """A parameter in no optimizer.

    Attributes:
        name: Its name.
        parameter: The parameter, not kept alive.
        version: How often it had been written at the first look.
        is_forgotten: Whether it is to be trained: most of its model is in optimizers, or nothing ever trained it; and
            its module is in training mode.
        gradient: The gradient of the last look, not kept alive.
        gradient_version: How often that had been written.
        fresh: On how many looks there was a new gradient.
        sample: Some of its elements at the first gradient.
        unchanged: Whether these are what they were, at the last look.
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
        """See whether there is a new gradient."""
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
        """Tell whether it received gradients and, as far as is known at no cost, was not written to; else compare."""
        parameter = self.parameter()
        if parameter is None or self.sample is None or 2 * self.fresh < LOOKS:
            return False
        self.unchanged = (_sample(parameter) == self.sample).all()
        return version_of(parameter) == self.version


class Unowned:
    """Parameters that receive gradients step after step and are in no optimizer.

    **Guarantees**: nothing is said of a parameter that somebody writes to, by whatever way, nor where an optimizer
    holds as many elements that are in no module: master copies of these very parameters.

    Args:
        modules: All modules.
        optimized: The parameters of all optimizers that are known.
        reached: The tensors that the first backward passes gave a gradient.
    """

    def __init__(
        self, modules: Sequence[nn.Module], optimized: Sequence[Tensor], reached: Sequence[Tensor] = ()
    ) -> None:
        self._candidates: dict[int, _Candidate] = {}
        self._sizes: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()  # those looked at
        self._looks = self._steps = 0
        if optimized and not are_spread(optimized):
            loose: dict[int, Tensor] = {id(p): p for p in reached if isinstance(p, nn.Parameter)}
            self._find(modules, {id(p): p for p in optimized}, loose)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing to look for any more."""
        return not self._candidates

    def before_step(self, optimizer: Optimizer, parameters: Sequence[Tensor], index: int) -> Iterator[Event]:
        """Look at the gradients of one step of any optimizer; say what is sure."""
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
        """Say what is left; by now the model may be gone."""
        if self._looks < LOOKS:
            self._compare()
        left = self._candidates.values()
        for forgotten in (True, False):
            yield from _told([one for one in left if one.is_forgotten is forgotten], index, not forgotten)
        self._candidates = {}

    def _compare(self) -> None:
        """Keep those that had gradients and have not been written to."""
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
                    its.is_forgotten = its.is_forgotten and forgotten  # part of several modules
        for key in loose.keys() - optimized.keys():  # of no module: nobody writes nn.Parameter for what is to stay
            name, p = f"nn.Parameter of shape {tuple(loose[key].shape)}", loose[key]
            self._candidates[key] = _Candidate(name, weakref.ref(p), version_of(p), is_forgotten=True)
        # what never gets a gradient is no master copy: a part of a model that was replaced
        elements = sum(one.numel() for one in unnamed.values() if not is_lazy(one) and one.grad is not None)
        known: list[Tensor] = without_none(candidate.parameter() for candidate in self._candidates.values())
        if elements and elements >= sum(p.numel() for p in known):
            self._candidates = {}


class IdleOptimizers:
    """Optimizers that step and never had a gradient.

    Attributes:
        alive: The identities of those that had one.
    """

    def __init__(self) -> None:
        self.alive: set[int] = set()
        self._idle = Counter[int | None]()  # steps by the place of the optimizer, which may be gone at the end
        self._told = set[int | None]()

    @property
    def steps(self) -> int:
        """Steps of those that never had one."""
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
        """Take note of a step; say what is sure.

        Args:
            optimizer: The optimizer.
            place: Which one it is.
            parameters: Its parameters.
            has_gradients: Whether one of them has a gradient.
            sure: Whether backward has run as often, so that gradients went elsewhere.
            index: Number of the last step.

        Yields:
            An optimizer without gradients, where there is none with.
        """
        if has_gradients:
            self.alive.add(id(optimizer))
            del self._idle[place]
            self._told.discard(place)
        elif any(p.requires_grad for p in parameters):
            self._idle[place] += 1
            if self._idle[place] >= IDLE_STEPS and sure and place not in self._told and not self.alive:
                self._told.add(place)  # nothing that is watched is trained
                yield setup_event(NO_GRADIENT, index, self._idle[place], place, harmless=False)

    def end(self, index: int) -> Iterator[Event]:
        """Say what is left: while the run goes on, a later phase of it may bring gradients."""
        for place, steps in self._idle.items():
            if steps >= IDLE_STEPS and place not in self._told:
                yield setup_event(NO_GRADIENT, index, steps, place, harmless=True)


def _told(found: Sequence[_Candidate], index: int, harmless: bool) -> Iterator[Event]:
    names = Counter(one.name for one in found)  # layers of one class in a plain list have one name
    seen, same = Counter[str](), dict[str, Tensor]()
    for one in found:
        seen[one.name] += 1
        if one.unchanged is not None:
            alike = f" ({seen[one.name]} of {names[one.name]})" if names[one.name] > 1 else ""
            same[one.name + alike] = one.unchanged
    if same:
        device = next(iter(same.values())).device
        named = {name: one.to(device, non_blocking=device.type != "cpu") for name, one in same.items()}
        count = max(one.fresh for one in found)
        yield setup_event(NO_OPTIMIZER, index, count, named=named, harmless=harmless)


def _sample(parameter: Tensor) -> Tensor:
    return parameter.detach().reshape(-1)[:: max(1, parameter.numel() // _SAMPLE)]  # the first rows may be padding


def are_untrained(parameters: Sequence[Tensor]) -> bool:
    """Return whether all matrices among some parameters are as a random start makes them, and nobody wrote to them.

    No direction of a random matrix stands out: its largest singular value is that of independent numbers of its
    spread, which is the spread times the sum of the roots of its sides. A weight that has learned has larger ones.

    Args:
        parameters: The parameters.

    Returns:
        False where there is no matrix of at least `_FEWEST_ROWS` rows and columns.
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
    """The parameters of the parts of ``module`` that are in training mode."""
    return {id(p) for part in module.modules() if part.training for p in part.parameters(recurse=False)}
