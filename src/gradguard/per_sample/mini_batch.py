"""Collect the gradients of one backward, and turn each layer's inputs and output gradients into contributions."""

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradguard.errors import InvalidValueError, UnsupportedGradientError
from gradguard.listeners import changes_on_the_way
from gradguard.per_sample.call_arguments import Gradients, Skeleton, Versions, versions_of, written
from gradguard.per_sample.contributions import (
    Contribution,
    Contributions,
    Materialized,
    Recomputed,
    choose_method,
    kept_bytes,
    together,
)
from gradguard.per_sample.layer_plans import CallPlan
from gradguard.per_sample.layers.call import LayerCall
from gradguard.per_sample.plain_sum import Again, Leaves, Run, by_itself, magnitude, not_adding_up
from gradguard.per_sample.sample_loop import LoopedCall
from gradguard.per_sample.vmap_fallback import NestedCall, VmapFallback
from gradguard.tensors.matmul_precision import TF32_EPSILON, Kind, full_float32, is_tf32_allowed, outside_autocast
from gradguard.torch_private import call_after_backward, current_graph_task

_LEAST = 32 << 20
"""Bytes of per-sample gradients that may always be stored."""


@dataclass
class UsedLayer:
    """One call of a layer that has a rule.

    Attributes:
        module: The layer.
        plan: The layer's rule, and the batch axes of its inputs and outputs.
        arguments: The structure of the arguments, without tensors.
        batch_size: Number of samples.
        names: The layer's trained parameters: by name in the layer, the name in the whole module.
        generator_state: State of the random generator before the call, for a rule that replays a layer with dropout.
        leaves: Stand-ins for the parameters, on a step that is to be verified.
        precision: Machine epsilon of the autocast dtype of the call; 0 for no autocast.
        run: Runs the layer again alone; None if that is impossible, or the call is not to be verified.
    """

    module: nn.Module
    plan: CallPlan
    arguments: Skeleton
    batch_size: int
    names: Mapping[str, str]
    generator_state: Tensor | None
    leaves: Leaves | None = None
    precision: float = 0.0
    run: Run | None = None

    def again(self, call: LayerCall, dtype: torch.dtype | None) -> dict[str, Tensor]:
        """Return the plain gradients from a second run of the layer alone, by name in the whole module."""
        assert self.run is not None
        assert self.leaves is not None
        values = {own: self.leaves.values[name] for own, name in self.names.items()}
        return dict(zip(self.names.values(), by_itself(call, self.run, values, dtype), strict=True))


class Unverified(NamedTuple):
    """The contributions of one call of a layer, which must add up to its plain gradients.

    Attributes:
        layer: The call.
        contributions: The contribution to each parameter.
        precision: Machine epsilon of the coarsest dtype of the computation.
        size: Size of the largest contribution, for parameters whose own gradient is small.
        again: Computes the layer's plain gradients again; None if the layer cannot run again.
        summands: The largest number of values of the layer's output gradients that a kernel may sum into one.
    """

    layer: UsedLayer
    contributions: Contributions
    precision: float
    size: Tensor
    again: Again | None
    summands: float

    def wrong(self) -> str:
        """Return a message about a parameter whose gradients do not add up, or ""."""
        assert self.layer.leaves is not None
        name = not_adding_up(
            self.contributions, self.layer.leaves, self.precision, self.size, self.again, self.summands
        )
        return name and self.words_of(name)

    def words_of(self, name: str) -> str:
        """Return the message for a parameter whose gradients do not add up."""
        return (
            f"the samples' gradients of {name} do not add up to its plain gradient in "
            f"{type(self.layer.module).__name__}. Does a hook, or a forward that was replaced, use its "
            "parameters, or its output before the clipper's hook gets it? Nothing was clipped."
        )


@dataclass
class MiniBatch:
    """The contributions of one mini-batch.

    Attributes:
        task: The id of the backward that produced the contributions.
        complete: Whether the backward ran to its end.
        batch_size: Number of samples; -1 while it is unknown.
        parts: The contributions to each parameter.
        fallbacks: Runs of code that is differentiated once backward has computed all gradients.
        budget: Bytes of per-sample gradients that may still be stored.
        shared: Parameters that are used more than once.
        loops: Calls that are repeated sample by sample.
        witnessed: Calls of which some samples run alone.
        to_verify: Calls of layers whose plain gradients are not complete. Each is compared as soon as they are, which
            frees the layer's inputs.
        wrong: Messages about calls whose gradients did not add up.
        compared: Calls that were compared, with the message for a gradient that reaches them later.
        reached: Calls whose parameters have received a plain gradient.
        tapped: Calls whose outputs have received a gradient.
        read_later: Inputs that contributions read after the backward, with their versions in it.
        finished: One contribution for each parameter, after `finish`.
    """

    task: int
    budget: int
    shared: Set[str] = frozenset()
    complete: bool = False
    batch_size: int = -1
    parts: dict[str, list[Contribution]] = field(default_factory=lambda: defaultdict(list))
    fallbacks: list[VmapFallback] = field(default_factory=list)
    loops: list[LoopedCall] = field(default_factory=list)
    witnessed: list[LoopedCall] = field(default_factory=list)
    to_verify: dict[Leaves, Unverified] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    compared: dict[Leaves, str] = field(default_factory=dict)
    reached: list[Leaves] = field(default_factory=list)
    tapped: set[Leaves] = field(default_factory=set)
    read_later: Versions = field(default_factory=list)
    finished: Contributions | None = None

    def expect(self, batch_size: int, layer: nn.Module) -> None:
        """Check that ``layer`` was called with as many samples as the other layers.

        Raises:
            UnsupportedGradientError: If the numbers differ.
        """
        if self.batch_size not in (-1, batch_size):
            raise UnsupportedGradientError(
                f"{type(layer).__name__} was called with {batch_size} samples and another layer with "
                f"{self.batch_size} in one backward, so gradients cannot be assigned to samples. Give all calls in "
                "one mini-batch the same number of samples, and call clipper.clip_and_accumulate() after the "
                "backward of each mini-batch."
            )
        self.batch_size = batch_size

    def add(self, name: str, contribution: Contribution, device: torch.device) -> Contribution:
        """Add the contribution of one use of parameter ``name``, and choose its method at once if it is the only use.

        A contribution that is materialized at once frees the layer's input and gradient during backward.

        Returns:
            The contribution as it is stored.
        """
        if name not in self.shared:
            held = choose_method(contribution, self.budget, device)
            if isinstance(held, Materialized):
                self.budget -= kept_bytes(contribution)
            contribution = held
        self.parts[name].append(contribution)
        return contribution

    def compare(self, leaves: Leaves) -> None:
        """Compare the plain gradients of a layer's call with its rule's contributions, and free the call's tensors."""
        one = self.to_verify.pop(leaves)
        self.compared[leaves] = one.words_of(next(iter(one.contributions), ""))
        if words := one.wrong():
            self.wrong.append(words)

    def finish(self, device: torch.device) -> Contributions:
        """Return one contribution for each parameter that was used.

        Raises:
            UnsupportedGradientError: If a gradient reached parameters of a call whose outputs got none, if the
                samples' gradients of a call do not add up to its plain gradients, or if an input was written in place
                since the backward.
        """
        if self.finished is None:
            if written(self.read_later):
                raise UnsupportedGradientError(
                    "a tensor that a layer got as its input was written in place between backward and "
                    "clip_and_accumulate(), which still reads it: for example a buffer into which the next batch was "
                    "copied. Clip first, or copy the next batch into another tensor. Nothing of this mini-batch was "
                    "clipped."
                )
            self.read_later.clear()
            for leaves in self.reached:
                if leaves not in self.tapped and any(bool(gradient.any()) for gradient in leaves.plain.values()):
                    raise UnsupportedGradientError(
                        f"a gradient reached {', '.join(leaves.plain)} in {type(leaves.module).__name__} by a path "
                        "that the clipper does not follow. Either a value inside the module reached the loss other "
                        "than through its outputs (an attribute, a list, a hook): return the value instead. Or the "
                        "module's code used these parameters in another way than when the clipper examined the model: "
                        "repeat this step, and the clipper examines it again. Nothing was clipped."
                    )
            self.reached.clear()  # leaves refer to the collector: a cycle until the next garbage collection
            self.tapped.clear()
            for leaves in list(self.to_verify):
                self.compare(leaves)
            self.compared.clear()
            for words in self.wrong:
                raise UnsupportedGradientError(words)
            while self.fallbacks:
                for name, gradients in self.fallbacks.pop().per_sample_gradients().items():
                    self.parts[name].append(Materialized(gradients))
            for loop in self.loops:
                for name, contribution in loop.contributions(self.budget).items():
                    self.parts[name].append(contribution)
                loop.verify({name: self.parts[name][-1] for name in loop.places})
            self.finished = {}
            for name in list(self.parts):
                uses = self.parts.pop(name)
                merged = together(uses)
                self.finished[name] = merged if merged is uses[0] else choose_method(merged, self.budget, device)
        return self.finished


class GradientCollector:
    """Receive gradients from taps, for one mini-batch at a time.

    Attributes:
        mini_batch: The gradients that were received and not yet taken.
        activations: Bytes of the inputs and outputs of tapped layers since the last mini-batch was taken. Backward
            frees about as many, so per-sample gradients may take their place.
        shared: Parameters that are used more than once.
        closed: Whether the clipper was detached, so gradients are refused.
    """

    def __init__(self, shared: Set[str] = frozenset()) -> None:
        self.mini_batch: MiniBatch | None = None
        self.closed = False
        self.activations = 0
        self.shared = shared

    def completed(self) -> MiniBatch:
        """Return the mini-batch of the backward that has just run.

        Raises:
            InvalidValueError: If no backward ran, or it stopped with an error.
        """
        mini_batch = self.mini_batch
        if mini_batch is None:
            raise InvalidValueError(
                "there are no gradients to clip: call loss.backward() on a loss that was computed with the "
                "module first, once for each mini-batch."
            )
        if not mini_batch.complete:
            self.mini_batch = None
            raise InvalidValueError(
                "the last backward did not run to its end (it raised an error), so its gradients are incomplete and "
                "were dropped. Repeat the forward and backward of this mini-batch."
            )
        return mini_batch

    def discard(self) -> None:
        """Drop the received gradients."""
        self.mini_batch, self.activations = None, 0

    def receive_layer(self, layer: UsedLayer, saved: Sequence[Tensor], grads: Gradients, task: int) -> None:
        """Compute the contributions of a layer with a rule, from the gradients of its outputs."""
        if all(grad is None for grad in grads):
            self._of(task)
            return
        mini_batch = self._reached(layer, task)
        args, kwargs = layer.arguments.fill(saved[: len(layer.arguments)])
        outputs: list[Tensor | None] = list(saved[len(layer.arguments) :])
        call = LayerCall(
            layer.module,
            args,
            kwargs,
            outputs or [None] * len(grads),
            grads,
            layer.batch_size,
            layer.plan.inputs,
            layer.plan.outputs,
            frozenset(layer.names),
            layer.generator_state,
            layer.precision,
        )
        assert layer.plan.rule is not None
        device = next(grad.device for grad in grads if grad is not None)
        kinds = _kinds_of(type(layer.module))
        is_rounded = layer.leaves is not None and is_tf32_allowed(device, *kinds)
        with outside_autocast(device), full_float32("product", *kinds):
            contributions = layer.plan.rule.contributions(call)
            if contributions.keys() != layer.names.keys():
                raise UnsupportedGradientError(
                    f"the rule of {type(layer.module).__name__} computes gradients of {sorted(contributions)}, but "
                    f"{sorted(layer.names)} are trained. Is the weight computed by an old-style hook (weight_norm, "
                    "spectral_norm, prune)? Use torch.nn.utils.parametrizations in its place."
                )
            added, sizes, reads = dict[str, Contribution](), list[Tensor](), False
            for name, contribution in contributions.items():
                held = added[layer.names[name]] = mini_batch.add(layer.names[name], contribution, device)
                reads = reads or not isinstance(held, Materialized)
                if layer.leaves is not None:  # a recomputed contribution is measured as it is stored, not once more
                    sizes.append(magnitude(held if isinstance(contribution, Recomputed) else contribution))
            if reads:
                mini_batch.read_later += versions_of(saved)
            if layer.leaves is not None:
                floats = [t for t in (*saved, *grads) if t is not None and t.is_floating_point()]
                size = torch.stack(sizes).nan_to_num(0.0, 0.0, 0.0).max()
                precision = max(layer.precision, *(torch.finfo(t.dtype).eps for t in floats))
                precision = max(precision, TF32_EPSILON) if is_rounded else precision
                again = None if layer.run is None else partial(layer.again, call)
                summands = max((grad.numel() for grad in grads if grad is not None), default=0)
                mini_batch.to_verify[layer.leaves] = Unverified(layer, added, precision, size, again, summands)

    def receive_nested_call(self, layer: NestedCall, saved: Sequence[Tensor], grads: Gradients, task: int) -> None:
        """Store the gradients of the tensors that a module's own code passed to a layer."""
        del saved
        self._of(task)
        layer.grads = list(grads)

    def receive_plain(self, made_in: int, leaves: Leaves) -> None:
        """Record that the parameters of a call received a plain gradient, and compare once it is complete."""
        mini_batch = self._of(current_graph_task() if made_in == -1 else made_in)
        mini_batch.reached.append(leaves)
        if leaves in mini_batch.compared:
            mini_batch.wrong.append(mini_batch.compared[leaves])
        elif leaves.are_complete and leaves in mini_batch.to_verify:
            mini_batch.compare(leaves)

    def receive_fallback(self, fallback: VmapFallback, saved: Sequence[Tensor], grads: Gradients, task: int) -> None:
        """Store the gradients of the outputs of a module's own code.

        Backward has not reached the tensors that the code passed to layers yet.
        """
        mini_batch = self._reached(fallback, task)
        fallback.saved, fallback.grads = saved, list(grads)
        mini_batch.read_later += versions_of(saved)
        mini_batch.fallbacks.append(fallback)

    def receive_loop(self, loop: LoopedCall, saved: Sequence[Tensor], grads: Gradients, task: int) -> None:
        """Store the gradients of the outputs of a looped call."""
        del saved
        loop.grads = list(grads)
        self._reached(loop, task).loops.append(loop)

    def receive_witnessed(self, call: LoopedCall, saved: Sequence[Tensor], grads: Gradients, task: int) -> None:
        """Store the gradients of the outputs of a call of which some samples run alone."""
        del saved
        call.grads = list(grads)
        self._of(task).witnessed.append(call)

    def receive_nothing(self, saved: Sequence[Tensor], grads: Gradients, task: int) -> None:
        """Record a backward through a call without samples."""
        del saved, grads
        self._of(task).batch_size = 0

    def take_from_checkpoint(self, name: str, gradient: Tensor, task: int) -> bool:
        """Add a plain gradient that a reentrant checkpoint's own backward accumulated in a parameter.

        Such a checkpoint repeats its forward in backward with the parameter itself, where the first forward had a leaf.

        Args:
            name: The name of the parameter.
            gradient: The gradient.
            task: The id of the running backward.

        Returns:
            Whether the gradient was added. False in the outermost backward, or unless exactly one looped call is
            verified that uses the parameter.
        """
        loops = [] if self.mini_batch is None or self.mini_batch.task == task else self.mini_batch.loops
        verified = [loop.leaves for loop in loops if loop.leaves is not None and name in loop.places]
        if len(verified) == 1:
            verified[0].add(name, gradient)
        return len(verified) == 1

    def _reached(self, call: UsedLayer | VmapFallback | LoopedCall, task: int) -> MiniBatch:
        """Return the mini-batch of the running backward, after recording that it reached the outputs of a call."""
        mini_batch = self._of(task)
        mini_batch.expect(call.batch_size, call.module)
        if call.leaves is not None:
            mini_batch.tapped.add(call.leaves)
        return mini_batch

    def _of(self, task: int) -> MiniBatch:
        """Return the mini-batch of the running backward; begin one if there is none.

        Raises:
            InvalidValueError: If the clipper was detached, or the mini-batch of an earlier backward was not taken.
            UnsupportedGradientError: If something changes gradients on their way, such as an error clip.
        """
        if self.closed:
            raise InvalidValueError(
                "the clipper was detached between a forward of the module and its backward, so the module's "
                "parameters get no gradients. Call clipper.detach() after backward, or run forward again."
            )
        running = self.mini_batch
        if running is not None and running.task == task:
            return running
        if running is not None and running.complete:
            raise InvalidValueError(
                "a second backward ran before the samples of the first were clipped, so the gradients of two "
                "mini-batches would be mixed up. A mini-batch has one backward: add up its losses first, and compute "
                "gradients for anything else (a metric, a penalty) with a copy of the module. In a loop of your own, "
                "call clip_and_accumulate() of the PerSampleGradientClipper after each backward. The first mini-batch "
                "is still stored."
            )
        if what := changes_on_the_way():
            raise UnsupportedGradientError(
                f"a backward within {what} went through a module whose per-sample gradients are clipped. An error clip "
                "is not linear: a sample's gradient would depend on the number of samples in the batch and on a "
                "GradScaler. Remove it: the norm of each sample's gradient is bounded without it."
            )
        mini_batch = self.mini_batch = MiniBatch(task, max(_LEAST, self.activations // 2), self.shared)

        def completed() -> None:
            mini_batch.complete = True

        call_after_backward(completed)
        return mini_batch


@functools.cache
def _kinds_of(layer: type[nn.Module]) -> list[Kind]:
    """Return the kinds of operations that the backward of a layer may compute in TF32; all kinds if unknown."""
    if "Conv" in layer.__name__:
        return ["convolution"]
    if issubclass(layer, nn.RNNBase | nn.RNNCellBase):
        return ["recurrent", "product"]
    if issubclass(layer, nn.Linear | nn.Bilinear | nn.MultiheadAttention | nn.Embedding):
        return ["product"]
    return ["product", "convolution", "recurrent"]
