r"""The one all-reduce: from the norms of each rank's parts to the norms of the whole tensors.

.. math:: \lVert g \rVert_p = \Bigl(\sum_{r} \frac{1}{k_r} \lVert g^{(r)} \rVert_p^p\Bigr)^{1/p}
          \qquad \lVert g \rVert_\infty = \max_r \lVert g^{(r)} \rVert_\infty

over all ranks r, where :math:`k_r` ranks hold the same part as r. Powers are summed in float64. Powers of float64
gradients, or of an order p above 6, could leave its range. Such a power is written as :math:`m \cdot 2^{900 b}`, with
a separate sum for each b: still one all-reduce.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradguard.distributed.agreement import agree, device_of, gather_objects, run_collective
from gradguard.distributed.reduction_group import MOST_RANKS, ReductionGroup, check_alive
from gradguard.distributed.settings import Settings, difference, digest
from gradguard.errors import DistributedError, UnsupportedGradientError
from gradguard.tensors.layout import are_readable, move
from gradguard.words import listed

_BITS = 900
"""The powers of one sum span this many binary orders, which float64 holds with room for additions."""

SAFE_ORDER = 6
"""Up to this order, powers of the norms of float32 gradients stay in the range of float64."""

SHORTEST = 64
"""The shortest all-reduce, in numbers: gloo kills a process that receives more numbers than it sends."""

APART = 0.005
"""The largest relative difference between the norms of equal copies of one gradient."""


def buckets(order: float, wide: bool) -> range:
    """Return the exponents b for which powers of ``order`` get a sum."""
    if not wide and order <= SAFE_ORDER:
        return range(1)
    return range(math.floor(-1080 * order / _BITS), math.ceil(1060 * order / _BITS) + 1)


def encode(norms: Tensor, weights: Tensor, order: float, wide: bool) -> Tensor:
    """Return the numbers to sum over ranks: the weighted powers of ``norms``, ``[len(norms) * buckets]``."""
    sums = buckets(order, wide)
    if len(sums) == 1:
        powers = norms * norms if order == 2 else norms**order
        return powers.mul_(weights)
    exponent = order * norms.log2()
    place = (exponent / _BITS).floor().nan_to_num(sums[-1], sums[-1], sums[0]).clamp(sums[0], sums[-1])
    spread = norms.new_zeros(len(norms), len(sums))
    mantissa = torch.exp2(exponent - _BITS * place) * weights
    return spread.scatter_(1, (place - sums[0]).long()[:, None], mantissa[:, None]).flatten()


def decode(added: Tensor, present: Tensor, order: float, wide: bool) -> Tensor:
    """Return the norms from the sums over all ranks.

    Args:
        added: The sum over ranks of the results of `encode`.
        present: For a tensor that every rank holds whole, the share of ranks that have a gradient; else 0.
        order: The order of the norms.
        wide: As for `encode`.
    """
    sums = buckets(order, wide)
    share = torch.where(present > 0, present, 1.0)
    if len(sums) == 1:
        powers = added / share
        return powers.sqrt() if order == 2 else powers ** (1 / order)
    table = added.view(-1, len(sums)) / share[:, None]
    place = torch.arange(len(sums), device=added.device).expand_as(table)
    top = torch.where(table != 0, place, 0).amax(dim=1, keepdim=True)  # NaN is not 0
    below = torch.where(top > 0, table.gather(1, (top - 1).clamp(min=0)), 0.0)
    powers = table.gather(1, top) + below * 2.0**-_BITS
    return torch.exp2((powers.log2() + _BITS * (top + sums[0])) / order).squeeze(1)


@dataclass(frozen=True, slots=True)
class Copies:
    """Tensors that several ranks hold whole: their gradients must be equal on these ranks.

    Attributes:
        at: Their positions among the measured tensors.
        names: Their names.
    """

    at: Tensor
    names: Sequence[str]

    def taken(self, positions: Sequence[int]) -> "Copies":
        """Return the copies that are among ``positions``, with their indices in ``positions``."""
        place = {int(position): i for i, position in enumerate(positions)}
        kept = [(place[at], name) for at, name in zip(self.at.tolist(), self.names, strict=True) if at in place]
        return Copies(torch.tensor([at for at, _ in kept], dtype=torch.int64, device="cpu"), [name for _, name in kept])


NO_COPIES = Copies(torch.empty(0, dtype=torch.int64, device="cpu"), ())


class Reducer:
    """One list of tensors that all ranks have agreed on, and the all-reduce of its norms.

    Args:
        union: The ranks that take part; all of them make a reducer at the same time.
        signature: A description of each listed tensor, equal on all ranks of a stage.
        wide: Whether powers may leave the range of float64, at least on this rank.
        device: The device of the norms.
        moves: Whether this rank has gradients that must be redistributed to their parameters' layouts.
        details: Further values that are agreed on; JSON must be able to hold them.

    Attributes:
        wide: Whether powers may leave the range on any rank.
        moves: Whether any rank has such gradients, or has had some.
        agreement: The result of `agree`.
        is_alone: Whether no other rank takes part.
        number: The number of the agreement, and its square.
        world: How many ranks take part.
    """

    def __init__(
        self,
        union: ReductionGroup,
        signature: Sequence[str],
        wide: bool,
        device: torch.device,
        moves: bool = False,
        details: Any = None,
    ) -> None:
        self.union, self._signature = union, signature
        self.world = dist.get_world_size(union.group)
        self.is_alone = self.world == 1
        self.device = device if self.is_alone else device_of(union.group, device)
        self.agreement = agree(union, signature, (wide, moves), self.device, details)
        self.wide, self.moves = self.agreement.wishes
        number = self.agreement.number
        self.number = torch.tensor([number, number**2], dtype=torch.float64, device=self.device)

    def begin_moves(self) -> None:
        """Agree with all ranks that some gradients now differ in layout from their parameters, for the first time.

        Raises:
            DistributedError: If a rank has no such gradient; if the host waits, the rank is named within seconds.
        """
        if not self.is_alone:
            agree(self.union, self._signature, (), self.device)
        self.moves = True

    def agreed_largest(self, *values: Tensor, call: int = 0, refusal: Exception | None = None) -> list[Tensor]:
        """Return the largest of each value on any rank: one all-reduce, for which the host waits.

        Args:
            values: Values on the CPU.
            call: A number on which the ranks must agree.
            refusal: Why this rank refuses, so that all ranks must.

        Raises:
            DistributedError: If another rank refuses, or comes with another list or number.
        """
        if self.is_alone:
            return [*values]
        told = torch.cat([self.number[:1], self.number.new_full((1,), call)])
        found, most, same = self.largest([move(one, self.device) for one in values], told, refusal)
        if not same.all():
            raise self.difference(refusal, bool(most.isinf().any()))
        return [move(one, values[0].device) for one in found]

    def largest(
        self, values: Sequence[Tensor], told: Tensor, refusal: Exception | None
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the largest of each value, and of each number ``told``, and whether all ranks sent equal ``told``."""
        vector = torch.cat([_unless(refusal, told[:1]), told[1:], -told, *values])
        most, least, *found = self.run(vector, dist.ReduceOp.MAX).split([len(told), len(told), *map(len, values)])
        return found, most, (most == told) & (least == -told)

    def run(self, vector: Tensor, operation: Any) -> Tensor:
        """Return the all-reduced ``vector``, which the caller may write to.

        Raises:
            DistributedError: If another rank is missing.
        """
        sent = torch.nn.functional.pad(vector, (0, max(0, SHORTEST - len(vector))))
        reduce = partial(dist.all_reduce, sent, operation, self.union.group)
        run_collective(reduce, self.union, self._signature, known=True, on_host=sent.is_cpu)
        return sent[: len(vector)]

    def difference(self, refusal: Exception | None, is_refused: bool) -> Exception:
        """Return this rank's error after ranks have reduced different things. A collective if one rank refuses.

        Args:
            refusal: Why this rank refuses, or None.
            is_refused: Whether any rank refuses.
        """
        if not is_refused:
            return DistributedError(
                "another rank clipped another list of gradients in this place: every rank must clip the same lists in "
                "the same order."
            )
        said = gather_objects(self.union, refusal and str(refusal), self._signature)
        ranks = dist.get_process_group_ranks(self.union.group)
        rank, words = next((rank, words) for rank, words in zip(ranks, said, strict=True) if words)
        return refusal or DistributedError(f"rank {rank} refuses, and so do the others: {words}")


def _unless(refusal: Exception | None, told: Tensor) -> Tensor:
    """Return the numbers that ranks compare; infinite ones report that this rank refuses."""
    return told if refusal is None else torch.full_like(told, math.inf)


@dataclass(frozen=True, slots=True, eq=False)
class NormReduction:
    """The norms of some gradients, of which each rank measures its own parts, ready to be reduced over ranks.

    Attributes:
        reducer: The reducer.
        weights: One over the number of ranks that hold the same part, for each gradient.
        shares: 0 for a gradient that this rank lacks. Otherwise its weight: positive if several ranks hold the whole
            gradient, negative if they hold parts of it or one rank alone holds it.
        balance: A number that sums to 0 over the ranks if replicas have the same gradients: 0-dim.
        settings: The rule and its arguments, which must be equal on all ranks.
        copies: The gradients that must be equal on all ranks that hold them, judged by the first measured norms.
        refusal: Why this rank refuses its gradients, so that all ranks do once the norms are reduced.
        unless_all: Whether nothing is refused if all ranks refuse with the same settings. Reading this is a host sync.
    """

    reducer: Reducer
    weights: Tensor
    shares: Tensor
    balance: Tensor
    settings: Settings = ()
    copies: Copies = NO_COPIES
    refusal: Exception | None = None
    unless_all: bool = False

    def refusing(self, error: Exception) -> "NormReduction":
        """Return a reduction in which this rank refuses its gradients.

        Raises:
            Exception: At once, if no other rank takes part.
        """
        if self.reducer.is_alone:
            raise error
        return replace(self, refusal=error)

    def of(self, positions: Sequence[int]) -> "NormReduction":
        """Return the reduction of some of the gradients; every rank must take the same ones."""
        at = move(torch.tensor(list(positions), dtype=torch.int64, device="cpu"), self.weights.device)
        weights, shares, copies = self.weights[at], self.shares[at], self.copies.taken(positions)
        return replace(self, weights=weights, shares=shares, copies=copies)

    def add_up(self, *measured: tuple[Tensor, float]) -> list[Tensor]:
        """Return the norms of the whole tensors, from vectors of the norms of this rank's parts, with their orders."""
        return self.measure(*measured)[0]

    @torch.no_grad()
    def measure(self, *measured: tuple[Tensor, float]) -> tuple[list[Tensor], Tensor]:
        """Return the result of `add_up`, and which tensors have a gradient on any rank: ``[len]``, bool.

        It is one all-reduce, and a second if some orders are infinite and some are not.

        Raises:
            DistributedError: If another rank is missing, refuses its gradients, reduces other tensors or for another
                rule, or lacks a gradient that it must have. On an accelerator all cases but the first return NaN
                instead, to avoid a host sync.
            UnsupportedGradientError: If copies differ by some percent (NaN on an accelerator, too), or this rank
                refuses its gradients.
        """
        if self.reducer.is_alone or not measured:
            return [norms for norms, _ in measured], self.shares != 0
        check_alive(self.reducer.union.group)
        home = measured[0][0].device
        moved = [(move(norms.double(), self.reducer.device), order) for norms, order in measured]
        finite = [(norms, order) for norms, order in moved if not math.isinf(order)]
        infinite = [norms for norms, order in moved if math.isinf(order)]
        added, there = self._added(finite) if finite else ([], torch.ones_like(self.shares) > 0)
        rest = replace(self, copies=NO_COPIES) if finite else self
        sums, largest = iter(added), iter(rest._largest(infinite) if infinite else ())
        norms = [move(next(largest if math.isinf(order) else sums), home) for _, order in moved]
        return norms, move(there, home)

    def _added(self, measured: Sequence[tuple[Tensor, float]]) -> tuple[list[Tensor], Tensor]:
        reducer, weights, at = self.reducer, self.weights, self.copies.at.to(self.reducer.device)
        parts = [encode(norms, weights, order, reducer.wide) for norms, order in measured]
        first, order = measured[0]
        # The mean of squared powers equals the square of the mean power if, and only if, all copies are equal.
        squares = encode(first[at], weights[at], 2 * order, reducer.wide) if len(at) else first[:0]
        mine = digest(self.settings, reducer.device)
        told = _unless(self.refusal, reducer.number)  # first, where another list's vector has its number, too
        sent = [told, mine, self.balance.view(1), self.shares, squares, *parts]
        reduced = reducer.run(torch.cat(sent), dist.ReduceOp.SUM).split([*map(len, sent)])
        numbers, alike, remainder, share, squares, *added = reduced
        norms = [decode(x, share, order, reducer.wide) for x, (_, order) in zip(added, measured, strict=True)]
        apart = at > 0
        if len(at):
            spread = decode(squares, share[at], 2 * order, reducer.wide) / norms[0][at]
            apart = (spread > (1 + (order * APART) ** 2) ** (0.5 / order)) & (share[at] > 0)
        is_told = numbers == reducer.world * reducer.number, alike == reducer.world * mine, remainder == 0
        return self._checked(norms, is_told, apart, numbers), share != 0

    def _largest(self, measured: Sequence[Tensor]) -> list[Tensor]:
        # NaN is sent separately: backends differ on its maximum.
        parts = [torch.cat([x.nan_to_num(0.0, math.inf, 0.0), x.isnan().to(x.dtype)]) for x in measured]
        device, at = self.reducer.device, self.copies.at.to(self.reducer.device)
        told = torch.cat([self.reducer.number[:1], digest(self.settings, device)[:1]])
        least = torch.where(self.shares[at] > 0, -parts[0][at], -math.inf)  # of copies; -inf excludes a missing one
        (least, *largest), numbers, (number, agreed) = self.reducer.largest([least, *parts], told, self.refusal)
        most = largest[0][at]
        norms = [torch.where(nan > 0, math.nan, x) for x, nan in (part.chunk(2) for part in largest)]
        return self._checked(norms, (number, agreed, agreed), most + least > 2 * APART * most, numbers)

    def _checked(
        self, norms: list[Tensor], is_told: tuple[Tensor, Tensor, Tensor], apart: Tensor, numbers: Tensor
    ) -> list[Tensor]:
        """Return the norms; NaN if something is wrong and raising would need a host sync.

        Args:
            norms: The norms.
            is_told: Whether all ranks reduced the same list, by the same rule, with the same gradients in replicas.
            apart: For each of the copies, whether the ranks' gradients differ.
            numbers: The numbers of the list, some infinite if a rank refuses.

        Raises:
            DistributedError: If one of ``is_told`` is false.
            UnsupportedGradientError: If copies differ, or this rank refuses its gradients.
        """
        same, agreed, balanced = map(torch.all, is_told)
        if self.unless_all and agreed:
            return norms
        sound = same & agreed & balanced & ~apart.any()
        if not are_readable(sound):
            if self.refusal is not None:
                raise self.refusal
            return [torch.where(sound, x, math.nan) for x in norms]
        if sound:
            return norms
        if not same:
            raise self.reducer.difference(self.refusal, bool(numbers.isinf().any()))
        if not agreed:
            raise DistributedError(
                f"{difference(self.reducer.union, self.settings)}: every rank must clip by the same rule with the same "
                "arguments. Nothing was changed."
            )
        if not balanced:
            raise DistributedError(
                "a gradient is None on some of the ranks that hold the same part of it, but not on the others: their "
                "norm is unknown. Either all replicas or none must have a gradient; fill missing ones with zeros."
            )
        wrong = [name for name, is_apart in zip(self.copies.names, apart.tolist(), strict=True) if is_apart]
        raise UnsupportedGradientError(
            f"the gradient of {listed(wrong, MOST_RANKS)} differs between the processes that hold all of it, because "
            "no all-reduce has summed it. This happens if FSDP ignores a parameter, FSDP1's HYBRID_SHARD shards over "
            "one process, a backward ran inside no_sync(), or stages share a weight. All-reduce it before the clip, or "
            "let FSDP or DDP do so. A gradient that each process has for itself, such as an expert's, must be a "
            "DTensor. Nothing was changed."
        )
