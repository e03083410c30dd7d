"""Rules that turn the norms of samples' gradients into factors: flat, per layer, per parameter, automatic, quantile."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.per_sample.clipping_rule import (
    NormClipper,
    check_keys,
    in_range,
    layer_of,
    non_negative,
    only,
)

_FLOAT32 = torch.finfo(torch.float32)


class FlatNormClipper(NormClipper):
    r"""Clip each sample's whole gradient to at most one norm: :math:`c_i = \min(1,\; C / n_i)`.

    ========================  ========================================
    edge case                 factor
    ========================  ========================================
    norm 0, or within C       exactly 1
    C infinite                1
    C = 0                     0, for a norm of 0 too
    norm NaN or infinite      0, whatever C
    norm above 8e37 C         rounded down: float32 has few digits there
    ========================  ========================================

    Args:
        max_norm: The threshold C, a number >= 0. Infinity clips nothing and only measures norms.

    Raises:
        InvalidValueError: If ``max_norm`` is NaN or negative.
        InvalidTypeError: If ``max_norm`` is not a number.

    Example:
        >>> clipper = FlatNormClipper(2.0)
        >>> clipper.calc_clipping_factors([torch.tensor([0.0, 1.0, 4.0, float("inf")])])[0].round(decimals=4)
        tensor([1.0000, 1.0000, 0.5000, 0.0000], dtype=torch.float64)
        >>> clipper.sensitivity("replace_one")
        4.0

    Reference: Abadi et al., Deep learning with differential privacy, 2016, arXiv 1607.00133.
    """

    def __init__(self, max_norm: float) -> None:
        self.max_norm = non_negative("max_norm", max_norm)

    def calc_clipping_factors(self, norms: list[Tensor]) -> list[Tensor]:
        """Return ``min(1, C / norm)``."""
        return [self.largest_factors(only(self, norms), self.max_norm).clamp_(max=1)]

    @property
    def thresholds(self) -> list[float]:
        """``max_norm``."""
        return [self.max_norm]


class _PartNormClipper(NormClipper):
    """Clip each part of a sample's gradient to a norm of its own; a subclass defines the parts.

    Args:
        max_norms: One number for all parts; or a list with one number for each part, in order; or a mapping from names
            of parts, or dotted beginnings of names, to numbers. The longest matching beginning counts.
    """

    _part: str
    _part_of: Callable[[str], str]

    def __init__(self, max_norms: float | Sequence[float] | Mapping[str, float]) -> None:
        self.max_norms = _each_max_norm(max_norms, self._part)
        self._parts: dict[str, list[str]] = {}

    def prepare(self, names: list[str]) -> None:
        """Group the trained parameters into parts.

        Raises:
            InvalidValueError: If ``max_norms`` does not fit the parts.
        """
        parts: dict[str, list[str]] = {}
        for name in names:
            parts.setdefault(self._part_of(name), []).append(name)
        self._chosen(parts)
        self._parts, self.groups = parts, list(parts.values())
        super().prepare(names)

    def calc_clipping_factors(self, norms: list[Tensor]) -> list[Tensor]:
        """Return ``min(1, C_l / norm)`` for each part."""
        if len(norms) != len(self.thresholds):
            raise InvalidValueError(f"expected norms of {len(self.thresholds)} {self._part}s, got {len(norms)}.")
        return [self.largest_factors(n, c).clamp_(max=1) for n, c in zip(norms, self.thresholds, strict=True)]

    @property
    def thresholds(self) -> list[float]:
        """The threshold of each part, in the order of the parts."""
        if not self.names:
            raise InvalidValueError("the thresholds depend on the trained parameters: call prepare(names) first.")
        return self._chosen(self._parts)

    def _chosen(self, parts: dict[str, list[str]]) -> list[float]:
        if isinstance(self.max_norms, dict):
            covering = {part: [key for key in self.max_norms if _is_within(part, key)] for part in parts}
            missing = [part for part, keys in covering.items() if not keys]
            unknown = [key for key in self.max_norms if not any(_is_within(part, key) for part in parts)]
            if missing or unknown:
                raise InvalidValueError(
                    f"max_norms: expected names of {self._part}s, or dotted beginnings of names, that cover each "
                    f"trained {self._part}; missing: {missing}, not of a trained {self._part}: {unknown}. A tied "
                    "parameter belongs to the first module that holds it; PerParameterNormClipper takes the names of "
                    "parameters."
                )
            return [self.max_norms[max(keys, key=len)] for keys in covering.values()]
        if not isinstance(self.max_norms, list):
            return [self.max_norms] * len(parts)
        if len(parts) != len(self.max_norms):
            raise InvalidValueError(
                f"max_norms has {len(self.max_norms)} numbers for {len(parts)} trained {self._part}s "
                f"({', '.join(map(repr, parts))}): expected one number for each, or a single number for all, not in a "
                "list."
            )
        return list(self.max_norms)


class PerLayerNormClipper(_PartNormClipper):
    r"""Clip each layer's part of a sample's gradient to a norm of its own: :math:`c_{il} = \min(1, C_l / n_{il})`.

    A layer consists of the parameters that one module holds itself, such as its weight and bias. A tied parameter
    belongs to the first module that holds it. The norm of the whole gradient is at most :math:`\sqrt{\sum_l C_l^2}`,
    or :math:`C\sqrt{L}` where all L layers have one threshold C. To bound the whole gradient by C, pass
    ``C / L ** 0.5``. Edge cases are those of `FlatNormClipper`, for each layer.

    Args:
        max_norms: One number for all layers; or a list with one number for each layer, in the order of the model; or a
            mapping from modules' names, or dotted beginnings of names, to numbers. The longest matching beginning
            counts: ``{"encoder": 0.5, "encoder.head": 1.0}``. ``""`` matches every name.

    Raises:
        InvalidValueError: If a number is NaN or negative, or ``max_norms`` is empty.
        InvalidTypeError: If a threshold is not a number, or a key is not a string.

    Example:
        >>> clipper = PerLayerNormClipper({"0": 3.0, "2": 4.0})
        >>> clipper.prepare(["0.weight", "0.bias", "2.weight", "2.bias"])
        >>> [factors.tolist() for factors in clipper.calc_clipping_factors([torch.ones(2), torch.zeros(2)])]
        [[1.0, 1.0], [1.0, 1.0]]
        >>> clipper.sensitivity("add_or_remove_one")
        5.0

    Reference: McMahan et al., Learning differentially private recurrent language models, 2018, arXiv 1710.06963.
    """

    _part = "layer"
    _part_of = staticmethod(layer_of)


class PerParameterNormClipper(_PartNormClipper):
    r"""Clip each parameter's part of a sample's gradient to a norm of its own: :math:`c_{ip} = \min(1, C_p / n_{ip})`.

    Unlike `PerLayerNormClipper`, this rule clips a weight and its bias separately. The norm of the whole gradient is
    at most :math:`\sqrt{\sum_p C_p^2}`.

    Args:
        max_norms: One number for all parameters; or a list with one number for each trained parameter, in the order of
            the model; or a mapping from their names, or dotted beginnings of names, to numbers. The longest matching
            beginning counts.

    Raises:
        InvalidValueError: If a number is NaN or negative, or ``max_norms`` is empty.
        InvalidTypeError: If a threshold is not a number, or a key is not a string.

    Example:
        >>> clipper = PerParameterNormClipper({"weight": 3.0, "bias": 4.0})
        >>> clipper.prepare(["weight", "bias"])
        >>> clipper.sensitivity("add_or_remove_one")
        5.0
    """

    _part = "parameter"
    _part_of = staticmethod(str)


class AutoNormClipper(NormClipper):
    r"""Normalise each sample's gradient to a norm below C, near C unless the gradient is small (AUTO-S).

    .. math:: c_i = C / (n_i + \gamma)

    No threshold needs tuning: C only scales the learning rate. A clipped norm is :math:`C n_i / (n_i + \gamma) < C`.
    **Factors exceed 1** where :math:`n_i < C - \gamma`: small gradients grow, by :math:`C / \gamma` at most.
    Edge cases: a norm of 0 gives the factor :math:`C / \gamma`; a NaN or infinite norm gives 0; C = 0 gives 0.

    Args:
        max_norm: C, a finite number >= 0.
        gamma: The stability constant :math:`\gamma`, a finite number > 0. Gradients much smaller than it keep their
            relative sizes.

    Raises:
        InvalidValueError: If ``max_norm`` or ``gamma`` is outside its range, or their ratio outside float32.
        InvalidTypeError: If an argument is not a number.

    Example:
        >>> AutoNormClipper(gamma=0.5).calc_clipping_factors([torch.tensor([0.0, 0.5, 3.5])])[0].round(decimals=4)
        tensor([2.0000, 1.0000, 0.2500], dtype=torch.float64)

    Reference: Bu, Wang, Zha, Karypis, Automatic clipping, 2022, arXiv 2206.07136.
    """

    def __init__(self, max_norm: float = 1.0, gamma: float = 0.01) -> None:
        self.max_norm = in_range("max_norm", max_norm, 0.0, _FLOAT32.max)
        self.gamma = in_range("gamma", gamma, _FLOAT32.tiny, _FLOAT32.max)
        in_range("max_norm / gamma", self.max_norm / self.gamma, 0.0, _FLOAT32.max)

    def calc_clipping_factors(self, norms: list[Tensor]) -> list[Tensor]:
        """Return ``C / (norm + gamma)``."""
        return [self.largest_factors(only(self, norms) + self.gamma, self.max_norm)]

    @property
    def thresholds(self) -> list[float]:
        """``max_norm``."""
        return [self.max_norm]


class QuantileNormClipper(NormClipper):
    r"""Clip each sample's whole gradient at a threshold that follows a quantile of the norms.

    All mini-batches of a logical step use one C. After the step,

    .. math::
        C \leftarrow C \exp(-\eta (b - \gamma)), \qquad
        b = \tfrac12 + \tfrac1m \Bigl(\sum_i \bigl(1[n_i \le C] - \tfrac12\bigr) + N(0, \sigma_b^2)\Bigr),

    limited to ``[min_max_norm, max_max_norm]``. m is ``expected_batch_size`` if set; otherwise it is the number of
    samples, and b is the fraction of norms within C, plus noise. Edge cases of the factors are those of
    `FlatNormClipper`. A non-finite norm counts as above C. A step without samples leaves C unchanged, unless
    ``expected_batch_size`` is set.

    **Privacy.** With ``count_noise=0`` the threshold is **not private**, whatever noise the gradients get. Otherwise
    the count spends budget: one sample changes the sum of halves by 1/2. Noise of :math:`z_\Delta C` on the sum of
    gradients and :math:`\sigma_b` on the count together cost as much as noise of :math:`z C` on the gradients alone,
    where

    .. math:: z_\Delta = \bigl(z^{-2} - (2 \sigma_b)^{-2}\bigr)^{-1/2}.

    This holds for both relations if z is counted in thresholds C (`noise_multiplier_for_gradients`). Account for z,
    and add noise of :math:`z_\Delta C`. The paper proposes :math:`\sigma_b = m / 20`. Under Poisson sampling the number
    of samples is itself private: set ``expected_batch_size``. The rule counts the samples of its own process only: in
    a distributed run the thresholds of the processes would differ.

    Args:
        initial_max_norm: C in the first step.
        target_quantile: :math:`\gamma`, the fraction of norms within C, from 0 to 1.
        learning_rate: :math:`\eta \ge 0`.
        count_noise: :math:`\sigma_b \ge 0`, the standard deviation of the noise on the count.
        min_max_norm: The smallest C, > 0.
        max_max_norm: The largest C, finite.
        generator: Source of the count's noise, for repeatable runs. Without one, the noise comes from the operating
            system's generator, which ``torch.manual_seed`` does not affect. `state_dict` contains its state.

    Raises:
        InvalidValueError: If a number is outside its range.
        InvalidTypeError: If an argument is not a number.

    Attributes:
        max_norm: The present threshold C.

    Example:
        >>> clipper = QuantileNormClipper(1.0, target_quantile=0.75, learning_rate=1.0)
        >>> factors = clipper.calc_clipping_factors([torch.tensor([0.5, 2.0, 3.0, 4.0])])
        >>> clipper.finish_step()  # a quarter was within 1, and three quarters should be
        >>> round(clipper.max_norm, 3)  # exp(0.5)
        1.649

    Reference: Andrew, Thakkar, McMahan, Ramaswamy, Differentially private learning with adaptive clipping, 2021,
    arXiv 1905.03871.
    """

    def __init__(
        self,
        initial_max_norm: float,
        target_quantile: float = 0.5,
        learning_rate: float = 0.2,
        count_noise: float = 0.0,
        min_max_norm: float = 1e-8,
        max_max_norm: float = 1e8,
        generator: torch.Generator | None = None,
    ) -> None:
        self.min_max_norm = in_range("min_max_norm", min_max_norm, _FLOAT32.tiny, _FLOAT32.max)
        self.max_max_norm = in_range("max_max_norm", max_max_norm, self.min_max_norm, _FLOAT32.max)
        self.max_norm = in_range("initial_max_norm", initial_max_norm, self.min_max_norm, self.max_max_norm)
        self.target_quantile = in_range("target_quantile", target_quantile, 0.0, 1.0)
        self.learning_rate = in_range("learning_rate", learning_rate, 0.0, _FLOAT32.max)
        self.count_noise = in_range("count_noise", count_noise, 0.0, _FLOAT32.max)
        self.generator = generator
        self._expected_batch_size: float | None = None
        self._within: Tensor | int = 0
        self._samples = 0
        self.steps = 0

    @property
    def expected_batch_size(self) -> float | None:
        """The mean number of samples in a logical step, > 0; None stands for the actual number of each step."""
        return self._expected_batch_size

    @expected_batch_size.setter
    def expected_batch_size(self, size: float | None) -> None:
        known = None if size is None else in_range("expected_batch_size", size, _FLOAT32.tiny, _FLOAT32.max)
        self._expected_batch_size = known

    @property
    def thresholds(self) -> list[float]:
        """``max_norm``, the same for all mini-batches of a logical step."""
        return [self.max_norm]

    def calc_clipping_factors(self, norms: list[Tensor]) -> list[Tensor]:
        """Return ``min(1, C / norm)``, and count the norms for `finish_step`; call this once for each mini-batch."""
        norm = only(self, norms)
        self._within = self._within + (norm <= self.max_norm).sum()
        self._samples += norm.numel()
        return [self.largest_factors(norm, self.max_norm).clamp_(max=1)]

    def finish_step(self) -> None:
        """Move the threshold to follow the quantile; on an accelerator this makes one host sync, for the count."""
        self.steps += 1
        centred = int(self._within) - self._samples / 2 + self._noise()
        size = self._samples if self.expected_batch_size is None else self.expected_batch_size
        self._within, self._samples = 0, 0
        if not size:
            return
        exponent = self.learning_rate * (self.target_quantile - 0.5 - centred / size)
        moved = self.max_norm * math.exp(min(max(exponent, -700.0), 700.0))  # exp raises on overflow
        self.max_norm = min(max(moved, self.min_max_norm), self.max_max_norm)

    def drop_step(self) -> None:
        """Drop the norms that were counted since the last step; the threshold stays."""
        self._within, self._samples = 0, 0

    def noise_multiplier_for_gradients(self, noise_multiplier: float) -> float:
        """Return the noise multiplier of the gradients that, with the noise on the count, costs ``noise_multiplier``.

        Args:
            noise_multiplier: z, the number for the accountant, counted in thresholds C (not 2 C, for "replace_one").

        Raises:
            InvalidValueError: If ``count_noise <= z / 2``: the count alone would then spend more than z allows.
        """
        z = in_range("noise_multiplier", noise_multiplier, 0.0, _FLOAT32.max)
        if z == 0:
            return 0.0
        if z >= 2 * self.count_noise:
            raise InvalidValueError(
                f"count_noise={self.count_noise} spends more than noise_multiplier={z} allows, so no noise on the "
                f"gradients can make up for it: expected count_noise above {z / 2}."
            )
        return z / math.sqrt(1 - (z / (2 * self.count_noise)) ** 2)

    def state_dict(self) -> dict[str, Any]:
        """Return the threshold, the count so far, and the generator's state or None."""
        state = {"max_norm": self.max_norm, "within": int(self._within), "samples": self._samples}
        return {**state, "generator": None if self.generator is None else self.generator.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned; a saved generator state is loaded if this rule has a generator."""
        check_keys(self, state_dict, self.state_dict())
        max_norm = in_range("the saved max_norm", state_dict["max_norm"], self.min_max_norm, self.max_max_norm)
        if self.generator is not None and state_dict["generator"] is not None:
            self.generator.set_state(state_dict["generator"])
        self.max_norm = max_norm
        self._within, self._samples = int(state_dict["within"]), int(state_dict["samples"])

    def _noise(self) -> float:
        if not self.count_noise:
            return 0.0
        if self.generator is None:
            return random.SystemRandom().normalvariate(0.0, self.count_noise)
        device = self.generator.device
        return self.count_noise * float(torch.randn((), generator=self.generator, device=device, dtype=torch.float64))


def _is_within(layer: str, beginning: str) -> bool:
    """Return whether ``layer`` equals ``beginning`` or starts with it and a dot; ``""`` matches every name."""
    return not beginning or f"{layer}.".startswith(f"{beginning}.")


def _each_max_norm(max_norms: Any, part: str) -> float | list[float] | dict[str, float]:
    if hasattr(max_norms, "__float__") and not getattr(max_norms, "ndim", 0):
        return non_negative("max_norms", max_norms)
    each: list[float] | dict[str, float]
    if isinstance(max_norms, Mapping):
        for name in max_norms:
            if not isinstance(name, str):
                raise InvalidTypeError(
                    f"max_norms: expected names of {part}s as keys, got {name!r}, of type {type(name).__name__}."
                )
        each = {name: non_negative(f"max_norms[{name!r}]", value) for name, value in max_norms.items()}
    elif isinstance(max_norms, Sequence) and not isinstance(max_norms, str | bytes):
        each = [non_negative(f"max_norms[{i}]", value) for i, value in enumerate(max_norms)]
    else:
        raise InvalidTypeError(
            f"max_norms={max_norms!r}: expected one number, a list with one for each {part}, or a mapping from names, "
            f"got {type(max_norms).__name__}."
        )
    if not each:
        raise InvalidValueError(f"max_norms is empty: expected one number for each trained {part}.")
    return each
