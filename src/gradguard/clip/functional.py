"""Clipping by norm and by value as functions, drop-ins for `torch.nn.utils`."""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from gradguard.arguments import check_interval, check_order, check_threshold
from gradguard.clip.adaptive import ClipAdaptive, selector_of
from gradguard.clip.clip_rules import ClipByGlobalNorm, ClipByValue
from gradguard.clip.clipper import ClipResult
from gradguard.clip.gradients import (
    Parameters,
    gradients_among,
    gradients_of,
    local_gradients,
    module_of,
    named_tensors,
    norm_in,
    norms_in,
    refuse_nonfinite_in,
    refused_by_name,
    to_clip_by,
)
from gradguard.clip.selection import Selection
from gradguard.distributed.reduction_group import Stages
from gradguard.errors import InvalidValueError
from gradguard.listeners import ClipEvent, announce, is_heard, tell
from gradguard.policies import NonFinitePolicy, check_policy
from gradguard.tensors.layout import coalesce_, public_dtype
from gradguard.tensors.nonfinite import zero_if_nonfinite_
from gradguard.tensors.norms import norm_of_norms, total_norm
from gradguard.tensors.scaling import clamp_, clip_coefficient, scale_
from gradguard.tensors.tensor_admission import keeping_subnormals


@keeping_subnormals
def clip_grad_norm_(
    parameters: Parameters,
    max_norm: float | Tensor,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    nonfinite: NonFinitePolicy | None = None,
    process_group: Any = None,
    mesh: Any = None,
    shared: Any = None,
) -> Tensor:
    r"""Scale all gradients together so that their norm is at most ``max_norm``, in place; return the norm before.

    .. math:: g \leftarrow g \cdot \min\Bigl(1, \frac{m}{\lVert g \rVert_p + 10^{-6}}\Bigr), \qquad
              \lVert g \rVert_p = \Bigl(\sum_i |g_i|^p\Bigr)^{1/p} \text{ over all gradients as one vector}

    A drop-in for `torch.nn.utils.clip_grad_norm_`: the same result to rounding wherever that is right.

    **Guarantees.** The norm is accumulated in at least float32 whatever the dtype and is right to 2e-6, without
    overflow or underflow of the powers. Arguments are checked before any gradient changes. On the CPU, a clip that
    does not bind writes nothing. On an accelerator there is no host sync, unless ``nonfinite="raise"`` requires one or
    the list also holds CPU gradients.

    **Edge cases.**

    =========================================================  =========================================================
    input                                                      result
    =========================================================  =========================================================
    no gradients, or all empty                                 0, nothing changed; an exhausted generator also warns
    the same parameter twice, tied                             counted and scaled once
    ``max_norm=inf``                                           the norm is returned and nothing is written, even if it
                                                               is not finite
    ``max_norm=0``                                             gradients become 0
    NaN or inf among the gradients                             handled by the ``nonfinite`` policy
    float16 norm beyond 65,504                                 right: the norm is float32, the coefficient is applied in
                                                               float32
    sparse (COO)                                               the norm is that of the coalesced gradient
    complex                                                    moduli
    several devices                                            one partial norm for each, then one copy
    DTensors, also on several meshes, beside plain tensors     one true norm, in one all-reduce; every process of the
                                                               meshes must call, also one without gradients; plain
                                                               tensors are equal on all of them
    Partial gradients                                          reduced first, in place (one more collective for each)
    =========================================================  =========================================================

    Args:
        parameters: A module, a tensor, an iterable of tensors or of ``(name, tensor)`` pairs, or a mapping from name
            to tensor. Tensors whose ``.grad`` is None are skipped.
        max_norm: m, at least 0. A 0-dim tensor stays on its device, so a schedule needs no host sync.
        norm_type: p, above 0 or ``float("inf")``.
        error_if_nonfinite: PyTorch's name for ``nonfinite="raise"``.
        foreach: Accepted so that calls written for PyTorch keep working. The fastest exact path is always taken.
        nonfinite: ``"propagate"`` (default, PyTorch's: one NaN makes every gradient NaN), ``"raise"`` (name the
            parameters, change nothing) or ``"zero"`` (all gradients of the step become 0).
        process_group: The process group along which parameters differ, as they do between pipeline stages. Parameters
            that are sharded or replicated the same way on every process need none of these three arguments.
        mesh: The group as a device mesh of one dimension, such as ``mesh["pp"]``.
        shared: Weights that several of those stages hold, such as a tied embedding, as a mapping from a name that is
            the same on all stages to the parameter. They count once. Their gradients must be equal already.

    Returns:
        The norm before clipping: 0-dim, float32 (float64 if any gradient is float64).

    Raises:
        InvalidValueError: If ``max_norm`` is negative or NaN, ``norm_type`` is not above 0, or the policy is unknown.
        InvalidTypeError: If ``parameters`` or ``max_norm`` has another type.
        NonFiniteGradientError: Under ``nonfinite="raise"``, if a gradient holds NaN or infinity.
        DistributedError: If processes that hold parts of the gradients do not clip together, or clip other lists.

    Example:
        >>> import gradguard as gg, torch
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> gg.clip_grad_norm_(layer, max_norm=1.0)
        tensor(5.)
        >>> layer.weight.grad
        tensor([[0.6000, 0.8000]])

    Reference:
        Pascanu, Mikolov, Bengio (2013), On the difficulty of training recurrent neural networks, arXiv 1211.5063.
    """
    del foreach
    max_norm, order = check_threshold("max_norm", max_norm), check_order(norm_type)
    if error_if_nonfinite and nonfinite not in (None, "raise"):
        raise InvalidValueError(
            f'error_if_nonfinite=True means nonfinite="raise", but nonfinite={nonfinite!r} was given: leave one out.'
        )
    policy = "raise" if error_if_nonfinite else check_policy(nonfinite or "propagate")
    names, tensors = named_tensors(parameters, "parameters")
    stages, module = Stages.named(process_group, mesh, shared), module_of(parameters)
    grads = to_clip_by(gradients_of(names, tensors, stages, module), "clip_grad_norm_", max_norm, order, policy)
    heard = is_heard()
    if heard:
        announce(tensors)
    with refused_by_name(grads):
        norm = norm_in(grads, order)
    if policy == "raise":
        refuse_nonfinite_in(grads, norm)
    coefficient = clip_coefficient(norm, max_norm)
    if isinstance(max_norm, Tensor) or not math.isinf(max_norm):
        scale_(grads.gradients, coefficient)
    if policy == "zero":
        zero_if_nonfinite_(norm, grads.gradients)
    if heard:
        tell(ClipEvent("norm", grads.parameters, max_norm, norm, coefficient, norm_type=order))
    return norm.to(public_dtype(grads.gradients))


@keeping_subnormals
def get_total_norm(
    tensors: Parameters,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    r"""Return the p-norm of all ``tensors`` as one vector; nothing is ever written.

    .. math:: \lVert x \rVert_p = \Bigl(\sum_i |x_i|^p\Bigr)^{1/p}

    A drop-in for `torch.nn.utils.get_total_norm`, with the accuracy of `clip_grad_norm_`: use it to log.

    **Edge cases.** No tensors, or only empty ones, give 0. ``None`` entries are skipped, so
    ``[p.grad for p in model.parameters()]`` works. The same tensor twice counts once. NaN gives NaN; inf gives inf.
    DTensors give one true norm in one all-reduce. The ``None`` entries may differ between processes, but each process
    must have an entry on the widest mesh. A Partial entry that is None on some processes is refused: a list of
    gradients does not show the layout of a missing one. Parameters do, so
    ``clip_grad_norm_(parameters, float("inf"))`` measures such gradients.

    Args:
        tensors: The gradients themselves (or any tensors): one, an iterable, ``(name, tensor)`` pairs or a mapping.
        norm_type: p, above 0 or ``float("inf")``.
        error_if_nonfinite: Raise, naming the tensors, if any element is NaN or infinite.
        foreach: Accepted so that calls written for PyTorch keep working. The fastest exact path is always taken.

    Returns:
        0-dim, float32 (float64 if any tensor is float64).

    Raises:
        InvalidValueError: If ``norm_type`` is not above 0.
        InvalidTypeError: If ``tensors`` has another type; a module has parameters *and* gradients, so pass one of them.
        NonFiniteGradientError: Under ``error_if_nonfinite``.
        DistributedError: If processes that hold parts of the tensors do not call together, or lack a Partial one.

    Example:
        >>> import gradguard as gg, torch
        >>> gg.get_total_norm([torch.tensor([3.0]), torch.tensor([4.0])])
        tensor(5.)
    """
    del foreach
    order = check_order(norm_type)
    grads = gradients_among(tensors, order)
    with refused_by_name(grads):
        norms = None if grads.reduction is None else norms_in(grads, order)
        norm = total_norm(grads.gradients, order) if norms is None else norm_of_norms(norms, order)
    if error_if_nonfinite:
        refuse_nonfinite_in(grads, norm, norms)
    return norm.to(public_dtype(grads.gradients))


@keeping_subnormals
def clip_grad_value_(
    parameters: Parameters,
    clip_value: float | Tensor,
    foreach: bool | None = None,
    *,
    min_value: float | None = None,
    nonfinite: NonFinitePolicy = "propagate",
) -> None:
    r"""Clamp every element of every gradient to ``[-clip_value, clip_value]``, in place.

    .. math:: g_i \leftarrow \max(\min(g_i, c), -c), \qquad \text{or to } [\text{min\_value}, c]

    A drop-in for `torch.nn.utils.clip_grad_value_`. Unlike the norm rule it changes the direction of the gradient.

    **Guarantees.** One pass over memory. On the CPU nothing is written if nothing exceeds the bounds.

    **Edge cases.**

    ================================  ==========================================================================
    input                             result
    ================================  ==========================================================================
    NaN, inf                          under ``"propagate"`` NaN stays and inf becomes the bound, as in PyTorch;
                                      the other policies measure before anything is clamped
    a bound beyond the dtype's range  the dtype's largest finite number
    sparse (COO)                      coalesced in place, then clamped
    complex                           real and imaginary parts are clamped separately
    no gradients, or all empty        nothing happens
    DTensors                          each process clamps its part; only the other policies reduce a norm
    Partial gradients                 reduced first, by all processes of their mesh: each must have them
    ================================  ==========================================================================

    Args:
        parameters: As for `clip_grad_norm_`.
        clip_value: c: the upper bound, and without ``min_value`` the negated lower one (then at least 0).
        foreach: Accepted so that calls written for PyTorch keep working. The fastest exact path is always taken.
        min_value: Lower bound, if it is not ``-clip_value``; at most ``clip_value``.
        nonfinite: ``"propagate"``, ``"raise"`` or ``"zero"``, as for `clip_grad_norm_`.

    Raises:
        InvalidValueError: If a bound is NaN, the bounds are in the wrong order, or the policy is unknown.
        InvalidTypeError: If an argument has another type.
        NonFiniteGradientError: Under ``nonfinite="raise"``, if a gradient holds NaN or infinity.
        DistributedError: If processes that hold parts of the gradients do not clip together.

    Example:
        >>> import gradguard as gg, torch
        >>> layer = torch.nn.Linear(2, 1, bias=False)
        >>> layer.weight.grad = torch.tensor([[3.0, -0.5]])
        >>> gg.clip_grad_value_(layer, 1.0)
        >>> layer.weight.grad
        tensor([[ 1.0000, -0.5000]])

    Reference:
        Mikolov (2012), Statistical language models based on neural networks, PhD thesis.
    """
    del foreach
    low, high = check_interval(min_value, clip_value, ("min_value", "clip_value"))
    policy = check_policy(nonfinite)
    names, tensors = named_tensors(parameters, "parameters")
    if policy == "propagate":  # a clamp of one element depends on no other
        grads, norm = local_gradients(names, tensors, module_of(parameters)), torch.zeros((), device="cpu")
    else:
        grads = gradients_of(names, tensors, module=module_of(parameters))
        grads = to_clip_by(grads, "clip_grad_value_", low, high, policy)
        with refused_by_name(grads):
            norm = norm_in(grads)
    heard = is_heard()
    if heard:
        announce(tensors)
    with refused_by_name(grads):
        if policy == "raise":
            refuse_nonfinite_in(grads, norm)
        if any([gradient.layout is not torch.strided for gradient in grads.gradients]):
            for gradient in grads.gradients:
                coalesce_(gradient)  # a duplicate index would store an element as several values
        clamp_(grads.gradients, low, high)
        if policy == "zero":
            zero_if_nonfinite_(norm, grads.gradients)
    if heard:
        tell(ClipEvent("value", grads.parameters, clip_value))


def apply_gradient_clipping(
    model: Parameters,
    clipping_type: Literal["norm", "value", "adaptive"],
    clipping_threshold: float,
    *,
    exclude: Selection = (),
    nonfinite: NonFinitePolicy = "propagate",
) -> ClipResult:
    """Clip all gradients of ``model`` by one of the three rules, in place, and return a `ClipResult`.

    Args:
        model: As ``parameters`` of `clip_grad_norm_`; a module gives `clip_grad_adaptive_` the right units.
        clipping_type: ``"norm"`` (`clip_grad_norm_` with the 2-norm), ``"value"`` (`clip_grad_value_`) or
            ``"adaptive"`` (`clip_grad_adaptive_`).
        clipping_threshold: The threshold of that rule, at least 0.
        exclude: Parameters that ``"adaptive"`` leaves unclipped, as for `clip_grad_adaptive_`; an error for the others.
        nonfinite: ``"propagate"``, ``"raise"`` or ``"zero"``, as for `clip_grad_norm_`.

    Returns:
        The norm before the clip, the norm of each tensor, and whether and by how much the clip changed the gradients.

    Raises:
        InvalidValueError: If the type or the policy is unknown, or the threshold is negative or NaN.
        InvalidTypeError: If an argument has another type.
        NonFiniteGradientError: Under ``nonfinite="raise"``, if a gradient holds NaN or infinity.
        DistributedError: If processes that hold parts of the gradients do not clip together.

    Example:
        >>> import gradguard as gg, torch
        >>> model = torch.nn.Linear(4, 2)
        >>> model(torch.ones(3, 4)).sum().backward()
        >>> result = gg.apply_gradient_clipping(model, "value", 0.5)
        >>> bool(result.clipped)
        True

    Reference:
        MosaicML Composer (2021), the GradientClipping algorithm.
    """
    if clipping_type not in ("norm", "value", "adaptive"):
        raise InvalidValueError(f"clipping_type={clipping_type!r}: expected 'norm', 'value' or 'adaptive'.")
    policy = check_policy(nonfinite)
    threshold = check_threshold("clipping_threshold", clipping_threshold)
    if clipping_type != "adaptive" and selector_of(exclude) is not None:
        raise InvalidValueError(
            f"exclude= requires clipping_type='adaptive', but this is {clipping_type!r}: use gradguard.Groups to "
            "exempt parameters from another rule."
        )
    if clipping_type == "adaptive":
        clipper = ClipAdaptive(threshold, exclude=exclude)
    else:
        clipper = ClipByGlobalNorm(threshold) if clipping_type == "norm" else ClipByValue(threshold)
    return clipper.for_one_step()(model, nonfinite=policy)
