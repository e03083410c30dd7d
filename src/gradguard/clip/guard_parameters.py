"""The parameters of an optimizer whose steps are clipped, which the clipper learns of, and their gradients."""

from dataclasses import replace

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from gradguard.clip.clipper import Clipper, ListedParameters
from gradguard.clip.gradients import Gradients, gradients_of
from gradguard.clip.optimizer_names import names_in, names_of
from gradguard.clip.optimizer_proxy import OptimizerProxy
from gradguard.clip.reach import Reach, with_reach
from gradguard.distributed.reduction_group import Stages
from gradguard.optimizer_hooks import parameters_of


class GuardedParameters:
    """The parameters of an optimizer, which may get new ones.

    Args:
        optimizer: The optimizer.
        clipper: Learns of the parameters at each `look` that finds new ones, and may refuse them.
        model: Names them; None for the names that the optimizer has.
        stages: The pipeline stages along which they differ.

    Attributes:
        parameters: Those of the last look.
        model: As given.
        stages: As given.
    """

    def __init__(self, optimizer: Optimizer, clipper: Clipper, model: nn.Module | None, stages: Stages) -> None:
        self.model, self.stages, self.parameters = model, stages, list[Tensor]()
        self._optimizer, self._clipper = optimizer, clipper
        self._model_names, self._names = names_in(model, optimizer), list[str]()
        self._stages_learned = False

    def gradients(self, policy: str, proxy: OptimizerProxy | None = None, reach: Reach | None = None) -> Gradients:
        """Return the gradients of the parameters of the last `look`, as the clipper compares them.

        Args:
            policy: The policy for gradients that are not finite, or what else all processes must clip by.
            proxy: Lays them out for a fused kernel; None for an optimizer without one.
            reach: How far the step moves the weights; None for what the optimizer tells before it steps.
        """
        grads = gradients_of(self._names, self.parameters, self.stages, self.model)
        if proxy is not None and proxy.is_fused():
            grads = replace(grads, gradients=proxy.lay_out(grads.parameters, grads.gradients))
        if self.stages.group is not None and not self._stages_learned:
            self._clipper.learn(ListedParameters(grads, self.model))  # those of all stages
            self._stages_learned = True
        grads = with_reach(grads, self._clipper, self._optimizer) if reach is None else replace(grads, reach=reach)
        return self._clipper.compared(grads, policy)

    def look(self) -> None:
        """Show the clipper the parameters, where they are others than at the last look that it did not refuse."""
        parameters = parameters_of(self._optimizer)
        if list(map(id, parameters)) == list(map(id, self.parameters)):
            return
        names = names_of(self._optimizer, self._model_names)
        if self.stages.group is None:
            self._clipper.learn(list(zip(names, parameters, strict=True)) if self.model is None else self.model)
        self.parameters, self._names, self._stages_learned = parameters, names, False
