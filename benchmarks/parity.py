"""What `save_gradients` costs: how often it runs a step, and how much more memory than the step itself it takes.

    python benchmarks/parity.py

Memory is counted, not sampled: all storages that live after each operation, forward and backward. A step's own are its
weights, gradients and activations; an optimizer's moments, which training has besides, are left out.
"""

import argparse
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradguard as gg

MOST_STEPS, MOST_MORE = 6, 0.01


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations inside the block make, and their largest sum."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self._live: dict[StorageWeakRef, int] = {}
        self.peak = 0
        self._note(known)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self._note([t for t in tree_leaves(result) if isinstance(t, torch.Tensor)])
        return result

    def _note(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._live[StorageWeakRef(storage)] = storage.nbytes()
        self._live = {ref: size for ref, size in self._live.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._live.values()))


def peak(model: nn.Module, act: Callable[[], object]) -> int:
    """Return the most bytes that live at once while ``act()`` runs, with the model's weights."""
    for p in model.parameters():
        p.grad = None
    with LiveBytes([p.detach() for p in model.parameters()]) as counted:
        act()
    return counted.peak


def network(width: int, layers: int) -> nn.Module:
    """Return a network whose weights make most of a step's memory."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))


def measured(width: int, layers: int) -> tuple[int, int, int, int]:
    """Return how many parameters there are, how often the step ran, its own peak, and that of `save_gradients`."""
    model, x, calls = network(width, layers), torch.randn(64, width), []

    def step() -> None:
        calls.append(1)
        model(x).square().mean().backward()

    own = peak(model, step)
    saving = peak(model, lambda: gg.save_gradients(None, model, step, perturbed=1))  # each further run is the same
    calls.clear()
    small, sample = network(8, 2), torch.randn(4, 8)
    gg.save_gradients(None, small, lambda: (calls.append(1), small(sample).square().mean().backward()))
    return sum(p.numel() for p in model.parameters()), len(calls), own, saving


def main() -> int:
    """Print a line for each size; 1 if a goal is missed by the largest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="512x4,1024x8,2048x8", help="widths and numbers of layers")
    steps, more = 0, 0.0
    for size in parser.parse_args().sizes.split(","):
        parameters, steps, own, saving = measured(*map(int, size.split("x")))
        more = saving / own - 1
        print(
            f"{parameters / 1e6:6.1f} M parameters: {steps} steps; {own / 2**20:7.1f} MiB, {saving / 2**20:7.1f} with "
            f"save_gradients, {100 * more:.2f} % ({(saving - own) / 2**20:.2f} MiB) more",
            flush=True,
        )
    return int(steps > MOST_STEPS or more > MOST_MORE)


if __name__ == "__main__":
    sys.exit(main())
