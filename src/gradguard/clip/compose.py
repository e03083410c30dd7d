"""Chain: one rule after the other, as one clipper."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor

from gradguard.clip.clipper import Clipper, Decision, MeasuredGradients, measured
from gradguard.clip.gradients import Gradients, Parameters, current_gradients
from gradguard.clip.result import ClipResult
from gradguard.distributed.settings import Settings
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.tensors.scaling import scale_


class Chain(Clipper):
    r"""Apply clippers one after the other: each sees what the one before it leaves.

    .. math:: g \leftarrow \text{clip}_m(\cdots \text{clip}_2(\text{clip}_1(g)))

    **Guarantees.** While the members multiply all gradients by one number each, the gradients are read once and
    written once, by the product :math:`c = c_1 c_2 \cdots`: the second member is told the gradients as
    :math:`c_1` times what is in memory, so the norm that it sees is the norm after the first. Only behind a member that
    does something else (a clamp, units, groups) are the gradients written and measured again.

    **Edge cases.**

    ===============================  ===========================================================================
    input                            result
    ===============================  ===========================================================================
    all members give a coefficient   so does the chain, and a fused optimizer may multiply instead
    another kind of member           those behind it decide, and their state follows, when the gradients are
                                     written; ``coefficient``, ``clipped``, ``locked_in`` are complete then
    a first coefficient of 0         the others see gradients of norm 0
    NaN among the gradients          every member sees a norm that is not finite; none lets it into its state
    ===============================  ===========================================================================

    Args:
        clippers: The members, in order; at least one.

    Raises:
        InvalidTypeError: If a member is no clipper.
        InvalidValueError: If there is no member, or one comes twice.

    The result's norms are those before the first member; ``coefficient`` is the product; ``threshold`` is None.

    Example:
        >>> import torch
        >>> import gradguard as gg
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[30.0, 40.0]])
        >>> result = gg.Chain(gg.ClipByValue(8.0), gg.ClipByGlobalNorm(5.0))(layer)
        >>> layer.weight.grad.norm(), result.norm
        (tensor(5.0000), tensor(50.))

    Reference:
        Babuschkin and others (2020), The DeepMind JAX ecosystem, ``optax.chain``.
    """

    def __init__(self, *clippers: Clipper) -> None:
        for i, clipper in enumerate(clippers):
            if not isinstance(clipper, Clipper):
                raise InvalidTypeError(
                    f"member {i} of the chain is {clipper!r}: expected clippers, as in Chain(ClipByValue(1.0), "
                    "ClipByGlobalNorm(1.0))."
                )
        if not clippers:
            raise InvalidValueError("the chain has no members: expected at least one clipper.")
        if len(set(map(id, clippers))) < len(clippers):
            raise InvalidValueError("the same clipper object is in the chain twice: make one for each place.")
        self.members = clippers

    @property
    def needs_tensor_norms(self) -> bool:  # type: ignore[override]
        """Whether a member asks for the norm of each tensor."""
        return any(member.needs_tensor_norms for member in self.members)

    def settings(self) -> Settings:
        """Return those of all members."""
        return "Chain", *(setting for member in self.members for setting in member.settings())

    def choices(self, found: Gradients) -> Settings:
        """Return those of all members."""
        return tuple(chosen for member in self.members for chosen in member.choices(found))

    def leaves(self) -> list[Clipper]:
        """Return those of all members."""
        return [leaf for member in self.members for leaf in member.leaves()]

    def orders(self) -> set[float]:
        """Return those of all members."""
        return {2.0}.union(*(member.orders() for member in self.members))

    def is_per_tensor(self) -> bool:
        """Tell whether all members treat each gradient without regard to the others."""
        return all(member.is_per_tensor() for member in self.members)

    def learn(self, parameters: Parameters) -> None:
        """Let every member look at the parameters."""
        for member in self.members:
            member.learn(parameters)

    @torch.no_grad()
    def decide(self, found: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Decide for all members up to the first that does not multiply by one number; the others follow it."""
        return _decide(self.members, found, scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each member, by its place."""
        return {str(i): member.state_dict() for i, member in enumerate(self.members)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned.

        Raises:
            InvalidValueError: If it is of another number of members.
        """
        if set(state_dict) != {str(i) for i in range(len(self.members))}:
            raise InvalidValueError(
                f"the state has {len(state_dict)} members, but this chain has {len(self.members)}: make a Chain of "
                "the same clippers in the same order."
            )
        for i, member in enumerate(self.members):
            member.load_state_dict(state_dict[str(i)])

    def to(self, device: torch.device | str) -> Self:
        """Move the state of every member to ``device``."""
        for member in self.members:
            member.to(device)
        return self


def _decide(members: Sequence[Clipper], found: Gradients, scale: float | Tensor) -> Decision:
    if found.part is None or not members[0].measures_itself:
        orders = {2.0}.union(*(member.orders() for member in members))
        found = measured(found, orders, each=any(member.needs_tensor_norms for member in members))
    decisions: list[Decision] = []
    product, seen_scale = None, scale
    for member in members:
        decision = member.decide(found, seen_scale)
        decisions.append(decision)
        if decision.coefficient is None:
            break
        product = decision.coefficient if product is None else product * decision.coefficient
        seen_scale = scale / product  # gradients to be multiplied by c are, as they lie in memory, 1/c times too large
    result = _together([d.result for d in decisions])
    if decisions[-1].coefficient is not None:
        return Decision(found, result, product)
    behind = members[len(decisions) :]
    told = _writable(result)

    def write() -> None:
        decisions[-1].apply()
        gradients = current_gradients(found)
        if product is not None:
            scale_(gradients, product)
        results = [d.result for d in decisions]
        if behind:
            rest = _decide(behind, _left(found, gradients, decisions[-1], product), scale)
            rest.apply()
            results.append(rest.result)
        _fill(told, _together(results))

    return Decision(found, told, None, write)


def _left(found: Gradients, gradients: Sequence[Tensor], written: Decision, product: Tensor | None) -> Gradients:
    """The gradients after a write: unmeasured, unless the one who wrote knew what norms it would leave."""
    after = Gradients(
        found.parameters, gradients, found.positions, found.names, part=found.part, wants_each=found.wants_each
    )
    if written.left is None:
        return after
    norms = written.left if product is None else written.left * product
    known = written.gradients
    classes = known.classes if isinstance(known, MeasuredGradients) else None
    lists = after.parameters, after.gradients, after.positions, after.names
    return MeasuredGradients(*lists, norms, classes=classes, part=found.part, wants_each=found.wants_each)


def _together(results: Sequence[ClipResult]) -> ClipResult:
    """What a row of clips did: measured before the first, done by all."""
    if len(results) == 1:
        return results[0]
    coefficient, clipped = results[0].coefficient, results[0].clipped
    for result in results[1:]:
        coefficient, clipped = coefficient * result.coefficient, clipped | result.clipped
    alarms = [result.locked_in for result in results if result.locked_in is not None]
    groups = [result.group_norms for result in results if result.group_norms is not None]
    return replace(
        results[0],
        coefficient=coefficient,
        clipped=clipped,
        threshold=None,
        locked_in=torch.stack(alarms).any() if alarms else None,
        group_norms=groups[0] if groups else None,
    )


def _writable(result: ClipResult) -> ClipResult:
    """A copy that `_fill` may complete later."""
    locked_in = torch.zeros_like(result.clipped) if result.locked_in is None else result.locked_in.clone()
    return replace(result, coefficient=result.coefficient.clone(), clipped=result.clipped.clone(), locked_in=locked_in)


def _fill(told: ClipResult, complete: ClipResult) -> None:
    told.coefficient.copy_(complete.coefficient)
    told.clipped.copy_(complete.clipped)
    if told.locked_in is not None and complete.locked_in is not None:
        told.locked_in.copy_(complete.locked_in)
