"""`error_clip`: the block within which gradients are clipped on their way."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

from torch import Tensor, nn

from gradguard.backward_clip.backward_graph import raise_if_freed
from gradguard.backward_clip.error_clip_rules import BaseErrorClip, ErrorClipNonfinite
from gradguard.backward_clip.hooks import Clipping
from gradguard.backward_clip.scopes import LossScale, LossScope, Scope, Target, TargetScope, active
from gradguard.backward_clip.statistics import BlockCounts, ErrorClipStats
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.listeners import changing_on_the_way


@contextmanager
def error_clip(
    target: Target | Iterable[Target],
    rule: BaseErrorClip | None,
    *,
    leaves: bool = False,
    scale: LossScale | None = None,
    stats: ErrorClipStats | None = None,
) -> Iterator[None]:
    r"""Clip the gradient of every intermediate value while a backward runs inside the block.

    .. math:: g_v \leftarrow \text{rule}\Bigl(\sum_{w \text{ uses } v} (\partial w / \partial v)^\top g_w\Bigr)
              \quad\text{before the backward of the operation that made } v

    It helps where gradients overflow or explode *on their way*, which clipping parameter gradients afterwards cannot
    undo; it bounds no parameter gradient, so use it with `clip_grad_norm_`.

    **What is clipped** is the gradient of each intermediate value, accumulated over all operations that use the value,
    once, before the backward of the operation that made it. Not clipped are the root (the loss's own 1, the loss scale,
    or the ``gradient=`` that you pass), the scalar terms of a loss that is their sum with constant weights, and leaves,
    unless ``leaves``. A chain of views and casts of a leaf, such as ``weight.t()``, a shard's split or autocast's copy,
    counts as the leaf. A value is the output of one autograd node: a fused attention, an RNN of cuDNN, a custom
    function and a compiled block have one each.

    **Order.** Your tensor hooks see gradients before the clip, and the gradient that they return is clipped;
    ``retain_grad`` and ``backward(inputs=[h])`` give the gradient before the clip at h; full backward hooks of modules,
    DDP, FSDP and the optimizer see clipped gradients.

    **Scopes.** ``target`` may be a module, for the values that its forward makes inside the block, its outputs included
    (a 0-dim output is taken for the loss); or a list of tensors, for these values and no others. Each value has one
    rule: that of the block for chosen tensors before that for a module before that for a whole graph, and among
    blocks of one kind the innermost. A rule of ``None`` leaves a scope alone.

    **Guarantees.**

    - Each intermediate value has one rule, and its accumulated gradient is clipped once in each backward.
    - Gradients of parameters and inputs are clipped only under ``leaves=True``.
    - The loss's own gradient, a loss scale and a ``gradient=`` of yours are never clipped.
    - With a loss scale, and in float16, an overflow stays visible as NaN.
    - A backward that the block cannot clip in full raises an error: a reentrant checkpoint, a loss that comes straight
      out of compiled code, a module that no backward passed through.
    - Nothing stays attached after the block, also after an error.

    **Edge cases.**

    ===============================  ===========================================================================
    input                            result
    ===============================  ===========================================================================
    ``retain_graph``, two backwards  both are clipped
    ``create_graph=True``            the clip is differentiated, as `torch.clamp` is
    activation checkpointing         as without it; reentrant ones (``use_reentrant=True``) are refused
    float16, or ``scale=``           what is not finite becomes NaN, so that a GradScaler backs off
    sparse gradient of a value       refused, naming the operation
    compiled block in the graph      its outputs' gradients are clipped; for its inside see `attach_error_clip`
    compiled autograd                as without it
    ``torch.func.grad``              its backward runs behind the block: use `attach_error_clip` in the function
    threads                          each has blocks of its own; the backward may run in any thread
    ===============================  ===========================================================================

    Args:
        target: The loss, for the whole graph behind it; a module; or a list of tensors and modules.
        rule: The rule for each gradient: `ErrorClipByValue`, another rule, or a subclass of `BaseErrorClip`.
        leaves: Also clip the gradients of parameters and inputs, before they are accumulated (not for a list of
            tensors, which may have parameters among them).
        scale: The loss scale, as a GradScaler, a number or a tensor: thresholds are in units of the unscaled loss.
        stats: Counts what happens; see `ErrorClipStats`.

    Yields:
        Nothing.

    Raises:
        InvalidValueError: If the loss has no graph, or one that is compiled altogether or holds a reentrant checkpoint,
            or nothing differentiable, or no backward, passed through a module in the block.
        InvalidTypeError: If ``target``, ``rule`` or ``stats`` is of another type, or the rule returns something that
            the backward cannot go on with.
        UnsupportedGradientError: If a gradient is sparse.
        FreedGraphError: If the backward goes through a graph that an earlier one has freed.
        RuntimeError: If PyTorch raises it in the block.

    Example:
        >>> import gradguard as gg, torch
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> loss = (10 * x).square().sum()
        >>> with gg.error_clip(loss, gg.ErrorClipByValue(max=5.0)):
        ...     loss.backward()  # the gradient of 10 * x is [20, 40] before the clip
        >>> x.grad
        tensor([50., 50.])

    Reference:
        PaddlePaddle, Error Clip (2018).
    """
    rule = checked_rule(rule)
    clipping = Clipping(rule, leaves=leaves, observer=observer_of(stats, rule))
    scope = _scope(target, clipping, scale)
    try:
        active[scope.serial] = scope
        scope.enter()
        with changing_on_the_way("gg.error_clip") if rule is not None else nullcontext():
            yield
        scope.check()
    except RuntimeError as error:
        raise_if_freed(error, scope.nodes())
        raise
    finally:
        del active[scope.serial]
        scope.exit()


def checked_rule(rule: object) -> BaseErrorClip:
    """Return ``rule``, or the rule that does nothing for None.

    Raises:
        InvalidTypeError: If it is not a rule.
        InvalidValueError: If one of its thresholds has no value.
    """
    if rule is None:
        return ErrorClipNonfinite("keep")
    if isinstance(rule, BaseErrorClip):
        for name in rule.thresholds or ():
            if not hasattr(rule, name):
                raise InvalidValueError(
                    f"{type(rule).__name__}.thresholds names {name!r}, and the rule has no such attribute: assign it "
                    f"in __init__, or correct the name."
                )
        return rule
    hint = f": did you mean gg.ErrorClipByValue({rule})?" if isinstance(rule, int | float) else "."
    raise InvalidTypeError(f"rule is {type(rule).__name__}, expected one such as gg.ErrorClipByValue(max=5.0){hint}")


def _scope(target: object, clipping: Clipping, scale: LossScale | None) -> Scope:
    if isinstance(target, Tensor):
        return LossScope(clipping, scale, target)
    if isinstance(target, nn.Module):
        return TargetScope(clipping, scale, [target])
    if isinstance(target, str | bytes) or not isinstance(target, Iterable):
        raise InvalidTypeError(f"target is {type(target).__name__}: expected a loss, a module, or a list of tensors.")
    targets = list(target)
    if not targets:
        raise InvalidValueError("target is an empty list: expected tensors or modules.")
    return TargetScope(clipping, scale, targets)


def observer_of(stats: object, rule: BaseErrorClip) -> BlockCounts | None:
    """Return a counter of the gradients of blocks with ``rule`` for ``stats``, None for None.

    Raises:
        InvalidTypeError: If ``stats`` are of another type.
    """
    if stats is None:
        return None
    if not isinstance(stats, ErrorClipStats):
        raise InvalidTypeError(f"stats is {type(stats).__name__}: expected gg.ErrorClipStats().")
    return BlockCounts(stats, rule)
