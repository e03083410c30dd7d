"""FSDP2: the ranks over which a model is sharded, and a block in which the model is whole on every rank."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from gradguard.distributed.placements import is_sharded, placement_of
from gradguard.distributed.reduction_group import reduction_group_of
from gradguard.errors import UnsupportedGradientError
from gradguard.torch_private import let_fsdp2_only_cast, meshes_of_fsdp2, parameter_slots

_EXPECTED = (
    "expected every parameter sharded by fully_shard over one mesh of data-parallel processes, as fully_shard(model) "
    "does, also layer by layer and with a mesh of two dimensions (HSDP)."
)


def is_fully_sharded(module: nn.Module) -> bool:
    """Tell whether ``fully_shard`` was applied to ``module`` itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def group_of_fully_sharded(model: nn.Module) -> Any:
    """Return the group of all ranks over which ``fully_shard`` has sharded ``model``; None if nothing is sharded.

    Each of these ranks computes with other samples and whole parameters. A sum over samples is therefore right if it is
    reduced over this group, with FSDP and with HSDP.

    Raises:
        UnsupportedGradientError: If a parameter is sharded in another way. If each rank computes with a part of it
            (tensor parallelism), no rank has the gradient of a sample.
        InvalidValueError: If no process group holds all of the ranks.
    """
    named = list(model.named_parameters())
    if not any(is_sharded(p) for _, p in named):
        return None
    held = meshes_of_fsdp2(module for module in model.modules() if is_fully_sharded(module))
    for name, parameter in named:
        _check(name, parameter, held)
    meshes = {p.device_mesh for _, p in named}  # type: ignore[attr-defined]
    if len(meshes) > 1:
        raise UnsupportedGradientError(f"the parameters lie on {len(meshes)} device meshes: {_EXPECTED}")
    union = reduction_group_of([placement_of(named[0][1])])
    assert union is not None
    return union.group


def _check(name: str, parameter: Any, held: dict[int, Any]) -> None:
    if not is_sharded(parameter):
        raise UnsupportedGradientError(
            f"{name} is not sharded, and others are: {_EXPECTED} Make the clipper before the first "
            "forward, or after model.reshard(), so that no layer is gathered."
        )
    how = ", ".join(map(repr, parameter.placements))
    names = parameter.device_mesh.mesh_dim_names or range(parameter.device_mesh.ndim)
    if held.get(id(parameter)) != parameter.device_mesh:
        raise UnsupportedGradientError(
            f"{name} is spread as [{how}] over the mesh dimensions {list(names)}, and not by fully_shard alone. If "
            "layers compute with parts of their parameters, as in tensor parallelism, no process has the gradient of a "
            f"sample: {_EXPECTED}"
        )


def own_parameters(model: nn.Module) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """Return the modules and attributes that hold parameters, by the module that gathers them with itself."""
    found: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for unit, module, slot in _own_slots(model):
        if parameter_slots(module)[slot] is not None:
            found.setdefault(unit, []).append((module, slot))
    return found


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Gather every layer of ``model`` in a block; all ranks enter it together. A plain model is left as it is.

    No forward or backward of the model inside the block communicates. Ranks may therefore run it a different number of
    times. Arguments and outputs are still cast as a `MixedPrecisionPolicy` says. Afterwards the layers that were
    sharded are sharded again.

    Args:
        model: The model, with or without layers that ``fully_shard`` was applied to.
    """
    units: list[Any] = [module for module in model.modules() if is_fully_sharded(module)]
    sharded = [(unit, module, slot) for unit, module, slot in _own_slots(model) if _holds(module, slot)]
    with ExitStack() as after:
        after.callback(_shard_again, sharded)
        for unit in units:
            unit.unshard()
        after.callback(let_fsdp2_only_cast(units))
        yield


def _shard_again(sharded: Sequence[tuple[Any, nn.Module, str]]) -> None:
    for unit in {id(unit): unit for unit, module, slot in sharded if not _holds(module, slot)}.values():
        unit.reshard()


def _own_slots(model: nn.Module) -> list[tuple[Any, nn.Module, str]]:
    """Return each parameter's module and name there, with the nearest enclosing module that was sharded."""
    found: list[tuple[Any, nn.Module, str]] = []
    units: dict[str, nn.Module | None] = {}
    for name, module in model.named_modules():
        holder = name.rpartition(".")[0]
        units[name] = module if is_fully_sharded(module) else units[holder] if name else None
        if units[name] is not None:
            found.extend((units[name], module, slot) for slot in parameter_slots(module))
    return found


def _holds(module: nn.Module, slot: str) -> bool:
    parameter: Tensor | None = parameter_slots(module).get(slot)
    return parameter is not None and is_sharded(parameter)
