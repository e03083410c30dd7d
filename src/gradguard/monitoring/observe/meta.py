"""The first line of a record: versions, the machine, the processes, and the parameters by name."""

import os
import platform
import subprocess
import sys
import weakref
from array import array
from collections import Counter
from collections.abc import Sequence
from operator import call, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradguard.distributed.placements import placements_of
from gradguard.distributed.processes import joined_rank_and_size
from gradguard.distributed.wrappers import named_parameters
from gradguard.living import alive
from gradguard.monitoring.observe.graph_facts import GraphFacts
from gradguard.monitoring.record.file import SCHEMA, Line
from gradguard.monitoring.record.record_lines import known_fields
from gradguard.monitoring.record.redaction import redacted_arguments
from gradguard.optimizer_hooks import parameters_of

OWNER = "GRADGUARD_PROCESS"
"""The environment variable that tells the children of a watched process its number, and when it began."""

GIT_SECONDS = 1.0
"""Longer than this nobody waits for git."""


def rank_and_world() -> tuple[int, int]:
    """Return the number of this process among those that train together, and how many there are.

    From `torch.distributed` where it is initialised, else from what a launcher (torchrun, accelerate) set.
    """
    return joined_rank_and_size() or (_number("RANK", 0), _number("WORLD_SIZE", 1))


def mesh_of(parameters: Sequence[Tensor]) -> dict[str, int] | None:
    """Return the device mesh that parameters are sharded over: the size of each dimension by name; None without one.

    Where there are several meshes, the one of most dimensions is the one that says most.
    """
    return max((placement.sizes for placement in placements_of(parameters)), key=len, default={}) or None


def git_state() -> str | None:
    """Return the short commit of the working folder, with ``-dirty`` where files differ from it; None without git."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _root() -> int | None:
    """The number of the first watched process of those that this one comes from; None where nobody has said so."""
    number = os.environ.get(OWNER, "").partition(" ")[0]
    return int(number) if number.isdecimal() else None


def _number(name: str, otherwise: int) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return otherwise


def living_modules() -> list[nn.Module]:
    """Return every module that exists and is not part of another one."""
    modules = [module for module in alive(nn.Module, frozen=False) if _is_set_up(module)]
    parts = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in parts]


def _is_set_up(module: nn.Module) -> bool:
    try:
        next(module.children(), None)
    except AttributeError:  # its __init__ has not called that of nn.Module, or not yet
        return False
    return True


def living_optimizers(first: Optimizer) -> list[Optimizer]:
    """Return ``first`` and every other optimizer that exists and holds other parameters.

    The others are in the order of their parameters' shapes, since nothing says who was made first: the same program has
    the same order each time, unless two of them hold parameters of the same shapes.
    """
    seen = {id(p) for p in parameters_of(first)}
    found = [first]
    for thing in sorted(all_optimizers(), key=lambda one: list(map(_shape, parameters_of(one)))):
        if thing is not first:
            own = {id(p) for p in parameters_of(thing)}
            if not own & seen:
                found.append(thing)
                seen |= own
    return found


def all_optimizers() -> list[Optimizer]:
    """Return every optimizer that exists."""
    return [thing for thing in alive(Optimizer, frozen=False) if hasattr(thing, "param_groups")]


class Places:
    """Where parameters stand in the ``params`` of a first line.

    Args:
        parameters: All of them, which are not kept alive.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._known = {id(p): (weakref.ref(p), place) for place, p in enumerate(parameters)}

    def of(self, parameters: Sequence[Tensor]) -> array:
        """Return the place of each, -1 for one that came later."""
        return array("q", map(self._place, parameters))

    def _place(self, parameter: Tensor) -> int:
        known, place = self._known.get(id(parameter), (None, -1))
        return place if known is not None and known() is parameter else -1


class LastPlaces:
    """The `Places` of the parameters in the last step of an optimizer, which are hardly ever those of other ones."""

    def __init__(self) -> None:
        self._last = list[weakref.ref](), array("q")

    def of(self, parameters: Sequence[Tensor], places: Places) -> array:
        """Return the place of each of ``parameters``; the last array where they are those of the last step."""
        last, found = self._last
        if len(last) != len(parameters) or not all(map(is_, map(call, last), parameters)):
            found = places.of(parameters)
            self._last = list(map(weakref.ref, parameters)), found
        return found


def name_parameters(parameters: list[Tensor], modules: list[nn.Module]) -> list[str]:
    """Return a name for each parameter: its dotted name in the root module that holds it, else its place.

    Where several root modules hold some of the parameters, names that occur twice start with the module's class and its
    number, in the order of ``parameters``.
    """
    wanted = set(map(id, parameters))
    owners: dict[int, tuple[nn.Module | None, str]] = {}
    held = [(module, {name: p for name, p in _named(module).items() if id(p) in wanted}) for module in modules]
    for module, named in sorted(held, key=lambda pair: -len(pair[1])):  # the module that holds most of them first
        for name, p in named.items():
            owners.setdefault(id(p), (module, name))
    shared, numbers, names = Counter(name for _, name in owners.values()), dict[nn.Module | None, int](), []
    for place, p in enumerate(parameters):
        module, name = owners.get(id(p), (None, f"parameter {place}"))
        number = numbers.setdefault(module, len(numbers)) if module is not None else 0
        names.append(f"{type(module).__name__}#{number}.{name}" if shared[name] > 1 else name)
    return names


def _named(module: nn.Module) -> dict[str, Tensor]:
    try:
        return dict(named_parameters(module))
    except Exception:  # somebody's half-built module must not end the watch
        return {}


def described(
    names: Sequence[str], parameters: Sequence[Tensor], optimizers: Sequence[Optimizer], graph: GraphFacts | None
) -> list[Line]:
    """Return what ``meta`` says of each parameter; ``optimizer`` where there are several, ``frozen`` where it is.

    ``order`` is its place in the forward, where a backward has reached it before the first step, and ``uses`` how many
    operations took it.
    """
    used = [{}] * len(parameters) if graph is None else graph.of(parameters)
    groups = {
        id(p): (place if len(optimizers) > 1 else None, k, group)
        for place, optimizer in enumerate(optimizers)
        for k, group in enumerate(optimizer.param_groups)
        for p in group["params"]
    }
    lines = []
    for name, p, its in zip(names, parameters, used, strict=True):
        owner, k, group = groups[id(p)]
        lines.append(
            {
                "name": name,
                "shape": list(_shape(p)),
                "numel": 0 if is_lazy(p) else p.numel(),
                "dtype": str(p.dtype).removeprefix("torch."),
                "group": k,
                "weight_decay": _number_in(group, "weight_decay") or None,
                "optimizer": owner,
                "frozen": None if p.requires_grad else True,
                **its,
            }
        )
    return [known_fields(line) for line in lines]


def _shape(parameter: Tensor) -> tuple[int, ...]:
    return () if is_lazy(parameter) else tuple(parameter.shape)  # of a module that was never called, nobody knows it


def _number_in(group: dict[str, Any], name: str) -> float | None:
    value = group.get(name)
    return float(value) if isinstance(value, int | float) else None


def program_facts(argv: Sequence[str] | None = None, clip: str | None = None, *, keep_arguments: bool = False) -> Line:
    """Return what a first line says of the program: its version of gradguard, its arguments, its commit.

    Args:
        argv: The arguments; those of this process by default.
        clip: The rule that clips its gradients.
        keep_arguments: Whether the arguments are written as they are, with the secrets that may be among them.
    """
    given = sys.argv if argv is None else argv
    if given and given[0].endswith("ipykernel_launcher.py"):  # a notebook's kernel, which is no program to run again
        given = []
    shown = list(given) if keep_arguments else redacted_arguments(given)
    version = getattr(sys.modules.get("gradguard"), "__version__", None)  # not imported: this floor is below
    return {"version": version, "argv": shown, "clip": clip, "git": git_state()}


def meta_line(
    program: Line,
    optimizers: Sequence[Optimizer],
    parameters: Sequence[Tensor],
    names: Sequence[str],
    graph: GraphFacts | None,
) -> Line:
    """Return the first line of a record.

    Args:
        program: The `program_facts`.
        optimizers: Those that are known.
        parameters: All their parameters.
        names: The names of these.
        graph: Facts of the graphs of the losses before the first step, where they were seen.
    """
    seen, (rank, world) = graph if graph is not None and graph.leaves else None, rank_and_world()
    line = {
        "t": "meta",
        "schema": SCHEMA,
        **program,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host_platform": platform.platform(terse=True),
        "device": str(parameters[0].device) if parameters else "cpu",
        "world": world,
        "rank": rank,
        "mesh": mesh_of(parameters),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "root": _root(),
        "optimizers": [type(optimizer).__name__ for optimizer in optimizers],
        "eps": [_number_in(optimizer.param_groups[0], "eps") for optimizer in optimizers],  # beside Adam's divisor
        "compute": None if seen is None else sorted(seen.dtypes),
        "leaves": None if graph is None else len(graph.leaves),
        "loss_factor": None if seen is None else seen.factor,
        "doubled": None if seen is None or seen.doubled is None else [*seen.doubled],
        "params": described(names, parameters, optimizers, seen),
    }
    return known_fields(line)
