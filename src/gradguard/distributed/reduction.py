r"""The one all-reduce: from the norms of the parts that each process holds to the norms of the whole tensors.

.. math:: \lVert g \rVert_p = \Bigl(\sum_{r} \frac{1}{k_r} \lVert g^{(r)} \rVert_p^p\Bigr)^{1/p}
          \qquad \lVert g \rVert_\infty = \max_r \lVert g^{(r)} \rVert_\infty

over all processes r, of which :math:`k_r` hold the same part. Powers are added up in float64. Where they could leave
its range (float64 gradients, or p above 6), a power is written as :math:`m \cdot 2^{900 b}`, with a sum of its own for
each b: still one all-reduce.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradguard.distributed.agreement import agree, device_of, gather_objects, together
from gradguard.distributed.reduction_group import MOST_RANKS, ReductionGroup, check_alive
from gradguard.distributed.settings import Settings, difference, digest
from gradguard.errors import DistributedError, UnsupportedGradientError
from gradguard.tensors.layout import are_readable, move
from gradguard.words import listed

_BITS = 900
"""Powers of one sum lie within this many binary orders, which float64 holds with room for additions."""

SAFE_ORDER = 6
"""Up to this order, powers of the norms of float32 gradients stay in the range of float64."""

SHORTEST = 64
"""Numbers of the shortest all-reduce: gloo ends a process that gets more numbers than its own list has."""

APART = 0.005
"""Copies of one gradient are not equal if their norms vary by more than this part of them."""


def buckets(order: float, wide: bool) -> range:
    """Return the numbers b for which powers of ``order`` get a sum."""
    if not wide and order <= SAFE_ORDER:
        return range(1)
    return range(math.floor(-1080 * order / _BITS), math.ceil(1060 * order / _BITS) + 1)


def encode(norms: Tensor, weights: Tensor, order: float, wide: bool) -> Tensor:
    """Return what to add up over the processes: the weighted powers of ``norms``, ``[len(norms) * buckets]``."""
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
    """Return the norms from the sums over all processes.

    Args:
        added: The sum of what `encode` returned.
        present: Where every process holds the whole tensor, the share of those that have a gradient; else 0.
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
    """Tensors whose gradients must be equal on all processes that hold all of them, where several do.

    Attributes:
        at: Their positions among what is measured.
        names: Their names.
    """

    at: Tensor
    names: Sequence[str]

    def taken(self, positions: Sequence[int]) -> "Copies":
        """Return the copies that are among ``positions``, at their places in it."""
        place = {int(position): i for i, position in enumerate(positions)}
        kept = [(place[at], name) for at, name in zip(self.at.tolist(), self.names, strict=True) if at in place]
        return Copies(torch.tensor([at for at, _ in kept], dtype=torch.int64, device="cpu"), [name for _, name in kept])


NO_COPIES = Copies(torch.empty(0, dtype=torch.int64, device="cpu"), ())


class Reducer:
    """One list of tensors that all processes have agreed on, and the all-reduce of what they measure of it.

    Args:
        union: Who takes part; all of them make a reducer at the same time.
        signature: A description of each listed tensor, the same on all processes of a stage.
        wide: Whether powers may leave the range of float64, at least on this process.
        device: Where the norms are.
        moves: Whether this process has gradients that must be brought in line with their parameters.
        details: Further values that are agreed on; JSON can hold them.

    Attributes:
        wide: Whether powers may leave the range on any process.
        moves: Whether any process has such gradients, or has had some.
        agreement: The result of `agree`.
        is_alone: Whether no other process takes part.
        number: The number of the agreement, and its square.
        world: How many processes take part.
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
        """Let all processes come where some gradients are, for the first time, laid out unlike their parameters.

        Raises:
            DistributedError: If a process has none such; where the host waits, it is named within seconds.
        """
        if not self.is_alone:
            agree(self.union, self._signature, (), self.device)
        self.moves = True

    def agreed_largest(self, *values: Tensor, call: int = 0, refusal: Exception | None = None) -> list[Tensor]:
        """Return the largest of each value on any process: one all-reduce, for which the host waits.

        Args:
            values: Values on the CPU.
            call: A number that the others must come with, too.
            refusal: Why this process, and so all of them, must refuse.

        Raises:
            DistributedError: If another process refuses, or comes with another list or number.
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
        """Return the largest of each value, the largest of each number ``told``, and whether all told the same."""
        vector = torch.cat([_unless(refusal, told), -told, *values])
        most, least, *found = self.run(vector, dist.ReduceOp.MAX).split([len(told), len(told), *map(len, values)])
        return found, most, (most == told) & (least == -told)

    def run(self, vector: Tensor, operation: Any) -> Tensor:
        """Return the all-reduced ``vector``, which may be written.

        Raises:
            DistributedError: If another process does not come.
        """
        sent = torch.nn.functional.pad(vector, (0, max(0, SHORTEST - len(vector))))
        reduce = partial(dist.all_reduce, sent, operation, self.union.group)
        together(reduce, self.union, self._signature, known=True, on_host=sent.is_cpu)
        return sent[: len(vector)]

    def difference(self, refusal: Exception | None, is_refused: bool) -> Exception:
        """Return the error of this process where not all have reduced the same. A collective if one refuses.

        Args:
            refusal: Why this process refuses.
            is_refused: Whether any does.
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
    """Return numbers that processes compare: infinite ones tell that this one refuses."""
    return told if refusal is None else torch.full_like(told, math.inf)


@dataclass(frozen=True, slots=True, eq=False)
class NormReduction:
    """The norms of some gradients, each process with its own part of each, ready to be added up over processes.

    Attributes:
        reducer: The reducer that adds them up.
        weights: One over the number of processes that hold the same part of each.
        shares: ``weights`` where this process has a gradient, negative unless every process holds all of it; else 0.
        balance: A number that adds up to 0 over the processes if replicas have the same gradients: 0-dim.
        settings: The rule and its arguments, which must be the same on all processes.
        copies: The gradients that must be equal on all that hold them, by the norms that were measured first.
        refusal: Why this process refuses its gradients, so that all do once the norms have been added up.
    """

    reducer: Reducer
    weights: Tensor
    shares: Tensor
    balance: Tensor
    settings: Settings = ()
    copies: Copies = NO_COPIES
    refusal: Exception | None = None

    def refusing(self, error: Exception) -> "NormReduction":
        """Return a reduction in which this process refuses its gradients.

        Raises:
            Exception: At once, if no other process takes part.
        """
        if self.reducer.is_alone:
            raise error
        return replace(self, refusal=error)

    def of(self, positions: Sequence[int]) -> "NormReduction":
        """Return the reduction of some of the gradients; every process must take the same ones."""
        at = move(torch.tensor(list(positions), dtype=torch.int64, device="cpu"), self.weights.device)
        weights, shares, copies = self.weights[at], self.shares[at], self.copies.taken(positions)
        return replace(self, weights=weights, shares=shares, copies=copies)

    def add_up(self, *measured: tuple[Tensor, float]) -> list[Tensor]:
        """Return the norms of the whole tensors, for vectors of norms of what this process holds, with their orders."""
        return self.measure(*measured)[0]

    @torch.no_grad()
    def measure(self, *measured: tuple[Tensor, float]) -> tuple[list[Tensor], Tensor]:
        """Return what `add_up` does, and which tensors have a gradient on any process: ``[len]``, bool.

        It is one all-reduce, and a second if some orders are infinite and some are not.

        Raises:
            DistributedError: If another process does not come, refuses its gradients, reduces something else, for
                something else, or lacks a gradient that it must have. On an accelerator all but the first give NaN
                instead, so that nothing waits.
            UnsupportedGradientError: If copies differ by some percent (NaN on an accelerator, too), or this process
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
        # The mean of the squares of powers is the square of their mean if, and only if, all copies are equal.
        squares = encode(first[at], weights[at], 2 * order, reducer.wide) if len(at) else first[:0]
        mine = digest(self.settings, reducer.device)
        told = _unless(self.refusal, reducer.number)  # in front, where other lists have theirs
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
        # NaN is told beside: backends differ on the maximum of it.
        parts = [torch.cat([x.nan_to_num(0.0, math.inf, 0.0), x.isnan().to(x.dtype)]) for x in measured]
        device, at = self.reducer.device, self.copies.at.to(self.reducer.device)
        told = torch.cat([self.reducer.number[:1], digest(self.settings, device)[:1]])
        least = torch.where(self.shares[at] > 0, -parts[0][at], -math.inf)  # of copies; one that is missing is none
        (least, *largest), numbers, (number, agreed) = self.reducer.largest([least, *parts], told, self.refusal)
        most = largest[0][at]
        norms = [torch.where(nan > 0, math.nan, x) for x, nan in (part.chunk(2) for part in largest)]
        return self._checked(norms, (number, agreed, agreed), most + least > 2 * APART * most, numbers)

    def _checked(
        self, norms: list[Tensor], is_told: tuple[Tensor, Tensor, Tensor], apart: Tensor, numbers: Tensor
    ) -> list[Tensor]:
        """Return the norms; NaN where something is wrong and the host must not wait.

        Args:
            norms: The norms.
            is_told: Whether all processes reduced the same list, by the same rule, and replicas have it alike.
            apart: Whether the processes' gradients differ, for each of the copies.
            numbers: The numbers of the list, of which some are infinite if a process refuses.

        Raises:
            DistributedError: If one of ``is_told`` is false.
            UnsupportedGradientError: If copies differ, or this process refuses its gradients.
        """
        same, agreed, balanced = map(torch.all, is_told)
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
                "a gradient is None on some of the ranks that hold the same part of it, and not on the others: their "
                "norm cannot be told. Replicas must have a gradient or not have it alike; fill missing ones with zeros."
            )
        wrong = [name for name, is_apart in zip(self.copies.names, apart.tolist(), strict=True) if is_apart]
        raise UnsupportedGradientError(
            f"the gradient of {listed(wrong, MOST_RANKS)} differs between the processes that hold all of it: "
            "nothing has added it up, as where FSDP ignores a parameter, FSDP1's HYBRID_SHARD shards over one "
            "process, a backward ran inside no_sync(), or stages share a weight. All-reduce it before the clip, or "
            "let FSDP or DDP do so; what each process has for itself, as an expert, must say so with a DTensor. "
            "Nothing was changed."
        )
