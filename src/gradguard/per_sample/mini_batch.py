"""Gathers what one backward brings: from each layer's input and its output's gradient to contributions."""

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
from gradguard.per_sample.call_arguments import Gradients, Skeleton
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
"""Bytes of per-sample gradients that may always be kept."""


@dataclass
class UsedLayer:
    """One call of a layer that has a rule.

    Attributes:
        module: The layer.
        plan: Its rule, and where its samples are.
        arguments: Its arguments, without tensors.
        batch_size: Number of samples.
        names: Its trained parameters: from their names in the layer to those in the whole module.
        generator_state: State of the random generator before the call, where the rule asks.
        leaves: Stand-ins for its parameters, on a step that is to be verified.
        precision: Machine epsilon of the autocast that it ran under; 0 for none.
        run: Runs it again by itself; None where it cannot be, or is not to be verified.
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
        """Return the plain gradients that the layer gives by itself, by their names in the whole module."""
        assert self.run is not None
        assert self.leaves is not None
        values = {own: self.leaves.values[name] for own, name in self.names.items()}
        return dict(zip(self.names.values(), by_itself(call, self.run, values, dtype), strict=True))


class Unverified(NamedTuple):
    """A layer's contributions, which must add up to the plain gradients of one call.

    Attributes:
        layer: The call.
        contributions: To each parameter.
        precision: Machine epsilon of the coarsest dtype that was computed in.
        size: Size of the gradients beside one that is small.
        again: Computes the layer's plain gradients again.
        summands: How many numbers of the layer's results a kernel may add up to one.
    """

    layer: UsedLayer
    contributions: Contributions
    precision: float
    size: Tensor
    again: Again | None
    summands: float

    def wrong(self) -> str:
        """Return words for what does not add up, "" if all does."""
        assert self.layer.leaves is not None
        name = not_adding_up(
            self.contributions, self.layer.leaves, self.precision, self.size, self.again, self.summands
        )
        return name and self.words_of(name)

    def words_of(self, name: str) -> str:
        """Return the words for a parameter that does not add up."""
        return (
            f"the samples' gradients of {name} do not add up to its plain gradient in "
            f"{type(self.layer.module).__name__}. Does a hook, or a forward that was replaced, use its "
            "parameters or its output before the clipper sees it? Nothing was clipped."
        )


@dataclass
class MiniBatch:
    """The contributions of one mini-batch.

    Attributes:
        task: The backward that they come from.
        complete: The backward has gone through to its end.
        batch_size: Number of samples; -1 as long as it is not known.
        parts: The contributions to each parameter.
        fallbacks: Runs of code that is differentiated when all gradients are there.
        budget: Bytes of per-sample gradients that may still be kept.
        shared: Parameters that are used more than once.
        loops: Calls that are repeated sample by sample.
        witnessed: Calls that one sample is run alone of.
        to_verify: Layers whose plain gradients have not all come; with one, autograd frees what the layer was given.
        wrong: Words for those that did not add up.
        compared: Those that were compared, and the words if a gradient comes to them after all.
        reached: Calls to whose parameters a plain gradient has come.
        tapped: Calls whose outputs a gradient has come to.
        finished: One contribution for each parameter, once `finish` was called.
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
    finished: Contributions | None = None

    def expect(self, batch_size: int, layer: nn.Module) -> None:
        """Check that ``layer`` saw as many samples as the others.

        Raises:
            UnsupportedGradientError: If not.
        """
        if self.batch_size not in (-1, batch_size):
            raise UnsupportedGradientError(
                f"{type(layer).__name__} was called with {batch_size} samples and another layer with "
                f"{self.batch_size} in one backward, so whose gradient is whose cannot be told. Give all calls in "
                "one mini-batch the same number of samples, and call clipper.clip_and_accumulate() after the "
                "backward of each mini-batch."
            )
        self.batch_size = batch_size

    def add(self, name: str, contribution: Contribution, device: torch.device) -> Contribution:
        """Add what one use of parameter ``name`` contributes; unless there are others, its way is settled at once.

        What is kept at once frees the layer's input and gradient while backward goes on freeing activations.

        Returns:
            The contribution as it is held.
        """
        if name not in self.shared:
            held = choose_method(contribution, self.budget, device)
            if isinstance(held, Materialized):
                self.budget -= kept_bytes(contribution)
            contribution = held
        self.parts[name].append(contribution)
        return contribution

    def compare(self, leaves: Leaves) -> None:
        """Compare the plain gradients of a layer's call with what its rule gave, and let go what it was given."""
        one = self.to_verify.pop(leaves)
        self.compared[leaves] = one.words_of(next(iter(one.contributions), ""))
        if words := one.wrong():
            self.wrong.append(words)

    def finish(self, device: torch.device) -> Contributions:
        """Return one contribution for each parameter that was used.

        Raises:
            UnsupportedGradientError: If a gradient came to parameters of a call whose outputs got none, or the plain
                gradients of a layer's call are not the sum of what its rule gave.
        """
        if self.finished is None:
            for leaves in self.reached:
                if leaves not in self.tapped and any(bool(gradient.any()) for gradient in leaves.plain.values()):
                    raise UnsupportedGradientError(
                        f"a gradient reached {', '.join(leaves.plain)} in {type(leaves.module).__name__} by a way that "
                        "is not followed. Either a value that it made reached the loss beside what it returned (an "
                        "attribute, a list, a hook): return it instead. Or its code used them in another way than when "
                        "the model was looked at: repeat this step, and it is looked at again. Nothing was clipped."
                    )
            self.reached.clear()  # they know of what gathers them: a cycle that would live until the next collection
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
    """Receives from taps; one mini-batch at a time.

    Attributes:
        mini_batch: Gradients that have come and are not yet taken.
        activations: Bytes that the tapped layers have taken and returned since the last mini-batch was taken: about
            what backward frees as it goes, and so what may be kept in its place.
        shared: Parameters that are used more than once.
        closed: Nobody will take what comes.
    """

    def __init__(self, shared: Set[str] = frozenset()) -> None:
        self.mini_batch: MiniBatch | None = None
        self.closed = False
        self.activations = 0
        self.shared = shared

    def completed(self) -> MiniBatch:
        """Return the mini-batch of the backward that has just run.

        Raises:
            InvalidValueError: If there is none, or it was cut short.
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
                "the last backward did not run to its end (it raised an error), so its gradients are not complete; "
                "they were thrown away. Repeat the forward and backward of this mini-batch."
            )
        return mini_batch

    def discard(self) -> None:
        """Forget what has come."""
        self.mini_batch, self.activations = None, 0

    def receive_layer(self, layer: UsedLayer, saved: Sequence[Tensor], grads: Gradients, task: int) -> None:
        """A layer with a rule: compute its contributions."""
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
                    f"the rule of {type(layer.module).__name__} gives gradients of {sorted(contributions)}, but "
                    f"{sorted(layer.names)} are trained. Is the weight computed by an old-style hook (weight_norm, "
                    "spectral_norm, prune)? Use torch.nn.utils.parametrizations in its place."
                )
            added, sizes = dict[str, Contribution](), list[Tensor]()
            for name, contribution in contributions.items():
                held = added[layer.names[name]] = mini_batch.add(layer.names[name], contribution, device)
                if layer.leaves is not None:  # what is computed again for each purpose is measured as it is held
                    sizes.append(magnitude(held if isinstance(contribution, Recomputed) else contribution))
            if layer.leaves is not None:
                floats = [t for t in (*saved, *grads) if t is not None and t.is_floating_point()]
                size = torch.stack(sizes).nan_to_num(0.0, 0.0, 0.0).max()
                precision = max(layer.precision, *(torch.finfo(t.dtype).eps for t in floats))
                precision = max(precision, TF32_EPSILON) if is_rounded else precision
                again = None if layer.run is None else partial(layer.again, call)
                summands = max((grad.numel() for grad in grads if grad is not None), default=0)
                mini_batch.to_verify[layer.leaves] = Unverified(layer, added, precision, size, again, summands)

    def receive_nested_call(self, layer: NestedCall, saved: Sequence[Tensor], grads: Gradients, task: int) -> None:
        """The gradient of what a module's own code called a layer with."""
        del saved
        self._of(task)
        layer.grads = list(grads)

    def receive_plain(self, made_in: int, leaves: Leaves) -> None:
        """A plain gradient came to the parameters of a call."""
        mini_batch = self._of(current_graph_task() if made_in == -1 else made_in)
        mini_batch.reached.append(leaves)
        if leaves in mini_batch.compared:
            mini_batch.wrong.append(mini_batch.compared[leaves])
        elif leaves.are_complete and leaves in mini_batch.to_verify:
            mini_batch.compare(leaves)

    def receive_fallback(self, fallback: VmapFallback, saved: Sequence[Tensor], grads: Gradients, task: int) -> None:
        """The gradient of what a module's own code returned; those of what it called layers with are still to come."""
        mini_batch = self._reached(fallback, task)
        fallback.saved, fallback.grads = saved, list(grads)
        mini_batch.fallbacks.append(fallback)

    def receive_loop(self, loop: LoopedCall, saved: Sequence[Tensor], grads: Gradients, task: int) -> None:
        """The gradients of what a looped call returned."""
        del saved
        loop.grads = list(grads)
        self._reached(loop, task).loops.append(loop)

    def receive_witnessed(self, call: LoopedCall, saved: Sequence[Tensor], grads: Gradients, task: int) -> None:
        """The gradients of what an outermost call returned that one sample is run alone of."""
        del saved
        call.grads = list(grads)
        self._of(task).witnessed.append(call)

    def receive_nothing(self, saved: Sequence[Tensor], grads: Gradients, task: int) -> None:
        """A backward through a call with no samples."""
        del saved, grads
        self._of(task).batch_size = 0

    def take_from_checkpoint(self, name: str, gradient: Tensor, task: int) -> bool:
        """Take a plain gradient that a checkpoint's own backward gave a parameter, of a call that is to be verified.

        A reentrant checkpoint runs forward again in backward, where the parameter itself stands in its place.

        Args:
            name: The parameter's.
            gradient: The gradient.
            task: The number of the running backward.

        Returns:
            False if it came in the outermost backward, or there is no such call.
        """
        loops = [] if self.mini_batch is None or self.mini_batch.task == task else self.mini_batch.loops
        verified = [loop.leaves for loop in loops if loop.leaves is not None and name in loop.places]
        if len(verified) == 1:
            verified[0].add(name, gradient)
        return len(verified) == 1

    def _reached(self, call: UsedLayer | VmapFallback | LoopedCall, task: int) -> MiniBatch:
        """The mini-batch that the running backward belongs to, which has come to what a call returned."""
        mini_batch = self._of(task)
        mini_batch.expect(call.batch_size, call.module)
        if call.leaves is not None:
            mini_batch.tapped.add(call.leaves)
        return mini_batch

    def _of(self, task: int) -> MiniBatch:
        """The mini-batch that the running backward belongs to."""
        if self.closed:
            raise InvalidValueError(
                "the clipper was detached between a forward of the module and its backward, so the module's "
                "parameters get no gradient. Call clipper.detach() after backward, or run forward again."
            )
        running = self.mini_batch
        if running is not None and running.task == task:
            return running
        if running is not None and running.complete:
            raise InvalidValueError(
                "a second backward came before the samples of the first were clipped: those of two mini-batches would "
                "be taken for the same. A mini-batch has one backward: add up its losses before, and take gradients "
                "for anything else (a metric, a penalty) from a copy of the module. In a loop of your own call "
                "clip_and_accumulate() of the PerSampleGradientClipper after each. The first mini-batch is still there."
            )
        if what := changes_on_the_way():
            raise UnsupportedGradientError(
                f"a backward within {what} went through a module whose per-sample gradients are clipped. An error clip "
                "is not linear: what a sample gives would depend on the number of samples in the batch and on a "
                "GradScaler. Leave it away: the norm of each sample's gradient is bounded as it is."
            )
        mini_batch = self.mini_batch = MiniBatch(task, max(_LEAST, self.activations // 2), self.shared)

        def completed() -> None:
            mini_batch.complete = True

        call_after_backward(completed)
        return mini_batch


@functools.cache
def _kinds_of(layer: type[nn.Module]) -> list[Kind]:
    """Return what the backward of a layer may compute in TF32: its name tells, or it may be anything."""
    if "Conv" in layer.__name__:
        return ["convolution"]
    if issubclass(layer, nn.RNNBase | nn.RNNCellBase):
        return ["recurrent", "product"]
    if issubclass(layer, nn.Linear | nn.Bilinear | nn.MultiheadAttention | nn.Embedding):
        return ["product"]
    return ["product", "convolution", "recurrent"]
