"""The largest attention logit of each head, from the arguments of attention calls.

For `scaled_dot_product_attention` it is computed from queries and keys; the kernel of FlexAttention returns it on
request.
"""

import functools
import math
import threading
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradguard.distributed.placements import any_sharded
from gradguard.errors import UnsupportedGradientError
from gradguard.listeners import Listener, tell_of
from gradguard.module_hooks import ForwardHook
from gradguard.replacements import Replacement, once
from gradguard.tensors.matmul_precision import full_float32
from gradguard.torch_private import never_compiled

_MASKED = -1e4
"""An additive mask at or below this masks a position: minus infinity, a dtype's smallest number, BERT's -1e4."""

_BLOCK = 1 << 22
"""The number of logits to compute at a time, unless one row of queries has more."""


class AttentionCall(NamedTuple):
    """The arguments of a call of `scaled_dot_product_attention` or FlexAttention, apart from dropout.

    Attributes:
        query: A tensor of shape (..., heads, L, E).
        key: A tensor of shape (..., key heads, S, E).
        value: A tensor of shape (..., key heads, S, Ev).
        mask: ``attn_mask``.
        causal: ``is_causal``.
        scale: The factor of the products.
        from_kernel: The largest logit of each head, if the kernel returned it; else None.
        is_changed: Whether a ``score_mod`` changes the products.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    from_kernel: Tensor | None = None
    is_changed: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether the call has no logits: an empty batch, no queries or no keys."""
        return not (self.query.numel() and self.key.numel())


def _call_of(
    attention: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """Return the arguments of a call of `scaled_dot_product_attention`.

    Raises:
        UnsupportedGradientError: If torch's own function was replaced, or receives nested or sharded tensors.
    """
    del dropout_p, enable_gqa  # the shapes of query and key show grouped heads
    if not isinstance(attention, BuiltinFunctionType):
        raise UnsupportedGradientError(
            "torch.nn.functional.scaled_dot_product_attention was replaced by a function of "
            f"{getattr(attention, '__module__', None)}, as context_parallel does, where queries and keys are parts "
            "of the sequence: the largest logit is not known. Run attention without it, or detach() the LogitWatch "
            "or QKClip."
        )
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if query.is_nested or key.is_nested or any_sharded([query, key, attn_mask]):
        raise UnsupportedGradientError(
            "scaled_dot_product_attention is called with nested tensors or DTensors, so this process does not hold "
            "every logit. Expected padded tensors, and under tensor parallelism the local heads "
            "(ColwiseParallel() with its default use_local_output=True); or detach() the LogitWatch or QKClip."
        )
    return AttentionCall(query.detach(), key.detach(), value.detach(), attn_mask, is_causal, scale)


@torch.no_grad()
def largest_logits(call: AttentionCall, exact: bool = True) -> Tensor:
    r"""Return the largest logit of each head, over the batch and all unmasked positions.

    .. math:: S_h = \max_{b, i, j \text{ not masked}} s\, q_{bhi} \cdot k_{bhj}

    Args:
        call: The call.
        exact: Whether to compute the logits, one block of queries after the other, in float32 (float64 for float64),
            unless the kernel has returned the largest one. Otherwise return the bound
            :math:`\max_b |s| \max_i \lVert q_{bhi} \rVert \max_j \lVert k_{bhj} \rVert`, of all positions.

    Returns:
        One number for each head. A query of fewer than four dimensions does not separate heads from the batch; the
        result is then one number for all. An additive mask of -1e4 or less masks; it adds nothing elsewhere.
    """
    if call.from_kernel is not None:
        return call.from_kernel
    wide = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    with torch.autocast(call.query.device.type, enabled=False), full_float32("product"):
        query, key = call.query.to(wide) * call.scale, call.key.to(wide)
        if query.dim() > 2 and key.shape[-3] != query.shape[-3]:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        if not exact:
            norms = [torch.linalg.vector_norm(one, dim=-1).amax(-1) for one in (query, key)]
            return _by_head(norms[0] * norms[1])
        batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        length, keys = query.shape[-2], key.shape[-2]
        rows = max(1, _BLOCK // max(1, math.prod(batch) * keys))
        largest = query.new_full(batch, -math.inf)
        for start in range(0, length if keys else 0, rows):
            end = min(start + rows, length)
            logits = query[..., start:end, :] @ key.mT
            if (hidden := _hidden(call, start, end)) is not None:
                logits = logits.masked_fill(hidden, -math.inf)
            largest = torch.maximum(largest, logits.amax((-2, -1)))
        return _by_head(largest)


def _hidden(call: AttentionCall, start: int, end: int) -> Tensor | None:
    """Return which logits of the queries from ``start`` to ``end`` are masked; None if none is."""
    if call.causal:
        at = torch.arange(call.key.shape[-2], device=call.key.device)
        return at > torch.arange(start, end, device=call.key.device)[:, None]
    if call.mask is None:
        return None
    mask = call.mask[..., start:end, :] if call.mask.dim() > 1 and call.mask.shape[-2] > 1 else call.mask
    return ~mask if mask.dtype == torch.bool else mask <= _MASKED


def _by_head(largest: Tensor) -> Tensor:
    return largest.reshape(-1, largest.shape[-1]).amax(0) if largest.dim() > 1 else largest.amax().reshape(1)


# Listening to calls.


class _Stack(threading.local):
    """The modules and the calls that run in this thread.

    Attributes:
        open: The running modules, outermost first: listener, name, training mode, function that ends the listening.
        waiting: Calls of FlexAttention that are not reported yet.
    """

    def __init__(self) -> None:
        self.open: list[tuple[AttentionListener, str, bool, Callable[[], None]]] = []
        self.waiting: list[tuple[Any, ...]] = []


_running = _Stack()


class AttentionListener:
    """Reports each attention call in a training forward of ``model``.

    As long as a module of the model runs, `torch.nn.functional.scaled_dot_product_attention` is replaced by a function
    that reports the call and makes it, and FlexAttention's kernel also returns the largest logits. A call counts if
    gradients are on and the innermost module of the model is in training mode. Evaluations therefore do not count, and
    a checkpointed block counts whenever gradients are on.

    Args:
        model: The model.
        heard: Called with the names of the running modules, outermost first, and the call.
    """

    def __init__(self, model: nn.Module, heard: Callable[[Sequence[str], AttentionCall], None]) -> None:
        self._heard = heard
        self._hooks: list[RemovableHandle] = []
        for name, module in model.named_modules():
            forward = type(module).forward
            of_torch = (getattr(forward, "__module__", None) or "").startswith("torch.nn.modules.")
            if not of_torch or forward is nn.MultiheadAttention.forward:  # other torch layers compute no attention
                enter, leave = ForwardHook(self._enter, name), ForwardHook(self._leave, name)
                self._hooks.append(module.register_forward_pre_hook(enter, prepend=True))
                self._hooks.append(module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        """Stop listening."""
        while self._hooks:
            self._hooks.pop().remove()

    @never_compiled
    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        del args
        tell_waiting()
        _running.open.append((self, name, module.training, once(_attention.use(), _flex_attention.use())))

    @never_compiled
    def _leave(self, name: str, module: nn.Module, args: Any, result: Any) -> None:
        del module, args, result
        try:
            tell_waiting()  # may raise for a kernel that returns no logits
        finally:
            places = [i for i, one in enumerate(_running.open) if one[:2] == (self, name)]
            if places:  # empty if another hook raised before `_enter`
                *_, end = _running.open.pop(places[-1])
                end()

    def tell(self, call_in: Callable[[str], AttentionCall]) -> None:
        """Report a call by the innermost module of the model, unless that module is in eval mode.

        Args:
            call_in: Returns the call, or raises, given the name of that module.
        """
        running = [one[1:3] for one in _running.open if one[0] is self]
        if running[-1][1]:
            names = [name for name, _ in running]
            self._heard(names, call_in(names[-1] or "the model"))


def _tell(call_in: Callable[[str], AttentionCall]) -> None:
    """Report a call to the listeners of all running modules."""
    for listener in dict.fromkeys(one[0] for one in _running.open):
        listener.tell(call_in)


def _tell_and_attend(attention: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    if torch.is_grad_enabled():
        _tell(lambda _: _call_of(attention, *args, **kwargs))
    return attention(*args, **kwargs)


_attention = Replacement(
    "torch.nn.functional", "scaled_dot_product_attention", _tell_and_attend, decorate=never_compiled
)


_KERNELS_THAT_TELL = ("cpu", "cuda", "xpu")


def _asking(replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Return FlexAttention's operator with a request for the largest logits; compiled code calls the same function."""
    attention = replacement.__wrapped__  # pyright: ignore

    @functools.wraps(replacement)
    def ask_and_attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any,
        mask: Any,
        scale: float,
        options: Any,
        *more: Any,
    ) -> Any:
        if not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad) and query.numel()):
            return attention(query, key, value, score_mod, mask, scale, options, *more)
        tells = query.device.type in _KERNELS_THAT_TELL and options["BACKEND"] != "FLASH"
        options = {**options, "OUTPUT_MAX": options["OUTPUT_MAX"] or tells}
        result = attention(query, key, value, score_mod, mask, scale, options, *more)
        largest = result[2].detach().amax((0, 2)) * math.log(2) if tells else None  # the kernel's logits are base 2
        is_changed = score_mod.__name__ != "_identity"  # torch passes `_identity` if the caller passed None
        _running.waiting.append((query.detach(), key.detach(), value.detach(), None, False, scale, largest, is_changed))
        return result

    return ask_and_attend


_flex_attention = Replacement(
    "torch.nn.attention.flex_attention",
    "flex_attention_hop",
    lambda attention, *args: attention(*args),
    decorate=_asking,
)


def tell_waiting() -> None:
    """Report the calls of FlexAttention since the last module began or ended.

    Raises:
        UnsupportedGradientError: If a kernel does not return the largest logit.
    """
    waiting, _running.waiting = _running.waiting, []
    for call in waiting:
        _tell(functools.partial(_call_of_flex, AttentionCall(*call)))


def _call_of_flex(call: AttentionCall, name: str) -> AttentionCall:
    if call.from_kernel is None:
        raise UnsupportedGradientError(
            f"{name} calls flex_attention with the kernel 'FLASH', or on a device where no kernel returns the "
            "largest logit. Expected kernel_options without BACKEND='FLASH', or detach() the LogitWatch or QKClip."
        )
    return call


class LogitWatch:
    r"""The largest attention logit of each head since the last `reset`.

    .. math:: S_h = \max_{b, i, j \text{ not masked}} s\, q_{bhi} \cdot k_{bhj}

    Logits that keep growing make the softmax one-hot and a run diverge, often long before its loss shows it; 16-bit
    training of large models watches them. For each call of `torch.nn.functional.scaled_dot_product_attention` in a
    training forward, the watch reads query and key: any mask, ``is_causal``, ``scale``, ``enable_gqa``, any dtype.
    FlexAttention's kernel returns the largest logit on request, eager or compiled, however the script imported it.

    **Guarantees.** The forward stays bit-identical. The maximum covers micro-batches, all calls of one module, and both
    forwards of a checkpoint. Evaluations (gradients off, or the module in eval mode) do not count. There is no host
    sync until a number is read. If a `Monitor` or ``gradguard run`` records, each step holds the largest logit of all
    heads, and a finding reports its growth.

    **Edge cases.**

    ==================================  ========================================================================
    case                                what happens
    ==================================  ========================================================================
    a query of three dimensions         one number: heads look like a batch
    an additive mask                    -1e4 or less is masked; a larger addend is not part of the logit
    NaN                                 is the largest
    half precision, autocast            products in float32 of the arguments of the call
    an empty batch                      nothing is counted
    another number of heads             an error, until `reset`
    several processes                   each has its own numbers, of its batch and its heads
    nested tensors, DTensors, a         an error
    function in place of torch's, as
    under ``context_parallel``
    FlexAttention with a ``score_mod``  its result is the logit: a soft cap bounds it, a bias is part of it. Positions
                                        that the block mask excludes do not count
    FlexAttention, ``exact=False``      exact all the same
    FlexAttention whose queries and     not counted: these logits do not change
    keys need no gradient
    FlexAttention's kernel ``FLASH``,   an error: the kernel returns no logits
    devices other than CPU, CUDA, XPU
    flash_attn, softmax by hand,        unnoticed: no entry. So is `torch.nn.MultiheadAttention` with its default
    scaled_dot_product_attention that   ``need_weights=True``
    was imported by its name
    ==================================  ========================================================================

    Args:
        model: The model, before or after it is wrapped. Attach the watch before `torch.compile`, which then breaks its
            graph at each watched module.
        exact: Whether logits are computed, one block of queries after the other, which costs about one more product of
            queries and keys; otherwise the numbers are the upper bound
            :math:`\max_b |s| \max_i \lVert q_{bhi} \rVert \max_j \lVert k_{bhj} \rVert`, of masked positions too.

    Example:
        >>> import gradguard as gg, torch
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> watch = gg.LogitWatch(model)
        >>> _ = model(torch.randn(3, 5, 8))
        >>> {name: tuple(largest.shape) for name, largest in watch.max_logits.items()}
        {'self_attn': (2,)}

    Reference:
        Dehghani et al. (2023), Scaling vision transformers to 22 billion parameters, arXiv 2302.05442 (logits that
        grow).
    """

    def __init__(self, model: nn.Module, *, exact: bool = True) -> None:
        self._exact = exact
        self._largest: dict[str, Tensor] = {}
        self._listener = AttentionListener(model, self._heard)

    @property
    def max_logits(self) -> dict[str, Tensor]:
        """The largest logit of each head, by the name of the attention module; empty before the first call."""
        return dict(self._largest)

    def reset(self) -> None:
        """Forget the logits so far, for example after each step."""
        self._largest = {}

    def detach(self) -> None:
        """Stop watching."""
        self._listener.remove()

    def _heard(self, names: Sequence[str], call: AttentionCall) -> None:
        if call.is_empty:
            return
        largest, known = largest_logits(call, self._exact), self._largest.get(names[-1])
        tell_of(Listener.on_logits, names[-1], largest)
        if known is not None and known.shape != largest.shape:
            raise UnsupportedGradientError(
                f"{names[-1] or 'the model'} attends with {len(largest)} heads, and has attended with {len(known)}: "
                "their largest logits cannot be combined. Call reset() of the LogitWatch in between."
            )
        self._largest[names[-1]] = largest if known is None else torch.maximum(known, largest)
