"""Names of the parameters of an optimizer."""

from collections import Counter

from torch import nn
from torch.optim.optimizer import Optimizer

from gradguard.distributed.wrappers import named_parameters
from gradguard.errors import InvalidValueError
from gradguard.optimizer_hooks import parameters_of


def names_in(model: nn.Module | None, optimizer: Optimizer) -> dict[int, str]:
    """Return the parameter names in ``model``, by id; empty without a model.

    Raises:
        InvalidValueError: If the model has none of the optimizer's parameters.
    """
    if model is None:
        return {}
    names = {id(p): name for name, p in named_parameters(model)}
    if not any(id(p) in names for p in parameters_of(optimizer)):
        raise InvalidValueError(
            f"model ({type(model).__name__}) has none of the optimizer's parameters: expected the module that was "
            "given to the optimizer, in its present form; wrapping or moving it may have made new parameters."
        )
    return names


def names_of(optimizer: Optimizer, known: dict[int, str]) -> list[str]:
    """Return names for the parameters of ``optimizer``: the model's, the optimizer's, or their positions.

    Parameters that share a name, for example from two models, are named by position: a clipper may keep state under
    each name.
    """
    names, places = list[str](), list[str]()
    for i, group in enumerate(optimizer.param_groups):
        numbered = [f"param_groups[{i}]['params'][{k}]" for k in range(len(group["params"]))]
        own = group.get("param_names") or numbered
        names += [known.get(id(p)) or name for p, name in zip(group["params"], own, strict=True)]
        places += numbered
    count = Counter(names)
    return [name if count[name] == 1 else place for name, place in zip(names, places, strict=True)]
