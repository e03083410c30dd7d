"""What the first line of a record says of the machine, the program's version and the other processes."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

GIT_SECONDS = 1.0
"""Longer than this nobody waits for git."""


def rank_and_world() -> tuple[int, int]:
    """Return the number of this process among those that train together, and how many there are.

    From `torch.distributed` where it is initialised, else from what a launcher (torchrun, accelerate) set.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return _number("RANK", 0), _number("WORLD_SIZE", 1)


def mesh_of(parameters: Sequence[Tensor]) -> dict[str, int] | None:
    """Return the device mesh that parameters are sharded over: the size of each dimension by name; None without one.

    Where there are several meshes, the one of most dimensions is the one that says most.
    """
    meshes = [mesh for mesh in (getattr(p, "device_mesh", None) for p in parameters) if mesh is not None]
    if not meshes:
        return None
    mesh = max(meshes, key=lambda mesh: mesh.ndim)
    names = mesh.mesh_dim_names or [f"dim {k}" for k in range(mesh.ndim)]
    return {name: mesh.size(k) for k, name in enumerate(names)}


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


def describe(parameters: Sequence[Tensor]) -> dict[str, Any]:
    """Return the fields of ``meta`` that this process knows by the time it trains."""
    rank, world = rank_and_world()
    return {
        "python": platform.python_version(),
        "host_platform": platform.platform(terse=True),
        "device": str(parameters[0].device) if parameters else "cpu",
        "world": world,
        "rank": rank,
        "mesh": mesh_of(parameters),
    }


def _number(name: str, otherwise: int) -> int:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return otherwise
