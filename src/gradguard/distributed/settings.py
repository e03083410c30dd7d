"""Check that all ranks clip in the same way: a rank with another threshold would silently get other weights.

Two numbers in the all-reduce check this: a digest h below 65,536 of the rule and its arguments, and its square. All h
are equal if, and only if, their mean is h and the mean of their squares is the square of h.
"""

import zlib
from collections import Counter
from functools import lru_cache
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor

from gradguard.distributed.agreement import gather_objects
from gradguard.distributed.reduction_group import MOST_RANKS, ReductionGroup
from gradguard.tensors.layout import move
from gradguard.words import listed

Setting = float | str | Tensor | None
Settings = tuple[Setting, ...]
"""Settings of a clip in addition to the gradients: names and numbers; a 0-dim tensor stays on its device."""


def as_setting(value: object) -> Setting:
    """Return an argument of a rule as a value that ranks can compare; an object becomes the name of its type."""
    if value is None or isinstance(value, float | int | str) or (isinstance(value, Tensor) and value.dim() == 0):
        return value
    if isinstance(value, tuple | list):
        return f"({', '.join(str(as_setting(entry)) for entry in value)})"
    return f"a {type(value).__name__}"


def digest(settings: Settings, device: torch.device) -> Tensor:
    """Return the digest of ``settings``, and its square: ``[2]``, float64, integers, without a host sync."""
    tensors = [s for s in settings if isinstance(s, Tensor) and not s.is_cpu]
    pair = _digest_of_words(repr(list(map(_plain, settings))), device)
    if not tensors:
        return pair
    number = pair[0]
    for tensor in tensors:
        bits = move(tensor.detach(), device, torch.float64).view(torch.int64)
        number = (number * 31 + (bits % 65_521) + (bits >> 32) % 65_519) % 65_536
    return torch.stack([number, number * number])


def _plain(setting: Setting) -> object:
    """Return one value for 1, 1.0 and a CPU tensor of 1; a tensor on an accelerator is not read."""
    if isinstance(setting, Tensor):
        return float(setting) if setting.is_cpu else "on the device"
    return float(setting) + 0.0 if isinstance(setting, Real) else setting


@lru_cache(64)
def _digest_of_words(words: str, device: torch.device) -> Tensor:
    number = float(zlib.crc32(words.encode()) % 65_536)
    return torch.tensor([number, number * number], dtype=torch.float64, device=device)


def difference(union: ReductionGroup, settings: Settings) -> str:
    """Return a sentence about the ranks whose settings differ from those of most ranks. A collective."""
    own = ", ".join(str(float(s)) if isinstance(s, Tensor) else repr(s) for s in settings)
    said = list(map(str, gather_objects(union, f"({own})")))
    usual = Counter(said).most_common(1)[0][0]
    ranks = dist.get_process_group_ranks(union.group)
    others = [rank for rank, one in zip(ranks, said, strict=True) if one != usual]
    first = next(one for one in said if one != usual)
    plural = "ranks" if len(others) > 1 else "rank"
    return f"{plural} {listed(others, MOST_RANKS)} came with {first} where rank {ranks[said.index(usual)]} has {usual}"
