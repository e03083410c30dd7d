"""Measure the norms of gradients that are sharded over processes, together and without deadlocks.

Each measurement needs one all-reduce of all processes. A process whose own measurement failed still joins: it adds
zeros, and a flag that marks the sum as incomplete. The other processes are therefore never left waiting.
"""

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.distributed.engines.fsdp1 import FlatParameters
from gradguard.distributed.engines.megatron import Megatron
from gradguard.distributed.norm_plan import NormPlan, plan_for
from gradguard.distributed.placements import any_sharded
from gradguard.distributed.reduction import NO_COPIES, NormReduction
from gradguard.distributed.reduction_group import several_processes
from gradguard.errors import DistributedError, UnsupportedGradientError
from gradguard.monitoring.observe.measure import Norms
from gradguard.monitoring.observe.meta import living_modules
from gradguard.tensors import host_copy
from gradguard.tensors.layout import are_readable
from gradguard.tensors.norms import tensor_norms
from gradguard.torch_private import flattened_by_fsdp1


def are_spread(parameters: Sequence[Tensor]) -> bool:
    """Return whether processes hold shards of ``parameters``: DTensors, FSDP1's flat parameters, or Megatron's.

    All processes get the same answer.
    """
    if any_sharded(parameters):
        return True
    if not several_processes():
        return False
    return any(flattened_by_fsdp1(parameters)) or bool(Megatron().placements(parameters))


def is_captured(parameter: Tensor) -> bool:
    """Return whether a CUDA graph is being captured, which would replay the measurement's kernels."""
    return parameter.is_cuda and host_copy.is_captured(parameter.device)


@dataclass(frozen=True, slots=True)
class Shared:
    """One measurement by all processes.

    Attributes:
        norms: The 2-norm of each parameter's whole gradient; 0 if no process has one.
        lost: Above 0 if a process could not measure its part; a 0-dim tensor if reading it needs a host sync.
    """

    norms: Norms
    lost: Any


def refuse_lost(lost: Any) -> None:
    """Raise if a measurement is incomplete: its norms would be plausible but too small.

    Raises:
        DistributedError: If ``lost`` is above 0.
    """
    if lost is not None and float(lost) > 0:
        raise DistributedError("another process could not measure its part of the gradients; its stderr says why")


class SharedNorms:
    """Measure together with the other processes; each must join at the same steps with the same parameters."""

    def __init__(self) -> None:
        self._failed = self._ended = False
        self._process = os.getpid()
        self._module: weakref.ref[nn.Module] | None = None

    def join(self, parameters: Sequence[Tensor], fail: Callable[[Exception], object]) -> tuple[bool, Shared | None]:
        """Join a measurement if the parameters are sharded, even if this process writes no record or has failed.

        The call never raises.

        Args:
            parameters: All parameters of an optimizer, or of a clip.
            fail: A function called with an exception of the measurement.

        Returns:
            Whether ``parameters`` are sharded over processes; and the measurement, None without one.
        """
        spread = False
        try:
            spread = bool(parameters) and are_spread(parameters)
            if not spread or os.getpid() != self._process or is_captured(parameters[0]):
                return spread, None
            shared = self.of(parameters)
            if shared is not None and isinstance(shared.lost, float):
                refuse_lost(shared.lost)
            return True, shared
        except Exception as error:
            fail(error)
            return spread, None

    def of(self, parameters: Sequence[Tensor]) -> Shared | None:
        """Return the norms of the whole gradients of ``parameters``; None if this process has stopped joining.

        Raises:
            Exception: The failure of this process, raised once. The other processes still get its part of the
                collective, unless the collective itself failed.
            UnsupportedGradientError: If the layout of the shards is unknown.
        """
        if self._ended:
            return None
        try:
            planned = plan_for(parameters, None, module=self._module_of(parameters), measures_stage=True)
            if planned is None:
                raise UnsupportedGradientError("no process group holds these gradients: they cannot be measured.")
            plan, tensors, _ = planned
            own, problem = self._own_part(plan, tensors)
            norms, lost = self._added_up(plan, own)
        except Exception:  # without a plan or a working collective, this process cannot join again
            self._ended = True
            raise
        if problem is not None:
            raise problem
        if len(tensors) != len(parameters):
            place = {id(tensor): k for k, tensor in enumerate(tensors)}
            norms = norms[[place[id(p)] for p in parameters]]
        return Shared(norms.tolist(), lost.item()) if are_readable(norms, lost) else Shared(norms, lost)

    @torch.no_grad()
    def _own_part(
        self, plan: NormPlan, tensors: Sequence[Tensor]
    ) -> tuple[tuple[NormReduction, Tensor] | None, Exception | None]:
        """Return this process's part of the sum; if it failed, None, and the exception the first time."""
        gradients, had_failed = [tensor.grad for tensor in tensors], self._failed
        try:
            held = plan.hold(tensors, None)  # also after a failure: it communicates if gradients must be redistributed
            return None if had_failed else (held.reduction, tensor_norms(held.gradients)), None
        except DistributedError:
            raise
        except Exception as error:
            self._failed = True
            return None, None if had_failed else error
        finally:  # `hold` may have redistributed gradients; the script must find its own
            for tensor, gradient in zip(tensors, gradients, strict=True):
                if tensor.grad is not gradient:
                    tensor.grad = gradient

    @torch.no_grad()
    def _added_up(self, plan: NormPlan, own: tuple[NormReduction, Tensor] | None) -> tuple[Tensor, Tensor]:
        if own is None:
            nothing = torch.zeros_like(plan.weights)
            own = NormReduction(plan.reducer, plan.weights, nothing, plan.balance_of_all), nothing
        part, norms = replace(own[0], copies=NO_COPIES), own[1]  # a failed process cannot send copies
        marks = torch.full_like(norms, float(self._failed))
        found, lost = part.add_up((norms, 2.0), (marks, 1.0))
        return found, lost.amax()

    def _module_of(self, parameters: Sequence[Tensor]) -> nn.Module | None:
        """Return the FSDP1 module that holds ``parameters``: their own attributes do not describe their shards."""
        if any_sharded(parameters) or not any(flattened_by_fsdp1(parameters)):
            return None
        known = self._module() if self._module is not None else None
        for module in [known] if known is not None else living_modules():
            with suppress(UnsupportedGradientError):
                FlatParameters().placements(parameters, module)
                self._module = weakref.ref(module)
                return module
        self._module = None
        return None
