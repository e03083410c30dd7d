"""Save the rest of a training step: the gradients that the optimizer takes, its state, and the weights' change."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.distributed.local_shard import LocalShard
from gradguard.distributed.placements import local_part
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.grad_scaler import listen_to_scale
from gradguard.living import Living, alive
from gradguard.optimizer_hooks import EveryStep, parameters_of
from gradguard.parity.backward_replay import add_signs, scale_gradients
from gradguard.parity.kept_tensors import KeptTensors, averages_in, kept_by
from gradguard.parity.rounding_runs import not_same_twice
from gradguard.parity.saved import (
    BUFFER,
    COPIES,
    GRADIENT,
    START,
    STATE,
    TRAINED,
    UPDATE,
    SavedGradients,
    SavedParameter,
    after_step,
)
from gradguard.parity.scales import ScriptRun
from gradguard.parity.shards import (
    LocalParameter,
    LocalParameters,
    gathered_settings,
    gathered_words,
    local_buffers,
    of_one_shape,
)
from gradguard.parity.vectors import norm
from gradguard.parity.whole import Sketched, Sketches, WholeParameters, about, local_gradients, local_weights
from gradguard.state.copies import Copier, Restorer
from gradguard.state.optimizer_copy import OptimizerCopy
from gradguard.state.snapshot_parts import OtherState
from gradguard.torch_private import gradients_are_scaled, scaler_states_of


class TrainingState:
    """A copy of the weights, the optimizers' states and settings, and other objects that an update changes.

    Args:
        local: This process's shards of the model's parameters.
        optimizers: The optimizers that step.
        others: Objects with ``state_dict`` and ``load_state_dict``, such as a scheduler or a GradScaler.
    """

    def __init__(self, local: LocalParameters, optimizers: Sequence[Optimizer], others: Sequence[Any]) -> None:
        copier = Copier()
        self._kept = [(one.parameter, copier.tensor(one.parameter)) for one in local]
        self._optimizers = [OptimizerCopy(one) for one in optimizers]
        self._others = list(map(OtherState, others))
        for part in (*self._optimizers, *self._others):
            part.take(copier)
        self._of_scalers = [(one, copier.copy(scaler_states_of(one))) for one in enabled_scalers(others)]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the copied state bit for bit, and set gradients to None."""
        restorer = Restorer()
        for p, kept in self._kept:
            restorer.write(kept, p)
            p.grad = None
        for part in (*self._optimizers, *self._others):
            part.restore(restorer)
        for p in chain(*(one.parameters.values() for one in self._optimizers)):
            p.grad = None
        self.restore_scalers()

    def restore_scalers(self) -> None:
        """Restore each GradScaler's record of unscaled optimizers, which its ``state_dict`` does not contain."""
        for scaler, states in self._of_scalers:
            Restorer().restored(states, scaler_states_of(scaler))


@dataclass(frozen=True)
class Noted:
    """This process's part of one stage of one run.

    Attributes:
        tensors: This process's shards of the stage's tensors.
        about: The descriptions of the tensors.
        sketches: The sketches of the tensors, by name; a tensor may have none.
        copies: The sketches that must be equal on ranks with the same shard, by name.
        calls: The number of backward passes in a gradient.
    """

    tensors: LocalParameters
    about: Sequence[SavedParameter]
    sketches: Sketched
    copies: Sketched
    calls: int

    @classmethod
    def of(
        cls, tensors: LocalParameters, calls: int, sketches: Sketched | None = None, copies: Sketched | None = None
    ) -> "Noted":
        """Describe the tensors of a stage, and sketch them if no sketches are given.

        Args:
            tensors: This process's shards of the stage's tensors.
            calls: The number of backward passes in a gradient.
            sketches: The sketches to save; by default, of the tensors themselves.
            copies: The sketches to compare between ranks; by default, ``sketches``.

        Returns:
            This process's part of the stage.
        """
        sketches = local_weights(tensors) if sketches is None else sketches
        described = [replace(about(p), has_gradient=p.name in sketches) for p in tensors]
        # Each rank may have its own buffers.
        copies = {name: one for name, one in (copies or sketches).items() if not name.startswith(BUFFER)}
        return cls(tensors, described, sketches, copies, calls)


class StepNotes:
    """Records the stages of training steps on this process, without communication.

    Args:
        local: This process's shards of the model's parameters.
        optimizers: The optimizers that step.
        models: The models whose buffers are recorded, each with a prefix for the buffers' names.
        others: Further objects to compare, such as averages of the weights.

    Attributes:
        stepped: The tensors that optimizers step: a parameter's master weights if it has any, else the parameter.
        settings: The numbers among the optimizers' settings, by parameter: at the first step, and after each step,
            together with the schedulers' numbers.
        left_out: The descriptions of states that cannot be compared.
        taken: The sketches of the gradients that optimizers have taken since `before_update`, by name.
    """

    def __init__(
        self,
        local: LocalParameters,
        optimizers: Sequence[Optimizer],
        models: Sequence[tuple[str, nn.Module]],
        others: Sequence[KeptTensors] = (),
    ) -> None:
        self._local, self._optimizers, self._models, self._others = local, optimizers, models, others
        self.stepped = [_master(p) for p in local]
        self.settings: dict[str, dict[str, float]] = {}
        self.left_out = {one.words: None for one in others if not [*self._averages(0, one)]}
        self._before: Sketched = {}
        self.taken: Sketched = {}
        if optimizers:
            _schedulers.look()

    def start(self) -> Noted:
        """Record the state before the first forward, which changes buffers."""
        return Noted.of([*self._states(), *self._copies()], 1)

    def before_update(self) -> None:
        """Record the weights before the next step changes them."""
        self._before, self.taken = local_weights(self.stepped), {}

    @torch.no_grad()
    def take(self, optimizer: Optimizer, evaluation: int) -> None:
        """Record the gradients with which ``optimizer`` steps; later evaluations of a closure are ignored."""
        if evaluation:
            return
        groups = _groups([optimizer])
        own = [p for p in self.stepped if id(p.parameter) in groups]
        factor = taken_off_by(optimizer)
        self.taken |= {name: factor * sketch for name, sketch in local_gradients(own).items()}
        for p in own:
            self.settings.setdefault(p.name, _numbers(groups[id(p.parameter)]))

    def end(self, t: int, calls: int) -> dict[str, Noted]:
        """Return the stages of step ``t`` after its gradients; call it after the update."""
        with_gradient = [p for p in self.stepped if p.name in self.taken]
        now = local_weights(self.stepped)
        change = {name: weights - self._before[name] for name, weights in now.items()}
        self._note_settings(t)
        return {
            f"gradient that the optimizer takes at step {t}": Noted.of(with_gradient, calls, self.taken),
            f"{STATE} after step {t}": Noted.of([*self._states()], calls),
            f"{UPDATE} {t}": Noted.of(self.stepped, calls, change, now),
            f"{COPIES} after step {t}": Noted.of([*self._copies()], calls),
        }

    def _note_settings(self, t: int) -> None:
        """Record the settings after step ``t``, which act in the next step even if that step is not saved."""
        groups = _groups(self._optimizers)
        of_schedulers = defaultdict[int, dict[str, float]](dict)
        for one in schedulers_of(self._optimizers):  # search in each step: a script may create a scheduler at any time
            numbers = _numbers(one.state_dict(), f"{type(one).__name__}.")
            for p in parameters_of(one.optimizer):
                of_schedulers[id(p)] |= numbers  # an optimizer may have several: a warm-up and a decay
        for model, p in zip(self._local, self.stepped, strict=True):
            if p.name in self.settings:
                key_of = id(p.parameter)
                numbers = _numbers(groups.get(key_of, {})) | of_schedulers.get(key_of, {})
                numbers[TRAINED] = float(model.parameter.requires_grad)
                self.settings[p.name] |= {after_step(key, t): value for key, value in numbers.items()}

    def _states(self) -> Iterator[LocalParameter]:
        """Yield the tensors and numbers of the optimizers' states, each as a separate tensor, and the buffers."""
        for p in self.stepped:
            state: Any = next((o.state[p.parameter] for o in self._optimizers if p.parameter in o.state), {})
            for key, value in _leaves(state):
                tensor = torch.tensor(float(value), device="cpu") if isinstance(value, int | float) else value.detach()
                one = _part(p, f"{key} of {p.name}", tensor)
                if one is None:
                    self.left_out[f"{key} of {p.name}"] = None
                else:
                    yield one
        for front, one in self._models:
            yield from local_buffers(one, front)

    def _copies(self) -> Iterator[LocalParameter]:
        """Yield the model's weights that have master weights, these master weights, and averages of the weights."""
        for model, p in zip(self._local, self.stepped, strict=True):
            if p is not model:
                yield replace(p, name=f"master weights of {p.name}")
                yield replace(model, name=f"weights of {p.name}")
        for i, one in enumerate(self._others):
            yield from self._averages(sum(one.kind == other.kind for other in self._others[:i]), one)

    def _averages(self, number: int, other: KeptTensors) -> Iterator[LocalParameter]:
        """Yield the tensors of ``other`` with the name and the shape of a parameter, such as averages of weights."""
        known = {p.name: p for p in self._local}
        kind = f"{other.kind}{number or ''}"  # several objects may have one class
        for key, value in _leaves(other.state()):
            words = key.split(".")
            fronts = (i for i in range(len(words)) if ".".join(words[i:]) in known)
            if isinstance(value, Tensor) and (at := next(fronts, None)) is not None:
                name = ".".join(words[at:])
                one = _part(known[name], f"{'.'.join([kind, *words[:at]])} of {name}", value.detach())
                if one is not None and value.dim() == known[name].parameter.dim():
                    yield one


class ComparedStages:
    """The stages of several runs, equal on all ranks; `add` is a collective."""

    def __init__(self) -> None:
        self._wholes: dict[str, WholeParameters] = {}
        self._first: dict[str, SavedGradients] = {}  # the descriptions of the first run's tensors, and the contrasts

    def add(self, name: str, of_process: Noted) -> Sketches:
        """Add up the ranks' sketches of one stage of one run; the first run determines the stage's tensors."""
        if name not in self._first:
            tensors = of_one_shape(of_process.tensors)
            whole, names = WholeParameters(tensors, may_be_none=True), {p.name for p in tensors}
            described = whole.about([one for one in of_process.about if one.name in names], of_process.calls)
            copies = of_process.copies
            tables = {"contrasts": whole.contrasts(copies), "gradient": [whole.reduced(copies)]}
            self._wholes[name], self._first[name] = whole, SavedGradients(described, tables)
        return self._wholes[name].reduced(of_process.sketches)

    def saved(self, run: Mapping[str, Sketches], epsilon: float) -> dict[str, SavedGradients]:
        """Return the stages of one run, in order."""
        found = {}
        for name, first in self._first.items():
            if first.parameters or name == START:
                tables = {"gradient": [run[name]], "contrasts": first.sketches["contrasts"]}
                tensors = [*first.parameters]
                for i, change in enumerate(run[name] if name.startswith(UPDATE) else ()):
                    if size := norm(change):  # the weights' dtype rounds each change of the weights
                        stored = tensors[i].weight_rounding * norm(first.sketches["gradient"][0][i]) / size
                        tensors[i] = replace(tensors[i], rounding=min(1.0, max(tensors[i].rounding, stored)))
                found[name] = SavedGradients(tuple(tensors), tables, epsilon=epsilon)
        return found


def check_updates(runs: Sequence[SavedGradients]) -> None:
    """Refuse updates that differ between the first two runs by more than rounding.

    Raises:
        UnsupportedGradientError: If the median tensor of an update differs.
    """
    for name, _ in not_same_twice(runs):
        if name.startswith(UPDATE):
            raise UnsupportedGradientError(
                f"{name} is not the same twice: which objects does update() change, besides the weights and the "
                "optimizer? Pass them as others=[scheduler, scaler, ...], which have state_dict and "
                "load_state_dict; or let step() load the same batch each time."
            )


class TrainingSteps:
    """Continues a run from the gradients of its first step through several updates.

    Args:
        local: This process's shards of the model's parameters.
        optimizers: The optimizers that step.
        update: A function that applies the gradients: the clip, the optimizers' steps, ``zero_grad``. By default, the
            steps and ``zero_grad``.
        steps: The number of steps.
        others: Further objects that ``update`` changes.
        model: The model whose buffers are compared; None to leave the buffers out.

    Attributes:
        restore: A function that restores the weights, the optimizers and ``others``.

    Raises:
        UnsupportedGradientError: If an optimizer steps tensors that are neither parameters of the model nor their
            ``main_param``.
    """

    def __init__(
        self,
        local: LocalParameters,
        optimizers: Sequence[Optimizer],
        update: Callable[[], Any] | None,
        steps: int,
        others: Sequence[Any],
        model: nn.Module | None,
    ) -> None:
        self._local, self._optimizers, self._update, self._steps = local, optimizers, update, steps
        of_others = [kept_by(one, "the state of {}") for one in others]
        self._notes = StepNotes(local, optimizers, [] if model is None else [("", model)], of_others)
        self._stages = ComparedStages()
        for one in optimizers:
            trained_by(one, self._notes.stepped)
        found = [one for one in (*schedulers_of(optimizers), *alive(torch.amp.GradScaler)) if one not in others]
        self._scalers = enabled_scalers((*others, *found))
        self._state = TrainingState(local, optimizers, (*others, *found))
        self.restore = self._state.restore
        self._scale, self._unscaled = 1.0, set[int]()
        self._notes.left_out |= {one.words: None for one in averages_in(local, others)}
        if model is None:
            self._notes.left_out["buffers, because of shard_of="] = None
        self._start: Sketches = []

    def first_step(self) -> AbstractContextManager[None]:
        """Return the context of `hearing` for a first step, after restoring scalers that an earlier run has used."""
        self._state.restore_scalers()
        return self.hearing()

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Record the scale of a GradScaler inside the block, and the optimizers whose gradients it unscales there."""
        self._scale, self._unscaled, end = 1.0, set(), listen_to_scale(self._heard, lambda *_: None)
        try:
            yield
        finally:
            end()
        for one in self._optimizers:
            if not all(gradients_are_scaled(scaler, one) for scaler in self._scalers):
                self._unscaled |= {id(p) for p in parameters_of(one)}

    @property
    def loss_scales(self) -> dict[str, float]:
        """The loss scale in each parameter's gradient since `hearing`, by name; 1 for an unscaled gradient."""
        return {p.name: 1.0 if id(p.parameter) in self._unscaled else self._scale for p in self._local}

    def _heard(self, loss: Any, scaled: Any) -> None:
        if (times := scale_between(loss, scaled)) is not None:
            known = (one.get_scale() for one in self._scalers)  # the ratio of two 16-bit losses is only approximate
            self._scale = next((one for one in known if math.isclose(one, times, rel_tol=1e-2)), times)

    def unscaled_gradients(self) -> Sketched:
        """Return the sketch of each shard's gradient without the loss scale, by name."""
        scales = self.loss_scales
        return {name: sketch / scales[name] for name, sketch in local_gradients(self._local).items()}

    def begin(self) -> None:
        """Record the state before the first forward, which changes buffers."""
        self._start = self._stages.add(START, self._notes.start())

    def follow(self, again: Callable[[], Any], how: ScriptRun, calls: int, epsilon: float) -> dict[str, SavedGradients]:
        """Continue from the current gradients, and return the stages of this run.

        Args:
            again: A function that runs forward and backward of the next step.
            how: The description of this run; its scale is divided out before each update.
            calls: The number of backward passes in a gradient.
            epsilon: The machine epsilon of the coarsest dtype of the computation.

        Returns:
            The stages, by name.
        """
        run = {START: self._start}
        self._notes.settings = {}
        for t in range(1, self._steps + 1):
            if t > 1:
                scale_gradients(self._local, how.scale)  # a forgotten zero_grad leaves gradients without the scale
                with self.hearing():
                    again()
            scale_gradients(self._local, 1 / how.scale)
            name = f"{GRADIENT} {t}"
            run[name] = self._stages.add(name, Noted.of(self._local, calls, self.unscaled_gradients()))
            if sizes := how.sizes.get(name):
                add_signs(self._local, {n: scale * sizes.get(n, 0.0) for n, scale in self.loss_scales.items()}, t)
            self._notes.before_update()
            self._updated()
            run |= {name: self._stages.add(name, one) for name, one in self._notes.end(t, calls).items()}
        return self._stages.saved(run, epsilon)

    @property
    def settings(self) -> dict[str, Mapping[str, float]]:
        """The settings of all ranks in the last run, by parameter. A collective."""
        return gathered_settings(self._notes.settings)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The descriptions of the states that are not compared on some rank. A collective."""
        return gathered_words(self._notes.left_out)

    def _updated(self) -> None:
        """Run the update, and record the gradients that optimizers take."""
        hooks = [EveryStep(self._notes.take, lambda _: None, optimizer=one) for one in self._optimizers]
        try:
            if self._update is not None:
                self._update()
            else:
                for one in self._optimizers:
                    one.step()
                for one in self._optimizers:
                    one.zero_grad()
        finally:
            for hook in hooks:
                hook.remove()
        if not self._notes.taken:
            raise InvalidValueError(
                "update() made no step of the optimizer with gradients: expected the code after backward in the "
                "training loop, as in update=optimizer.step. A GradScaler skips a step if a gradient overflows."
            )


def trained_by(optimizer: Optimizer, own: LocalParameters) -> set[int]:
    """Return the ids of an optimizer's trained parameters.

    Raises:
        UnsupportedGradientError: If a parameter is not among ``own``.
    """
    known, given = {id(p.parameter) for p in own}, [p for p in parameters_of(optimizer) if p.requires_grad]
    if foreign := [list(p.shape) for p in given if id(p) not in known]:
        raise UnsupportedGradientError(
            f"{len(foreign)} of the {len(given)} parameters of {type(optimizer).__name__} belong to no model that was "
            f"called before the step, or is saved, the first of shape {foreign[0]}. A tensor outside of the model (a "
            "temperature, log_alpha) has no name: make it a parameter of a module that is called. Master weights are "
            "found if each parameter has its own, of the parameter's shape, as main_param. If an engine such as "
            "DeepSpeed holds the weights, save gradients alone: call gradguard.save_gradients(file, model, step) in "
            "the script."
        )
    return {id(p) for p in given}


def scale_between(loss: Any, scaled: Any) -> float | None:
    """Return the factor between a loss and the scaled loss; None if it is not a finite number."""
    if not (isinstance(loss, Tensor) and isinstance(scaled, Tensor) and loss.numel() == 1):
        return None
    before, after = float(loss.detach()), float(scaled.detach())
    return after / before if before and math.isfinite(after / before) else None


def taken_off_by(optimizer: Optimizer) -> float:
    """Return the factor by which a fused optimizer removes a GradScaler's scale; 1 for other optimizers."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else 1 / float(scale)


_schedulers = Living(torch.optim.lr_scheduler.LRScheduler)


def schedulers_of(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Return the live PyTorch schedulers of ``optimizers``, sorted by ``last_epoch``; 0 for a chain without one."""
    known = {id(one) for one in optimizers}
    found = [one for one in _schedulers() if id(vars(one).get("optimizer")) in known]
    return sorted(found, key=lambda one: getattr(one, "last_epoch", 0))


def enabled_scalers(others: Sequence[Any]) -> list[torch.amp.GradScaler]:
    """Return the GradScalers among ``others`` that are enabled."""
    return [one for one in others if isinstance(one, torch.amp.GradScaler) and one.is_enabled()]


def _master(p: LocalParameter) -> LocalParameter:
    """Return a parameter's master weights, Megatron's ``main_param``, if they have its shape; else the parameter."""
    main = getattr(p.parameter, "main_param", None)
    if not isinstance(main, Tensor) or main.shape != p.parameter.shape:
        return p
    part = p.weights()[0]
    return LocalParameter(p.name, main, part)


def _part(p: LocalParameter, name: str, tensor: Tensor) -> LocalParameter | None:
    """Return a tensor of a parameter's state as a shard; None if the parameter's shard does not determine its own."""
    part, weights = p.weights()
    if p.offset is not None and tensor.shape == p.parameter.shape:
        return replace(p, name=name, parameter=tensor)
    if local_part(tensor).shape == weights.shape:
        return LocalParameter(name, local_part(tensor), part)
    if tensor.numel() == 1 or math.prod(part.own) == math.prod(part.shape):
        own = tuple(tensor.shape) if tensor.numel() > 1 else ()
        return LocalParameter(name, local_part(tensor).reshape(own), LocalShard(own, own))
    return None


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the numbers and tensors of nested containers, each with its path."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _leaves(entry, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for i, entry in enumerate(value):
            yield from _leaves(entry, f"{key}[{i}]")
    elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() and not value.is_complex()):
        yield key, value


def _groups(optimizers: Sequence[Optimizer]) -> dict[int, Mapping[str, Any]]:
    """Return each parameter's group, by the parameter's id."""
    return {id(p): group for one in optimizers for group in one.param_groups for p in group["params"]}


def _numbers(settings: Mapping[str, Any], front: str = "") -> dict[str, float]:
    """Return the finite numbers in the settings of a parameter group, or in the state of a scheduler."""
    leaves = _leaves({key: value for key, value in settings.items() if key != "params" and key[:1] != "_"})
    numbers = {front + key: float(x) for key, x in leaves if not isinstance(x, Tensor) or x.numel() == 1}
    return {key: value for key, value in numbers.items() if math.isfinite(value)}
