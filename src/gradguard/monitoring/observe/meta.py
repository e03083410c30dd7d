"""Write the first line of a record: versions, the machine, the processes, and the parameters by name."""

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
"""The environment variable that passes a watched process's PID and start time to its children."""

GIT_SECONDS = 1.0
"""The time limit in seconds of the call to git."""


def rank_and_world() -> tuple[int, int]:
    """Return the rank of this process and the world size.

    Both come from `torch.distributed` if it is initialised, else from the environment variables that a launcher
    (torchrun, accelerate) sets.
    """
    return joined_rank_and_size() or (_number("RANK", 0), _number("WORLD_SIZE", 1))


def mesh_of(parameters: Sequence[Tensor]) -> dict[str, int] | None:
    """Return the sizes of the device mesh that shards the parameters, by dimension name; None without a mesh.

    If the parameters use several meshes, the function returns the mesh with the most dimensions.
    """
    return max((placement.sizes for placement in placements_of(parameters)), key=len, default={}) or None


def git_state() -> str | None:
    """Return the short commit of the working directory, with ``-dirty`` if files differ from it; None without git."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GIT_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _root() -> int | None:
    """Return the PID of the watched process that this process descends from, or is; None without one."""
    number = os.environ.get(OWNER, "").partition(" ")[0]
    return int(number) if number.isdecimal() else None


def _number(name: str, otherwise: int) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return otherwise


def living_modules() -> list[nn.Module]:
    """Return every module in memory that is not a child of another module."""
    modules = [module for module in alive(nn.Module, frozen=False) if _is_set_up(module)]
    parts = {id(child) for module in modules for child in module.children()}
    return [module for module in modules if id(module) not in parts]


def _is_set_up(module: nn.Module) -> bool:
    try:
        next(module.children(), None)
    except AttributeError:  # the subclass's __init__ has not called nn.Module.__init__ yet
        return False
    return True


def living_optimizers(first: Optimizer) -> list[Optimizer]:
    """Return ``first`` and every other optimizer in memory that shares no parameter with those listed before it.

    The others are sorted by the shapes of their parameters, because their order of creation is unknown. A program
    therefore gets the same order in each run, unless two optimizers hold parameters of the same shapes.
    """
    listed = {id(p) for p in parameters_of(first)}
    found = [first]
    for optimizer in sorted(all_optimizers(), key=lambda other: list(map(_shape, parameters_of(other)))):
        if optimizer is not first:
            own = {id(p) for p in parameters_of(optimizer)}
            if not own & listed:
                found.append(optimizer)
                listed |= own
    return found


def all_optimizers() -> list[Optimizer]:
    """Return every optimizer in memory that has parameter groups."""
    return [optimizer for optimizer in alive(Optimizer, frozen=False) if hasattr(optimizer, "param_groups")]


class Places:
    """Map parameters to their indices in ``params`` of the record's first line.

    Args:
        parameters: All parameters in that order. They are referenced weakly.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._known = {id(p): (weakref.ref(p), place) for place, p in enumerate(parameters)}

    def of(self, parameters: Sequence[Tensor]) -> array:
        """Return the index of each parameter; -1 for a parameter added after the first line."""
        return array("q", map(self._place, parameters))

    def _place(self, parameter: Tensor) -> int:
        known, place = self._known.get(id(parameter), (None, -1))
        return place if known is not None and known() is parameter else -1


class LastPlaces:
    """Cache the indices of an optimizer's parameters: they rarely change from one step to the next."""

    def __init__(self) -> None:
        self._last = list[weakref.ref](), array("q")

    def of(self, parameters: Sequence[Tensor], places: Places) -> array:
        """Return the index of each parameter, from the cache if the last call had the same parameters."""
        last, found = self._last
        if len(last) != len(parameters) or not all(map(is_, map(call, last), parameters)):
            found = places.of(parameters)
            self._last = list(map(weakref.ref, parameters)), found
        return found


def name_parameters(parameters: list[Tensor], modules: list[nn.Module]) -> list[str]:
    """Return a name for each parameter: its dotted name in a root module, or ``parameter <index>`` without a module.

    If the same dotted name occurs in several root modules, each of these names starts with the module's class and a
    number. The modules are numbered in the order of ``parameters``.
    """
    wanted = set(map(id, parameters))
    owners: dict[int, tuple[nn.Module | None, str]] = {}
    named_by_module = [
        (module, {name: p for name, p in _named(module).items() if id(p) in wanted}) for module in modules
    ]
    for module, named in sorted(named_by_module, key=lambda pair: -len(pair[1])):  # most of the parameters first
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
    except Exception:  # a user's half-built module must not stop the recording
        return {}


def described(
    names: Sequence[str], parameters: Sequence[Tensor], optimizers: Sequence[Optimizer], graph: GraphFacts | None
) -> list[Line]:
    """Return the entry of each parameter in ``params`` of the first line.

    ``optimizer`` is written if there are several optimizers, and ``frozen`` if the parameter requires no gradient.
    ``order`` is the parameter's position in the forward, if a backward reached it before the first step. ``uses``
    counts the operations that take it.
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
    return () if is_lazy(parameter) else tuple(parameter.shape)  # a lazy module has no shape before its first call


def _number_in(group: dict[str, Any], name: str) -> float | None:
    value = group.get(name)
    return float(value) if isinstance(value, int | float) else None


def program_facts(argv: Sequence[str] | None = None, clip: str | None = None, *, keep_arguments: bool = False) -> Line:
    """Return the fields of the first line that describe the program: gradguard's version, the arguments, the commit.

    Args:
        argv: The arguments; by default the arguments of this process.
        clip: The rule that clips the gradients.
        keep_arguments: Whether to write the arguments unredacted, including any secrets.
    """
    given = sys.argv if argv is None else argv
    if given and given[0].endswith("ipykernel_launcher.py"):  # a notebook kernel cannot be rerun from its arguments
        given = []
    shown = list(given) if keep_arguments else redacted_arguments(given)
    version = getattr(sys.modules.get("gradguard"), "__version__", None)  # an import would go up a layer
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
        program: The fields from `program_facts`.
        optimizers: The optimizers that the recorder watches.
        parameters: All parameters of these optimizers.
        names: The name of each parameter.
        graph: The facts from the autograd graphs of the losses before the first step; None if no graph was read.
    """
    reached, (rank, world) = graph if graph is not None and graph.leaves else None, rank_and_world()
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
        "eps": [_number_in(optimizer.param_groups[0], "eps") for optimizer in optimizers],  # in Adam's denominator
        "compute": None if reached is None else sorted(reached.dtypes),
        "leaves": None if graph is None else len(graph.leaves),
        "loss_factor": None if reached is None else reached.factor,
        "doubled": None if reached is None or reached.doubled is None else [*reached.doubled],
        "params": described(names, parameters, optimizers, reached),
    }
    return known_fields(line)
