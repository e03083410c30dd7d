"""The parameters of a guarded optimizer: the clipper learns of new ones, and reads their gradients."""

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
        clipper: Learns the parameters in each `refresh` that finds new ones, and may refuse them.
        model: Names the parameters; None for the optimizer's own names.
        stages: The pipeline stages along which the parameters differ.

    Attributes:
        parameters: The parameters at the last `refresh`.
        model: The argument.
        stages: The argument.
    """

    def __init__(self, optimizer: Optimizer, clipper: Clipper, model: nn.Module | None, stages: Stages) -> None:
        self.model, self.stages, self.parameters = model, stages, list[Tensor]()
        self._optimizer, self._clipper = optimizer, clipper
        self._model_names, self._names = names_in(model, optimizer), list[str]()
        self._stages_learned = False

    def gradients(self, policy: str, proxy: OptimizerProxy | None = None, reach: Reach | None = None) -> Gradients:
        """Return the gradients of the parameters of the last `refresh`, with the settings that all ranks must share.

        Args:
            policy: The policy for non-finite gradients, or another setting that all ranks must share.
            proxy: Gives the gradients the layout of a fused kernel; None for an optimizer without one.
            reach: How far the step moves the weights; None for what the optimizer's state says before the step.
        """
        grads = gradients_of(self._names, self.parameters, self.stages, self.model)
        if proxy is not None and proxy.is_fused():
            grads = replace(grads, gradients=proxy.lay_out(grads.parameters, grads.gradients))
        if self.stages.group is not None and not self._stages_learned:
            self._clipper.learn(ListedParameters(grads, self.model))  # the parameters of all stages
            self._stages_learned = True
        grads = with_reach(grads, self._clipper, self._optimizer) if reach is None else replace(grads, reach=reach)
        return self._clipper.compared(grads, policy)

    def refresh(self) -> None:
        """Show the parameters to the clipper if they differ from those of the last `refresh` that it accepted."""
        parameters = parameters_of(self._optimizer)
        if list(map(id, parameters)) == list(map(id, self.parameters)):
            return
        names = names_of(self._optimizer, self._model_names)
        if self.stages.group is None:
            self._clipper.learn(list(zip(names, parameters, strict=True)) if self.model is None else self.model)
        self.parameters, self._names, self._stages_learned = parameters, names, False
