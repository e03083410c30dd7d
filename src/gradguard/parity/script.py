"""The gradients of a script's first optimizer step, seen from outside: what one process of it writes down."""

import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer

from gradguard.distributed.processes import rank_and_size
from gradguard.errors import GradguardError, UnsupportedGradientError
from gradguard.listeners import ClipCall, ClipEvent, Listener
from gradguard.parity.replay import flip_weights, precision_of
from gradguard.parity.saved import SavedParameter, write
from gradguard.parity.shards import LocalParameter, gathered, local_parameters
from gradguard.parity.summation import backwards
from gradguard.parity.whole import WholeParameters, about, local_gradients, local_weights
from gradguard.state.generators import generator_states, have_drawn
from gradguard.torch_private import never_compiled


class Saved(SystemExit):
    """Ends the script once its gradients are saved: what cleans up on the way out does so."""


class ScriptGradients(Listener):
    """Saves the gradients that a script's optimizers take in their first step, before a clip, and ends the script.

    Args:
        file: Where this process writes; all write the same.
        modules: Returns the root modules that exist.
        optimizers: Returns the optimizers that exist.
        epsilon: By what part of themselves the weights are changed at the script's first forward pass.
        run: Which of several such changes; 0 for none.
        scale: What the gradient at each loss is multiplied by from then on; it is taken off what is saved.

    Attributes:
        refusal: Why nothing was saved, once it is known.
        done: Whether ``file`` is written.
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        modules: Callable[[], Sequence[nn.Module]],
        optimizers: Callable[[], Sequence[Optimizer]],
        epsilon: float = 0.0,
        run: int = 0,
        scale: float = 1.0,
    ) -> None:
        self._file, self._modules, self._optimizers = file, modules, optimizers
        self._epsilon, self._run, self._scale = epsilon, run, scale
        self._local: list[LocalParameter] = []
        self._states: dict[str, Any] = {}
        self._seen: list[set[torch.dtype]] = []
        self._stack, self._depth = ExitStack(), 0
        self._before_clip: dict[str, Tensor] | None = None
        self._after_clip: dict[str, Tensor] = {}
        self._stepped: list[Optimizer] = []
        self._gradients: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._about: dict[str, SavedParameter] = {}
        self._facts: dict[str, float] = {}
        self._backwards, self._taken, self._clipped_before = 0, True, False
        self.refusal, self.done = "", False

    def on_begin(self) -> None:
        """Wait for the first forward pass."""
        self._stack.enter_context(warnings.catch_warnings())  # of hooks that fire twice: the second finds all done
        warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
        self._stack.callback(register_module_forward_pre_hook(self._before_forward).remove)
        self._stack.callback(register_module_forward_hook(self._after_forward, always_call=True).remove)

    def on_end(self) -> None:
        """Leave modules and warnings as they were."""
        self._stack.close()

    def finish(self) -> None:
        """Save what is known, where the script has ended well before each of its optimizers made a step."""
        if self._stepped and not self.done and not self.refusal:
            with suppress(SystemExit):
                self._refused(self._save)

    # The first forward pass: who is trained, and by what weights.

    @never_compiled
    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        del module, arguments
        self._depth += 1
        if self._depth == 1 and torch.is_grad_enabled() and not self._local:
            self._refused(self._begin)

    @never_compiled
    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        del module, arguments, output
        self._depth -= 1

    def _begin(self) -> None:
        trained = self._trained()
        if not trained:
            return  # a forward pass before there is an optimizer
        roots = [m for m in self._modules() if any(id(p) in trained for p in m.parameters())]
        self._local = _named(roots)
        self._states = generator_states()
        self._stack.close()
        self._seen = [self._stack.enter_context(precision_of(root)) for root in roots]
        self._stack.enter_context(backwards(self._scale))
        self._flip(self._local)

    # What the script does.

    def on_backward(self, losses: Sequence[Tensor]) -> None:
        """Count micro-batches; what was looked at before a clip is no longer all."""
        del losses
        if self._before_clip is not None:
            self._clipped_before = self._clipped_before or not self._taken
            self._before_clip = None
        self._backwards += 0 if self._stepped else 1

    def on_clip(self, call: ClipCall, parameters: Sequence[Tensor]) -> None:
        """Look at the gradients before the first clip of a step."""
        del call, parameters
        self._look()

    def on_clipped(self, event: ClipEvent) -> None:
        """Look at the gradients after a clip, unless it acts within the step: nothing else may change them before."""
        if event.optimizer is None and event.elements is None:
            self._look_again()

    def on_scale(self, loss: Any, scaled: Any) -> None:
        """Keep the loss scale: a factor may be that."""
        if isinstance(loss, Tensor) and isinstance(scaled, Tensor) and loss.numel() == 1:
            before, after = float(loss.detach()), float(scaled.detach())
            if before and math.isfinite(after / before):
                self._facts["loss scale"] = after / before

    def on_scale_update(self, before: Tensor | None, after: Tensor | None) -> None:
        """A step was left out, or made: what follows is another one."""
        del before, after
        if not self._stepped:
            self._before_clip, self._backwards = None, 0

    @torch.no_grad()
    def _look(self) -> None:
        if self._before_clip is not None:
            self._compare(self._local)
        elif self._local:
            self._before_clip, self._taken = local_gradients(self._local), False

    @torch.no_grad()
    def _look_again(self) -> None:
        if self._before_clip is not None:
            self._after_clip = local_gradients(self._local)

    def _compare(self, local: Sequence[LocalParameter]) -> None:
        """Note whether something has changed gradients since the last clip: in what was saved it would be hidden."""
        then = self._after_clip
        if any(name not in then or not torch.equal(then[name], now) for name, now in local_gradients(local).items()):
            self._clipped_before = True

    # The step.

    def on_step(self, optimizer: Optimizer, evaluation: int) -> None:
        """Take the gradients of an optimizer's first step."""
        if evaluation == 0:
            self._refused(lambda: self._take(optimizer))

    @torch.no_grad()
    def _take(self, optimizer: Optimizer) -> None:
        if any(one is optimizer for one in self._stepped):
            self._save()
            raise Saved
        own = self._of(optimizer)
        overflow = getattr(optimizer, "found_inf", None)
        if overflow is not None and float(overflow):
            return  # a fused optimizer leaves the step out by itself
        found, factor = self._before_clip, 1.0
        if found is not None:
            self._compare(own)
        else:
            scale = getattr(optimizer, "grad_scale", None)  # which a fused optimizer takes off by itself
            found, factor = local_gradients(own), 1.0 if scale is None else 1 / float(scale)
        self._gradients |= {p.name: found[p.name] * factor for p in own if p.name in found}
        self._flip(own, back=True)
        self._about |= {p.name: about(p) for p in own}
        self._weights |= local_weights(own)
        self._flip(own)
        self._stepped.append(optimizer)
        self._taken = True
        trained = self._trained()
        if all(p.name in self._about for p in self._local if id(p.parameter) in trained):
            self._save()
            raise Saved

    def _flip(self, own: Sequence[LocalParameter], *, back: bool = False) -> None:
        if self._run:
            with torch.no_grad():
                flip_weights(own, self._epsilon, self._run, back=back)

    def _trained(self) -> set[int]:
        return {id(p) for one in self._optimizers() for group in one.param_groups for p in group["params"]}

    def _of(self, optimizer: Optimizer) -> list[LocalParameter]:
        known = {id(p.parameter) for p in self._local}
        given = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if foreign := sum(id(p) not in known for p in given):
            raise UnsupportedGradientError(
                f"{foreign} of the {len(given)} parameters of {type(optimizer).__name__} belong to no model that was "
                "called before the step (weights of an engine of its own, such as DeepSpeed's?): call "
                "gradguard.save_gradients(file, model, step) in the script."
            )
        wanted = {id(p) for p in given}
        return [p for p in self._local if id(p.parameter) in wanted and p.name not in self._about]

    def _save(self) -> None:
        """One all-reduce for each kind of number: every process comes here after the same step."""
        local = [p for p in self._local if p.name in self._about]
        whole = WholeParameters(local)
        parameters = whole.about([*self._about.values()], self._backwards)
        if not any(p.has_gradient for p in parameters):
            raise UnsupportedGradientError("no parameter has a gradient at the first optimizer step.")
        saved = whole.saved(
            parameters,
            {
                "gradient": [whole.reduced(self._gradients, 1 / self._scale)],
                "weights": [whole.weights(self._weights)],
                "contrasts": whole.contrasts(self._gradients),
            },
            {"micro-batches": float(max(self._backwards, 1)), **self._facts},
            random=any(gathered(have_drawn(self._states))),
            epsilon=whole.epsilon(set().union(*self._seen)),
            clipped=any(gathered(self._clipped_before)),
        )
        write(self._file, saved)
        self.done = True

    def _refused(self, act: Callable[[], None]) -> None:
        """Run ``act``; what it refuses ends the script, and is said once behind it."""
        try:
            act()
        except GradguardError as error:
            rank, world = rank_and_size()
            self.refusal = f"rank {rank}: {error}" if world > 1 else str(error)
            raise SystemExit(2) from error


def _named(roots: Sequence[nn.Module]) -> list[LocalParameter]:
    """This process' parts of the roots' parameters; where there are several roots, their class is in the name."""
    found: list[tuple[str, list[LocalParameter]]] = []
    held: set[int] = set()
    for root in sorted(roots, key=lambda root: -sum(1 for _ in root.parameters())):
        own = [p for p in local_parameters(root, None) if p.flat is not None or id(p.parameter) not in held]
        if own:
            found.append((type(root).__name__, own))
            held |= {id(p.parameter) for p in own}
    [(kind, count), *_] = Counter(kind for kind, _ in found).most_common(1) or [("", 0)]
    if count > 1:
        raise UnsupportedGradientError(
            f"the script trains {count} models of the class {kind}, which cannot be told apart from "
            "outside: call gradguard.save_gradients(file, model, step) for each."
        )
    if len(found) == 1:
        return found[0][1]
    return [replace(p, name=f"{kind}.{p.name}") for kind, own in found for p in own]
