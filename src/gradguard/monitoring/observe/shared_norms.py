"""Norms of gradients that are spread over processes: all of them measure together, whatever becomes of one of them.

A process that watches must not make the others wait. So it takes part in the one all-reduce of each measurement also
when its own watching has failed: it then adds zeros, and a mark by which the others know that the sum is not complete.
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
    """Return whether processes hold parts of ``parameters``: DTensors, FSDP1's flat ones, Megatron's.

    The answer is the same on all processes.
    """
    if any_sharded(parameters):
        return True
    if not several_processes():
        return False
    return any(flattened_by_fsdp1(parameters)) or bool(Megatron().placements(parameters))


def is_captured(parameter: Tensor) -> bool:
    """Return whether a CUDA graph is recorded: it would replay our own work without us."""
    return parameter.is_cuda and host_copy.is_captured(parameter.device)


@dataclass(frozen=True, slots=True)
class Shared:
    """One measurement.

    Attributes:
        norms: 2-norm of the whole gradient of each parameter, 0 where no process has one.
        lost: Above 0 if a process could not measure its part; a 0-dim tensor where reading it would wait.
    """

    norms: Norms
    lost: Any


def refuse_lost(lost: Any) -> None:
    """Raise if a measurement is not complete: its norms would be plausible and too small.

    Raises:
        DistributedError: If so.
    """
    if lost is not None and float(lost) > 0:
        raise DistributedError("another process could not measure its part of the gradients; its stderr says why")


class SharedNorms:
    """Measures together with the other processes; each of them must ask at the same steps for the same parameters."""

    def __init__(self) -> None:
        self._failed = self._ended = False
        self._process = os.getpid()
        self._module: weakref.ref[nn.Module] | None = None

    def join(self, parameters: Sequence[Tensor], fail: Callable[[Exception], object]) -> tuple[bool, Shared | None]:
        """Take part in a measurement, where there is one: also where nothing is written, or watching has failed.

        It raises nothing.

        Args:
            parameters: All parameters of an optimizer, or of a clip.
            fail: Called with what goes wrong.

        Returns:
            Whether ``parameters`` are spread over processes; and what they have measured, None if nothing.
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
        """Return the norms of the whole gradients of ``parameters``; None if this process takes no part any more.

        Raises:
            Exception: The failure of this process, once; the others have not been left waiting unless the collective
                failed.
            UnsupportedGradientError: If nobody knows how they are spread.
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
        except Exception:  # without the collective, or a plan for it, there is no way to join
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
        """Return this process' addend; None, with the problem the first time, where it is unknown."""
        if self._failed:
            return None, None
        gradients = [tensor.grad for tensor in tensors]
        try:
            held = plan.hold(tensors, None)
            return (held.reduction, tensor_norms(held.gradients)), None
        except DistributedError:
            raise
        except Exception as error:
            self._failed = True
            return None, error
        finally:  # what `hold` brought in line is the script's, which must find it unchanged
            for tensor, gradient in zip(tensors, gradients, strict=True):
                if tensor.grad is not gradient:
                    tensor.grad = gradient

    @torch.no_grad()
    def _added_up(self, plan: NormPlan, own: tuple[NormReduction, Tensor] | None) -> tuple[Tensor, Tensor]:
        if own is None:
            nothing = torch.zeros_like(plan.weights)
            own = NormReduction(plan.reducer, plan.weights, nothing, plan.balance_of_all), nothing
        part, norms = replace(own[0], copies=NO_COPIES), own[1]  # the same numbers where a process has nothing to add
        marks = torch.full_like(norms, float(self._failed))
        found, lost = part.add_up((norms, 2.0), (marks, 1.0))
        return found, lost.amax()

    def _module_of(self, parameters: Sequence[Tensor]) -> nn.Module | None:
        """The module whose FSDP1 parts hold ``parameters``, which alone do not tell how they are spread."""
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
