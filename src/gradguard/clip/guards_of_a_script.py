"""One rule for every optimizer of a script, each with a clipper of its own: what ``gradguard run --clip`` applies."""

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from gradguard.clip.clipper import Clipper
from gradguard.clip.gradients import gradients_of
from gradguard.clip.in_backward import is_in_backward, refuse_in_backward
from gradguard.clip.optimizer_names import names_of
from gradguard.clip.reach import with_reach
from gradguard.clip.selection import Selector
from gradguard.distributed.reduction_group import ONE_STAGE
from gradguard.distributed.wrappers import named_parameters
from gradguard.listeners import ClipEvent
from gradguard.optimizer_hooks import parameters_of


class ClipEachOptimizer:
    """Clips the gradients of each optimizer just before it steps.

    **Guarantees.** Norms that a rule remembers are of one optimizer, and without a loss scale that the optimizer itself
    takes off. Gradients that are not finite are clipped under ``"propagate"``, and enter no rule's state; a step that a
    GradScaler leaves out is not clipped.

    Args:
        make: Makes a clipper; takes ``exclude=`` if there is one.
        exclude: Name patterns of parameters to leave alone, as they are called in the modules of the script.
    """

    def __init__(self, make: Callable[..., Clipper], exclude: Sequence[str] = ()) -> None:
        self._make, self._exclude = make, exclude
        self._clippers: WeakKeyDictionary[Optimizer, tuple[Clipper, list[int], list[str]]] = WeakKeyDictionary()

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, modules: Callable[[], Sequence[nn.Module]]) -> ClipEvent:
        """Clip.

        Args:
            optimizer: Its gradients are complete.
            modules: Returns the modules of the script, which tell what the units of their parameters are; asked only
                where there are new parameters, because to find them takes long.

        Returns:
            The event of the clip.
        """
        parameters = parameters_of(optimizer)
        clipper, known, names = self._clippers.get(optimizer) or (None, [], [])
        if clipper is None or list(map(id, parameters)) != known:
            living, names = modules(), names_of(optimizer, {})
            if self._exclude:
                selector = Selector(self._exclude, "exclude")
                named = [entry for module in living for entry in named_parameters(module, remove_duplicate=False)]
                selector.require_match([p for _, p in named], [name for name, _ in named], complete=True)
                clipper = self._make(exclude=[p for name, p in named if selector.fits([name])])
            clipper = clipper or self._make()
            clipper.learn(nn.ModuleList(living))  # which is gone after this line, and leaves no trace on them
            self._clippers[optimizer] = clipper, list(map(id, parameters)), names
        if is_in_backward():
            refuse_in_backward(clipper, parameters, ONE_STAGE)
        scale = getattr(optimizer, "grad_scale", None)
        grads = with_reach(gradients_of(names, parameters), clipper, optimizer)
        grads = clipper.compared(grads, "propagate")
        decision = clipper.decide(grads, 1.0 if scale is None else scale)
        decision.apply()
        return clipper.event_of(decision, decision.result, optimizer)
