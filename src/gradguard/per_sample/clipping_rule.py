"""The base class of clipping rules, and the check that every rule, a user's own too, keeps its bound."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gradguard.arguments import check_number, check_threshold
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.tensors.layout import HALVES, are_readable, wide_dtype

SLACK = 8 * torch.finfo(torch.float32).eps
"""Relative margin for rounding: norms may be up to 2e-7 too small, and factors and products are rounded to float32."""

TOLERANCE = 1e-6
"""Relative excess over a threshold that `checked_factors` still attributes to rounding."""

_FLOAT32 = torch.finfo(torch.float32)

RELATIONS = {"add_or_remove_one": 1.0, "replace_one": 2.0}


def slack_for(dtypes: set[torch.dtype]) -> float:
    """Return the relative margin for the rounding of norms, factors, products and the final gradients in ``dtypes``."""
    if dtypes <= {torch.float64, torch.complex128}:
        return 8 * torch.finfo(torch.float64).eps
    return SLACK + max([torch.finfo(dtype).eps / 2 for dtype in dtypes & set(HALVES)], default=0.0)


class NormClipper(ABC):
    r"""Base class of rules that map the norms :math:`n_i` of samples' gradients to factors :math:`c_i`.

    A rule states its ``thresholds``, and promises :math:`c_i n_i \le C`. `checked_factors` enforces this promise at
    every call of a rule that is not gradguard's, so such a rule needs no care about rounding, NaN or infinity. For
    private training a sample's factor must depend on its own norms alone.

    Guarantees (of gradguard's rules, and of any other after `checked_factors`):
        - With factors ``C / (norm * (1 + slack))``, the norm of ``factor * gradient`` is at most ``C``, although
          norms are measured, and products rounded, in float32. Thresholds below 1e-30 leave the range of float32:
          there, elements that underflow may exceed them.
        - A sample whose norm is NaN or infinite gets the factor 0.

    Attributes:
        groups: Lists of parameter names; the parameters of one group have one norm together. Every trained parameter
            must be in exactly one group. Empty means one group of all parameters. A rule with several groups sets them
            in `prepare`.
        slack: Relative margin for rounding; a clipper of half-precision gradients raises it by half their eps.
        names: The names of the trained parameters, in the order of the norms; set by `prepare`.

    Example:
        >>> class Normalize(NormClipper):
        ...     thresholds = [2.0]
        ...     def calc_clipping_factors(self, norms):
        ...         return [2.0 / (norms[0] + 1e-3)]
        >>> checked_factors(Normalize(), [torch.tensor([3.0, 1.0, float("nan")])])[0].round(decimals=3)
        tensor([0.6660, 1.9980, 0.0000], dtype=torch.float64)
    """

    groups: Sequence[Sequence[str]] = ()
    slack: float = SLACK
    names: tuple[str, ...] = ()

    @abstractmethod
    def calc_clipping_factors(self, norms: list[Tensor]) -> list[Tensor]:
        """Return one tensor of factors for each tensor of norms, of the same shape.

        Args:
            norms: float64 tensors ``[B]``, one for each of the ``groups``.
        """

    @property
    @abstractmethod
    def thresholds(self) -> list[float]:
        """Return the bound on the norm of each of the ``groups``, in their order."""

    def prepare(self, names: list[str]) -> None:
        """Store the names of the trained parameters, in the order of the norms; called before any norms."""
        self.names = tuple(names)

    def finish_step(self) -> None:  # noqa: B027 - most rules have nothing to do
        """End a logical step of any number of mini-batches."""

    def drop_step(self) -> None:  # noqa: B027 - most rules have nothing to do
        """Drop the mini-batches since the last step, because the clipper discarded them."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that changes during training; empty unless a subclass overrides this method."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check that the saved state is empty; a subclass with a state overrides this method to load it.

        Raises:
            InvalidValueError: If ``state_dict`` is not empty.
        """
        check_keys(self, state_dict, {})

    def sensitivity(self, relation: str) -> float:
        r"""Return the largest L2 change of the clipped *sum* by one sample: :math:`\sqrt{\sum_l C_l^2}`, or twice that.

        Args:
            relation: ``"add_or_remove_one"`` if a sample is added or removed; ``"replace_one"``, for twice the change,
                if another sample replaces it.

        Raises:
            InvalidValueError: If ``relation`` is neither.
        """
        if not isinstance(relation, str) or relation not in RELATIONS:
            raise InvalidValueError(f"relation={relation!r}: expected 'add_or_remove_one' or 'replace_one'.")
        return RELATIONS[relation] * math.hypot(*self.thresholds)

    def largest_factors(self, norms: Tensor, threshold: float) -> Tensor:
        """Return the largest factors, which may exceed 1, with which the norms stay within ``threshold``; see `SLACK`.

        A threshold of 0 gives the factor 0, and an infinite threshold gives infinity. A norm of 0 gives infinity; a NaN
        or infinite norm gives 0.
        """
        norms = norms.to(wide_dtype(norms.device))
        bound = torch.tensor(threshold / (1 + self.slack), dtype=norms.dtype, device="cpu")  # avoids a kernel launch
        factors = (bound / norms).nan_to_num_(0.0, torch.inf)
        # Round down to multiples of float32's smallest number, because a conversion to nearest could round up.
        if factors.dtype is torch.float64:
            factors.mul_(2.0**149).floor_().mul_(2.0**-149)
        return factors


def checked_factors(norm_clipper: NormClipper, norms: list[Tensor], apart: bool = False) -> list[Tensor]:
    """Return the factors of ``norm_clipper`` for ``norms``, after enforcing the rule's bound.

    Guarantees:
        - One detached float64 tensor ``[B]`` for each tensor of norms; 0 where a norm is NaN or infinite.
        - The bound includes all rounding, also for a rule that ignores rounding: factors are lowered to
          `NormClipper.largest_factors`.
        - On the CPU, a rule that exceeds its threshold by more than rounding is an error. On an accelerator, where
          reading values would be a host sync, the factor is lowered silently, and a negative or NaN factor becomes 0.

    Args:
        norm_clipper: Any rule.
        norms: float64 tensors ``[B]``; a rule that is not gradguard's gets copies.
        apart: Whether a sample's factor must depend on its own norms alone, as private training needs. Copies of a rule
            that is not gradguard's then compute factors for the samples at even places, for those at odd places, and
            for the sample of the smallest and of the largest norm alone. This reads the factors on the host.

    Returns:
        The factors.

    Raises:
        InvalidTypeError: If the rule returns anything but a list of real tensors.
        InvalidValueError: If the number, shape or device of the factors does not fit the norms; if the number of
            thresholds does not; or if a factor is NaN, negative, beyond float32, or takes a norm above its threshold.
            With ``apart``, if a sample gets another factor beside fewer others, or the rule cannot be copied.
    """
    formula = getattr(norm_clipper.calc_clipping_factors, "__func__", None)  # a subclass may override the formula
    is_own = getattr(formula, "__module__", "") == "gradguard.per_sample.norm_clippers"
    thresholds = _checked_thresholds(norm_clipper, len(norms))
    if is_own:
        return norm_clipper.calc_clipping_factors(norms)
    copied = _copied(norm_clipper) if apart else None
    found = norm_clipper.calc_clipping_factors([norm.clone() for norm in norms])
    _check_form(norm_clipper, found, norms)
    checked = []
    for part, (factors, norm, threshold) in enumerate(zip(found, norms, thresholds, strict=True)):
        wide = factors.detach().to(wide_dtype(norm.device)).masked_fill(~norm.isfinite(), 0)
        if are_readable(wide, norm):
            _check_values(norm_clipper, part, wide, norm, threshold)
        bound = norm_clipper.largest_factors(norm, threshold)
        checked.append(torch.where(wide > 0, torch.minimum(wide, bound), 0))
    if copied is not None and len(norms[0]):
        places = torch.arange(len(norms[0]), device=norms[0].device)
        for some in (places[::2], places[1::2], norms[0].argmin()[None], norms[0].argmax()[None]):
            if len(some):
                _check_apart(_copied(copied), [norm[some] for norm in norms], [factor[some] for factor in checked])
    return checked


def _copied(norm_clipper: NormClipper) -> NormClipper:
    try:
        return deepcopy(norm_clipper)
    except Exception as error:
        raise InvalidValueError(
            f"{_name(norm_clipper)} cannot be copied ({error}). Private training uses copies of a custom rule to check "
            "that a sample's factor depends on its own norms alone: give the rule a __deepcopy__ that leaves out the "
            "attributes that cannot be copied."
        ) from error


def _check_apart(norm_clipper: NormClipper, norms: list[Tensor], factors: list[Tensor]) -> None:
    """Check that a rule gives some samples of a batch the same factors without the others."""
    for apart, together in zip(checked_factors(norm_clipper, norms), factors, strict=True):
        off = (apart - together).abs() > TOLERANCE * together
        if off.any():
            i = int(off.nonzero()[0])
            raise InvalidValueError(
                f"{_name(norm_clipper)} gives a sample of norm {float(norms[0][i]):.4g} the factor "
                f"{float(together[i]):.4g} in this batch and {float(apart[i]):.4g} beside fewer others. In "
                "private training a factor must depend on the sample's own norms alone. Otherwise one sample changes "
                "the contributions of all others, and the sensitivity is larger than the thresholds say."
            )


def checked_groups(norm_clipper: NormClipper, names: Sequence[str]) -> list[list[str]]:
    """Return the groups of a rule, in the order of its norms.

    Args:
        norm_clipper: Any rule, after `NormClipper.prepare`.
        names: The names of the trained parameters.

    Raises:
        InvalidValueError: If some trained parameter is not in exactly one group; one in no group would not be clipped.
    """
    groups = [list(group) for group in norm_clipper.groups] or [list(names)]
    given = Counter(chain.from_iterable(groups))
    if given != Counter(names) or not all(groups):
        raise InvalidValueError(
            f"{_name(norm_clipper)}.groups: expected each trained parameter in exactly one group; missing: "
            f"{[*(Counter(names) - given)]}, not trained or in several: {[*(given - Counter(names))]}, empty groups: "
            f"{groups.count([])}."
        )
    return groups


def layer_of(name: str) -> str:
    """Return the name of the layer that a parameter belongs to: the module that holds it.

    The parameters that `torch.nn.utils.parametrize` holds for a module count as the module's own, so a linear layer
    with weight normalization is one layer.
    """
    holder = f".{name}".rpartition(".")[0]
    return f"{holder}.".partition(".parametrizations.")[0].strip(".")


def check_keys(norm_clipper: NormClipper, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that a saved state belongs to this kind of rule.

    Raises:
        InvalidValueError: If its keys differ from the expected ones.
    """
    if set(found) != set(expected):
        raise InvalidValueError(
            f"expected a state of {_name(norm_clipper)}, with the keys {sorted(expected)}, got {sorted(found)}: "
            f"was it saved by another rule?"
        )


def only(norm_clipper: NormClipper, norms: list[Tensor]) -> Tensor:
    """Return the single tensor of norms that a flat rule gets, in the wide dtype of norms.

    Raises:
        InvalidValueError: If ``norms`` does not contain exactly one tensor.
    """
    if len(norms) != 1:
        raise InvalidValueError(
            f"{_name(norm_clipper)} takes one norm of each sample, over all parameters: expected a list of 1 tensor, "
            f"got {len(norms)}. PerLayerNormClipper takes one tensor for each layer."
        )
    return norms[0].to(wide_dtype(norms[0].device))


def non_negative(name: str, value: float) -> float:
    """Return a threshold as a float, after `check_threshold`; infinity is a valid threshold."""
    return float(check_threshold(name, check_number(name, value)))


def in_range(name: str, value: float, low: float, high: float) -> float:
    """Return ``value`` as a float.

    Raises:
        InvalidValueError: If it is NaN or outside ``[low, high]``.
    """
    number = check_number(name, value)
    if not low <= number <= high:
        raise InvalidValueError(f"{name}={number}: expected a number from {low:.4g} to {high:.4g}.")
    return number


def _name(norm_clipper: NormClipper) -> str:
    return type(norm_clipper).__name__


def _check_form(norm_clipper: NormClipper, found: Any, norms: list[Tensor]) -> None:
    call = f"{_name(norm_clipper)}.calc_clipping_factors"
    _check_list(f"{call} returned", found, "tensors", len(norms))
    for part, (factors, norm) in enumerate(zip(found, norms, strict=True)):
        if not isinstance(factors, Tensor) or factors.is_complex():
            kind = factors.dtype if isinstance(factors, Tensor) else type(factors).__name__
            raise InvalidTypeError(f"{call} returned factors of {kind}: expected real tensors, like the norms.")
        if factors.shape != norm.shape or factors.device != norm.device:
            raise InvalidValueError(
                f"{call} returned factors {part} of shape {tuple(factors.shape)} on {factors.device}: expected "
                f"{tuple(norm.shape)} on {norm.device}, one factor for each sample, like the norms."
            )


def _check_list(where: str, found: Any, of: str, count: int) -> None:
    if not isinstance(found, list | tuple):
        raise InvalidTypeError(f"{where} {type(found).__name__}: expected a list of {count} {of}, like the norms.")
    if len(found) != count:
        raise InvalidValueError(f"{where} {len(found)} {of}: expected {count}, as many as norms.")


def _checked_thresholds(norm_clipper: NormClipper, count: int) -> list[float]:
    where, thresholds = f"{_name(norm_clipper)}.thresholds", norm_clipper.thresholds
    _check_list(f"{where} has", thresholds, "numbers", count)
    return [non_negative(f"{where}[{i}]", value) for i, value in enumerate(thresholds)]


def _check_values(norm_clipper: NormClipper, part: int, factors: Tensor, norm: Tensor, threshold: float) -> None:
    wrong = ~((factors >= 0) & (factors <= _FLOAT32.max))
    excess = factors * norm > threshold * (1 + TOLERANCE)
    if not bool((wrong | excess).any()):
        return
    sample = int((wrong | excess).nonzero()[0])
    factor, length = float(factors[sample]), float(norm[sample])
    group = norm_clipper.groups[part] if norm_clipper.groups else norm_clipper.names
    where = f"sample {sample}, group {part} of parameters, {[*group[:3]]}, with norm {length:.7g}"
    if wrong[sample]:
        raise InvalidValueError(
            f"{_name(norm_clipper)} gave the factor {factor:.7g} to {where}: expected a factor >= 0 in float32's range."
        )
    raise InvalidValueError(
        f"{_name(norm_clipper)} gave the factor {factor:.7g} to {where}. The clipped norm {factor * length:.7g} "
        f"exceeds thresholds[{part}]={threshold:.7g}: lower the factor, or state a higher threshold."
    )
