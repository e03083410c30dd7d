"""Names for the parameters of a script that never told us its model."""

import gc
from collections import Counter

from torch import Tensor, nn
from torch.optim import Optimizer


def living_modules() -> list[nn.Module]:
    """Return every module that exists and is not part of another one."""
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and "_modules" in vars(thing)]
    parts = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in parts]


def living_optimizers(first: Optimizer) -> list[Optimizer]:
    """Return ``first`` and every other optimizer that exists and holds other parameters."""
    seen = {id(p) for p in parameters_of(first)}
    found = [first]
    for thing in gc.get_objects():
        if issubclass(type(thing), Optimizer) and thing is not first and hasattr(thing, "param_groups"):
            own = {id(p) for p in parameters_of(thing)}
            if not own & seen:
                found.append(thing)
                seen |= own
    return found


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all groups of ``optimizer``."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def name_parameters(parameters: list[Tensor], modules: list[nn.Module]) -> list[str]:
    """Return a name for each parameter: its dotted name in the root module that holds it, else its place.

    Where several root modules hold some of the parameters, names that occur twice start with the module's class, and
    a number if that occurs twice too.
    """
    wanted = {id(p) for p in parameters}
    held = [(module, {name: p for name, p in _named(module).items() if id(p) in wanted}) for module in modules]
    held = sorted((pair for pair in held if pair[1]), key=lambda pair: -len(pair[1]))
    found: dict[int, tuple[str, str]] = {}
    for number, (module, named) in enumerate(held):
        for name, p in named.items():
            found.setdefault(id(p), (name, f"{type(module).__name__}#{number}.{name}"))
    shared = Counter(name for name, _ in found.values())
    names = {key: full if shared[name] > 1 else name for key, (name, full) in found.items()}
    return [names.get(id(p), f"parameter {i}") for i, p in enumerate(parameters)]


def _named(module: nn.Module) -> dict[str, Tensor]:
    try:
        return dict(module.named_parameters())
    except Exception:  # somebody's half-built module must not end the watch
        return {}
