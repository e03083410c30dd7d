"""QK-Clip: after a step, rescale the query and key weights of heads whose attention logits have become too large."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NoReturn, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from gradguard.arguments import check_number, check_whole
from gradguard.clip.guard import OfOneOptimizer, check_hookable, guard_of
from gradguard.clip.guard_counts import LateReader
from gradguard.clip.logits import AttentionCall, AttentionListener, largest_logits, tell_waiting
from gradguard.distributed.placements import gradient_of, is_sharded, local_part, shard_like
from gradguard.distributed.processes import largest_over, numbers_of_all
from gradguard.errors import InvalidTypeError, InvalidValueError, UnsupportedGradientError
from gradguard.module_hooks import ForwardHook
from gradguard.optimizer_hooks import EveryStep, parameters_of
from gradguard.tensors.layout import are_readable, move, wide_dtype
from gradguard.torch_private import layer_slots, never_compiled, parameter_slots

Projections = str | tuple[str, str] | tuple[str, str, int]

_USUAL = (("q_proj", "k_proj"), ("wq", "wk"), ("to_q", "to_k"), ("query", "key"), ("qkv",), ("qkv_proj",), ("c_attn",))
_TASK = "clip attention logits"
_USUAL_WORDS = " or ".join(", ".join(names) for names in _USUAL)


class QKClip(OfOneOptimizer):
    r"""After each step of ``optimizer``, rescale the query and key weights of heads whose largest logit was too large.

    .. math:: S_h = \max_{i, j} s\, q_{hi} \cdot k_{hj}, \qquad \gamma_h = \min(1, \tau / S_h), \qquad
              W_q^h \leftarrow \gamma_h^{\alpha}\, W_q^h, \quad W_k^h \leftarrow \gamma_h^{1 - \alpha}\, W_k^h

    The same batch then has a largest logit of τ if the attention gets the same input. In stacked layers a rescaling
    changes the input of later layers, so their logits end near τ. A module that is called several times (ALBERT) is
    rescaled once, by the largest S of its calls. QK-Clip is the second half of MuonClip, the rule that Kimi K2 was
    trained with: Muon's updates have full rank, and let logits grow faster than Adam's do. Biases are rescaled like the
    rows of their weights. :math:`S_h` is the number that `LogitWatch` measures: the maximum over unmasked positions,
    micro-batches and processes.

    ``projections`` names the layers that make queries and keys. Without it they are found:
    `torch.nn.MultiheadAttention`, and modules with `torch.nn.Linear` layers called ``q_proj, k_proj``, ``wq, wk``,
    ``to_q, to_k``, ``query, key``, or, with rows for all queries, all keys, all values in this order, ``qkv``,
    ``qkv_proj``, ``c_attn``. The attention calls show the number of heads.

    **Guarantees.**

    * For each head the norms of the queries and keys in the attention call are compared with the norms of the layers'
      outputs: they must have one ratio, as after a rotary embedding or a constant factor. Anything else is an error
      before the step: a normalisation of queries or keys (QK-norm), which would undo any rescaling; a position added to
      them; rows in another order than ``projections`` says.
    * That ratio, times ``scale``, must be the same number at every call since the clip was attached, within 0.1 % (2 %
      in half precision). A normalisation by a norm of a whole tensor, head or batch looks like a constant in the first
      call, so one rescaling may follow; a call in which the ratio differs is an error before its step.
    * On an accelerator these two checks are read without a host sync: a step that fails them rescales nothing, and the
      error is raised at one of the next steps.
    * An attention that calls `scaled_dot_product_attention` or `flex_attention` and whose projections are unknown is an
      error. A training forward of a known attention that computes its softmax in another way is an error at once; a
      step with a gradient of a known projection, but without a recorded forward of its attention, is an error too.
    * At each step the weights, and in each forward the layers, must be those that were found at first, trained and
      without a parametrization; anything else is an error.
    * A weight or layer that is registered in several places is an error. So are values that are a multiple of the
      keys, including those of a layer that was initialised as a copy of the key layer. If another layer computes values
      from the keys, a rescaling changes these values too.
    * A step that a `Guard` or a GradScaler skips rescales nothing; the logits of its batches count at the next step.
    * Rows of heads at or below the threshold keep their bits, and so do values, outputs and the optimizer's state.

    **Edge cases.**

    ==================================  ========================================================================
    case                                what happens
    ==================================  ========================================================================
    grouped queries (GQA, MQA)          heads that share a key share the largest S of their group, all of them
    MLA, ``("q", "kv", rotary)``        head-wise rows as above; the ``rotary`` last rows of a query's head by γ; the
                                        rotary key, which all heads share, not at all
    a logit of NaN or infinity          enters no maximum
    logits of -1e4 or less, all masked  nothing is rescaled
    a threshold passed in evaluations   does not count
    DDP, FSDP2, tensor parallelism      the maximum is over all processes, or ``process_group``
    FSDP1, QK-norm, weight_norm,        an error that says so, as under ``context_parallel``
    spectral_norm, tied weights,
    frozen projections,
    ``need_weights``, FlexAttention
    with a ``score_mod`` or a kernel
    that reports none, as FLASH,
    ``add_bias_kv``, a second QKClip,
    a factor that is learned or
    depends on the length
    LoRA                                an error. If the base layer is named and trained and the adapter still returns
                                        zeros, the error comes once the adapter's outputs change
    an attention that is frozen when    not clipped, unless ``projections`` names it; attach again after unfreezing it
    the clip is attached
    after a step that was refused       set the gradients to None; the next step counts the calls until then
    batch and heads in one dimension    an error
    an empty batch                      counts nothing
    another number of heads             an error
    `torch.compile`                     attach before the first call; the graph breaks at watched modules. A compiled
                                        attention that was not recorded is an error at the step
    weights kept twice (a master copy)  only those of the model are rescaled
    one token, or tokens that are all   norms cannot differ, so a QK-norm is not noticed on that batch
    alike
    heads cut by hand, plain tensors    pass as ``process_group`` the processes that hold the same heads: nothing else
                                        shows which heads a process holds
    ==================================  ========================================================================

    Args:
        optimizer: The optimizer that holds the query and key weights; another may hold the biases.
        model: The model.
        threshold: τ.
        alpha: α, the share of γ that queries get.
        projections: The names of the layers inside an attention module, by the module's name or a pattern:
            ``(query, key)``; one name for both; ``(query, key, rotary)`` for MLA, with the number of rotary dimensions
            of a head; None to leave its logits unclipped. Other attentions are found.
        exact: As for `LogitWatch`: with False the upper bound replaces S, and rescales earlier.
        process_group: The processes that hold the same layers, such as those of a pipeline's stage; None for all.

    Attributes:
        last: The largest logit of each head at the last step, over all processes, by the attention's name; -inf for a
            head without one.
        optimizer: The optimizer.

    Raises:
        InvalidTypeError: If ``optimizer`` cannot be hooked, or ``projections`` has another type.
        InvalidValueError: If no projections are found, or those that are given do not exist, are shared, belong to
            another optimizer, or have a QKClip already; or an argument is out of range.
        UnsupportedGradientError: If a projection is not a plain `torch.nn.Linear`, is frozen, or belongs to FSDP1.

    Example:
        >>> import gradguard as gg, torch
        >>> attention = torch.nn.MultiheadAttention(4, 2, bias=False, batch_first=True)
        >>> optimizer = torch.optim.SGD(attention.parameters(), lr=0.0)
        >>> clip = gg.QKClip(optimizer, attention, threshold=2.0)
        >>> _ = attention.in_proj_weight.data.copy_(3 * torch.eye(4).repeat(3, 1))
        >>> x = torch.eye(4)[None]
        >>> for _ in range(2):
        ...     attention(x, x, x, need_weights=False)[0].sum().backward()
        ...     optimizer.step()
        ...     print(clip.last[""])
        tensor([6.3640, 6.3640], dtype=torch.float64)
        tensor([2.0000, 2.0000], dtype=torch.float64)

    Reference:
        Kimi Team (2025), Kimi K2: open agentic intelligence, arXiv 2507.20534, section 2.1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        threshold: float = 100.0,
        alpha: float = 0.5,
        *,
        projections: Mapping[str, Projections | None] | None = None,
        exact: bool = True,
        process_group: Any = None,
    ) -> None:
        check_hookable(optimizer)
        self.optimizer, self.last = optimizer, cast("dict[str, Tensor]", {})
        self._threshold = check_number("threshold", threshold, "a finite number > 0")
        self._alpha = check_number("alpha", alpha, "a number from 0 to 1")
        self._exact, self._group = exact, process_group
        self._attentions = _found(model, projections or {})
        self._rescaled = [one for one in self._attentions.values() if one is not None]
        _check_weights(model, self._rescaled, optimizer)
        for one in self._rescaled:
            one.measured = one.nothing()
        self._overflow: Tensor | None = None
        self._is_agreed = False  # whether all ranks are known to have the same attentions
        self._late = LateReader(self._refuse_changed)
        self._listener = AttentionListener(model, self._heard)
        self._hooks = [hook for one in self._rescaled for hook in one.keep_outputs()]
        self._steps = EveryStep(self._before, self._after, optimizer=optimizer)
        _clipped.update(one.query for one in self._rescaled)

    def __repr__(self) -> str:
        """Return the constructor call, with the names ``optimizer`` and ``model``."""
        return f"QKClip(optimizer, model, threshold={self._threshold:g}, alpha={self._alpha:g})"

    def detach(self) -> None:
        """Stop clipping, for good; may be repeated."""
        self._listener.remove()
        self._steps.remove()
        _clipped.difference_update([one.query for one in self._rescaled] if self._hooks else [])
        while self._hooks:
            self._hooks.pop().remove()

    def _heard(self, names: Sequence[str], call: AttentionCall) -> None:
        """Record one call, for the innermost module whose projections are known."""
        known = [name for name in names if name in self._attentions]
        if not known:
            raise InvalidValueError(
                f"{names[-1] or 'the model'} computes an attention, but the layers that make its queries and keys are "
                f"not known: expected torch.nn.Linear layers called {_USUAL_WORDS}. Name them, "
                f"projections={{{names[-1]!r}: ('query layer', 'key layer')}}, or leave its logits unclipped with "
                f"projections={{{names[-1]!r}: None}}."
            )
        attention = self._attentions[known[-1]]
        if attention is not None:
            attention.take(call, self._exact)

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, number: int) -> None:
        """Take the maximum over ranks; before the step, refuse an attention that would be rescaled wrongly."""
        del number
        self._overflow = getattr(optimizer, "found_inf", None)
        self._steps.act_last()  # rescale after a `ClipUpdate` that was attached later, which measures the step alone
        for one in self._rescaled:
            one.check()
        parts = [one.measured.to(one.nothing()) for one in self._rescaled]
        joined = torch.cat([move(part, parts[0].device) for part in parts])
        if not self._is_agreed and len(set(numbers_of_all(len(joined), self._group, _TASK))) > 1:
            raise InvalidValueError(
                "the processes have different query weights, as pipeline stages do: expected process_group=, the "
                "processes that have the same layers."
            )
        self._is_agreed = True
        joined = largest_over(joined, self._group, _TASK).split(list(map(len, parts)))
        for one, part, everywhere in zip(self._rescaled, parts, joined, strict=True):
            one.measured = move(everywhere, part.device)
            one.look()
        self._late.push(torch.stack([part[_FAULTS] for part in joined]).flatten())

    @torch.no_grad()
    def _after(self, optimizer: Optimizer) -> None:
        guard = guard_of(optimizer)
        self.last = {}
        for one in self._rescaled:
            one.is_seen = False
            if one.shape is None:
                continue
            home, measured = one.measured.device, one.measured
            skipped = False if guard is None else guard.skipped
            left_out = move(skipped, home) if isinstance(skipped, Tensor) else torch.full((), skipped, device=home)
            if self._overflow is not None:
                left_out = left_out | (move(self._overflow, home).reshape(()) != 0)
            self.last[one.name] = largest = one.largest()
            over = (largest > self._threshold) & ~left_out & ~(measured[_FAULTS] > 1).any()
            if not are_readable(over) or bool(over.any()):
                one.rescale(torch.where(over, self._threshold / largest, 1.0), self._alpha)
            one.measured = torch.where(left_out, measured, -torch.inf)

    def _refuse_changed(self, faults: list[float]) -> None:
        """Raise for the first attention whose vectors do not fit its projections.

        Raises:
            UnsupportedGradientError: If a fault is above 1; the message names the attention.
        """
        is_late = self._rescaled[0].nothing().device.type != "cpu"
        done = "It was never rescaled; steps since then were taken" if is_late else _NOTHING_DONE
        for place, fault in enumerate(faults):
            if fault > 1:
                one, words = self._rescaled[place // len(_FAULT_WORDS)], _FAULT_WORDS[place % len(_FAULT_WORDS)]
                raise UnsupportedGradientError(
                    f"{one.title} {words} Name the right layers, or leave this one unclipped, {one.left_alone}. {done}."
                )


_clipped: "WeakSet[nn.Module]" = WeakSet()
"""The query layers that a QKClip rescales."""

_NOTHING_DONE = "Nothing was rescaled, and no step was taken"

_FAULTS, _HEADER = slice(3, 6), 6
"""The header of `_Attention.measured` has the size of a head, the numbers of heads and key heads, and three faults: how
far vectors differ from the layers' outputs, whether values are keys, and how far the factor differs between calls. A
fault above 1 is too large."""

_FAULT_WORDS = (
    "does not attend with what its projections return: the norms of its query or key vectors are not one factor times "
    "those of the outputs. A normalisation between them (QK-norm) makes any rescaling of the weights useless, and "
    "needs none. A position that is added, or rows in another order, cannot be rescaled by rows of heads.",
    "attends with values that are its keys, which a rescaling of the keys would change.",
    "attends with what its projections return times a factor that differs between calls. A normalisation by a norm of "
    "a whole tensor, head or batch makes any rescaling of the weights useless; a learned factor, or one that depends "
    "on the length, looks the same.",
)

_TELLING = 8
"""With at least this many numbers in a head, values that are a multiple of the keys are so not by chance."""

_NEGLIGIBLE = 1e-3
"""Outputs below this share of a head's largest are not compared, because rounding may dominate them."""


@dataclass(eq=False)
class _Attention:
    """The projections of one attention, and its measurements since the last step.

    Attributes:
        name: The name of the module.
        module: The module.
        query: The layer that makes queries; a `torch.nn.MultiheadAttention` itself.
        key: The layer that makes keys; the same layer if it makes queries, keys and values.
        rotary: How many of a head's last dimensions have a key that all heads share (MLA).
        layers: The layers whose outputs are compared with the attention's arguments; none for
            `torch.nn.MultiheadAttention`.
        measured: Numbers that are reduced by their maximum over micro-batches and ranks: a header, then the largest
            logit of each row that makes queries.
        shape: The size of a head, the number of heads and the number of key heads, once known.
        is_seen: Whether this rank has recorded a call since the last step.
    """

    name: str
    module: nn.Module
    query: Any
    key: Any
    rotary: int = 0
    layers: list[nn.Linear] = field(init=False)
    measured: Tensor = field(init=False)
    shape: tuple[int, int, int] | None = None
    is_seen: bool = False
    _outputs: list[tuple[int, Tensor]] = field(default_factory=list)
    _heard: bool = False
    _factors: tuple[Tensor, Tensor] | None = None
    """The smallest and the largest factor of each head's queries and keys in any call."""
    _found: list[Tensor] = field(default_factory=list)
    _slots: list[tuple[str, Any, str]] = field(init=False)
    """For each weight and bias: what its rows make, the module that holds it, and its name there.

    Rows make queries (q), keys (k), or queries, keys and values in this order (qkv)."""

    @property
    def title(self) -> str:
        """The name, for a message."""
        return self.name or f"the {type(self.module).__name__}"

    @property
    def left_alone(self) -> str:
        """The argument that leaves this attention unclipped, for a message."""
        return f"projections={{{self.name!r}: None}}"

    def __post_init__(self) -> None:
        """List the weights and biases."""
        layer = self.query
        if isinstance(layer, nn.MultiheadAttention):
            self.layers = []
            weights = ["in_proj_weight"] if layer.in_proj_weight is not None else ["q_proj_weight", "k_proj_weight"]
            self._slots = [(name[0] if name[1] == "_" else "qkv", layer, name) for name in (*weights, "in_proj_bias")]
        else:
            made = {"qkv": layer} if layer is self.key else {"q": layer, "k": self.key}
            self.layers = [*made.values()]
            self._slots = [(kind, one, name) for name in ("weight", "bias") for kind, one in made.items()]

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Return the weights and then the biases, each with the kind of its rows."""
        found = [(kind, getattr(layer, name)) for kind, layer, name in self._slots]
        return [(kind, parameter) for kind, parameter in found if parameter is not None]

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by the kind of their rows."""
        return {kind: getattr(layer, name) for kind, layer, name in self._slots if name.endswith("weight")}

    def nothing(self) -> Tensor:
        """Return the initial value of ``measured``."""
        weight = next(iter(self.weights().values()))
        shape = (_HEADER + len(weight),)
        return torch.full(shape, -torch.inf, dtype=wide_dtype(weight.device), device=weight.device)

    def check(self) -> None:
        """Refuse layers and weights that have changed since they were found.

        Raises:
            UnsupportedGradientError: If a layer or weight was replaced, or is not plain.
        """
        why = self._why_not_plain()
        if why is None:
            now = [parameter for _, parameter in self.parameters()]
            self._found = self._found or now
            if list(map(id, now)) == list(map(id, self._found)):
                return
            why = "has another weight or bias than when the QKClip was attached"
        raise UnsupportedGradientError(
            f"a projection of {self.title} {why}. Attach a QKClip to the model in the form that is trained, or leave "
            f"the attention unclipped with {self.left_alone}."
        )

    def _why_not_plain(self) -> str | None:
        """Return why rescaling a weight may not rescale its layer's output; None if all layers are plain."""
        for layer in self.layers:
            if type(layer).forward is not nn.Linear.forward or "forward" in vars(layer):
                return (
                    f"is a {type(layer).__name__} whose output need not scale with its weight (an adapter, a forward "
                    "of its own): expected a plain torch.nn.Linear"
                )
        for _, layer, name in self._slots:
            if name.endswith("weight") and parameter_slots(layer).get(name) is None:
                return (
                    f"is a {type(layer).__name__} whose weight is computed from other parameters (weight_norm, "
                    "spectral_norm, another parametrization), so that its output need not scale with its weight"
                )
        if not all(parameter.requires_grad for _, parameter in self.parameters()):
            return "is frozen (requires_grad=False), and a rescaling would change it"
        return None

    def keep_outputs(self) -> list[RemovableHandle]:
        """Hook the module to store the layers' outputs, before other hooks change them, until the attention call."""
        return [
            self.module.register_forward_pre_hook(ForwardHook(self._enter), prepend=True),
            self.module.register_forward_hook(ForwardHook(self._leave), prepend=True),
            *(
                layer.register_forward_hook(ForwardHook(self._keep, place), prepend=True)
                for place, layer in enumerate(self.layers)
            ),
        ]

    @never_compiled
    def _enter(self, module: nn.Module, args: Any) -> None:
        del module, args
        self._outputs, self._heard = [], False

    @never_compiled
    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        del args, result
        tell_waiting()
        unheard = bool(self._outputs) if self.layers else not self._heard
        self._outputs = []
        if unheard and module.training and torch.is_grad_enabled():
            self._refuse_unheard()

    def _refuse_unheard(self) -> NoReturn:
        raise UnsupportedGradientError(
            f"{self.title} was trained, and no call of torch.nn.functional.scaled_dot_product_attention or "
            "flex_attention was seen in it while it was in training mode: its logits are not known. Expected calls of "
            "these functions (of torch.nn.MultiheadAttention: need_weights=False), model.train(), and the QKClip "
            "attached before torch.compile; other kernels are not seen. Or leave it unclipped with "
            f"{self.left_alone}. {_NOTHING_DONE}."
        )

    @never_compiled
    def _keep(self, place: int, layer: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        del layer, args
        if torch.is_grad_enabled() and output.numel():
            self._outputs.append((place, local_part(output).detach().clone()))  # a clone: later code may write to it
        return None

    # -- one call ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self, call: AttentionCall, exact: bool) -> None:
        """Record the largest logits of a call, and compare its arguments with the layers' outputs.

        Raises:
            UnsupportedGradientError: If the shapes do not match.
        """
        kept, self._outputs = self._outputs, []
        self._heard = True
        if call.is_empty:
            self.is_seen = True
            return
        self._require(call.query.dim() == 4, "attends with batch and heads in one dimension")
        if call.is_changed:
            raise UnsupportedGradientError(
                f"{self.title} calls flex_attention with a score_mod: the largest logit is not that of its queries and "
                "keys, and a rescaling of these need not lower it. Attend without it (a block_mask may stay), or leave "
                f"the attention unclipped with {self.left_alone}. {_NOTHING_DONE}."
            )
        layers, outputs = self.layers, dict(kept)
        self._require(
            len(outputs) == len(layers) == len(kept),
            "attends more than once with what its projections return, or they run more than once in its forward, or "
            "one was replaced after the QKClip was attached",
        )
        weights, size = self.weights(), call.query.shape[-1]
        rows = len(next(iter(weights.values())))
        heads = here = call.query.shape[-3]
        if "q" in weights:
            here = outputs[0].shape[-1] // size if layers else heads
            heads = rows // size
            keys = heads if self.rotary else len(weights["k"]) // size
        else:
            keys = (rows // size - heads) // 2
        shape = (size, heads, keys)
        self._require(
            self.shape in (None, shape), f"attends with {heads} heads of {size}, and has attended with other ones"
        )
        faults: Sequence[float | Tensor] = [0.0] * len(_FAULT_WORDS)
        if layers:
            faults = self._faults(call, [one.reshape(-1, one.shape[-1]) for _, one in sorted(outputs.items())], here)
        self.shape, self.is_seen = shape, True
        new, start = self.nothing(), self._first_head(here, heads, weights)
        for place, number in enumerate((*shape, *faults)):
            new[place].fill_(number)  # assigning a number by index would be a host sync
        largest = torch.nan_to_num(largest_logits(call, exact).to(new), -torch.inf, -torch.inf)
        new[_HEADER + start * size : _HEADER + (start + here) * size] = largest.repeat_interleave(size)
        self.measured = torch.maximum(self.measured.to(new), new)

    def _faults(self, call: AttentionCall, outputs: Sequence[Tensor], heads: int) -> list[Tensor]:
        """Return a number for each of `_FAULT_WORDS`, above 1 if the attention has that fault."""
        size, own = call.query.shape[-1], call.query.shape[-1] - self.rotary
        query, key, attending = outputs[0], outputs[-1], call.key.shape[-3]
        if query is key:
            keys = (query.shape[-1] // size - heads) // 2
            self._require(
                query.shape[-1] == (heads + 2 * keys) * size, "has another number of rows than its heads need"
            )
            query, key = query[:, : heads * size], query[:, heads * size : (heads + keys) * size]
        keys = heads if self.rotary else max(1, key.shape[-1] // size)
        fits = query.shape[-1] == heads * size and not heads % keys and not key.shape[-1] % keys
        fits = fits and 0 <= own <= key.shape[-1] // keys and not attending % keys
        self._require(fits and (self.rotary > 0 or key.shape[-1] == keys * size), "has rows that are not whole heads")
        queries = query.unflatten(-1, (heads, size))
        keyed = key.unflatten(-1, (keys, -1))[..., :own].repeat_interleave(attending // keys, 1)
        pairs = [(call.query[..., :own], queries[..., :own]), (call.key[..., :own], keyed)]
        if self.rotary:
            pairs.append((call.query[..., own:], queries[..., own:]))
        self._require(
            all(a.numel() == b.numel() for a, b in pairs), "attends with other tokens than its projections see"
        )
        compared = [_apart(*pair) for pair in pairs if pair[0].numel()]
        changes = [apart for apart, _, _ in compared]
        if self.rotary:
            shared = call.key[..., own:]
            changes.append(torch.where((shared == shared[:, :1]).all(), 0.0, torch.inf))
        factors = torch.cat([compared[0][1] * call.scale, *(factor for _, factor, _ in compared[1:])])
        least, most = [one.to(factors) for one in self._factors or (factors, factors)]
        self._factors = least, most = torch.fmin(least, factors), torch.fmax(most, factors)
        drift = torch.nan_to_num((most / least - 1).abs(), 0.0).amax() / max(tolerance for *_, tolerance in compared)
        return [torch.stack(changes).amax(), _are_keys(call, keyed), drift]

    def _require(self, fits: bool, what: str) -> None:
        if not fits:
            raise UnsupportedGradientError(
                f"{self.title} {what}: the rows of each head are not known. Name the right layers, "
                f"projections={{{self.name!r}: ('query layer', 'key layer')}}, or leave its logits unclipped with "
                f"{self.left_alone}."
            )

    def _first_head(self, here: int, total: int, weights: Mapping[str, Any]) -> int:
        """Return the number of this rank's first head: under tensor parallelism each rank has some of the heads."""
        if here == total:
            return 0
        weight = weights.get("q")
        shards = [] if weight is None or not is_sharded(weight) else list(enumerate(weight.placements))
        by = [i for i, p in shards if p.is_shard(0) and weight.device_mesh.size(i) * here == total]  # pyright: ignore
        self._require(bool(by), f"attends with {here} of {total} heads, and its weights are not cut by heads")
        return here * weight.device_mesh.get_coordinate()[by[-1]]  # pyright: ignore  # the last: FSDP2's comes first

    # -- one step ---------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take the shape of an attention that this rank has not called from the other ranks.

        Raises:
            UnsupportedGradientError: If no rank has called an attention whose weights have gradients.
        """
        if self.is_seen:
            return
        size, heads, keys = self.measured[: _FAULTS.start].tolist()
        if size > 0:
            self.shape = (int(size), int(heads), int(keys))
        # Use the weights that were found at first: in a forward of FSDP2 the layers hold others.
        elif any(gradient_of(parameter) is not None for parameter in self._found):
            self._refuse_unheard()

    def largest(self) -> Tensor:
        """Return the largest logit of each head."""
        size, heads, _ = cast("tuple[int, int, int]", self.shape)
        return self.measured[_HEADER:][: heads * size : size]

    def rescale(self, gamma: Tensor, alpha: float) -> None:
        """Rescale the rows of each head by its ``gamma``; heads that share a key use their smallest one."""
        size, heads, keys = cast("tuple[int, int, int]", self.shape)
        weights, own = self.weights(), size - self.rotary
        of_keys = gamma.reshape(keys, -1).amin(1)
        of_queries = of_keys.repeat_interleave(heads // keys)
        more = len(weights["k"]) // keys - own if "k" in weights else 0
        factors = {
            "q": _by_rows(of_queries, (alpha, own), (1.0, self.rotary)),
            "k": _by_rows(of_keys, (1 - alpha, own), (0.0, more)),
        }
        factors["qkv"] = torch.cat([factors["q"], factors["k"], torch.ones_like(factors["k"])])
        for kind, parameter in self.parameters():
            factor = factors[kind].reshape(-1, *[1] * (parameter.dim() - 1)).expand(parameter.shape)
            local, factor = local_part(parameter), local_part(shard_like(factor, parameter))
            wide = torch.promote_types(local.dtype, torch.float32)
            local.copy_(local.to(wide) * factor.to(wide))


def _by_rows(gamma: Tensor, *pattern: tuple[float, int]) -> Tensor:
    """Return the factor of each row; ``pattern`` lists powers of ``gamma`` for one head, with their numbers of rows."""
    return torch.cat([(gamma**power)[:, None].expand(-1, count) for power, count in pattern], 1).flatten()


def _apart(vectors: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor, float]:
    """Compare the norms of a head's vectors with one factor times the norms of its outputs.

    Both are sorted first, because a rescaling of rows does not depend on the order of tokens.

    Args:
        vectors: A tensor of shape (batch, heads, tokens, size).
        outputs: A tensor of shape (batch * tokens, heads, size), in any order of batch and tokens.

    Returns:
        The difference, above 1 if too large; the factor of each head, NaN if unknown; and the relative difference
        between factors that counts as rounding.
    """
    wide = torch.promote_types(torch.promote_types(vectors.dtype, outputs.dtype), torch.float32)
    norms = torch.linalg.vector_norm(vectors, dim=-1, dtype=wide).transpose(0, 1).flatten(1).sort(1).values
    of_outputs = torch.linalg.vector_norm(outputs, dim=-1, dtype=wide).T.sort(1).values
    ratios = norms / of_outputs
    known = (of_outputs > _NEGLIGIBLE * of_outputs[:, -1:]) & ratios.isfinite()
    most, least = torch.where(known, ratios, 0.0).amax(1), torch.where(known, ratios, torch.inf).amin(1)
    tolerance = 0.02 if 2 in (vectors.element_size(), outputs.element_size()) else 1e-3
    factor = torch.where(known, ratios, torch.nan).nanmedian(1).values
    return (most / least - 1).amax() / tolerance, factor, tolerance


def _are_keys(call: AttentionCall, outputs: Tensor) -> Tensor:
    """Return infinity if the values of a head are a multiple of its keys, in the call or as outputs; otherwise 0.

    Args:
        call: The call.
        outputs: The key layer's outputs, of shape (batch * tokens, heads, size), or with the tokens outside.
    """
    found = torch.zeros((), device=outputs.device)
    for order in ((0, 2, 1, 3), (2, 0, 1, 3)):
        values, keys = (one.permute(order).flatten(0, 1).float() for one in (call.value, call.key))
        for other in (keys, outputs.float()):
            if values.shape == other.shape and len(other) * other.shape[-1] >= _TELLING:
                product = (values * other).sum((0, 2))
                squares = values.square().sum((0, 2)) * other.square().sum((0, 2))
                found = torch.where(((squares > 0) & (product.square() > (1 - 1e-4) * squares)).any(), torch.inf, found)
    return found


# Finding the projections.


def _found(model: nn.Module, given: Mapping[str, Projections | None]) -> dict[str, _Attention | None]:
    """Return the projections of each attention by its name; None for those that stay unclipped.

    Raises:
        InvalidValueError: If there are none, or a pattern matches no module.
    """
    found: dict[str, _Attention | None] = {}
    modules = dict(model.named_modules())
    for pattern, layers in given.items():
        fitting = [name for name in modules if fnmatchcase(name, pattern)]
        if not fitting:
            raise InvalidValueError(f"projections has {pattern!r}, which matches no module of the model.")
        found |= {name: None if layers is None else _named(name, modules[name], layers) for name in fitting}
    for name, module in modules.items():
        if name not in found and (usual := _usual(name, module)) is not None:
            trained = any(parameter.requires_grad for _, parameter in usual.parameters())
            found[name] = usual if trained else None
    if not any(found.values()):
        raise InvalidValueError(
            f"this {type(model).__name__} has no attention whose projections are known and trained: expected "
            f"torch.nn.MultiheadAttention, or torch.nn.Linear layers called {_USUAL_WORDS}. Name them: "
            "projections={'blocks.*.attention': ('query layer', 'key layer')}."
        )
    return found


def _usual(name: str, module: nn.Module) -> _Attention | None:
    if type(module).forward is nn.MultiheadAttention.forward:
        return _Attention(name, module, module, module)
    for names in _USUAL:
        layers = [getattr(module, one, None) for one in names]
        if all(isinstance(layer, nn.Linear) for layer in layers):
            return _Attention(name, module, layers[0], layers[-1])
    return None


def _named(name: str, module: nn.Module, layers: Any) -> _Attention:
    names = (layers, layers) if isinstance(layers, str) else layers
    if not (isinstance(names, tuple) and len(names) in (2, 3) and all(isinstance(one, str) for one in names[:2])):
        raise InvalidTypeError(
            f"projections has {layers!r} for {name!r}: expected 'qkv layer', ('query layer', 'key layer'), "
            "('query layer', 'key layer', 64) with the number of rotary dimensions, or None."
        )
    rotary = check_whole("the number of rotary dimensions", names[2], 1) if len(names) == 3 else 0
    try:
        query, key = (module.get_submodule(one) for one in names[:2])
    except AttributeError as error:
        raise InvalidValueError(f"projections of {name!r}: {error}.") from None
    return _Attention(name, module, query, key, rotary)


def _check_weights(model: nn.Module, attentions: Sequence[_Attention], optimizer: Optimizer) -> None:
    """Check that ``optimizer`` steps the weights of each attention, and that rescaling rows rescales outputs.

    Raises:
        InvalidValueError: If weights are shared, or belong to another optimizer or another QKClip.
        UnsupportedGradientError: If a layer is not a plain linear one, or is frozen.
    """
    own, places = set(map(id, parameters_of(optimizer))), dict[int, list[str]]()
    for name, module in model.named_modules():  # every path of each layer and of each parameter
        for kind, part in (*layer_slots(module).items(), *parameter_slots(module).items()):
            places.setdefault(id(part), []).append(f"{name}.{kind}".lstrip("."))
    for one in attentions:
        one.check()
        if one.query in _clipped:
            raise InvalidValueError(
                f"the logits of {one.title} are clipped by another QKClip already: detach() that one first, or leave "
                f"the attention unclipped with {one.left_alone}."
            )
        if isinstance(one.query, nn.MultiheadAttention) and one.query.bias_k is not None:
            raise UnsupportedGradientError(
                f"{one.title} has add_bias_kv=True: a key that no projection makes. Leave it unclipped with "
                f"{one.left_alone}."
            )
        for weight in one.weights().values():
            if weight.dim() != 2 or not weight.is_floating_point():
                raise UnsupportedGradientError(
                    f"a projection of {one.title} has a weight of {weight.dim()} dimensions and {weight.dtype}: "
                    "expected a matrix of floating-point numbers, not one that FSDP1 or a quantization has packed. Use "
                    f"fully_shard(model), or {one.left_alone}."
                )
            if id(weight) not in own:
                raise InvalidValueError(
                    f"the projections of {one.title} are not parameters of this {type(optimizer).__name__}: expected "
                    "the optimizer that steps them, constructed from the present model. If several optimizers share "
                    f"them, make a QKClip for each, with {one.left_alone} for those of others."
                )
        for tied in (*one.layers, *(parameter for _, parameter in one.parameters())):
            names = places.get(id(tied), ())
            if len(names) > 1:
                raise InvalidValueError(
                    f"{one.title} has a projection in several places, {' and '.join(names)}, where a rescaling would "
                    "have unintended effects. Give each place its own layer and weight, or leave the attention "
                    "unclipped, None in projections."
                )
