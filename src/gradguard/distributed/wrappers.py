"""Modules that wrap a model: how FSDP1 and DDP treat its gradients, and the prefixes that wrappers add to its names."""

import sys
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from gradguard.distributed.agreement import warn_of_waiting
from gradguard.distributed.engines.megatron import refuse_experts, refuse_parts
from gradguard.distributed.processes import largest_over
from gradguard.errors import DistributedError, InvalidValueError, UnsupportedGradientError
from gradguard.living import alive
from gradguard.module_hooks import ForwardHook
from gradguard.torch_private import (
    default_store,
    flattened_by_fsdp1,
    is_fsdp1,
    is_silent_fsdp1,
    never_compiled,
    tree_leaves,
    wrapper_slots,
)

_PUT_IN_NAMES = wrapper_slots()

_REPLICAS_APART = 1e-3
"""The largest relative difference between norms of one averaged gradient on two replicas."""

_ON_EVERY_RANK = "Clip and measure on every rank, or after a backward that synchronizes"

_known: "weakref.WeakKeyDictionary[nn.Module, _KnownWrappers]" = weakref.WeakKeyDictionary()
"""For each DistributedDataParallel, the known facts about its gradients."""

_living: "weakref.WeakSet[nn.Module] | None" = None  # every wrapper; None before the first search


class _KnownWrappers:
    """Facts about the gradients of a DistributedDataParallel that are equal on all of its ranks.

    DDP records when each gradient was ready in a backward that synchronises; a hook on the outputs notices each
    backward. A forward alone shows nothing: one rank alone may evaluate, or sample.
    """

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        self._reducer = wrapper.reducer
        # DDP's reducer holds the statistics of the last backward that synchronised. If DDP's last forward ran inside
        # no_sync() or under no_grad(), a later backward may not have synchronised, so these statistics count as seen.
        last_synchronises = wrapper.require_forward_param_sync
        self._before = () if last_synchronises else tuple(self._reducer.get_backward_stats())
        """The statistics of DDP's reducer before the last backward, or clip."""
        self._averaged = weakref.WeakValueDictionary[int, Tensor]()
        """The averaged gradients, by the ids of their parameters."""
        wrapper.register_forward_hook(ForwardHook(self._after_forward))

    def are_averaged(self, wrapper: DistributedDataParallel, parameters: Sequence[Tensor]) -> bool:
        """Tell whether DDP averaged these gradients in the last backward, or an earlier clip has compared them."""
        now = tuple(self._reducer.get_backward_stats())
        if now != self._before and any(now):
            self._before = now
            self.note_averaged(wrapper.parameters())
        return all(p.grad is None or self._averaged.get(id(p)) is p.grad for p in parameters)

    def note_averaged(self, parameters: Iterable[Tensor]) -> None:
        """Record that these gradients are equal on all ranks, until the next backward."""
        self._averaged.update({id(p): p.grad for p in parameters if p.grad is not None})

    @never_compiled
    def _after_forward(self, wrapper: nn.Module, inputs: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        found = [one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad]
        if found:
            register_multi_grad_hook(found, self._before_backward, mode="any")

    def _before_backward(self, gradient: Tensor) -> None:
        self._before = tuple(self._reducer.get_backward_stats())
        self._averaged.clear()


def named_parameters(module: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters of ``module`` with their names in the model without wrappers.

    A rule for ``"head.*"``, and a history that is stored by name, are then the same on one process and under DDP,
    FSDP1, ``DataParallel``, ``torch.compile``, PyTorch's checkpoint wrapper and Fabric. If two parameters would get one
    name, all keep their own.
    """
    named = list(module.named_parameters(remove_duplicate=remove_duplicate))
    plain = plain_names(module, [name for name, _ in named])
    found = [(plain[name], p) for name, p in named]
    return found if len(dict(found)) == len(dict(named)) else named


def plain_names(module: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Return ``names`` of parameters, buffers or modules in ``module`` without the prefixes of wrappers."""
    words = "\n".join(names)
    if not any(part in words for part in (*_PUT_IN_NAMES, "module")):
        return {name: name for name in names}
    wrappers = DistributedDataParallel | nn.DataParallel
    modules = module.named_modules(remove_duplicate=False)
    wrapped = {(*_path(name), "module") for name, one in modules if isinstance(one, wrappers)}
    paths = {name: _path(name) for name in names}
    return {
        name: ".".join(word for i, word in enumerate(path, 1) if path[:i] not in wrapped)
        for name, path in paths.items()
    }


def _path(name: str) -> tuple[str, ...]:
    return tuple(word for word in name.split(".") if word and word not in _PUT_IN_NAMES)


def check_wrappers(tensors: Sequence[Tensor], stages: Any) -> None:
    """Refuse gradients that are not reduced over ranks yet.

    Args:
        tensors: The parameters.
        stages: The process group along which parameters differ, or None.

    Raises:
        UnsupportedGradientError: If the gradients are not synchronized: this rank's part alone would be wrong.
        InvalidValueError: If ``stages`` contains ranks over which the parameters are replicated.
    """
    possible = [w for w in _wrappers() if isinstance(w, DistributedDataParallel) or is_silent_fsdp1(w)]
    for wrapper, own in _wrappers_of(tensors, possible):
        is_ddp = isinstance(wrapper, DistributedDataParallel)
        if is_ddp and any(flattened_by_fsdp1(own)):
            continue  # FSDP1 averages the gradients of its flat parameters, also for a DDP inside it
        if not is_ddp or not wrapper.require_backward_grad_sync:
            raise UnsupportedGradientError(
                f"gradients of a backward inside {type(wrapper).__name__}.no_sync() belong to this process alone: "
                "their norm differs from rank to rank. Clip after the backward pass that synchronizes, outside "
                "no_sync()."
            )
        if stages is not None:
            both = set(dist.get_process_group_ranks(wrapper.process_group)) & set(dist.get_process_group_ranks(stages))
            if len(both) > 1:
                raise InvalidValueError(
                    f"process_group says that parameters differ between the ranks {sorted(both)}, over which "
                    "DistributedDataParallel replicates them: leave process_group out; it is for pipeline stages."
                )
        known = _known_of(wrapper)
        if not known.are_averaged(wrapper, own):
            _refuse_own_gradients(wrapper, own)
            known.note_averaged(own)


def follow_backwards() -> None:
    """Record from now on how each backward of a DistributedDataParallel treats its gradients."""
    for wrapper in _wrappers():
        if isinstance(wrapper, DistributedDataParallel):
            _known_of(wrapper)


def _known_of(wrapper: DistributedDataParallel) -> _KnownWrappers:
    if wrapper not in _known:
        _known[wrapper] = _KnownWrappers(wrapper)
    return _known[wrapper]


def _refuse_own_gradients(wrapper: DistributedDataParallel, parameters: Sequence[Tensor]) -> None:
    """Raise if gradients of replicas differ. A collective: a script may have averaged them itself."""
    if dist.get_world_size(wrapper.process_group) == 1:
        return
    _wait_for_all(wrapper.process_group)
    grads = [p.new_zeros(()) if p.grad is None else p.grad.detach() for p in parameters]
    norms = [torch.linalg.vector_norm(g.coalesce().values() if g.is_sparse else g).double() for g in grads]
    of_all = torch.stack([norm.to(norms[0].device) for norm in norms])
    here = torch.cat([of_all, -of_all]).nan_to_num(0.0, 0.0, 0.0)
    most, least = largest_over(here, wrapper.process_group, "compare the gradients of replicas").chunk(2)
    if bool((most + least > _REPLICAS_APART * most).any()):
        raise UnsupportedGradientError(
            "the last backward of DistributedDataParallel ran inside no_sync(), so each process has its own gradients "
            "and their norm differs from rank to rank. Run the forward and the backward of the last micro-batch "
            "outside no_sync(), and clip then. Nothing was changed."
        )


def _wait_for_all(group: Any) -> None:
    """Wait, at the store, until all ranks are ready to compare their gradients.

    If one rank alone started the collective, it would meet a collective of the others' next backward, and its numbers
    could be added to their gradients.

    Raises:
        DistributedError: If a rank is missing after the time-out of the store.
    """
    store, world = default_store(), dist.get_world_size(group)
    key, begin, waited = f"gradguard/{group.group_name}/replicas", time.monotonic(), 0.0
    came, pause = store.add(key, 1), 1e-4
    wanted = came + -came % world  # no rank begins a comparison before all ranks have joined the last one
    here = dist.PrefixStore(f"{key}/{wanted}", store)
    while came < wanted and waited < store.timeout.total_seconds():
        time.sleep(pause)
        came, pause, waited = store.add(key, 0), min(2 * pause, 0.05), time.monotonic() - begin
        warn_of_waiting(here, waited, partial("{} of {} processes".format, wanted - came, world), _ON_EVERY_RANK)
    if came == wanted:
        return
    if store.add(key, -1) < wanted - 1:
        raise DistributedError(
            f"only {came + world - wanted} of {world} processes came within {store.timeout.total_seconds():.0f} s to "
            "compare their gradients. DistributedDataParallel was not seen to average those of the last backward, as "
            f"happens inside no_sync(), so one process alone cannot compute their norm. {_ON_EVERY_RANK}. Nothing was "
            "changed."
        )
    store.add(key, 1)  # the last rank joined while this one gave up


def check_gradients(gradients: Sequence[Tensor | None]) -> None:
    """Refuse what `check_wrappers` refuses, for gradients that are passed instead of parameters.

    Raises:
        UnsupportedGradientError: If a gradient or its parameter belongs to FSDP1, or DistributedDataParallel has not
            averaged it.
    """
    wanted = {id(g) for g in gradients if g is not None}
    held = [(w, p) for w in _wrappers() for p in w.parameters() if id(p.grad) in wanted]
    is_ddp = [isinstance(w, DistributedDataParallel) for w, _ in held]
    if not all(is_ddp) or any(flattened_by_fsdp1(gradients)):
        raise UnsupportedGradientError(
            "a tensor belongs to FullyShardedDataParallel (FSDP1): its norm would be that of this process' part. "
            'clip_grad_norm_(model, float("inf")) with the root module measures all gradients and writes nothing.'
        )
    check_wrappers(list(dict.fromkeys(p for _, p in held)), None)


def refuse_flat_parameters(parameters: Sequence[Tensor], what: str) -> None:
    """Raise if FSDP1 has flattened several parameters into one tensor: ``what`` needs each parameter separately.

    Raises:
        UnsupportedGradientError: If FSDP1 has, or if the parameters are Megatron's experts.
    """
    refuse_experts(parameters, what)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(p, fsdp.FlatParameter) for p in parameters):
        raise UnsupportedGradientError(
            f"{what} needs each parameter by itself, and FullyShardedDataParallel (FSDP1) has made one tensor of "
            "several: use fully_shard(model), FullyShardedDataParallel(use_orig_params=True), or a norm of all."
        )


def _wrappers() -> list[nn.Module]:
    """Return every live DistributedDataParallel and FSDP1 module: one search, then a hook that records new ones."""
    global _living
    is_alone = not (dist.is_available() and dist.is_initialized())
    if is_alone or torch.compiler.is_compiling():  # compiled code cannot search; code outside it can
        return []
    if _living is None:
        found = [m for m in alive(nn.Module) if _is_wrapper(m)]
        _living = weakref.WeakSet(found)
        register_module_module_registration_hook(_note)
    return list(_living)


def _wrappers_of(parameters: Iterable[Tensor], wrappers: Sequence[nn.Module]) -> Iterator[tuple[Any, Sequence[Tensor]]]:
    """Yield each of ``wrappers`` that holds some of ``parameters``, with those parameters."""
    wanted = set(map(id, parameters)) if wrappers else set()
    for wrapper in wrappers:
        if own := [p for p in wrapper.parameters() if id(p) in wanted]:
            yield wrapper, own


def _note(module: nn.Module, name: str, part: nn.Module | None) -> None:
    if name in ("module", *_PUT_IN_NAMES) and _living is not None and _is_wrapper(module):
        _living.add(module)


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel) or is_fsdp1(module)


def refuse_wrapped_in_backward(parameters: Sequence[Tensor]) -> None:
    """Raise if DDP or FSDP1 reduces the gradients of ``parameters`` only later in the running backward.

    Raises:
        UnsupportedGradientError: If one of them does.
    """
    for wrapper, _ in _wrappers_of(parameters, _wrappers()):
        raise UnsupportedGradientError(
            f"the optimizer steps inside a backward pass, where {type(wrapper).__name__} has not yet added up the "
            "gradients of all processes: each process would step by its own. Use fully_shard(model), or step after "
            "backward()."
        )


def refuse_wrapped(parameters: Iterable[Tensor]) -> None:
    """Raise if DDP replicates ``parameters`` or Megatron shards them: the caller treats them as this rank's alone.

    Raises:
        UnsupportedGradientError: If one of them does.
    """
    parameters = list(parameters)
    refuse_parts(parameters, "per-sample clipping")
    for wrapper, _ in _wrappers_of(parameters, _wrappers()):
        if isinstance(wrapper, DistributedDataParallel) and dist.get_world_size(wrapper.process_group) > 1:
            raise UnsupportedGradientError(
                "DistributedDataParallel (or replicate) wraps the module that was given, and the samples of other "
                "processes would not be added up: give DistributedDataParallel(model) itself, made before."
            )
