"""Plans for one list of parameters: all ranks agree once on who holds what; each clip is then one all-reduce.

A plan gives every tensor an entry in one vector. If a rank holds nothing of a tensor (its gradient is None there, its
shard is empty, or it belongs to another pipeline stage), the entry is norm 0. The vector and the collective are
therefore the same on every rank whatever gradients are present, and the plan does not depend on them.
"""

import operator
import weakref
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradguard.distributed.agreement import gather_objects
from gradguard.distributed.engines import placements_by
from gradguard.distributed.engines.fsdp1 import FLAT
from gradguard.distributed.engines.megatron import refuse_megatron_gradients, refuse_unnamed_megatron_stages
from gradguard.distributed.placements import (
    Placement,
    any_sharded,
    check_alike,
    is_laid_out_as,
    is_partial,
    local_part,
    placement_of,
    placements_of,
)
from gradguard.distributed.redistribute import added_up, laid_out_as
from gradguard.distributed.reduction import NO_COPIES, Copies, NormReduction, Reducer
from gradguard.distributed.reduction_group import (
    ONE_STAGE,
    ReductionGroup,
    Stages,
    is_alive,
    reduction_group_of,
    refuse_unnamed_stages,
    several_processes,
)
from gradguard.distributed.replicas import balances, balances_of_moved, may_lack_summands
from gradguard.distributed.stages import Names, StageLists, details_of
from gradguard.distributed.wrappers import check_gradients, check_wrappers
from gradguard.errors import DistributedError, InvalidValueError, UnsupportedGradientError
from gradguard.tensors.layout import meeting_device, move
from gradguard.torch_private import grads_of, layouts_of, local_tensors, specs_of

_WIDE = (torch.float64, torch.complex128)
_ORDINARY = {Tensor, nn.Parameter}
_KEPT = 64
"""How many plans are kept: those of the most recently used lists, the same on every rank."""

_plans: dict[tuple, "NormPlan"] = {}
_plans_of_one: dict[tuple, "NormPlan"] = {}
"""Plans of lists of one parameter; an optimizer that steps inside the backward has many such lists."""
_reducers: dict[tuple, tuple[Reducer, Copies]] = {}
_unions: dict[tuple, ReductionGroup] = {}


@dataclass(frozen=True, slots=True)
class HeldParts:
    """The parts of the planned tensors on this rank, one entry for each position in the plan.

    Attributes:
        parameters: The parameters; empty tensors if they belong to another pipeline stage.
        gradients: This rank's part of each gradient, sharing its memory; empty if there is none.
        names: The parameters' names, if the list has names.
        reduction: The reduction of the gradients' norms.
    """

    parameters: Sequence[Tensor]
    gradients: Sequence[Tensor]
    names: Names
    reduction: NormReduction


class NormPlan:
    """How the norms of one list of tensors are reduced over ranks. Use `plan_for`.

    Args:
        union: The ranks that take part; all of them make the plan at the same time.
        tensors: The list.
        placements: The placement of each tensor.
        names: Their names, or None.
        shared: The weights among them that other stages hold too.
    """

    def __init__(
        self,
        union: ReductionGroup,
        tensors: Sequence[Tensor],
        placements: Sequence[Placement],
        names: Names,
        shared: Mapping[str, Tensor],
    ) -> None:
        self._placements = placements
        self._moved: dict[int, Any] = {}
        moves = self._moves(grads_of(tensors))
        where = meeting_device(tensors)
        is_wide = not {t.dtype for t in tensors}.isdisjoint(_WIDE)
        holders_of = {p: _holders(p, union) for p in set(placements)}
        holders, whole = [holders_of[p] for p in placements], [p.is_whole for p in placements]
        details = None if union.stages is None else details_of(tensors, names, shared, holders, whole)
        self.reducer = Reducer(union, _signature(tensors, placements, names), is_wide, where, bool(moves), details)
        self.alive: list[weakref.ref] = []
        self._layouts = layouts_of(tensors)
        held_by_stages = set(map(id, shared.values()))  # this stage does not know which ranks of others hold them
        own = [None if id(t) in held_by_stages else p for t, p in zip(tensors, placements, strict=True)]
        self._balances = balances(own, union, dist.get_rank())
        device = self.reducer.device
        self.balance_of_all = self._balances.sum().to(device)
        self.names, self.places = names, range(len(tensors))
        self._alike = self.lasts = union.stages is None
        if union.stages is not None:
            stages = StageLists(self.reducer)
            holders, whole, self.names, self.places = stages.holders, stages.whole, stages.names, stages.own
            self.lasts = not stages.one_is_empty
        count = len(holders)
        widest = torch.empty(0, dtype=torch.float64 if self.reducer.wide else torch.float32, device=where)
        # Parameters of other stages get fillers of their own, because parameters are told apart by id.
        self._fillers = [torch.empty_like(widest) for _ in range(count)]
        of_all = list(map(_share, holders, whole))
        shares = [0.0] * count
        for place, part in zip(self.places, _parts(tensors), strict=True):
            self._fillers[place] = part.new_empty(0)
            shares[place] = of_all[place]
        self.weights = torch.tensor(of_all, dtype=torch.float64, device=device).abs()
        self._shares = torch.tensor(shares, dtype=torch.float64, device=device)
        copied = [i for i, share in enumerate(of_all) if share > 0]
        self._copies = Copies(
            torch.tensor(copied, dtype=torch.int64, device="cpu"), [called(self.names, i) for i in copied]
        )
        self._asks = device.type == "cpu"  # the host waits for CPU collectives anyway
        self._codes = torch.zeros(count, dtype=torch.float64, device="cpu")  # of layouts that differ from parameters'
        self._due: Collection[int] = ()
        if self.reducer.moves:
            self._agree_on(moves)
        self._specs: list[Any] = [None] * len(tensors)  # of the gradients that were checked last

    def _agree_on(self, mine: dict[int, Any]) -> None:
        """Collect, over the ranks of this stage, which gradients differ in layout from their parameters, and how.

        Redistributing such a gradient is a collective, which ranks without that gradient must join.
        """
        union = self.reducer.union
        stage = min(union.stage)
        found = dict(self._moved)
        for its_stage, its in gather_objects(union, (stage, mine)):
            if its_stage == stage:
                found |= its
        self._moved = dict(sorted(found.items()))
        if not self._asks:
            self._balances[[*self._moved]] = balances_of_moved(self._moved, union, dist.get_rank())
            self.balance_of_all = self._balances.sum().to(self.reducer.device)

    def is_for(self, tensors: Sequence[Tensor]) -> bool:
        """Tell whether ``tensors``, for which the plan was made, still have the same layouts."""
        now = layouts_of(tensors)
        if now != self._layouts:  # almost always the same objects, whose contents need no comparison
            return False
        self._layouts = now
        return True

    def hold(self, tensors: Sequence[Tensor], names: Names, call: int = 0) -> HeldParts:
        """Return this rank's parts of the gradients of the planned parameters.

        A gradient whose layout differs from its parameter's, such as a Partial one, is redistributed and replaced. If
        that is impossible, this rank refuses; the reduction reports the refusal to the other ranks.

        Args:
            tensors: The parameters.
            names: Their present names.
            call: 0 if the norms will be all-reduced, which checks and reports everything. Otherwise a number of the
                call that is equal on all ranks: if gradients must be redistributed, ranks compare it, and a refusal is
                raised at once.
        """
        present, gradients = present_gradients(tensors, grads_of(tensors))
        if len(present) < len(tensors):
            gradients = list(map(dict(zip(present, gradients, strict=True)).get, range(len(tensors))))
        specs, refusal = specs_of(gradients), None
        if self.reducer.moves or not are_known(specs, self._specs):
            refusal = _refusal_of(tensors, gradients, names)
            if refusal is not None:
                gradients = [None for _ in tensors]
            self._look_at_layouts(gradients, call, refusal)
            if refusal is not None and call:
                raise refusal
            self._bring_in_line(tensors, gradients)
            now = specs_of(gradients)
            self._specs = [known if spec is None else spec for spec, known in zip(now, self._specs, strict=True)]
        shares, balance = self._of_present(gradients)
        part = NormReduction(self.reducer, self.weights, shares, balance, copies=self._copies)
        part = part if refusal is None else part.refusing(refusal)
        if self._alike:
            parts = _parts(gradients, self._fillers)
            return HeldParts(tensors, parts, names, part)
        parameters, parts = list(self._fillers), list(self._fillers)
        for place, parameter, gradient in zip(self.places, tensors, gradients, strict=True):
            parameters[place] = parameter
            if gradient is not None:
                parts[place] = local_part(gradient)
        return HeldParts(parameters, parts, self.names, part)

    def _moves(self, gradients: Sequence[Any]) -> dict[int, Any]:
        """Return, by position, the placements of gradients whose layouts differ from their parameters'."""
        return {
            i: spec.placements
            for i, (spec, placement) in enumerate(zip(specs_of(gradients), self._placements, strict=True))
            if spec and placement.kinds and spec.placements != placement.kinds and spec.mesh == placement.mesh
        }

    def _look_at_layouts(self, gradients: Sequence[Tensor | None], call: int, refusal: Exception | None) -> None:
        """Agree on the gradients' layouts, including gradients that other ranks have and this one lacks."""
        moves = self._moves(gradients)
        is_new = any(self._moved.get(i) != placements for i, placements in moves.items())
        if is_new and not self.reducer.moves:
            self.reducer.begin_moves()
        if self.reducer.moves and (self._asks or call):
            is_new = self._ask_for_layouts(gradients, moves, call, refusal)
        if is_new:
            self._agree_on(moves)

    def _ask_for_layouts(
        self, gradients: Sequence[Tensor | None], moves: Mapping[int, Any], call: int, refusal: Exception | None
    ) -> bool:
        """Find out which gradients differ in layout from their parameters on any rank.

        Returns:
            Whether there are new ones.

        Raises:
            UnsupportedGradientError: On all ranks, if a gradient has different layouts on two of them.
            DistributedError: On all ranks, if one lacks a part of a gradient that the others cannot supply, refuses its
                gradients, or makes another call.
        """
        most, least = torch.full((2, len(self.weights)), -torch.inf, dtype=torch.float64, device="cpu")
        lacks, needs = torch.zeros_like(most), torch.zeros_like(most)
        # Who must have a gradient: 2 every rank; 1 a rank may lack it if its peers in other replicas do; 0 any may.
        for i, (place, gradient) in enumerate(zip(self.places, gradients, strict=True)):
            if gradient is None or not self._placements[i].kinds:
                lacks[place] = 1.0
                continue
            most[place] = _code(moves[i]) if i in moves else 0
            least[place] = -most[place]
            if i in moves:
                may_lack, is_on_all = may_lack_summands(moves[i]), len(self._placements[i].ranks) == self.reducer.world
                needs[place] = 2 - may_lack - (may_lack and is_on_all)
        most, least, lacks, needs = self.reducer.agreed_largest(most, least, lacks, needs, call=call, refusal=refusal)
        for place in (most > -least).nonzero().flatten().tolist():
            raise UnsupportedGradientError(
                f"the gradient of {called(self.names, place)} is laid out differently on two processes, so their parts "
                "are unknown: give it its parameter's layout, or one layout on all."
            )
        lacking = needs * lacks
        for place in (lacking == 2).nonzero().flatten().tolist():
            raise DistributedError(
                f"the gradient of {called(self.names, place)} is laid out unlike its parameter and None on some of the "
                "ranks, whose part of it is unknown. Fill missing gradients with zeros."
            )
        if (lacking == 1).any():
            self._compare_replicas(moves, set((lacking == 1).nonzero().flatten().tolist()))
        is_new = bool(((most > 0) & (most != self._codes)).any())
        self._codes = torch.where(most > 0, most, self._codes)
        self._due = {i for i, place in enumerate(self.places) if most[place] > 0}
        return is_new

    def _compare_replicas(self, moves: Mapping[int, Any], summed: Collection[int]) -> None:
        """Raise on all ranks if replicas of a sum, at one of the positions ``summed``, lack different summands."""
        own = [(i, place) for i, place in enumerate(self.places) if place in summed]
        mine = {(place, tuple(self._placements[i].mesh.get_coordinate())): i in moves for i, place in own}
        found = gather_objects(self.reducer.union, mine)
        for place, at in sorted({key for its in found for key in its}):
            if len({its[place, at] for its in found if (place, at) in its}) > 1:
                raise DistributedError(
                    f"the gradient of {called(self.names, place)}, a sum over processes, is None on some of the ranks, "
                    "but not on those that have the same summand in other replicas: their norm is unknown. Fill "
                    "missing gradients with zeros."
                )

    def _bring_in_line(self, tensors: Sequence[Tensor], gradients: list[Any]) -> None:
        for i, placements in self._moved.items():
            gradient = gradients[i]
            is_due = gradient is not None and not is_laid_out_as(gradient, tensors[i])
            # A rank whose gradient is missing or already right joins the others' collective with zeros.
            right = laid_out_as(gradient if is_due else None, tensors[i], placements)
            if is_due or (gradient is None and i in self._due):
                tensors[i].grad = gradients[i] = right

    def _of_present(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor, Tensor]:
        """Return the shares of the gradients that this rank has, and the sum of their balances."""
        if type(None) not in set(map(type, gradients)):
            return self._shares, self.balance_of_all
        own = torch.tensor([g is not None for g in gradients], dtype=torch.float64, device="cpu")
        mask = torch.ones(len(self._fillers), dtype=torch.float64, device="cpu")
        mask[torch.tensor(list(self.places), dtype=torch.int64, device="cpu")] = own
        where = self._shares.device
        return self._shares * move(mask, where), move((self._balances * own).sum(), where)


def _refusal_of(
    tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], names: Names
) -> UnsupportedGradientError | None:
    """Return why a gradient cannot be redistributed to its parameter's layout; None if all can."""
    try:
        for i, (expected, spec) in enumerate(zip(specs_of(tensors), specs_of(gradients), strict=True)):
            gradient = gradients[i]
            if spec and expected and spec.mesh is expected.mesh:
                continue
            if gradient is not None and spec is not expected:
                check_alike(gradient, tensors[i], called(names, i))
    except UnsupportedGradientError as error:
        return error
    return None


def _code(placements: Any) -> float:
    """Return a number above 0 for a layout, equal on all ranks."""
    return zlib.crc32(repr(placements).encode()) + 1.0


def called(names: Names, place: int) -> str:
    """Return the name of a parameter for an error message."""
    return f"`{names[place]}`" if names else f"parameter {place}"


def plan_for(
    tensors: Sequence[Tensor],
    names: Names = None,
    stages: Stages = ONE_STAGE,
    module: nn.Module | None = None,
    *,
    measures_stage: bool = False,
) -> tuple[NormPlan, Sequence[Tensor], Names] | None:
    """Return the plan for a list of parameters, its parameters once each, and names; None if no other rank takes part.

    The first call for a list is a collective, as every clip is. Later calls find the plan by the parameters' ids.

    Args:
        tensors: Parameters; one that is listed twice counts once.
        names: Their names.
        stages: The pipeline stages.
        module: The module that holds them, if known: it shows its wrappers.
        measures_stage: Whether the caller wants the norms of one pipeline stage alone.

    Raises:
        UnsupportedGradientError: If FSDP1 or DistributedDataParallel keeps the gradients in a form whose norm is
            unknown.
        DistributedError: If another rank is missing, or comes with another list.
        InvalidValueError: If no process group holds all tensors, or one is destroyed; if ``stages`` shares a weight
            that is not listed; if ``stages`` contradicts the tensors' placements; or if it is missing although their
            mesh shows stages.
    """
    flat: Mapping[int, Placement] = {}
    if several_processes():
        check_wrappers(tensors, stages.group)
        refuse_unnamed_megatron_stages(tensors, stages)
        flat = placements_by(tensors, module, lambda engine: engine.has_parts)
    if stages.group is None and not flat and not any_sharded(tensors):
        return None
    once = first_places(tensors)
    if len(once) < len(tensors):
        tensors, names = [tensors[i] for i in once], None if names is None else [names[i] for i in once]
    staged = () if stages.group is None else (id(stages.group), *(names or ()))  # names must agree only over stages
    key = tuple(map(id, tensors)), staged, tuple((name, id(t)) for name, t in stages.shared.items())
    plans = _plans_of_one if len(tensors) == 1 and stages.group is None else _plans
    plan = _kept(plans, key)
    for name, tensor in stages.shared.items():
        if id(tensor) not in key[0]:
            raise InvalidValueError(f"shared[{name!r}] is not among the parameters of this call.")
    if plan is None or not plan.is_for(tensors) or not is_alive(plan.reducer.union.group):
        placements = placements_of(tensors)
        if flat:
            placements = [flat.get(id(t), p) for t, p in zip(tensors, placements, strict=True)]
        union = reduction_group_of(placements, stages)
        if union is None:
            return None
        if not measures_stage:
            refuse_unnamed_stages(placements, union)
        plan = NormPlan(union, tensors, placements, names, stages.shared)
        if not plan.lasts:
            return plan, tensors, names
        _keep(plans, key, plan, _KEPT if plans is _plans else None)
        # Drop the plan when a parameter dies, because ids are reused. Module.to() swaps a DTensor's contents, which
        # forbids a weak reference to the DTensor itself, so refer to its local tensor.
        forget = partial(_forget, plans, key, weakref.ref(plan))
        plan.alive = [weakref.ref(t, forget) for t in local_tensors(tensors, tensors)]
    return plan, tensors, names


def _forget(plans: dict[tuple, NormPlan], key: tuple, plan: weakref.ref, _: object) -> None:
    if plan() is not None and plans.get(key) is plan():
        del plans[key]


def plan_for_gradients(gradients: Sequence[Tensor | None], order: float) -> tuple[list[Tensor], NormReduction] | None:
    """Return this rank's parts of ``gradients``, and the reduction of their norms; None if no other rank takes part.

    The ``None`` entries may differ between ranks, so the ranks agree only on the number of gradients.

    Args:
        gradients: The gradients.
        order: The order of the norms that the caller then reduces, in one all-reduce.

    Raises:
        DistributedError: If another rank is missing, comes with another number of gradients, or lacks a gradient that
            is a sum over ranks.
        InvalidValueError: If no process group holds them all, or one is destroyed.
        UnsupportedGradientError: If FSDP1 keeps them in a form whose norm is unknown.
    """
    if not any_sharded(gradients):
        if several_processes():
            check_gradients(gradients)
            refuse_megatron_gradients()
        return None
    first = first_places(gradients)
    if len(first) < len(gradients):
        gradients = [g if i in first else None for i, g in enumerate(gradients)]
    there = [g for g in gradients if g is not None]
    placements = [None if g is None else placement_of(g) for g in gradients]
    sums = {i: spec.placements for i, spec in enumerate(specs_of(gradients)) if spec and is_partial(spec)}
    union = _union_of_kinds(frozenset(p for p in placements if p is not None))
    if union is None:
        return None
    key = ("gradients", len(gradients), id(union.group))
    where = next((g.device for g in there if not g.is_cpu), torch.device("cpu"))
    reducer, copies = _kept(_reducers, key) or (None, NO_COPIES)
    if reducer is None or reducer.union.group is not union.group:
        reducer = Reducer(union, [f"{len(gradients)} gradients"], True, where, bool(sums))
        names = [f"number {i}" for i in range(len(gradients))]
        copies = Copies(torch.arange(len(gradients), device="cpu"), names)  # no rank knows who holds a missing one
        _keep(_reducers, key, (reducer, copies))
    elif sums and not reducer.moves:
        _begin_sums(reducer, copies, min(sums), order)
    if reducer.moves:
        _check_sums(reducer, sums, len(gradients))
    shares = [0.0 if p is None else _share(_holders(p, union), p.is_whole) for p in placements]
    shares = torch.tensor(shares, dtype=torch.float64, device=reducer.device)
    balance = balances(placements, union, dist.get_rank()).sum()
    part = NormReduction(reducer, shares.abs(), shares, balance.to(reducer.device), copies=copies)
    nothing = torch.empty(0, device="cpu")
    return [
        nothing if g is None else local_part(added_up(g) if i in sums else g) for i, g in enumerate(gradients)
    ], part


def _begin_sums(reducer: Reducer, copies: Copies, first: int, order: float) -> None:
    """Agree with all ranks that some gradients now are Partial, for the first time in lists of this length.

    A rank without such a gradient does not know of the others': it reduces its norms. This rank joins that all-reduce,
    and refuses in it unless all ranks do.

    Raises:
        DistributedError: On all ranks, if one has no Partial gradient. On an accelerator the norm is NaN on that rank.
    """
    nothing = torch.zeros(len(copies.names), dtype=torch.float64, device=reducer.device)
    settings, refusal = ("Partial gradients",), _lacking_sum(first)
    part = NormReduction(reducer, nothing, nothing, nothing.sum(), settings, copies, refusal, unless_all=True)
    part.add_up((nothing, order))
    reducer.moves = True


def _check_sums(reducer: Reducer, sums: Mapping[int, Any], count: int) -> None:
    """Raise on all ranks if a gradient that is Partial on one is missing, or has another layout, on another."""
    codes = torch.zeros(count, dtype=torch.float64, device="cpu")
    for i, placements in sums.items():
        codes[i] = _code(placements)
    most, least = reducer.agreed_largest(codes, -codes)
    for i in (most != -least).nonzero().flatten().tolist():
        raise _lacking_sum(i)


def _lacking_sum(place: int) -> DistributedError:
    return DistributedError(
        f"tensor {place} is a Partial sum on some of the ranks, and None or laid out differently on others, whose "
        "part of it is unknown. Fill missing gradients with zeros, or measure the parameters, which show the "
        'layout: clip_grad_norm_(parameters, float("inf")) writes no gradient except to reduce Partial ones.'
    )


def _union_of_kinds(placements: frozenset[Placement]) -> ReductionGroup | None:
    """Return the union for gradients with these placements, made again if its process group was destroyed."""
    union = _kept(_unions, (placements,))
    if union is None or not is_alive(union.group):
        union = reduction_group_of(placements)
        if union is not None:
            _keep(_unions, (placements,), union)
    return union


def _kept(cache: dict[tuple, Any], key: tuple) -> Any:
    """Return the value of ``key``, and mark it as the most recently used."""
    found = cache.pop(key, None)
    if found is not None:
        cache[key] = found
    return found


def _keep(cache: dict[tuple, Any], key: tuple, value: Any, most: int | None = _KEPT) -> None:
    cache[key] = value
    while most is not None and len(cache) > most:
        del cache[next(iter(cache))]


def first_places(values: Sequence[Any]) -> Sequence[int]:
    """Return the index of each object's first appearance, in order."""
    if len(set(map(id, values))) == len(values):
        return range(len(values))
    return sorted({id(one): i for i, one in reversed(list(enumerate(values)))}.values())


def present_gradients(tensors: Sequence[Tensor], gradients: list[Any]) -> tuple[Sequence[int], list[Any]]:
    """Return the positions of the parameters that have a gradient, each once, and the gradients.

    ``gradients`` are those of ``tensors``, with None for a missing one.

    If several parameters share one tensor as their gradient, it would be scaled twice, so each gets its own copy:
    ``a.grad, b.grad = torch.autograd.grad((a + b).sum(), [a, b])`` makes such gradients.
    """
    if type(None) not in set(map(type, gradients)) and len(set(map(id, gradients))) == len(gradients):
        return range(len(gradients)), gradients  # the common case, without a loop in Python
    first: dict[int, int] = {}
    for i, tensor in enumerate(tensors):
        if tensor.grad is not None and tensors[first.setdefault(id(tensor.grad), i)] is not tensor:
            tensor.grad = tensor.grad.clone()
            first[id(tensor.grad)] = i
    return list(first.values()), [tensors[i].grad for i in first.values()]


def are_known(specs: Sequence[Any], known: Sequence[Any]) -> bool:
    """Tell whether each spec is the known one; None, for a missing gradient, always is."""
    return all(map(operator.is_, specs, known)) or all([s is None or s is k for s, k in zip(specs, known, strict=True)])


def _parts(tensors: Sequence[Tensor | None], missing: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Return the part of each tensor on this rank; the entry of ``missing`` in place of None."""
    if missing is None:
        missing = tensors  # type: ignore[assignment]
    parts = local_tensors(tensors, missing)  # type: ignore[arg-type]
    if not _ORDINARY.issuperset(map(type, parts)):  # a collective may not have delivered a part yet
        parts = [m if t is None else local_part(t) for m, t in zip(missing, tensors, strict=True)]  # type: ignore[arg-type]
    return parts


def _signature(tensors: Sequence[Tensor], placements: Sequence[Placement], names: Names) -> list[str]:
    """Describe each tensor as text that is equal on all ranks, without the shape of a flat parameter's part."""
    words: dict[tuple, str] = {}
    found = []
    for tensor, placement in zip(tensors, placements, strict=True):
        key = tensor.shape, tensor.dtype, placement
        if key not in words:
            shape = "" if placement.layout == FLAT else f"shape {tuple(tensor.shape)}, "
            words[key] = f"({shape}{str(tensor.dtype).removeprefix('torch.')}, {placement.layout})"
        found.append(words[key])
    return found if names is None else [f"`{name}` {is_}" for name, is_ in zip(names, found, strict=True)]


def _share(holders: int, is_whole: bool) -> float:
    """Return this rank's share of a gradient, as in `NormReduction`."""
    return 1 / holders if is_whole and holders > 1 else -1 / holders


def _holders(placement: Placement, union: ReductionGroup) -> int:
    """Return how many ranks of this stage hold the same part."""
    if not placement.ranks:
        return len(union.stage)
    return placement.replicas * len(union.stage) // len(placement.ranks)
