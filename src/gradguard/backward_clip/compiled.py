"""`attach_error_clip`: the clip as part of the graph, in eager code and inside `torch.compile`.

Compiling traces the real backward: whatever a hook on a node of the traced graph does becomes part of the compiled
backward, at the place where eager code has it, and is fused there. So one function that autograd's tracer runs, but
Dynamo does not look into, installs the same hooks as in eager code.
"""

from dataclasses import is_dataclass
from typing import TypeVar

import torch
from torch import Tensor

from gradguard.backward_clip.backward_graph import COMPILED, operation, root_of, walk
from gradguard.backward_clip.error_clip_block import checked_rule, observer_of
from gradguard.backward_clip.error_clip_rules import BaseErrorClip, Kind, decode_rule, encode_rule
from gradguard.backward_clip.hooks import Clipping, Gradients, Roots
from gradguard.backward_clip.scopes import LossScale, loss_scale
from gradguard.backward_clip.statistics import BlockCounts, ErrorClipStats
from gradguard.errors import InvalidTypeError, InvalidValueError
from gradguard.torch_private import (
    call_after_backward,
    constant_when_traced,
    current_graph_task,
    is_within_compiled_code,
    traced_inputs,
    tree_flatten,
    tree_unflatten,
)

Values = TypeVar("Values")

_BROKEN = (
    "attach_error_clip behind a graph break: what was compiled before it would not be clipped. Take the break out, "
    "which torch.compile(..., fullgraph=True) names, or compile nothing that runs before the clip."
)
_ALL_COMPILED = (
    "attach_error_clip in eager code, on values that come straight out of compiled code, whose inside it cannot reach: "
    "call it there, before they are returned."
)
_COUNTS = (
    "stats= in compiled code, which runs no Python for each gradient: leave it out there, and count in eager code, as "
    'within torch.compiler.set_stance("force_eager").'
)
_NOTHING_BEHIND = (
    "attach_error_clip on inputs of the compiled code: nothing that it computes lies behind them. Attach to what comes "
    "out of it, such as the loss, or to these values before they go in."
)


def attach_error_clip(
    values: Values,
    rule: BaseErrorClip | None,
    *,
    scale: LossScale | None = None,
    stats: ErrorClipStats | None = None,
) -> Values:
    """Attach an error clip to the graph behind ``values`` and return them; inside `torch.compile` it is fused.

    `error_clip` clips within a block; this call clips every backward through a graph, as long as the graph lives. In
    eager code the graph is everything behind ``values``; in compiled code it is the part within the compiled region,
    and the clip becomes part of the compiled backward, without a graph break, also under ``fullgraph=True`` and with
    dynamic shapes. A new threshold (a new rule of the same kind, or ``rule.max = …``) does not recompile; another kind
    of rule does.

    **Guarantees.** Those of `error_clip`, with these differences:

    - A value that is not 0-dim, such as logits, is an intermediate one, and its own gradient is clipped too. A 0-dim
      value is taken for the loss, and its gradient is not clipped.
    - Gradients of parameters are never clipped.
    - Under ``backend="aot_eager"`` compiled code is equal to eager code bit for bit; under Inductor the two differ by
      no more than they differ without a clip.
    - A graph break that would leave a part unclipped is refused.

    **Edge cases.** With gradients disabled nothing is attached. Two clips on one value apply one after the other. The
    compiler records some operations that do nothing, such as dropout in evaluation, as copies, and takes inputs of the
    compiled region for leaves: a rule that would change its own results, such as halving, meets the copy once more than
    in eager code, and views of an input go unclipped. Eager code takes a compiled region for one operation.

    Args:
        values: A tensor, or tuples, lists and dicts of tensors: the loss, or a module's outputs.
        rule: The rule for each gradient; ``ErrorClipNonfinite("raise")`` cannot be compiled.
        scale: The loss scale, as for `error_clip`.
        stats: Counts what happens in each backward, in eager code; see `ErrorClipStats`.

    Returns:
        ``values``, with the clip attached.

    Raises:
        InvalidValueError: If no value has a graph behind it, though gradients are enabled; if a graph break leaves
            what was compiled before it out of reach; in eager code, if all is compiled. If the values are inputs of the
            compiled code, the compiler's own error has it.
        InvalidTypeError: If ``rule`` is no rule, ``scale`` no loss scale, a dataclass is among the values, or ``stats``
            is given in compiled code.

    Example:
        >>> import gradguard as gg, torch
        >>> class Model(torch.nn.Module):
        ...     def __init__(self, rule):
        ...         super().__init__()
        ...         self.weight, self.rule = torch.nn.Parameter(torch.ones(3)), rule
        ...
        ...     def forward(self, x):
        ...         return gg.attach_error_clip((x * self.weight).square().sum(), self.rule)
        >>> model = Model(gg.ErrorClipByValue(max=0.5))  # torch.compile(model, fullgraph=True) does the same, fused
        >>> model(torch.ones(3)).backward()
        >>> model.weight.grad
        tensor([0.5000, 0.5000, 0.5000])
    """
    leaves, structure = tree_flatten(values)
    for leaf in leaves:
        if leaf is not None and is_dataclass(leaf):
            raise InvalidTypeError(
                f"{type(leaf).__name__} is a dataclass: attach the clip to the tensors in it instead."
            )
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not torch.is_grad_enabled():
        return values
    if torch.compiler.is_compiling():
        _make_known_to_the_compiler()
        if not tensors:
            return values
        if _is_behind_a_break():
            raise InvalidValueError(_BROKEN)
    else:
        if not any(tensor.grad_fn is not None for tensor in tensors):
            raise InvalidValueError(
                "no value has a graph behind it: expected the result of differentiable operations, such as a loss."
            )
        # A graph that was compiled in part, unless the user has put eager code around compiled code.
        if is_within_compiled_code() and _holds_compiled([root_of(t) for t in tensors if t.grad_fn is not None]):
            raise InvalidValueError(_BROKEN)
    if stats is not None and torch.compiler.is_compiling():
        _refuse_counts()
    rule = checked_rule(rule)
    kind, thresholds = encode_rule(rule)
    observer = observer_of(stats, rule)
    factor = None if scale is None else loss_scale(scale, tensors[0].device)
    attached = iter(_attach(kind, thresholds, factor, observer, tensors))
    chosen = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
    return tree_unflatten([next(attached) if c else leaf for c, leaf in zip(chosen, leaves, strict=True)], structure)


@constant_when_traced
def _refuse_counts() -> None:
    raise InvalidTypeError(_COUNTS)


@constant_when_traced
def _is_behind_a_break() -> bool:
    return is_within_compiled_code() and any(given.grad_fn is not None for given, _ in traced_inputs())


def _holds_compiled(roots: Roots) -> bool:
    return any(operation(node) == COMPILED for node in walk(roots).nodes)


def _attach(
    kind: Kind,
    thresholds: tuple[Tensor, ...],
    scale: float | Tensor | None,
    observer: BlockCounts | None,
    values: list[Tensor],
) -> list[Tensor]:
    """Install the hooks: called in eager code, and by the tracers of the compiler, which may call it several times."""
    clipping = Clipping(decode_rule(kind, thresholds))
    if scale is not None:
        clipping.set_scale(scale)
    roots = [root_of(value) for value in values if value.grad_fn is not None]
    if not roots or set(map(id, values)) <= {id(stand_in) for _, stand_in in traced_inputs()}:
        raise InvalidValueError(_NOTHING_BEHIND)
    if observer is not None:
        clipping.observer, begin = observer, _BeginBackward(observer)
        for node in dict.fromkeys(node for node, _ in roots):
            node.register_prehook(begin)
    clipping.install(roots, roots_too=True)
    if not clipping.reached and _holds_compiled(roots):
        raise InvalidValueError(_ALL_COMPILED)
    return values


class _BeginBackward:
    """A hook that announces to the statistics where a backward through an attached clip begins and ends."""

    def __init__(self, observer: BlockCounts) -> None:
        self.observer, self.task = observer, -1

    def __call__(self, grads: Gradients) -> None:
        if self.task != current_graph_task():
            self.task = current_graph_task()
            self.observer.begin(None)
            call_after_backward(self.observer.end)


# Called at the time of tracing: `_attach` is known just when it is needed, and importing gradguard does not import the
# compiler.
@constant_when_traced
def _make_known_to_the_compiler() -> bool:
    torch.compiler.allow_in_graph(_attach)
    return True
