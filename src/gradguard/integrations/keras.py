"""Clipping for Keras 3 on its PyTorch backend: an optimizer that wraps another, and clips the gradients it applies."""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError, MissingPackageError, NonFiniteGradientError, refuse
from gradguard.integrations.adapter import replaced
from gradguard.integrations.guard_job import check_clipper
from gradguard.integrations.versions import require
from gradguard.policies import GuardPolicy, check_guard_options

require("keras", "3.10", "4", extra="keras")

_HOW = 'Before Keras is imported, type: import os; os.environ["KERAS_BACKEND"] = "torch"'

try:
    import keras
except (ImportError, ValueError) as error:  # its default backend is TensorFlow, which need not be installed
    raise MissingPackageError(f"Keras does not start with the backend that it is set to: {error}. {_HOW}") from error

if keras.backend.backend() != "torch":
    raise MissingPackageError(f"Keras runs on {keras.backend.backend()}: gradguard clips PyTorch gradients. {_HOW}")


_clipper_to_load: ContextVar["gg.rules.Clipper | None"] = ContextVar("clipper_to_load", default=None)


class _NoStep(Exception):  # noqa: N818
    """Aborts the update of the inner optimizer before anything is written."""


def _inside(name: str, doc: str) -> Any:
    """Return a property for an attribute of the inner optimizer; None before there is one."""

    def read(outer: Any) -> Any:
        inner = vars(outer).get("inner_optimizer")
        return None if inner is None else getattr(inner, name)

    def write(outer: Any, value: Any) -> None:
        if "inner_optimizer" in vars(outer):  # otherwise Keras is still constructing this optimizer
            setattr(outer.inner_optimizer, name, value)

    return property(read, write, doc=doc)


@keras.saving.register_keras_serializable(package="gradguard")
class GuardedOptimizer(keras.optimizers.Optimizer):
    """A Keras optimizer that clips the gradients of each real update, and skips updates that are not finite.

    Use it like the optimizer itself: ``model.compile(optimizer=...)``, or ``apply`` in a loop of your own.

    **Guarantees.** The clipper receives the gradients that the update uses: of all accumulated batches, averaged,
    without the loss scale, before weight decay; once for each real update. A skipped update leaves weights, slots and
    averages unchanged, bit for bit. The clipper's state is saved and loaded with the model and its weights.

    **Edge cases.**

    ====================================  ======================================================================
    case                                  what happens
    ====================================  ======================================================================
    NaN or inf, ``"skip"``                no update; the clipper counts it and learns nothing; under accumulation the
                                          whole window is dropped; ``_iterations``, which counts batches, continues
    ``gradient_accumulation_steps``       clipped once, at the last batch of the window
    ``loss_scale_factor``                 thresholds are for gradients without it
    ``mixed_float16``                     Keras wraps this optimizer in its `LossScaleOptimizer`, which skips on
                                          overflow before the clip; by hand: ``LossScaleOptimizer(guard(...))``
    `LossScaleOptimizer` inside           an error: the clip would receive scaled gradients
    ``clipnorm`` etc. set inside          an error: two clips one after the other
    ``jit_compile=True``                  forward and backward are compiled, the update is not
    variables without a gradient          ignored; Keras warns
    weights saved without a guard         Keras finds another optimizer: ``load_weights(..., skip_mismatch=True)``
    `ClipAdaptive`                        an error: Keras stores kernels as ``[in, out]``, whose rows are no units
    ====================================  ======================================================================

    A variable's own ``.value.grad`` is clipped in place; other tensors passed to `apply` are copied first.

    Args:
        inner_optimizer: The Keras optimizer, built or not.
        clipper: The rule for the gradients; patterns of `Groups` match the ``path`` of variables.
        nonfinite: ``"skip"``, ``"propagate"``, ``"raise"`` or ``"zero"``, as for `gradguard.Guard`. ``"skip"`` reads
            one number a step.
        max_consecutive_skips: More skipped updates in a row than this raise an error; None never does.
        name: The name of this optimizer.

    Attributes:
        inner_optimizer: The wrapped optimizer.
        clipper: The clipper.
        last: The result of the last clip; None before the first.
        skipped_steps: Number of skipped updates.

    Raises:
        InvalidTypeError: If ``inner_optimizer`` is not a Keras optimizer, or ``clipper`` is not a clipper.
        InvalidValueError: If the optimizer clips by itself, scales the loss or is guarded already, if the clipper is
            adaptive, or if the policy is unknown.

    Example:
        >>> import os; os.environ["KERAS_BACKEND"] = "torch"
        >>> import keras, numpy as np, gradguard as gg
        >>> from gradguard.integrations.keras import guard
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        >>> optimizer = guard(keras.optimizers.Adam(0.01), gg.ClipByGlobalNorm(1.0))
        >>> model.compile(optimizer=optimizer, loss="mse")
        >>> history = model.fit(100 * np.ones((8, 4)), np.ones((8, 1)), verbose=0)
        >>> bool(optimizer.last.clipped), optimizer.last.names[0].endswith("kernel")
        (True, True)
    """

    def __init__(
        self,
        inner_optimizer: keras.optimizers.Optimizer,
        clipper: gg.rules.Clipper,
        *,
        nonfinite: GuardPolicy = "skip",
        max_consecutive_skips: int | None = 20,
        name: str | None = None,
    ) -> None:
        _check(inner_optimizer, clipper, nonfinite, max_consecutive_skips)
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.clipper, self.max_consecutive_skips = clipper, max_consecutive_skips
        self.nonfinite: GuardPolicy = nonfinite
        self.last: gg.results.ClipResult | None = None
        self.skipped_steps = 0
        self._skips_in_a_row = 0
        self._applied: Sequence[Any] | None = None
        self._clips = 0

    # -- the update -------------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def apply(self, grads: Sequence[Tensor | None], trainable_variables: Sequence[Any] | None = None) -> None:
        """Clip the gradients and apply them; the arguments are those of Keras."""
        if not self.built and trainable_variables is not None:
            self.build(list(trainable_variables))
        inner = self.inner_optimizer
        _refuse_own_clip(inner)  # the attribute may have been set since
        update, self._applied = inner._backend_apply_gradients, None
        with (
            replaced(inner, "_backend_apply_gradients", partial(self._update, update)),
            replaced(inner, "_clip_gradients", self._clip),
        ):
            try:
                inner.apply(grads, trainable_variables)
            except _NoStep:
                self._drop_window()
        self._check_clipped(self._applied is not None or all(gradient is None for gradient in grads))

    def _update(self, update: Callable[..., None], grads: Sequence[Tensor], trainable_variables: Sequence[Any]) -> None:
        """Replace the inner optimizer's update, which gets unscaled gradients of the variables that have one."""
        self._applied, before = list(trainable_variables), self._clips
        steps = self.inner_optimizer.gradient_accumulation_steps
        real = not steps or (int(self.inner_optimizer._iterations.value) + 1) % steps == 0
        update(grads, trainable_variables)
        if steps and real:
            self._empty_window()
        self._check_clipped(self._clips - before == int(real))

    def _check_clipped(self, once: bool) -> None:
        if not once:
            raise RuntimeError(
                f"{type(self.inner_optimizer).__name__} of Keras {keras.__version__} has made an update that was not "
                "clipped: it does not update like Keras' own optimizers. Clip before its apply, with the clipper "
                "itself."
            )

    def _clip(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Replace the inner optimizer's clip: all batches are accumulated, and nothing is written yet."""
        self._clips += 1
        named = [(variable.path, variable.value) for variable in self._applied or ()]
        held = [tensor.grad for _, tensor in named]
        try:
            for (_, tensor), gradient in zip(named, grads, strict=True):
                own = gradient if gradient is tensor.grad else gradient.clone()
                tensor.grad = own.detach().to(tensor.dtype)
            self.last = self.clipper(named, nonfinite="propagate" if self.nonfinite == "skip" else self.nonfinite)
            clipped = [tensor.grad for _, tensor in named]
        finally:
            for (_, tensor), gradient in zip(named, held, strict=True):
                tensor.grad = gradient
        if self.nonfinite == "skip" and bool(self.last.nonfinite):
            raise _NoStep
        self._skips_in_a_row = 0
        return clipped

    def _drop_window(self) -> None:
        if self.inner_optimizer.gradient_accumulation_steps:
            self._empty_window()
            self.inner_optimizer._iterations.assign_add(1)  # the next window starts with the next batch
        self.skipped_steps += 1
        self._skips_in_a_row += 1
        if self.max_consecutive_skips is not None and self._skips_in_a_row > self.max_consecutive_skips:
            culprits = ", ".join(self.last.culprits()) if self.last is not None else ""
            raise NonFiniteGradientError(
                f"{self._skips_in_a_row} updates in a row were skipped, because gradients were not finite; the last in "
                f"{culprits}. Nothing has changed. Find the operation, lower the learning "
                "rate, or pass max_consecutive_skips=None."
            )

    def _empty_window(self) -> None:
        """Set the accumulated gradients to 0; Keras multiplies them by 0, which would keep NaN forever."""
        for variable in self.inner_optimizer._accumulated_gradients:
            if variable is not None:
                variable.value.zero_()

    # -- interface of a Keras optimizer -----------------------------------------------------------------------------

    def build(self, variables: Sequence[Any]) -> None:
        """Build the inner optimizer; called by Keras."""
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        super().build(variables)

    variables = _inside("variables", "The variables of the inner optimizer; this one adds none.")
    learning_rate = _inside("learning_rate", "The learning rate of the inner optimizer.")
    iterations = _inside("iterations", "The number of updates of the inner optimizer.")
    loss_scale_factor = _inside("loss_scale_factor", "The loss scale of the inner optimizer.")
    scale_loss = _inside("scale_loss", "Scales the loss as the inner optimizer does.")
    finalize_variable_values = _inside(
        "finalize_variable_values", "Lets the inner optimizer write its averages into the variables."
    )
    exclude_from_weight_decay = _inside(
        "exclude_from_weight_decay", "Excludes variables from the inner optimizer's weight decay."
    )

    def stateless_apply(self, *arguments: Any) -> None:
        """Raise an error: Keras uses this on the JAX backend only."""
        del arguments
        raise InvalidTypeError("stateless_apply is for the JAX backend; gradguard needs apply, on PyTorch.")

    # -- saving -----------------------------------------------------------------------------------------------------

    def save_own_variables(self, store: Any) -> None:
        """Save the clipper's state; the inner optimizer saves its own."""
        memory = io.BytesIO()
        torch.save({"clipper": self.clipper.state_dict(), "skipped_steps": self.skipped_steps}, memory)
        store["guard"] = np.frombuffer(memory.getvalue(), dtype=np.uint8)

    def load_own_variables(self, store: Any) -> None:
        """Load the state of `save_own_variables`; weights saved without a guard leave the clipper unchanged."""
        if "guard" in store.keys():  # noqa: SIM118 - not a dictionary
            saved = torch.load(io.BytesIO(np.asarray(store["guard"]).tobytes()), weights_only=True)
            self.clipper.load_state_dict(saved["clipper"])
            self.skipped_steps = saved["skipped_steps"]

    def get_config(self) -> dict[str, Any]:
        """Return the configuration for Keras; the clipper is an object of your program, and named by its class."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "clipper": type(self.clipper).__name__,
            "nonfinite": self.nonfinite,
            "max_consecutive_skips": self.max_consecutive_skips,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Self:
        """Create the optimizer again, with the clipper of `loading`, without which this is an error."""
        clipper = _clipper_to_load.get()
        if clipper is None:
            raise InvalidValueError(
                f"this model was compiled with a guard, whose {config['clipper']} is an object of your program. Type: "
                f"with gradguard.integrations.keras.loading({config['clipper']}(...)): keras.saving.load_model(...)"
            )
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects=custom_objects)
        rest = {key: value for key, value in config.items() if key not in ("inner_optimizer", "clipper")}
        return cls(inner, clipper, **rest)


def guard(
    optimizer: keras.optimizers.Optimizer,
    clipper: gg.rules.Clipper,
    **options: Any,
) -> GuardedOptimizer:
    """Return the optimizer wrapped in a `GuardedOptimizer`, for ``model.compile`` or a loop of your own.

    Args:
        optimizer: A Keras optimizer that does not clip by itself.
        clipper: The rule.
        **options: ``nonfinite`` and ``max_consecutive_skips``, as for `GuardedOptimizer`.

    Returns:
        An optimizer to use instead of the one passed.

    Raises:
        GradguardError: As for `GuardedOptimizer`.

    Example:
        >>> import os; os.environ["KERAS_BACKEND"] = "torch"
        >>> import keras, torch, gradguard as gg
        >>> from gradguard.integrations.keras import guard
        >>> weight = keras.Variable([3.0, 4.0])
        >>> optimizer = guard(keras.optimizers.SGD(learning_rate=1.0), gg.ClipByGlobalNorm(1.0))
        >>> optimizer.apply([torch.tensor([30.0, 40.0])], [weight])
        >>> weight.value.detach()
        tensor([2.4000, 3.2000])
    """
    return GuardedOptimizer(optimizer, clipper, **options)


@contextmanager
def loading(clipper: gg.rules.Clipper) -> Iterator[None]:
    """Provide `keras.saving.load_model` with the clipper of a guarded model; the clipper's state is then loaded.

    Args:
        clipper: A new clipper with the same arguments.

    Yields:
        Nothing.

    Example:
        >>> with loading(gg.ClipByMedian()):
        ...     pass  # model = keras.saving.load_model("model.keras")
    """
    token = _clipper_to_load.set(clipper)
    try:
        yield
    finally:
        _clipper_to_load.reset(token)


def _check(optimizer: Any, clipper: Any, policy: str, max_skips: int | None) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise InvalidTypeError(
            f"inner_optimizer is {type(optimizer).__name__}: expected a Keras optimizer, such as "
            "keras.optimizers.Adam(). For a torch.optim.Optimizer use gradguard.Guard."
        )
    check_clipper(clipper)
    check_guard_options(policy, max_skips)
    refuse(
        InvalidValueError,
        (
            isinstance(optimizer, keras.optimizers.LossScaleOptimizer),
            "the optimizer is a LossScaleOptimizer, whose gradients are scaled: guard the inner one, "
            "LossScaleOptimizer(guard(optimizer, clipper)).",
        ),
        (
            isinstance(optimizer, GuardedOptimizer),
            "the optimizer has a guard already: for two rules pass gradguard.Chain(a, b).",
        ),
        (
            any(isinstance(leaf, gg.ClipAdaptive) for leaf in clipper.leaves()),
            "ClipAdaptive bounds the rows of a weight, and Keras stores kernels as [in, out], whose rows belong to "
            "inputs. Expected a rule about norms or values, such as ClipByMedian() or AdaGC().",
        ),
    )
    _refuse_own_clip(optimizer)


def _refuse_own_clip(optimizer: keras.optimizers.Optimizer) -> None:
    for name in ("clipnorm", "global_clipnorm", "clipvalue"):
        if value := getattr(optimizer, name, None):
            raise InvalidValueError(
                f"{type(optimizer).__name__} has {name}={value} and would clip a second time: remove {name}, or "
                "remove the guard."
            )
