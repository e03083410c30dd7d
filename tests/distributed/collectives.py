"""Which collectives a block runs in this process."""

from typing import Any

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional", "_dtensor")

_NO_COLLECTIVES = ("wait_tensor", "_wrap_tensor_autograd")


class Collectives(TorchDispatchMode):
    """Writes down the name of each collective that the process groups are asked for, in order.

    with Collectives() as ran:
        dist.all_reduce(x)
    assert ran.names == ["allreduce_"]
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it asks for what it needs itself, which comes here again
        name = func.overloadpacket.__name__
        if func.namespace in _NAMESPACES and name not in _NO_COLLECTIVES:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
