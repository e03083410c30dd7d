"""Sketches of whole parameters: each rank sketches its shards, and one all-reduce adds them up."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gradguard.distributed.local_shard import LocalShard
from gradguard.distributed.placements import gradient_of, placements_of
from gradguard.distributed.processes import rank_and_size, sum_over
from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.parity.backward_replay import epsilon_of
from gradguard.parity.saved import SavedGradients, SavedParameter
from gradguard.parity.shards import TASK, LocalParameter, LocalParameters, Whole, agree_on, gathered, gathered_settings
from gradguard.parity.summation import most_of_sums, rounding_of_sums
from gradguard.tensors.matmul_precision import Kind
from gradguard.tensors.sketch import HASH_VERSION, ROW_SUMS, SUMS, hashed, row_sketches, sketch_of

Sketches = list[list[float]]
"""The sketch of each parameter, in the order of `WholeParameters.wholes`."""

Sketched = dict[str, Tensor]
"""The sketches of this process's shards, by name."""

_CONTRASTS = 2


class WholeParameters:
    """The parameters of a model that is sharded over processes; the methods are collectives.

    Args:
        local: This process's shards.
        may_be_none: Whether to accept a model without parameters.

    Attributes:
        wholes: The whole parameters, equal on all ranks, by name.

    Raises:
        InvalidValueError: If there are no parameters.
        UnsupportedGradientError: If the shards of a parameter do not add up to the whole.
    """

    def __init__(self, local: LocalParameters, *, may_be_none: bool = False) -> None:
        self.wholes = agree_on(local)
        if not self.wholes and not may_be_none:
            raise InvalidValueError("the model has no parameter that requires a gradient, so there is nothing to save.")
        self._local = local
        self._rank, self._world = rank_and_size()
        self._device = next((p.weights()[1].device for p in local), torch.device("cpu"))

    # Sketches, equal on all ranks.

    def reduced(self, own: Sketched, times: float = 1.0) -> Sketches:
        """Add up the ranks' sketches, such as from `local_gradients`; return the wholes' sketches times ``times``."""
        return sum_over(times * self._weighted(own, self._share), task=TASK).tolist()

    def contrasts(self, own: Sketched, count: int = _CONTRASTS) -> list[Sketches]:
        """Return ``count`` weighted sums over the ranks' copies, 0 if the copies are equal."""
        return [
            sum_over(self._weighted(own, partial(_contrast, rank=self._rank, which=which)), task=TASK).tolist()
            for which in range(count)
        ]

    def weights(self, own: Sketched) -> Sketches:
        """Return the sketches of the whole weights from the result of `local_weights`.

        Raises:
            UnsupportedGradientError: If ranks hold different copies of one parameter.
        """
        found = self.reduced(own)
        for name, sketch, contrast in zip(self.wholes, found, *self.contrasts(own, 1), strict=True):
            size = math.hypot(*sketch)
            if math.isfinite(size) and math.hypot(*contrast) > 1e-9 * size:
                raise UnsupportedGradientError(
                    f"{name} has different weights on different ranks, so it is not one parameter: an expert, a "
                    "tensor-parallel shard or a layer of a stage? Describe the shard by "
                    "shard_of=lambda name: (whole name, whole shape, where it begins); or load one checkpoint."
                )
        return found

    def rows(self, name: str, times: float = 1.0) -> Sketches:
        """Return the sketch of each row of one parameter's gradient, multiplied by ``times``."""
        whole = self.wholes[name]
        table = torch.zeros(whole.shape[0], ROW_SUMS, dtype=torch.float64, device=self._device)
        for parameter in self._local:
            if parameter.name == name and (gradient := parameter.gradient()) is not None:
                part, values = gradient
                own = row_sketches(part.pieces(values), whole.shape[0], math.prod(whole.shape[1:]), values.device)
                table += own.to(self._device) * self._share(whole)
        return sum_over(times * table, task=TASK).tolist()

    def _share(self, whole: Whole) -> float:
        return 1 / len(whole.sharers(self._rank))

    def _weighted(self, own: Sketched, weight: Callable[[Whole], float]) -> Tensor:
        table = torch.zeros(len(self.wholes), SUMS, dtype=torch.float64, device=self._device)
        for i, (name, whole) in enumerate(self.wholes.items()):
            if name in own:
                table[i] = own[name].to(self._device) * weight(whole)
        return table

    # Descriptions of the parameters.

    def about(self, own: Sequence[SavedParameter], calls: int) -> tuple[SavedParameter, ...]:
        """Return the merged descriptions of each parameter from all ranks.

        Args:
            own: The result of `about` for each shard of this process.
            calls: The number of micro-batches.
        """
        most = max(gathered(calls))
        described: dict[str, SavedParameter] = {}
        for one in chain(*gathered(own)):
            if one.has_gradient or one.name not in described:
                described[one.name] = one
        return tuple(
            replace(
                described[name],
                rounding=rounding_of_sums(described[name].rounding, most),
                one_sided=most_of_sums(described[name].rounding, most),
                copies=whole.copies,
            )
            for name, whole in self.wholes.items()
        )

    def epsilon(self, seen: set[torch.dtype]) -> float:
        """Return the machine epsilon of the coarsest dtype on any rank: of ``seen``, of weights and of gradients."""
        dtypes = {p.weights()[1].dtype for p in self._local}
        gradients = {gradient.dtype for p in self._local if (gradient := gradient_of(p.parameter)) is not None}
        kinds: list[Kind] = ["product"]
        if any(p.parameter.dim() > 2 for p in self._local):
            kinds.append("convolution")
        if any("weight_hh" in p.name for p in self._local):  # a weight's name in PyTorch's recurrent layers
            kinds.append("recurrent")
        return max(gathered(epsilon_of(dtypes | gradients | seen or {torch.float32}, self._device, kinds)))

    def saved(
        self,
        parameters: Sequence[SavedParameter],
        sketches: Mapping[str, Sequence[Sketches]],
        facts: Mapping[str, float],
        **about: Any,
    ) -> SavedGradients:
        """Return the saved run with these sketches.

        Args:
            parameters: The descriptions of the parameters.
            sketches: The sketches by kind.
            facts: Numbers that may explain a factor; the world size and the sizes of meshes are added.
            **about: The other fields of `SavedGradients`.
        """
        known = {"world size": float(self._world)}
        for placement in placements_of([parameter.parameter for parameter in self._local]):
            known |= {f"size of {name}": float(size) for name, size in placement.sizes.items()}
        facts = {**gathered_settings(known), **facts}
        return SavedGradients(tuple(parameters), sketches, facts=facts, hash_version=HASH_VERSION, **about)


def local_weights(local: LocalParameters) -> Sketched:
    """Return the sketch of each shard's weights, by name."""
    return {p.name: _sketch(*p.weights()) for p in local}


def local_gradients(local: LocalParameters) -> Sketched:
    """Return the sketch of each shard's gradient, by name."""
    return {p.name: _sketch(*found) for p in local if (found := p.gradient()) is not None}


def _sketch(part: LocalShard, values: Tensor) -> Tensor:
    return sketch_of(part.pieces(values), values.device)


def about(parameter: LocalParameter) -> SavedParameter:
    """Describe this process's shard of a parameter; `WholeParameters.about` merges the descriptions of all ranks."""
    gradient, (shard, weights) = parameter.gradient(), parameter.weights()
    dtype = weights.dtype if gradient is None else gradient[1].dtype
    rounding, of_weights = (
        torch.finfo(one).eps / 2 if one.is_floating_point else 0.0 for one in (dtype, weights.dtype)
    )
    return SavedParameter(parameter.name, shard.shape, rounding, gradient is not None, 1, of_weights)


def _contrast(whole: Whole, rank: int, which: int) -> float:
    """Return the weight of a rank's copy in a sum that is 0 if all copies are equal.

    The weights are pseudo-random, so different copies do not cancel.
    """
    sharers = whole.sharers(rank)
    drawn = (hashed(torch.tensor(sharers, device="cpu") + 1000 * which).double() / 2.0**63).tolist()
    mean = sum(drawn) / len(drawn)
    size = math.hypot(*(x - mean for x in drawn))
    return (drawn[sharers.index(rank)] - mean) / size if size else 0.0
