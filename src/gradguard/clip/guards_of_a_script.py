"""One rule for every optimizer of a script, each with its own clipper: the engine of ``gradguard run --clip``."""

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

    **Guarantees.** A rule's remembered norms belong to one optimizer, and are divided by any loss scale that the
    optimizer itself removes. Non-finite gradients are clipped under ``"propagate"`` and enter no rule's state. A step
    that a GradScaler skips is not clipped.

    Args:
        make: Makes a clipper; accepts ``exclude=`` if ``exclude`` is not empty.
        exclude: Name patterns of parameters to leave unclipped, with their names in the script's modules.
    """

    def __init__(self, make: Callable[..., Clipper], exclude: Sequence[str] = ()) -> None:
        self._make, self._exclude = make, exclude
        self._clippers: WeakKeyDictionary[Optimizer, tuple[Clipper, list[int], list[str]]] = WeakKeyDictionary()

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, modules: Callable[[], Sequence[nn.Module]]) -> ClipEvent:
        """Clip the gradients of ``optimizer``.

        Args:
            optimizer: An optimizer whose gradients are complete.
            modules: Returns the modules of the script, which show the units of their parameters. It is called only if
                there are new parameters, because finding the modules is slow.

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
            clipper.learn(nn.ModuleList(living))  # a temporary container: it leaves no trace on the modules
            self._clippers[optimizer] = clipper, list(map(id, parameters)), names
        if is_in_backward():
            refuse_in_backward(clipper, parameters, ONE_STAGE)
        scale = getattr(optimizer, "grad_scale", None)
        grads = with_reach(gradients_of(names, parameters), clipper, optimizer)
        grads = clipper.compared(grads, "propagate")
        decision = clipper.decide(grads, 1.0 if scale is None else scale)
        decision.apply()
        return clipper.event_of(decision, decision.result, optimizer)
