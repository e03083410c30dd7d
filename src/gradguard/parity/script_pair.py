"""Record one or several steps of an unmodified script: the part of one of its processes."""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from gradguard.distributed.processes import rank_and_size
from gradguard.errors import GradguardError, UnsupportedGradientError
from gradguard.listeners import ClipCall, ClipEvent, Listener
from gradguard.optimizer_hooks import EveryStep, parameters_of, runs_hooks
from gradguard.parity.backward_replay import add_signs, flip_weights, precision_of, scale_gradients
from gradguard.parity.forked_runs import ForkedRuns
from gradguard.parity.kept_tensors import averages_in, kept_by
from gradguard.parity.saved import GRADIENT, START, SavedParameter
from gradguard.parity.scales import ScriptRun
from gradguard.parity.shards import (
    LocalParameter,
    LocalParameters,
    gathered,
    gathered_settings,
    gathered_words,
    local_parameters,
)
from gradguard.parity.step_parity import ComparedStages, Noted, StepNotes, scale_between, taken_off_by, trained_by
from gradguard.parity.summation import backwards
from gradguard.parity.whole import Sketched, WholeParameters, about, local_gradients, local_weights
from gradguard.state.generators import generator_states, have_drawn
from gradguard.torch_private import never_compiled


@dataclass
class _Step:
    """The current step of the script.

    Attributes:
        before_clip: The sketches of all gradients before the first clip since the last backward pass.
        after_clip: The sketches of all gradients after the last clip.
        is_taken: Whether an optimizer has stepped with the gradients whose sketches are ``before_clip``.
        is_doubtful: Whether gradients changed between a clip and the optimizer step, or another backward pass came
            between.
        backwards: The number of backward passes before the first optimizer step.
        stepped: The optimizers that have begun a step.
        gradients: The sketches to save, by name.
        about: The descriptions of the parameters whose optimizer has begun a step, by name.
        turned: The names of the parameters whose gradients were shifted up and down.
        is_over: Whether each optimizer has made its step.
    """

    before_clip: Sketched | None = None
    after_clip: Sketched = field(default_factory=dict)
    is_taken: bool = True
    is_doubtful: bool = False
    backwards: int = 0
    stepped: list[Optimizer] = field(default_factory=list)
    gradients: Sketched = field(default_factory=dict)
    about: dict[str, SavedParameter] = field(default_factory=dict)
    turned: set[str] = field(default_factory=set)
    is_over: bool = False


class ScriptGradients(Listener):
    """Saves the gradients of one step of a script before any clip, or whole steps, and then ends the script.

    A step ends when the optimizer of each trained parameter has stepped. The code after it belongs to the step until
    the next forward pass with gradients enabled, or the script's end.

    Args:
        runs: The runs of the script; this process is one of them.
        modules: A function that returns the existing root modules.
        optimizers: A function that returns the existing optimizers.
    """

    def __init__(
        self,
        runs: ForkedRuns,
        modules: Callable[[], Sequence[nn.Module]],
        optimizers: Callable[[], Sequence[Optimizer]],
    ) -> None:
        self._runs, self._modules, self._optimizers = runs, modules, optimizers
        self._run = ScriptRun()
        self._local: list[LocalParameter] = []
        self._notes = StepNotes([], [], [])
        self._known: list[Optimizer] = []
        self._stepping: list[Optimizer] = []  # the optimizers with hooks
        self._states: dict[str, Any] = {}
        self._dtypes: list[set[torch.dtype]] = []
        self._stack, self._forward, self._depth = ExitStack(), ExitStack(), 0
        self._raised = True  # whether gradients are multiplied by the run's scale
        self._number, self._step = 1, _Step()  # step 1 is the first saved step; earlier steps have numbers below 1
        self._first = _Step()
        self._weights: Sketched = {}
        self._weights_then: Sketched = {}
        self._noted: dict[str, Noted] = {}
        self._facts: dict[str, float] = {}

    def on_begin(self) -> None:
        """Wait for the first forward pass, which may be in the closure of an optimizer's step."""
        self._stack.callback(register_optimizer_step_pre_hook(self._enters).remove)
        self._await_forward()

    def on_end(self) -> None:
        """Remove the hooks from modules and optimizers, and restore the warning filters."""
        self._forward.close()
        self._stack.close()

    def finish(self) -> None:
        """Save the last step when the script ends, even if some optimizers have not stepped in it."""
        if self._step.stepped and self._number >= 1:
            self._refused(self._end_step)

    # Forward passes: the first, and the first one after each step.

    def _await_forward(self) -> None:
        # PyTorch warns that the hooks may run twice in compiled modules; the second run has no effect here.
        self._forward.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
        self._forward.callback(register_module_forward_pre_hook(self._before_forward).remove)
        self._forward.callback(register_module_forward_hook(self._after_forward, always_call=True).remove)
        self._depth = 0

    @never_compiled
    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        del module, arguments
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled():
            self._refused(self._end_step if self._local else self._begin)

    @never_compiled
    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        del module, arguments, output
        self._depth -= 1

    def _begin(self) -> None:
        trained = self._trained()
        if not trained:
            return  # no optimizer exists yet
        self._run = self._runs.which()
        self._number = 2 - self._run.at
        # An optimizer may step a parameter's master weights, ``main_param``, instead of the parameter.
        roots = [
            m
            for m in self._modules()
            if any({id(p), id(getattr(p, "main_param", p))} & trained for p in m.parameters())
        ]
        named = _named(roots)
        self._local = [p for _, _, own in named for p in own]
        self._states = generator_states()
        self._forward.close()
        self._dtypes = [self._stack.enter_context(precision_of(root)) for _, root, _ in named]
        self._stack.enter_context(backwards(self._run.scale))
        models = [(front, root) for front, root, _ in named]
        roots = [root for _, root in models]
        # A second model with the same shapes may be an average of the weights, or a target network.
        shapes, words = [*map(_shapes_of, roots)], "the weights of a second model, {} (an average, a target?)"
        copies = [kept_by(one, words) for one in self._modules() if one not in roots and _shapes_of(one) in shapes]
        copies += averages_in(self._local)
        self._notes = StepNotes(self._local, self._stepping, models, copies if self._run.steps else [])
        if not self._run.steps:
            self._notes.left_out |= {one.words: None for one in copies}
        for one in self._known:
            self._watch(one)
        self._start_step()
        self._flip(self._local)
        self._note_weights()

    def _start_step(self) -> None:
        if self._number == 1:
            self._weights_then = local_weights(self._local) if self._run.at > 1 else {}
            if self._run.steps:
                self._noted[START] = self._notes.start()

    def _note_weights(self) -> None:
        """Record the weights before the step's first backward pass, after which SAM moves them."""
        if self._run.steps and self._number >= 1:
            self._notes.before_update()

    @torch.no_grad()
    def _end_step(self) -> None:
        """Record the end of a step and of the code after it; save the file after the last step."""
        self._forward.close()
        step, calls = self._step, max(self._step.backwards, 1)
        own, taken = [p for p in self._local if p.name in step.about], step.gradients
        self._noted[f"{GRADIENT} {self._number}"] = Noted(own, [*step.about.values()], taken, taken, calls)
        if self._number >= 1 and self._run.steps:
            self._noted |= self._notes.end(self._number, calls)
        if self._number == 1:
            self._first = step
        if self._number == max(self._run.steps, 1):
            self._save(self._first)
        self._number, self._step = self._number + 1, _Step()
        self._start_step()
        self._note_weights()

    # The gradients of a step.

    def on_backward(self, losses: Sequence[Tensor], weights: Sequence[Tensor | None]) -> None:
        """Count the micro-batch; gradients recorded before a clip are incomplete after another backward pass."""
        del losses, weights
        if self._step.is_over:  # the new step's forward did not call a module
            self._refused(self._end_step)
        step = self._step
        # Record the weights before SAM moves them; not those of FSDP1, which are unsharded at this point.
        self._look_at_weights([p for p in self._local if p.offset is None])
        if step.before_clip is not None:
            step.is_doubtful |= not step.is_taken
            step.before_clip = None
        if not step.stepped:
            step.backwards += 1
        if not self._raised:
            scale_gradients(self._local, self._run.scale)  # a forgotten zero_grad leaves gradients without the scale
            self._raised = True

    def on_clip(self, call: ClipCall, parameters: Sequence[Tensor]) -> None:
        """Record the gradients before the first clip of a step."""
        del call
        if not self._local:
            return
        if self._step.before_clip is not None:
            self._compare(self._local)
        else:
            self._step.before_clip, self._step.is_taken = self._looked_at(self._local), False
            self._turn(self._in({id(p) for p in parameters}))

    def on_clipped(self, event: ClipEvent) -> None:
        """Record the gradients after a clip outside of an optimizer step, to detect a change before the step."""
        if event.optimizer is None and event.elements is None and self._step.before_clip is not None:
            self._step.after_clip = local_gradients(self._local)

    def on_scale(self, loss: Any, scaled: Any) -> None:
        """Record the loss scale, which may explain a factor."""
        if (times := scale_between(loss, scaled)) is not None:
            self._facts["loss scale"] = times

    def on_scale_update(self, before: Tensor | None, after: Tensor | None) -> None:
        """Begin a new step if a GradScaler has skipped this one."""
        del before, after
        if not self._step.stepped:
            self._step = _Step()

    def _looked_at(self, local: LocalParameters) -> Sketched:
        """Return the sketches of the gradients without the run's scale, and remove the scale from the gradients."""
        times = 1 / self._run.scale if self._raised else 1.0
        found = {name: times * sketch for name, sketch in local_gradients(local).items()}
        self._lower()
        return found

    def _turn(self, own: LocalParameters, factor: float = 1.0) -> None:
        """Shift gradients up and down, once in a step, if this run has sizes for the step."""
        if sizes := self._run.sizes.get(f"{GRADIENT} {self._number}"):
            own = [p for p in own if p.name not in self._step.turned]
            sizes = {name: size / factor for name, size in sizes.items()}
            add_signs(self._with_masters(own), sizes, self._number + self._run.at)
            self._step.turned |= {p.name for p in own}

    def _lower(self) -> None:
        if self._raised:
            scale_gradients(self._with_masters(self._local), 1 / self._run.scale)
            self._raised = False

    def _with_masters(self, own: LocalParameters) -> list[LocalParameter]:
        """Return these parameters, and those of their master weights whose gradients are separate tensors."""
        names, found = {p.name for p in own}, [*own]
        for p, master in zip(self._local, self._notes.stepped, strict=True):
            if master is not p and p.name in names:
                a, b = p.gradient(), master.gradient()
                if a is None or b is None or a[1].data_ptr() != b[1].data_ptr():
                    found.append(master)
        return found

    def _compare(self, local: LocalParameters) -> None:
        """Detect a change of gradients since the last clip, which the gradients saved before the clip do not show."""
        clipped = self._step.after_clip
        if self._run.steps or self._number < 1:
            return  # whole steps compare the gradients that the optimizer takes
        for name, now in local_gradients(local).items():
            if name not in clipped or not torch.equal(clipped[name], now):
                self._step.is_doubtful = True
                return

    # The optimizers.

    def on_step(self, optimizer: Optimizer, evaluation: int) -> None:
        """Record the gradients with which an optimizer steps."""
        if evaluation == 0:
            self._refused(lambda: self._take(optimizer))
        else:
            self._lower()

    def on_stepped(self, optimizer: Optimizer) -> None:
        """Wait for the next forward pass if each optimizer has stepped."""
        if optimizer in self._step.stepped and self._is_whole():
            self._step.is_over = True
            self._await_forward()

    @torch.no_grad()
    def _take(self, optimizer: Optimizer) -> None:
        if self._step.is_over:  # a second step without a new forward pass
            self._end_step()
        step = self._step
        if optimizer in step.stepped:
            if self._run.is_first_step_alone:
                self._end_step()
            raise UnsupportedGradientError(
                f"{type(optimizer).__name__} is about to make a second step before each trained parameter has had one, "
                "so that steps cannot be counted from outside. Leave --at and --steps out to save the gradients of the "
                "first step, or call gradguard.save_gradients(file, model, step, optimizer=...) in the script."
            )
        given = trained_by(optimizer, (*self._local, *self._notes.stepped))
        own = [p for p in self._in(given) if p.name not in step.about]
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None and float(overflow):
            return  # a fused optimizer skips the step itself after an overflow
        if optimizer not in self._known:
            self._known.append(optimizer)
        found, factor = step.before_clip, 1.0
        if found is not None:
            self._compare(own)
        else:
            found, factor = self._looked_at(own), taken_off_by(optimizer)
        step.gradients |= {p.name: found[p.name] * factor for p in own if p.name in found}
        self._turn(own, factor)
        step.about |= {p.name: about(p) for p in own}
        self._look_at_weights(own)
        step.stepped.append(optimizer)
        step.is_taken = True
        if self._number == 1 and not self._run.steps and self._is_whole():
            self._end_step()  # saves and ends the script before the weights change

    def _look_at_weights(self, own: LocalParameters) -> None:
        """Record the weights at the beginning of the first step, without this run's change."""
        # Use `data`: autograd would count the temporary change between forward and backward as a modification.
        if new := [replace(p, parameter=p.parameter.data) for p in own if p.name not in self._weights]:
            self._flip(new, back=True)
            self._weights |= local_weights(new)
            self._flip(new)

    def _watch(self, optimizer: Optimizer) -> None:
        """Register a hook for the gradients of ``optimizer``'s steps, after the clippers that act within the step."""
        if optimizer not in self._stepping and runs_hooks(optimizer):
            self._stepping.append(optimizer)
            self._stack.callback(EveryStep(self._optimizer_takes, lambda _: None, optimizer=optimizer).remove)

    @never_compiled
    def _enters(self, optimizer: Optimizer, arguments: tuple, named: dict) -> None:
        del arguments, named
        self._watch(optimizer)

    def _optimizer_takes(self, optimizer: Optimizer, evaluation: int) -> None:
        if self._run.steps and self._number >= 1 and optimizer in self._step.stepped:
            self._notes.take(optimizer, evaluation)

    def _is_whole(self) -> bool:
        return all(p.name in self._step.about for p in self._in(self._trained()) if p.parameter.requires_grad)

    def _in(self, ids: set[int]) -> list[LocalParameter]:
        """Return the parameters that are among these tensors, or whose master weights are."""
        masters = zip(self._local, self._notes.stepped, strict=True)
        return [p for p, master in masters if id(p.parameter) in ids or id(master.parameter) in ids]

    def _flip(self, own: LocalParameters, *, back: bool = False) -> None:
        if self._run.change:
            with torch.no_grad():
                flip_weights(own, self._run.epsilon, self._run.change, back=back)

    def _trained(self) -> set[int]:
        if self._number == 2 - self._run.at:  # the search is slow; later optimizers become known when they step
            self._known = [*self._optimizers()]
        return {id(p) for one in self._known for p in parameters_of(one)}

    # The file.

    def _save(self, first: _Step) -> NoReturn:
        """Sum the sketches over ranks and end the run; every rank calls this collective after the same step."""
        local = [p for p in self._local if p.name in first.about]
        whole = WholeParameters(local)
        parameters = whole.about([*first.about.values()], first.backwards)
        if not any(p.has_gradient for p in parameters):
            which = "the first optimizer step" if self._run.at == 1 else f"optimizer step {self._run.at}"
            raise UnsupportedGradientError(f"no parameter has a gradient at {which}.")
        weights = [self._weights, *([self._weights_then] if self._weights_then else ())]
        epsilon = whole.epsilon(set().union(*self._dtypes))
        left = [p.name for p in self._local if p.name not in first.about and p.parameter.requires_grad]
        not_stepped = [f"{name}, which is in no optimizer" for name in left]
        stages = ComparedStages()
        run = {name: stages.add(name, one) for name, one in self._noted.items()}
        saved = whole.saved(
            parameters,
            {
                "gradient": [whole.reduced(first.gradients)],
                "weights": [whole.weights(one) for one in weights],
                "contrasts": whole.contrasts(first.gradients),
            },
            {"micro-batches": float(max(first.backwards, 1)), **self._facts},
            random=any(gathered(have_drawn(self._states))),
            epsilon=epsilon,
            clipped=any(gathered(first.is_doubtful)),
            settings=gathered_settings(self._notes.settings),
            stages=stages.saved(run, epsilon),
            left_out=gathered_words([*self._notes.left_out, *not_stepped]),
        )
        self._runs.end(saved)

    def _refused(self, act: Callable[[], None]) -> None:
        """Run ``act``; an error of gradguard ends the script with its message."""
        try:
            act()
        except GradguardError as error:
            rank, world = rank_and_size()
            self._runs.end(None, f"rank {rank}: {error}" if world > 1 else str(error))


def _shapes_of(root: nn.Module) -> Counter[torch.Size]:
    return Counter(p.shape for p in root.parameters())


def _named(roots: Sequence[nn.Module]) -> list[tuple[str, nn.Module, list[LocalParameter]]]:
    """Return each root with a prefix for names (its class, if there are several roots) and its parameters."""
    found: list[tuple[str, nn.Module, list[LocalParameter]]] = []
    held: set[int] = set()
    for root in sorted(roots, key=lambda root: -sum(1 for _ in root.parameters())):
        own = [p for p in local_parameters(root, None) if p.offset is not None or id(p.parameter) not in held]
        if own:
            found.append((f"{type(root).__name__}.", root, own))
            held |= {id(p.parameter) for p in own}
    [(kind, count), *_] = Counter(type(root).__name__ for _, root, _ in found).most_common(1) or [("", 0)]
    if count > 1:
        raise UnsupportedGradientError(
            f"the script trains {count} models of the class {kind}, which cannot be distinguished from outside: call "
            "gradguard.save_gradients(file, model, step) in the script for each model."
        )
    if len(found) == 1:
        return [("", *found[0][1:])]
    return [(front, root, [replace(p, name=f"{front}{p.name}") for p in own]) for front, root, own in found]
