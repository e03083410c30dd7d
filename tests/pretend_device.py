"""A device that computes like the CPU but, like a GPU, refuses operands that are on the CPU.

Tensors on it report the device "lazy:0", a name for which PyTorch's autograd needs no driver. So values, backwards
and hooks are real, and one operation over both devices raises, as on CUDA. A 0-dim CPU tensor may be combined with one
of the device, and an index may be on the CPU. `pytest --device lazy` runs tests on it.
"""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("lazy", 0)
MAY_MIX = {"copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_", "_foreach_copy_"}


class OnDevice(Tensor):
    """A tensor that reports the device; ``held`` has its values, without the bits of sign and conjugate."""

    @staticmethod
    def __new__(cls, held):
        return Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype,
            layout=held.layout, device=DEVICE, requires_grad=held.requires_grad,
        )  # fmt: skip

    def __init__(self, held):
        self.held = held

    def __repr__(self):
        return f"OnDevice({self.held!r})"

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


class Makes(TorchDispatchMode):
    """Makes factories and ``.to`` create tensors on the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def run(func, args, kwargs):
    """Run an operation on the values of its operands."""
    name, leaves = func.overloadpacket.__name__, tree_leaves((args, kwargs))
    is_there = any(isinstance(x, OnDevice) for x in leaves)
    if is_there and name not in MAY_MIX:
        for x in leaves:
            if isinstance(x, Tensor) and not isinstance(x, OnDevice) and x.dim():
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found {DEVICE} and {x.device} in {name}"
                )
    if (asked := kwargs.get("device")) is not None:
        is_there = torch.device(asked).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")} if is_there else kwargs
    elif name in ("copy_", "_foreach_copy_"):
        is_there = any(isinstance(x, OnDevice) for x in tree_leaves(args[0]))
    wrappers = {}

    def unwrapped(x):
        if not isinstance(x, OnDevice):
            return x
        held = torch._conj(x.held) if x.is_conj() else x.held
        held = torch._neg_view(held) if x.is_neg() else held
        wrappers[id(held)] = x
        return held

    args, kwargs = tree_map(unwrapped, (args, kwargs))
    out = func(*args, **kwargs)
    return tree_map(lambda x: wrappers[id(x)] if id(x) in wrappers else wrapped(x), out) if is_there else out


def wrapped(x):
    """Return a tensor moved to the device."""
    if not isinstance(x, Tensor):
        return x
    held = torch._neg_view(x) if x.is_neg() else x
    there = OnDevice(torch._conj(held) if x.is_conj() else held)
    if x.is_neg():
        torch._C._set_neg(there, True)
    if x.is_conj():
        torch._C._set_conj(there, True)
    return there
