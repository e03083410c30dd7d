"""`error_clip`: a block in which the gradients of intermediate values are clipped during the backward."""

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
              \quad\text{before the backward of the operation that computed } v

    The clip helps against gradients that overflow or explode *during* the backward, which clipping parameter gradients
    afterwards cannot undo. It does not bound parameter gradients: use it together with `clip_grad_norm_`.

    **Clipped values.** The clip applies to the gradient of each intermediate value, accumulated over all operations
    that use the value, once, before the backward of the operation that computed the value. Three kinds of values are
    not clipped: the root (the loss's own 1, the loss scale, or your ``gradient=``); the scalar terms of a loss that is
    their sum with constant weights; and leaves, unless ``leaves``. A chain of views and casts of a leaf counts as the
    leaf: ``weight.t()``, a shard's split, autocast's copy. A value is an output of one autograd node: a fused
    attention, an RNN of cuDNN, a custom function and a compiled block are one node each.

    **Order.** Your tensor hooks receive gradients before the clip, and the gradients that they return are clipped.
    ``retain_grad`` and ``backward(inputs=[h])`` return the gradient of h before its clip. Full backward hooks of
    modules, DDP, FSDP and the optimizer receive clipped gradients.

    **Scopes.** ``target`` may be a module: the block clips the values that the module's forward computes inside the
    block, including its outputs (a 0-dim output counts as the loss). ``target`` may be a list of tensors: the block
    clips these values and no others. Each value has one rule. A block for chosen tensors takes precedence over a block
    for a module, and a block for a module over a block for a whole graph; among blocks of one kind the innermost wins.
    A rule of ``None`` excludes a scope from clipping.

    **Guarantees.**

    - Each intermediate value has one rule, and its accumulated gradient is clipped once in each backward.
    - Gradients of parameters and inputs are clipped only under ``leaves=True``, or if ``target`` lists them.
    - The loss's own gradient, a loss scale and your ``gradient=`` are never clipped.
    - With a loss scale, and in float16, an overflow stays visible as NaN.
    - A backward that the block cannot clip completely raises an error: a reentrant checkpoint, a loss that comes
      straight out of compiled code, or a module without a backward in the block.
    - The block removes all of its hooks, also after an error.

    **Edge cases.**

    ===============================  ===========================================================================
    input                            result
    ===============================  ===========================================================================
    ``retain_graph``, two backwards  both are clipped
    ``create_graph=True``            the clip is differentiated, as `torch.clamp` is
    activation checkpointing         supported; reentrant checkpoints (``use_reentrant=True``) are refused
    float16, or ``scale=``           non-finite elements become NaN, and a GradScaler lowers its scale
    sparse gradient of a value       refused; the error names the operation
    compiled block in the graph      its outputs' gradients are clipped; for its inside see `attach_error_clip`
    compiled autograd                supported
    ``torch.func.grad``              the block cannot reach its backward: use `attach_error_clip` in the function
    threads                          each thread has its own blocks; the backward may run in any thread
    ===============================  ===========================================================================

    Args:
        target: The loss, for the whole graph behind it; a module; or a list of tensors and modules.
        rule: The rule for each gradient: `ErrorClipByValue`, another rule, or a subclass of `BaseErrorClip`.
        leaves: Whether to clip the gradients of parameters and inputs too, before they are accumulated. Not for a list
            of tensors alone, which may contain parameters.
        scale: The loss scale, as a GradScaler, a number or a tensor: thresholds are in units of the unscaled loss.
        stats: The counter of clipped gradients; see `ErrorClipStats`.

    Yields:
        Nothing.

    Raises:
        InvalidValueError: If the loss has no graph, or the whole graph is compiled, or the graph has a reentrant
            checkpoint; or if a module had no differentiable forward, or no backward, in the block.
        InvalidTypeError: If ``target``, ``rule`` or ``stats`` has the wrong type, or the rule returns a gradient of
            another shape, dtype or device.
        UnsupportedGradientError: If a gradient is sparse.
        FreedGraphError: If an earlier backward has freed the graph.
        RuntimeError: If the code in the block raises one.

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
    """Return ``rule`` after checking it; for None, return a rule that changes nothing.

    Raises:
        InvalidTypeError: If ``rule`` is not a rule.
        InvalidValueError: If a threshold of the rule has no value.
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
    """Return a counter that adds the gradients of blocks with ``rule`` to ``stats``; None without ``stats``.

    Raises:
        InvalidTypeError: If ``stats`` is not an `ErrorClipStats`.
    """
    if stats is None:
        return None
    if not isinstance(stats, ErrorClipStats):
        raise InvalidTypeError(f"stats is {type(stats).__name__}: expected gg.ErrorClipStats().")
    return BlockCounts(stats, rule)
