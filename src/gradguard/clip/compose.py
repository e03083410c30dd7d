"""Clippers that combine clippers: `Chain` applies several in order, `Groups` gives each set of parameters its own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import EllipsisType
from typing import Any, cast

import torch
from torch import Tensor

from gradguard.clip.clipper import Clipper, ClipResult, Decision, ListedParameters, choice, describe, load_all
from gradguard.clip.gradients import (
    Gradients,
    Parameters,
    current_gradients,
    measured,
    norms_of,
    total_of,
)
from gradguard.clip.selection import MOST_NAMES, KnownNames, Selection, Selector
from gradguard.distributed.settings import Settings
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.tensors.layout import move
from gradguard.tensors.scaling import scale_
from gradguard.words import listed


class _Composite(Clipper):
    """A clipper that combines the clippers that ``_clippers`` returns."""

    def _clippers(self) -> Sequence[Clipper]:
        raise NotImplementedError

    def choices(self, grads: Gradients) -> Settings:
        """Return the choices of all members."""
        return tuple(chosen for member in self._clippers() for chosen in member.choices(grads))

    def leaves(self) -> list[Clipper]:
        """Return the basic rules inside the members."""
        return [leaf for member in self._clippers() for leaf in member.leaves()]

    def orders(self) -> set[float]:
        """Return the orders of the norms that the members need."""
        return {2.0}.union(*(member.orders() for member in self._clippers()))

    def is_per_tensor(self) -> bool:
        """Tell whether every member treats each gradient independently."""
        return all(member.is_per_tensor() for member in self._clippers())

    def learn(self, parameters: Parameters) -> None:
        """Let every member read the parameters."""
        for member in self._clippers():
            member.learn(parameters)


class Chain(_Composite):
    r"""Apply clippers one after the other: each receives the gradients that the one before has clipped.

    .. math:: g \leftarrow \text{clip}_m(\cdots \text{clip}_2(\text{clip}_1(g)))

    **Guarantees.** As long as each member multiplies all gradients by one number, the gradients are read once and
    written once, by the product :math:`c = c_1 c_2 \cdots`. The second member then computes its norm as :math:`c_1`
    times the norm in memory, which is the norm after the first. Gradients are written and measured again only after a
    member that does something else (a clamp, units, groups).

    **Edge cases.**

    ===============================  ===========================================================================
    input                            result
    ===============================  ===========================================================================
    all members give a coefficient   so does the chain, and a fused optimizer may multiply instead
    another kind of member           later members decide, and update their state, when the gradients are written;
                                     ``coefficient``, ``clipped``, ``locked_in`` are complete then
    a first coefficient of 0         the other members measure norm 0
    NaN among the gradients          every member measures a non-finite norm; none lets it into its state
    ===============================  ===========================================================================

    Args:
        clippers: The members, in order; at least one.

    Raises:
        InvalidTypeError: If a member is not a clipper.
        InvalidValueError: If there is no member, or one appears twice.

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
        if _has_one_twice(clippers):
            raise InvalidValueError("the same clipper object is in the chain twice: make one for each place.")
        self.members = clippers

    def __repr__(self) -> str:
        """Return the constructor call."""
        return f"Chain({', '.join(map(repr, self.members))})"

    def settings(self) -> Settings:
        """Return the settings of all members."""
        return "Chain", *(setting for member in self.members for setting in member.settings())

    @torch.no_grad()
    def decide(self, grads: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Decide for all members up to the first that does not multiply by one number; the others decide later."""
        return _decide(self.members, grads, scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each member, by its position."""
        return {str(i): member.state_dict() for i, member in enumerate(self.members)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises:
            InvalidValueError: If the state belongs to other members, or another number of them; no member changes then.
        """
        if set(state_dict) != set(map(str, range(len(self.members)))):
            raise InvalidValueError(
                f"the state has {len(state_dict)} members, but this chain has {len(self.members)}: make a Chain of "
                "the same clippers in the same order."
            )
        load_all([(member, state_dict[str(i)]) for i, member in enumerate(self.members)])

    def _clippers(self) -> Sequence[Clipper]:
        return self.members


def _decide(members: Sequence[Clipper], grads: Gradients, scale: float | Tensor) -> Decision:
    if grads.reduction is None or not members[0].measures_itself:
        grads = measured(grads, [order for member in members for order in member.orders()])
    decisions: list[Decision] = []
    product, seen_scale = None, scale
    for member in members:
        decision = member.decide(grads, seen_scale)
        decisions.append(decision)
        if decision.coefficient is None:
            break
        product = decision.coefficient if product is None else product * decision.coefficient
        seen_scale = scale / product  # memory holds the gradients before the product: too large by 1 / product
    result = _joined([d.result for d in decisions])
    if decisions[-1].coefficient is not None:
        return Decision(grads, result, product)
    behind = members[len(decisions) :]
    locked_in = torch.zeros_like(result.clipped) if result.locked_in is None else result.locked_in.clone()
    outcome = replace(
        result, coefficient=result.coefficient.clone(), clipped=result.clipped.clone(), locked_in=locked_in
    )

    def write() -> None:
        decisions[-1].apply()
        gradients = current_gradients(grads)
        if product is not None:
            scale_(gradients, product)
        results = [d.result for d in decisions]
        if behind:
            left = Gradients(
                grads.parameters, gradients, grads.positions, grads.names, reduction=grads.reduction, reach=grads.reach
            )
            rest = _decide(behind, left, scale)
            rest.apply()
            results.append(rest.result)
        complete = _joined(results)
        outcome.coefficient.copy_(complete.coefficient)
        outcome.clipped.copy_(complete.clipped)
        if complete.locked_in is not None:
            locked_in.copy_(complete.locked_in)

    return Decision(grads, outcome, None, write)


def _joined(results: Sequence[ClipResult]) -> ClipResult:
    """Return the result of successive clips: norms before the first, the combined effect of all."""
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


Rules = Mapping[Any, Clipper | None] | Iterable[tuple[Selection, Clipper | None]]
"""Selections and the clipper of each: a dict, or pairs for a selection (a list, a param group) that cannot be a key."""


class Groups(_Composite):
    r"""Give each group of parameters its own rule and threshold; ``None`` exempts a group.

    .. math:: g_k \leftarrow \text{clip}_k(g_k) \quad\text{for each group } k,
              \qquad n_k = \lVert g_k \rVert_2, \quad n = \Bigl(\sum_k n_k^2\Bigr)^{1/2}

    **Guarantees.** Every gradient is in exactly one group. All are measured in one pass, and rules on the 2-norm reuse
    that measurement. Under ``"propagate"`` NaN in one group does not affect the others.

    **Edge cases.**

    ==================================  ========================================================================
    input                               result
    ==================================  ========================================================================
    a parameter that fits two groups    an error that lists the parameters and their groups
    a pattern that fits nothing         an error that lists the names
    a parameter in no group             an error that lists them, unless ``rest`` is given
    a group without gradients           its norm is 0, its rule is not applied, its state is unchanged
    exempt gradients                    measured, never changed; they count in ``norm`` and ``nonfinite``
    tied parameters                     one parameter: any of its names fits
    ==================================  ========================================================================

    Args:
        groups: The groups, each with its clipper or None. A group is a name or glob pattern (``"head"`` selects all
            in that module), a module, a parameter, a list of these, or an entry of ``optimizer.param_groups``. Lists
            and param groups cannot be keys of a dict: pass pairs, ``[(group, clipper), ...]``. Patterns need names:
            pass the module or ``model.named_parameters()``.
        rest: The clipper of all other parameters, or None to exempt them. Without it every parameter must be in a
            group.

    Raises:
        InvalidValueError: If a group is empty, or two groups share one clipper, which would mix their states.
        InvalidTypeError: If a group or a clipper has another type.

    The result's ``group_norms`` holds the 2-norm of each group before the clip. Its keys are the pattern, or the
    ``"name"`` of the param group, or ``"group 0"``, ``"group 1"`` ..., and ``"rest"``. ``coefficient`` combines those
    of the groups; ``locked_in`` says whether any group is locked in.

    Example:
        >>> import torch
        >>> import gradguard as gg
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
        >>> model(torch.ones(1, 2)).square().sum().mul(1000).backward()
        >>> clip = gg.Groups({"0": gg.ClipByGlobalNorm(1.0), "*.bias": None}, rest=gg.ClipByGlobalNorm(0.1))
        >>> clip(model)
        Traceback (most recent call last):
        ...
        gradguard.errors.InvalidValueError: 1 parameter is in two groups: 0.bias ('0' and '*.bias'). ...
        >>> clip = gg.Groups({"0": gg.ClipByGlobalNorm(1.0), "1.bias": None}, rest=gg.ClipByGlobalNorm(0.1))
        >>> list(clip(model).group_norms)
        ['0', '1.bias', 'rest']
    """

    measures_itself = True

    def __init__(self, groups: Rules, rest: Clipper | EllipsisType | None = ...) -> None:
        pairs = list(groups.items()) if isinstance(groups, Mapping) else list(groups)
        self._selectors = [Selector(selection, f"group {i}") for i, (selection, _) in enumerate(pairs)]
        self._open = rest is ...
        clippers = [clipper for _, clipper in pairs] + ([] if isinstance(rest, EllipsisType) else [rest])
        labels = [_label(selection, i) for i, (selection, _) in enumerate(pairs)] + ["rest"] * (not self._open)
        for label, clipper in zip(labels, clippers, strict=True):
            if clipper is not None and not isinstance(clipper, Clipper):
                raise InvalidTypeError(
                    f"the clipper of {label!r} is {clipper!r}: expected a clipper such as ClipByGlobalNorm(1.0), or "
                    "None to exempt the group."
                )
        if _has_one_twice([clipper for clipper in clippers if clipper is not None]):
            raise InvalidValueError(
                "two groups have the same clipper object, whose state would follow both: make one for each group, or "
                "put both groups into one with a tuple of patterns."
            )
        if len(set(labels)) < len(labels):
            raise InvalidValueError(f"two groups have the same name, among {', '.join(labels)}: names tell them apart.")
        self.members: dict[str, Clipper | None] = dict(zip(labels, clippers, strict=True))
        self._names = KnownNames()
        self._checked: object = None  # the key of the parameters that `learn` checked last
        self._known: tuple[object, list[int]] | None = None  # the key of the last gradients, and the group of each

    def __repr__(self) -> str:
        """Return the constructor call; groups of parameters or modules themselves cannot be shown as source code."""
        members = list(self.members.values())
        groups = zip(self._selectors, members, strict=False)  # the rest comes last
        rest = "" if self._open else f", rest={members[-1]!r}"
        return f"Groups({{{', '.join(f'{selector!r}: {member!r}' for selector, member in groups)}}}{rest})"

    def settings(self) -> Settings:
        """Return the settings of all members, with the selections of their groups."""
        chosen = [*map(str, self._selectors), "rest"]
        own = [() if member is None else member.settings() for member in self.members.values()]
        both = zip(self.members, chosen, own, strict=False)  # there may be no rest
        labelled = [(label, *([] if words == label else [words]), *settings) for label, words, settings in both]
        return "Groups", *(setting for settings in labelled for setting in settings)

    def choices(self, grads: Gradients) -> Settings:
        """Return the group of each parameter, and the choices of the members."""
        return choice(self._places_of(grads)), *super().choices(grads)

    def learn(self, parameters: Parameters) -> None:
        """Check all parameters, with or without a gradient: every group matches one, and none is in two groups.

        Raises:
            InvalidTypeError: If pipeline stages are selected by anything but names.
        """
        if isinstance(parameters, ListedParameters):
            for selector in self._selectors:
                selector.refuse_identities()
        names, tensors = self._names.learn(parameters)
        everything = Gradients(tensors, tensors, range(len(tensors)), names)
        if self._checked != _key(everything):
            for selector in self._selectors:
                selector.require_match(tensors, names, complete=True)
            self._place(everything)
            self._checked, self._known = _key(everything), None
        super().learn(parameters)

    @torch.no_grad()
    def decide(self, grads: Gradients, scale: float | Tensor = 1.0) -> Decision:
        """Measure all gradients once, and let each group's rule decide separately."""
        grads = self.measure(grads)
        positions: list[list[int]] = [[] for _ in self.members]
        for i, place in enumerate(self._places_of(grads)):
            positions[place].append(i)
        parts = [grads.group(own) for own in positions]
        norms = norms_of(grads, scale)
        group_norms = {label: total_of(norms_of(p, scale)) for label, p in zip(self.members, parts, strict=True)}
        decisions = {
            label: member.decide(part, scale)
            for (label, member), part in zip(self.members.items(), parts, strict=True)
            if member is not None and part.is_there()
        }
        norm = total_of(norms)
        coefficient, clipped = torch.ones_like(norm), norm > norm
        alarms = any(decision.result.locked_in is not None for decision in decisions.values())
        locked_in = norm > norm if alarms else None

        def fill_in() -> None:
            after = [
                group_norm * decisions[label].result.coefficient if label in decisions else group_norm
                for label, group_norm in group_norms.items()
            ]
            binds = _any([d.result.clipped for d in decisions.values()], norm)
            clipped.copy_(binds)
            if locked_in is not None:  # some rules compute it only when they write
                verdicts = [d.result.locked_in for d in decisions.values()]
                locked_in.copy_(_any([verdict for verdict in verdicts if verdict is not None], norm))
            coefficient.copy_(torch.where(binds, total_of(_stacked(after, norm)) / norm, 1.0))

        def write() -> None:
            for decision in decisions.values():
                decision.apply()
            fill_in()

        fill_in()
        result = describe(grads, norms, coefficient, clipped, norm=norm, locked_in=locked_in, group_norms=group_norms)
        return Decision(grads, result, None, write)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each group's clipper, by the label of the group."""
        return {label: {} if m is None else m.state_dict() for label, m in self.members.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned.

        Raises:
            InvalidValueError: If the state belongs to other groups, or to other clippers; no clipper changes then.
        """
        if list(state_dict) != list(self.members):
            raise InvalidValueError(
                f"the state is of the groups {list(state_dict)}, but these are {list(self.members)}: make Groups with "
                "the same groups in the same order."
            )
        load_all([(member, state_dict[label]) for label, member in self.members.items() if member is not None])

    def _clippers(self) -> list[Clipper]:
        return [member for member in self.members.values() if member is not None]

    def _places_of(self, grads: Gradients) -> list[int]:
        """Return the group of each gradient, by position; computed again only for other gradients."""
        key = _key(grads)
        if self._known is None or self._known[0] != key:
            if self._checked is None:
                for selector in self._selectors:
                    selector.require_match(grads.parameters, grads.names, complete=False)
            self._known = key, self._place(grads)
        return self._known[1]

    def _place(self, grads: Gradients) -> list[int]:
        ids = [selector.ids() for selector in self._selectors]
        labels = list(self.members)
        places: list[int] = []
        doubled: dict[int, str] = {}
        left_out: dict[int, str] = {}
        for i, (parameter, names) in enumerate(zip(grads.parameters, self._names.of(grads), strict=True)):
            fitting = [
                k for k, s in enumerate(self._selectors) if id(parameter) in ids[k] or (s.patterns and s.fits(names))
            ]
            if len(fitting) > 1:
                name = grads.name(i).strip("`")
                doubled[id(parameter)] = f"{name} ({' and '.join(repr(labels[k]) for k in fitting)})"
            elif not fitting and self._open:
                left_out[id(parameter)] = grads.name(i).strip("`")
            places.append(fitting[0] if fitting else len(self._selectors))
        if doubled:
            raise InvalidValueError(
                f"{_count(doubled)} in two groups: {listed([*doubled.values()], MOST_NAMES)}. Make the groups "
                "disjoint ('body.*weight' and '*.bias' are; 'body' and '*.bias' are not), or put one Groups after "
                "another in a Chain."
            )
        if left_out:
            raise InvalidValueError(
                f"{_count(left_out)} in no group: {listed([*left_out.values()], MOST_NAMES)}. Give rest=None to exempt "
                "all others, or rest=a clipper for them."
            )
        return places


def _key(grads: Gradients) -> tuple[list[int], list[int], list[str] | None]:
    """Return the values that determine the group of each gradient."""
    return list(map(id, grads.parameters)), list(grads.positions), None if grads.names is None else list(grads.names)


def _label(selection: Selection, index: int) -> str:
    """Return the name of a group in results and states, equal in every run."""
    if isinstance(selection, str):
        return selection
    if isinstance(selection, Mapping) and isinstance(selection.get("name"), str):
        return selection["name"]
    if isinstance(selection, tuple) and all(isinstance(part, str) for part in selection):
        return ", ".join(cast("tuple[str, ...]", selection))
    return f"group {index}"


def _has_one_twice(clippers: Iterable[Clipper]) -> bool:
    leaves = [id(leaf) for clipper in clippers for leaf in clipper.leaves()]
    return len(set(leaves)) < len(leaves)


def _count(some: Mapping[int, str]) -> str:
    return "1 parameter is" if len(some) == 1 else f"{len(some)} parameters are"


def _any(flags: Sequence[Tensor], like: Tensor) -> Tensor:
    return _stacked(flags, like).any() if flags else like > like


def _stacked(scalars: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return scalars from several devices as one tensor on the device of ``like``."""
    return torch.stack([move(x, like.device) for x in scalars]) if scalars else like.new_zeros(0)
