"""A backward through a graph that an earlier backward has freed: say which operation, and what to type."""

from torch.autograd.graph import Node

from gradguard.errors import FreedGraphError
from gradguard.torch_private import is_freed

_PYTORCH_SAYS = "backward through the graph a second time"


def raise_if_freed(error: RuntimeError, nodes: list[Node]) -> None:
    """Raise our error in place of PyTorch's if that is about a freed graph.

    Raises:
        FreedGraphError: If it is.
    """
    if _PYTORCH_SAYS not in str(error):
        return
    name = next((node.name() for node in nodes if is_freed(node)), None)
    where = f" at {name}" if name else ""
    raise FreedGraphError(
        f"the graph was freed by an earlier backward{where}: expected a graph that has not been gone through; compute "
        f"the loss again, or call the earlier backward with retain_graph=True."
    ) from error
