"""Saved runs made of given gradients, for the tests of verdicts: no model, no files."""

import torch

from gradguard.parity.saved import SavedParameter
from gradguard.results import SavedGradients
from gradguard.tensors.sketch import in_chunks, row_sketches, sketch_of

CPU = torch.device("cpu")
EPSILON = 2.0**-23


def sketched(tensor):
    return sketch_of(in_chunks(tensor), CPU).tolist()


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rounded(tensor, relative, seed):
    """The same gradient, but for rounding of the relative size."""
    noise = drawn(tensor.shape, seed)
    return tensor + noise * relative * tensor.norm() / max(1.0, tensor.numel() ** 0.5)


def saved(gradients, *, bar=1e-6, seed=0, runs=5, weights=None, parts=None, rows=(), contrasts=None, copies=1, **about):
    """A run whose gradients are these, each known to ``bar``; a None is a parameter without one."""
    tensors = {name: torch.zeros(3, dtype=torch.float64) if g is None else g for name, g in gradients.items()}
    parameters = tuple(
        SavedParameter(name, tuple(t.shape), 2.0**-24, gradients[name] is not None, copies, 2.0**-24)
        for name, t in tensors.items()
    )
    size = dict.fromkeys(tensors, bar) if isinstance(bar, float) else bar
    kept = {name: [t] for name, t in tensors.items()}
    for k in range(runs):
        for i, (name, t) in enumerate(tensors.items()):
            kept[name].append(rounded(t, size[name], 1000 * seed + 50 * k + i + 7))
    sketches = {"gradient": [[sketched(kept[name][k]) for name in tensors] for k in range(runs + 1)]}
    sketches["weights"] = [[sketched(drawn(t.shape, 99) if weights is None else weights) for t in tensors.values()]]
    if parts:
        sketches["parts"] = [[sketched(part[name]) for name in tensors] for part in parts.values()]
    if contrasts:
        sketches["contrasts"] = [[sketched(contrasts[name]) for name in tensors]]
    wanted = {
        name: [row_sketches(in_chunks(t), len(t), t[0].numel(), CPU).tolist() for t in kept[name]] for name in rows
    }
    return SavedGradients(parameters, sketches, wanted, tuple(parts or ()), epsilon=EPSILON, **about)
