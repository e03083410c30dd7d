"""The one file that knows of `torch.distributed`. For now it only refuses what would give a rank-local number."""

import sys
from collections.abc import Iterable

from torch import Tensor

from gradguard.errors import UnsupportedGradientError


def refuse_sharded(tensors: Iterable[Tensor]) -> None:
    """Raise if a tensor is a shard: its local part would give a norm that is plausible and wrong.

    Raises:
        UnsupportedGradientError: If any tensor is a DTensor or an FSDP1 flat parameter.
    """
    module = sys.modules.get("torch.distributed.tensor")
    dtensor = getattr(module, "DTensor", None)
    for kind in set(map(type, tensors)):
        if kind.__name__ == "FlatParameter" or (dtensor is not None and issubclass(kind, dtensor)):
            raise UnsupportedGradientError(
                f"sharded gradients ({kind.__name__}) are not supported yet: their norm needs a reduction over all "
                "ranks, and this rank's part alone would be wrong. Use torch.nn.utils.clip_grad_norm_ (FSDP2) or "
                "the module's own clip_grad_norm_ (FSDP1) for now."
            )
