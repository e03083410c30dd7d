"""FSDP1 (FullyShardedDataParallel): one flat tensor for all parameters of a layer, cut into equal shards."""

import weakref
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from gradguard.distributed.engines.engine import Engine, Held
from gradguard.distributed.local_shard import LocalShard
from gradguard.distributed.placements import Placement
from gradguard.errors import UnsupportedGradientError
from gradguard.torch_private import (
    FlatPart,
    flat_part_of,
    flattened_by_fsdp1,
    wrapper_slots,
)

FLAT = "FSDP1 flat parameter"

_known: "weakref.WeakKeyDictionary[nn.Module, dict[int, Placement]]" = weakref.WeakKeyDictionary()


class FlatParameters(Engine):
    """FSDP1's flat parameters, and the original ones with ``use_orig_params=True``."""

    def placements(self, tensors: Sequence[Tensor], module: nn.Module | None) -> dict[int, Placement]:
        """Return how FSDP1 has spread ``tensors``, parameters of ``module``.

        Returns:
            Placements by identity; empty if none is FSDP1's.

        Raises:
            UnsupportedGradientError: If FSDP1 has spread them, and ``module`` does not show how.
        """
        flattened = flattened_by_fsdp1(tensors)
        if not any(flattened):  # the usual case, on the path of every step
            return {}
        flat = {id(t) for t, is_flat in zip(tensors, flattened, strict=True) if is_flat}
        known = {} if module is None else _known.get(module, {})
        if module is not None and not known.keys() >= flat:
            for part in filter(None, map(flat_part_of, module.modules())):
                known = known | dict.fromkeys(map(id, part.parameters), _placement(part))
            _known[module] = known
        if not known.keys() >= flat:
            raise UnsupportedGradientError(
                "a parameter belongs to FullyShardedDataParallel (FSDP1), and does not show which processes hold its "
                "other parts. Pass the root module itself: clip_grad_norm_(model, ...), or "
                "Guard(optimizer, clipper, model=model)."
            )
        return known

    def held_apart(self, model: nn.Module) -> Iterator[Held]:
        """Yield the part of each original parameter."""
        for path, module in model.named_modules():
            front = [word for word in path.split(".") if word and word not in wrapper_slots()]
            if (part := flat_part_of(module)) is None:
                continue
            for flat in part.shards:
                shard = LocalShard(flat.shape, (flat.numel,), start=flat.start, placement=_placement(part))
                yield Held(".".join([*front, flat.name]), flat.tensor, shard, flat.offset)


def _placement(part: FlatPart) -> Placement:
    ranks = frozenset(dist.get_process_group_ranks(part.process_group))
    return Placement(None, ranks, 1 if part.is_sharded else len(ranks), FLAT)
