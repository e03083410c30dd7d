"""The table of whole models that the clipper is compared with the oracle on, each built afresh from one seed."""

from collections.abc import Callable

import torch

from per_sample.call_models import CALL_CASES, MIXING, REFUSED
from per_sample.case import Case
from per_sample.layer_models import LAYER_CASES
from per_sample.structure_models import STRUCTURE_CASES

CASES: dict[str, Callable[[], Case]] = {**LAYER_CASES, **STRUCTURE_CASES, **CALL_CASES}
EVERY: dict[str, Callable[[], Case]] = {**CASES, **REFUSED, **MIXING}

STOCHASTIC = ["dropout", "dropout in attention", "dropout in an lstm", "randomised relu"]
DETERMINISTIC = [name for name in CASES if name not in STOCHASTIC]


def build(name: str, dtype: torch.dtype = torch.float64) -> Case:
    """The case, the same at each call and whatever ran before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sum(map(ord, name)))
        return EVERY[name]().to(dtype)
