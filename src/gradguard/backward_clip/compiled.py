"""`attach_error_clip`: the clip as part of the graph, in eager code and inside `torch.compile`.

Compiling traces the real backward. The operations of a hook on a node of the traced graph become part of the compiled
backward, at the same position as in eager code, and are fused there. One function therefore installs the same hooks in
both cases: autograd's tracer runs the function, and Dynamo does not trace into it.
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
    "attach_error_clip behind a graph break: values that were compiled before the break would not be clipped. Remove "
    "the break, which torch.compile(..., fullgraph=True) names, or compile nothing that runs before the clip."
)
_ALL_COMPILED = (
    "attach_error_clip in eager code, on values that come straight out of compiled code, whose inside it cannot reach: "
    "call attach_error_clip in the compiled function, before the values are returned."
)
_COUNTS = (
    "stats= in compiled code, which runs no Python for each gradient: leave it out there, and count in eager code, as "
    'within torch.compiler.set_stance("force_eager").'
)
_NOTHING_BEHIND = (
    "attach_error_clip on inputs of the compiled code: the compiled code computes nothing behind them. Attach the clip "
    "to its outputs, such as the loss, or to these values in the code that computes them."
)


def attach_error_clip(
    values: Values,
    rule: BaseErrorClip | None,
    *,
    scale: LossScale | None = None,
    stats: ErrorClipStats | None = None,
) -> Values:
    """Attach an error clip to the graph behind ``values`` and return them; inside `torch.compile` it is fused.

    `error_clip` clips within a block. `attach_error_clip` clips every backward through a graph, as long as the graph
    exists. In eager code, the graph is everything behind ``values``. In compiled code, the graph is the part within the
    compiled region, and the clip becomes part of the compiled backward. It causes no graph break, and works under
    ``fullgraph=True`` and with dynamic shapes. A new threshold (a new rule of the same kind, or ``rule.max = …``) does
    not recompile; another kind of rule does.

    **Guarantees.** The guarantees of `error_clip` hold, with these differences:

    - A value with dimensions, such as logits, is an intermediate value, and its own gradient is clipped too. A 0-dim
      value counts as the loss, and its gradient is not clipped.
    - Gradients of parameters are never clipped.
    - Under ``backend="aot_eager"``, compiled code equals eager code bit for bit. Under Inductor, the two differ by no
      more than they differ without a clip.
    - A graph break that would leave a part unclipped raises an error.

    **Edge cases.**

    - With gradients disabled, nothing is attached.
    - Two clips on one value apply one after the other.
    - The compiler records some operations without effect as copies, such as dropout in evaluation. A copy's gradient is
      clipped once more than in eager code; this matters for a rule that changes its own results, such as halving.
    - The compiler treats inputs of the compiled region as leaves, so views of an input are not clipped.
    - In eager code, a compiled region counts as one operation.

    Args:
        values: A tensor, or tuples, lists and dicts of tensors: the loss, or a module's outputs.
        rule: The rule for each gradient; ``ErrorClipNonfinite("raise")`` cannot be compiled.
        scale: The loss scale, as for `error_clip`.
        stats: The counter of clipped gradients in each backward, in eager code; see `ErrorClipStats`.

    Returns:
        ``values``, with the clip attached.

    Raises:
        InvalidValueError: If gradients are enabled and no value has a graph behind it; if code was compiled before a
            graph break, where the clip cannot reach it; or, in eager code, if the whole graph is compiled. If the
            values are inputs of the compiled code, the compiler wraps the message in its own error.
        InvalidTypeError: If ``rule`` is not a rule, ``scale`` is not a loss scale, a dataclass is among the values, or
            ``stats`` is given in compiled code.

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
        # Dynamo runs this eager code after a graph break, and a compiled part behind it would not be clipped.
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
    """Install the hooks. The compiler's tracers may call this function several times; eager code calls it once."""
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
    """A hook that notifies the statistics when a backward through an attached clip begins and ends."""

    def __init__(self, observer: BlockCounts) -> None:
        self.observer, self.task = observer, -1

    def __call__(self, grads: Gradients) -> None:
        if self.task != current_graph_task():
            self.task = current_graph_task()
            self.observer.begin(None)
            call_after_backward(self.observer.end)


# Called during tracing: importing gradguard then does not import the compiler.
@constant_when_traced
def _make_known_to_the_compiler() -> bool:
    torch.compiler.allow_in_graph(_attach)
    return True
