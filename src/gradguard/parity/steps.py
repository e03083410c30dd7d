"""The rest of a training step: what the optimizer takes, its state, and by how much weights change, step after step."""

import copy
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradguard.distributed.local_shard import LocalShard
from gradguard.distributed.placements import local_part
from gradguard.distributed.wrappers import all_objects
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.grad_scaler import listen_to_scale
from gradguard.optimizer_hooks import EveryStep
from gradguard.parity.replay import add_signs, scale_gradients
from gradguard.parity.saved import BUFFER, START, STATE, UPDATE, SavedGradients, SavedParameter
from gradguard.parity.shards import LocalParameter, gathered, local_buffers
from gradguard.parity.vectors import minus, norm
from gradguard.parity.whole import Sketches, WholeParameters, about, local_gradients, local_weights
from gradguard.state.copies import Copier, Restorer
from gradguard.state.optimizer_copy import OptimizerCopy
from gradguard.torch_private import gradients_are_scaled, scaler_states_of

_LOUD, _LOUDEST = 16.0, 1e-2
"""A turned gradient element is off by so many times what rounding does, but by no more of the gradient than that."""

_MOST_CHANCE, _FARTHEST = 1000, 0.1  # kernels that add in any order change an update by some epsilon


class TrainingState:
    """The weights, the optimizers' state and settings, and what else an update changes: kept, and put back.

    Args:
        local: This process' parts of the model's parameters.
        optimizers: Those that step.
        others: Objects with ``state_dict`` and ``load_state_dict``, such as a scheduler or a GradScaler.
    """

    def __init__(self, local: Sequence[LocalParameter], optimizers: Sequence[Optimizer], others: Sequence[Any]) -> None:
        self._weights, self._others, copier = [one.parameter for one in local], others, Copier()
        self._kept = [copier.tensor(p) for p in self._weights]
        self._optimizers = [OptimizerCopy(one) for one in optimizers]
        for one in self._optimizers:
            one.take(copier)
        self._of_others = [copy.deepcopy(one.state_dict()) for one in others]
        self._of_scalers = [(one, copy.deepcopy({**scaler_states_of(one)})) for one in enabled_scalers(others)]

    @torch.no_grad()
    def restore(self) -> None:
        """Make everything as it was, to the last bit."""
        restorer = Restorer()
        for p, kept in zip(self._weights, self._kept, strict=True):
            restorer.write(kept, p)
            p.grad = None
        for one in self._optimizers:
            one.restore(restorer)
            one.forget_new_attributes()
            for p in one.parameters.values():
                p.grad = None
        for other, state in zip(self._others, self._of_others, strict=True):
            other.load_state_dict(copy.deepcopy(state))
        self.restore_scalers()

    def restore_scalers(self) -> None:
        """Let each GradScaler have unscaled as before, which its ``state_dict`` does not hold."""
        for scaler, states in self._of_scalers:
            now = scaler_states_of(scaler)
            now.clear()
            now.update(copy.deepcopy(states))


@dataclass
class _Stage:
    """One stage of all runs: its tensors in the first run, and their sketches in each."""

    whole: WholeParameters
    tensors: Sequence[SavedParameter]
    contrasts: list[Sketches]
    runs: list[Sketches] = field(default_factory=list)


class TrainingSteps:
    """Follows a run from the gradients of its first step through several updates.

    Args:
        local: This process' parts of the model's parameters.
        optimizers: Those that step.
        update: Turns gradients into weights: the clip, the optimizers' steps, setting gradients to None.
        steps: How many to follow.
        others: What else ``update`` changes.
        model: The model, for its buffers; None to leave them out.

    Raises:
        UnsupportedGradientError: If an optimizer steps tensors that are neither parameters of the model nor their
            ``main_param``.
    """

    def __init__(
        self,
        local: Sequence[LocalParameter],
        optimizers: Sequence[Optimizer],
        update: Callable[[], Any],
        steps: int,
        others: Sequence[Any],
        model: nn.Module | None,
    ) -> None:
        self._model = model
        self._local, self._optimizers, self._update, self._steps = local, optimizers, update, steps
        self._stepped = [_master(p) for p in local]
        known = {id(p.parameter) for p in self._stepped}
        for one in optimizers:
            given = [p for group in one.param_groups for p in group["params"] if p.requires_grad]
            if foreign := sum(id(p) not in known for p in given):
                raise UnsupportedGradientError(
                    f"{foreign} of the {len(given)} parameters of {type(one).__name__} are not the model's: weights of "
                    "an engine of its own? Expected the parameters of the model, or master weights that each parameter "
                    "names as its main_param, whole, as Megatron does."
                )
        found = [one for one in schedulers_of(optimizers) if not any(one is other for other in others)]
        self._scalers = enabled_scalers((*others, *found))
        self._state = TrainingState(local, optimizers, (*others, *found))
        self._scale, self._unscaled = 1.0, set[int]()
        self._left_out = dict.fromkeys(f"the state of {type(one).__name__}" for one in others)
        if model is None:
            self._left_out["buffers, because of shard_of="] = None
        self._stages: dict[str, _Stage] = {}
        self._run: dict[str, Sketches] = {}
        self.settings: dict[str, dict[str, float]] = {}

    def restore(self) -> None:
        """Put weights and optimizers back."""
        self._state.restore()

    def first_step(self) -> AbstractContextManager[None]:
        """Return `hearing` for a run of the first step, before which another may have run without its update."""
        self._state.restore_scalers()
        return self.hearing()

    @contextmanager
    def hearing(self) -> Iterator[None]:
        """Find what a GradScaler multiplies the loss by inside the block, and whose gradients it has unscaled there."""
        self._scale, self._unscaled, end = 1.0, set(), listen_to_scale(self._heard, lambda *_: None)
        try:
            yield
        finally:
            end()
        for one in self._optimizers:
            if not all(gradients_are_scaled(scaler, one) for scaler in self._scalers):
                self._unscaled |= {id(p) for group in one.param_groups for p in group["params"]}

    def loss_scale(self, parameter: LocalParameter) -> float:
        """Return what the gradient of a parameter is multiplied by since `hearing`; 1 where it is unscaled."""
        return 1.0 if id(parameter.parameter) in self._unscaled else self._scale

    def _heard(self, loss: Any, scaled: Any) -> None:
        if not (isinstance(loss, Tensor) and isinstance(scaled, Tensor) and loss.numel() == 1):
            return
        before, after = float(loss.detach()), float(scaled.detach())
        times = after / before if before else math.nan
        if not math.isfinite(times):
            return
        known = (one.get_scale() for one in self._scalers)  # a loss of 16 bits is rounded
        self._scale = next((one for one in known if math.isclose(one, times, rel_tol=1e-2)), times)

    def unscaled_gradients(self, local: Sequence[LocalParameter]) -> dict[str, Tensor]:
        """Return the sketch of each part's gradient without the loss scale, by name."""
        scales = {p.name: self.loss_scale(p) for p in local}
        return {name: sketch / scales[name] for name, sketch in local_gradients(local).items()}

    def begin(self) -> None:
        """Note the state before the first forward, which changes buffers."""
        self._note(START, [*self._states()], local_weights, 1)

    def follow(self, again: Callable[[], Any], scale: float, calls: int, turned: int = 0) -> dict[str, Sketches]:
        """Go on from the gradients that are there, and return the sketches of each stage.

        Args:
            again: Runs forward and backward of the next step.
            scale: What gradients are multiplied by; taken off before each update.
            calls: How many backward passes add to a gradient.
            turned: 1 or -1 to move each element of each gradient up or down by more than rounding does.

        Returns:
            The sketches, by stage.
        """
        self._run = {}
        for t in range(1, self._steps + 1):
            if t > 1:
                scale_gradients(self._local, scale)  # what a forgotten zero_grad has left
                with self.hearing():
                    again()
            scale_gradients(self._local, 1 / scale)
            self._note(f"gradient of step {t}", self._local, self.unscaled_gradients, calls)
            if turned:
                self._turn(t, turned)
            before = local_weights(self._stepped)
            taken = self._updated()
            held = [p for p in self._stepped if p.name in taken]
            self._note(f"gradient that the optimizer takes at step {t}", held, lambda _, taken=taken: taken, calls)
            self._note(f"{STATE} after step {t}", [*self._states()], local_weights, calls)
            change = {name: now - before[name] for name, now in local_weights(self._stepped).items()}
            self._note(f"{UPDATE} {t}", self._stepped, lambda _, change=change: change, calls)
        return self._run

    def keep(self, *runs: Mapping[str, Sketches]) -> None:
        """Keep a run, or the mean of two whose gradients were turned up and down.

        What is linear in the gradient is in the mean as it is in the first run. Where an update jumps, as the sign of
        an element that is nearly zero does, one of the two has jumped: so the mean shows what no other run may.
        """
        for name, stage in self._stages.items():
            if name == START:
                continue
            tables = [run[name] for run in runs]
            stage.runs.append(
                [[sum(numbers) / len(runs) for numbers in zip(*of, strict=True)] for of in zip(*tables, strict=True)]
            )

    def check_same(self, epsilon: float) -> None:
        """Refuse updates that differ between the first two runs, which rounding alone tells apart.

        Raises:
            UnsupportedGradientError: If half of them do.
        """
        for name, stage in self._stages.items():
            if name.startswith(UPDATE):
                pairs = zip(*stage.runs[:2], strict=True)
                shares = [norm(minus(a, b)) / norm(a) for a, b in pairs if norm(a)]
                if shares and statistics.median(shares) > min(_MOST_CHANCE * epsilon, _FARTHEST):
                    raise UnsupportedGradientError(
                        f"{name} is not the same twice: what else does update() change, besides the weights and the "
                        "optimizer? Pass it as others=[scheduler, scaler, ...], which have state_dict and "
                        "load_state_dict; or let step() load the same batch each time."
                    )

    def saved(self, whole: WholeParameters, epsilon: float) -> dict[str, SavedGradients]:
        """Return the stages in order, without the gradient of the first step, which is saved by itself."""
        found = {}
        for name, stage in self._stages.items():
            if name != "gradient of step 1" and (stage.tensors or name == START):
                runs = stage.runs
                names = [*stage.whole.wholes]
                keep = [i for i, s in enumerate(runs[0]) if name != START or any(s) or names[i].startswith(BUFFER)]
                sketches = {
                    "gradient": [[run[i] for i in keep] for run in runs],
                    "contrasts": [[one[i] for i in keep] for one in stage.contrasts],
                }
                tensors = tuple(self._with_floor(name, stage, i) for i in keep)
                found[name] = replace(whole.saved(tensors, sketches, {}, epsilon=epsilon), versions={}, facts={})
        return found

    def _with_floor(self, name: str, stage: _Stage, i: int) -> SavedParameter:
        """A change of weights is known no better than their own dtype stores them."""
        tensor, change = stage.tensors[i], norm(stage.runs[0][i])
        if not name.startswith(UPDATE) or not change:
            return tensor
        stored = tensor.weight_rounding * self._sizes[tensor.name] / change
        return replace(tensor, rounding=min(1.0, max(tensor.rounding, stored)))

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return the parts that no process compares, in words."""
        return tuple(dict.fromkeys(one for of_rank in gathered([*self._left_out]) for one in of_rank))

    # One stage of one run.

    def _note(
        self,
        name: str,
        tensors: Sequence[LocalParameter],
        sketches_of: Callable[[Sequence[LocalParameter]], dict[str, Tensor]],
        calls: int,
    ) -> None:
        own = sketches_of(tensors)
        if name not in self._stages:
            whole = WholeParameters(tensors, may_be_none=True)
            told = whole.about([replace(about(p), has_gradient=p.name in own) for p in tensors], calls)
            copies = local_weights(tensors) if name.startswith(UPDATE) else own  # the weights, not their change
            copies = {n: one for n, one in copies.items() if not n.startswith(BUFFER)}  # ranks have their own
            self._stages[name] = _Stage(whole, told, whole.contrasts(copies))
            if name == START:
                self._stages[name].runs = [whole.reduced(own)] * 2
                weights = WholeParameters(self._stepped)
                sizes = map(norm, weights.reduced(local_weights(self._stepped)))
                self._sizes = dict(zip(weights.wholes, sizes, strict=True))
        self._run[name] = self._stages[name].whole.reduced(own)

    def _updated(self) -> dict[str, Tensor]:
        """Run the update, and return the sketches of the gradients that optimizers have taken."""
        taken: dict[str, Tensor] = {}
        hooks = [EveryStep(partial(self._take, taken), lambda _: None, optimizer=one) for one in self._optimizers]
        try:
            self._update()
        finally:
            for hook in hooks:
                hook.remove()
        if not taken:
            raise InvalidValueError(
                "update() made no step of the optimizer with gradients: expected what follows backward in the training "
                "loop, as in update=optimizer.step. A GradScaler leaves a step out where a gradient overflows."
            )
        return taken

    @torch.no_grad()
    def _take(self, taken: dict[str, Tensor], optimizer: Optimizer, evaluation: int) -> None:
        if evaluation:
            return
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        own = [p for p in self._stepped if id(p.parameter) in groups]
        scale = getattr(optimizer, "grad_scale", None)  # which a fused optimizer takes off by itself
        factor = 1.0 if scale is None else 1 / float(scale)
        taken |= {name: factor * sketch for name, sketch in local_gradients(own).items()}
        for p in own:
            numbers = {key: value for key, value in groups[id(p.parameter)].items() if key != "params"}
            self.settings.setdefault(p.name, dict(_numbers(numbers)))

    def _states(self) -> Iterator[LocalParameter]:
        """The tensors and numbers of the optimizers' state, and master weights, each as a tensor of its own."""
        for model, p in zip(self._local, self._stepped, strict=True):
            state: Any = next((o.state[p.parameter] for o in self._optimizers if p.parameter in o.state), {})
            for key, value in _leaves(state):
                tensor = torch.tensor(float(value), device="cpu") if isinstance(value, int | float) else value.detach()
                one = _part(p, f"{key} of {p.name}", tensor)
                if one is None:
                    self._left_out[f"{key} of {p.name}"] = None
                else:
                    yield one
            if p is not model:
                yield replace(p, name=f"master weights of {p.name}")
                yield replace(model, name=f"weights of {p.name}")
        if self._model is not None:
            yield from local_buffers(self._model)

    @torch.no_grad()
    def _turn(self, t: int, sign: int) -> None:
        """Move each element by some times what rounding does to one, up or down by its place."""
        stage = self._stages[f"gradient of step {t}"]
        first, *others = stage.runs
        sizes, scales = {}, {p.name: self.loss_scale(p) for p in self._local}
        for i, (name, whole) in enumerate(stage.whole.wholes.items()):
            least = stage.tensors[i].rounding * norm(first[i])
            noise = max(least, *(norm(minus(run[i], first[i])) for run in others))
            size = min(_LOUD * noise, max(_LOUDEST * norm(first[i]), noise))
            sizes[name] = sign * scales.get(name, 1.0) * size / math.sqrt(max(1, math.prod(whole.shape)))
        add_signs(self._local, sizes, t)


def schedulers_of(optimizers: Sequence[Optimizer]) -> list[Any]:
    """Return the live schedulers of PyTorch that belong to ``optimizers``, and every live GradScaler."""
    kinds, known = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler), {id(one) for one in optimizers}
    found = [one for one in all_objects() if issubclass(type(one), kinds)]
    return [one for one in found if isinstance(one, kinds[1]) or id(vars(one).get("optimizer")) in known]


def enabled_scalers(others: Sequence[Any]) -> list[torch.amp.GradScaler]:
    """Return the GradScalers of ``others`` that scale."""
    return [one for one in others if isinstance(one, torch.amp.GradScaler) and one.is_enabled()]


def _master(p: LocalParameter) -> LocalParameter:
    """The master weights of a parameter, as Megatron names them, where they are of its shape; else itself."""
    main = getattr(p.parameter, "main_param", None)
    if not isinstance(main, Tensor) or main.shape != p.parameter.shape:
        return p
    part = p.weights()[0]
    return LocalParameter(p.name, main, p.layout, lambda _: part)


def _part(p: LocalParameter, name: str, tensor: Tensor) -> LocalParameter | None:
    """A tensor of a parameter's state as a part of a whole; None if it is none that the parameter's part tells."""
    part, weights = p.weights()
    if p.flat is not None and tensor.shape == p.parameter.shape:
        return replace(p, name=name, parameter=tensor)
    if local_part(tensor).shape == weights.shape:
        return LocalParameter(name, local_part(tensor), p.layout, lambda _: part)
    if tensor.numel() == 1 or math.prod(part.own) == math.prod(part.shape):
        own = tuple(tensor.shape) if tensor.numel() > 1 else ()
        return LocalParameter(name, local_part(tensor).reshape(own), p.layout, lambda _: LocalShard(own, own))
    return None


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers and tensors of nested containers, each with its way there."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _leaves(entry, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple):
        for i, entry in enumerate(value):
            yield from _leaves(entry, f"{key}[{i}]")
    elif isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() and not value.is_complex()):
        yield key, value


def _numbers(settings: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in _leaves(settings):
        if (not isinstance(value, Tensor) or value.numel() == 1) and math.isfinite(float(value)):
            yield key, float(value)
