"""Gradient clipping for Composer, by its interface: ``match`` and ``apply`` on the event ``AFTER_TRAIN_BATCH``.

Nothing here imports Composer. Its published wheels require torch < 2.7.1, on which gradguard does not run, and its
engine accepts any object with the methods of an algorithm.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch

import gradguard as gg
from gradguard.errors import InvalidValueError, refuse
from gradguard.integrations.adapter import Job, Run
from gradguard.integrations.guard_job import check_clipper
from gradguard.policies import NonFinitePolicy, check_policy

ClippingType = Literal["norm", "value", "adaptive"]

_CLIPPERS: dict[str, Callable[..., gg.rules.Clipper]] = {
    "norm": gg.ClipByGlobalNorm,
    "value": gg.ClipByValue,
    "adaptive": gg.ClipAdaptive,
}


def apply_gradient_clipping(
    model: torch.nn.Module,
    clipping_type: ClippingType,
    clipping_threshold: float,
    fsdp_enabled: bool = False,
    *,
    exclude: Any = (),
) -> gg.results.ClipResult:
    """Clip all gradients of ``model``, in place, with the arguments of Composer's function of this name.

    It calls `gradguard.apply_gradient_clipping`; Composer's ``fsdp_enabled`` is accepted beside its arguments.

    **Guarantees.** A value clip clamps each element however the model is sharded; Composer 0.32 under FSDP1 scales all
    gradients by their largest element instead. An adaptive clip bounds each unit, also under FSDP2. Under FSDP1, which
    splits the rows, it is refused, as by Composer. A weight that is all zero can move: ``eps`` is 1e-3, while
    Composer's ratio is 0.

    Args:
        model: The model, sharded or not; FSDP1 and FSDP2 are recognised.
        clipping_type: ``"norm"``, ``"value"`` or ``"adaptive"``.
        clipping_threshold: The threshold of that rule, at least 0.
        fsdp_enabled: Accepted, so that calls written for Composer keep working; it changes nothing.
        exclude: Parameters that ``"adaptive"`` leaves alone, as for `gradguard.clip_grad_adaptive_`.

    Returns:
        The result of the clip. (Composer returns nothing.)

    Raises:
        InvalidValueError: If the type is unknown, or the threshold is negative or NaN.
        InvalidTypeError: If an argument is of another type.
        UnsupportedGradientError: If an adaptive clip is used under FSDP1.
        DistributedError: If processes that hold parts of the gradients do not clip together.

    Example:
        >>> import torch
        >>> from gradguard.integrations.composer import apply_gradient_clipping
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model.weight.grad = torch.tensor([[3.0, -0.5]])
        >>> result = apply_gradient_clipping(model, "value", 1.0, fsdp_enabled=True)
        >>> model.weight.grad
        tensor([[ 1.0000, -0.5000]])

    Reference:
        MosaicML Composer (2021), the GradientClipping algorithm.
    """
    del fsdp_enabled
    return gg.apply_gradient_clipping(model, clipping_type, clipping_threshold, exclude=exclude)


class ClipGradients(Job):
    """An algorithm for Composer's Trainer: one of gradguard's clippers, on the event ``AFTER_TRAIN_BATCH``.

    **Guarantees.** It acts once for each real step: on that event the gradients of all microbatches are complete,
    averaged over processes and, under automatic mixed precision, unscaled. Composer's checkpoints save the clipper's
    state.

    **Edge cases.**

    ================================  ==========================================================================
    case                              what happens
    ================================  ==========================================================================
    overflow under mixed precision    the GradScaler finds it before the clip and skips the step; a clipper with a
                                      history does not count the step
    two clipping algorithms           an error before training: two clips one after the other are rarely intended
    DeepSpeed (old Composer)          an error: its engine clips by itself
    checkpoint without this one       Composer reports it; the clipper starts fresh
    another Trainer                   the history continues with the same model, and starts fresh with another
    ================================  ==========================================================================

    Args:
        clipper: The rule for the gradients of the model.
        nonfinite: ``"propagate"``, ``"raise"`` or ``"zero"``, as for `gradguard.clip_grad_norm_`.
        log: Log ``gradguard/norm`` (before the clip), ``gradguard/coefficient`` and ``gradguard/clipped`` at each
            batch, with a host sync.

    Attributes:
        clipper: The clipper.
        last: The result of the last clip; None before the first.

    Raises:
        InvalidTypeError: If ``clipper`` is not a clipper.
        InvalidValueError: If the policy is unknown.

    Example:
        >>> import gradguard as gg
        >>> from gradguard.integrations.composer import ClipGradients
        >>> algorithm = ClipGradients(gg.ClipByMedian())  # Trainer(..., algorithms=[algorithm])
        >>> algorithm.match("after_train_batch", state=None)
        True
    """

    find_unused_parameters = False
    """Read by Composer: backward computes gradients of all parameters."""

    backwards_create_graph = False
    """Read by Composer: the gradients need no graph."""

    def __init__(
        self, clipper: gg.rules.Clipper, *, nonfinite: NonFinitePolicy = "propagate", log: bool = False
    ) -> None:
        check_clipper(clipper)
        super().__init__()
        self.clipper = clipper
        self.last: gg.results.ClipResult | None = None
        self._nonfinite: NonFinitePolicy = check_policy(nonfinite)
        self._log = log
        self._remember(clipper)

    def __repr__(self) -> str:
        """Name the clipper; Composer writes this into its checkpoints and traces."""
        return f"{type(self).__name__}({type(self.clipper).__name__})"

    @staticmethod
    def required_on_load() -> bool:
        """Return False: a checkpoint made with this algorithm can be loaded without it."""
        return False

    def match(self, event: Any, state: Any) -> bool:
        """Return whether Composer should call `apply` on this event."""
        del state
        return _name(event) in ("init", "after_train_batch", "fit_end")

    def apply(self, event: Any, state: Any, logger: Any) -> None:
        """Clip the gradients of ``state.model``; on ``INIT``, begin, and refuse anything that would clip them twice.

        Args:
            event: Composer's event, or its name.
            state: Composer's state.
            logger: Composer's logger.

        Raises:
            InvalidValueError: If another algorithm clips too, or DeepSpeed does.
            NonFiniteGradientError: Under ``nonfinite="raise"``, if a gradient holds NaN or infinity.
            DistributedError: If processes that hold parts of the gradients do not clip together.
        """
        event = _name(event)
        if event == "init":
            if getattr(state, "deepspeed_enabled", False):
                raise InvalidValueError(
                    "DeepSpeed is on, and its engine clips gradients that no algorithm receives: remove this algorithm "
                    'and set "gradient_clipping" in the DeepSpeed configuration.'
                )
            for other in getattr(state, "algorithms", ()):
                if other is not self and (isinstance(other, ClipGradients) or hasattr(other, "clipping_threshold")):
                    raise InvalidValueError(
                        f"two algorithms clip gradients: {other!r} and {self!r}. Keep one; for two rules one after the "
                        "other, ClipGradients(gradguard.Chain(first, second))."
                    )
            self.begin(Run(state.model, state.model, []))
        if event == "fit_end":
            self.end()
        if event != "after_train_batch":
            return
        self.last = self.clipper(state.model, nonfinite=self._nonfinite)
        if self._log:
            logger.log_metrics(
                {f"gradguard/{name}": float(getattr(self.last, name)) for name in ("norm", "coefficient", "clipped")}
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for Composer's checkpoint: the clipper's state, and its name."""
        return self._loaded or {"repr": repr(self), "clipper": self.clipper.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        if "clipper" in state:  # a checkpoint of Composer's own algorithm has none
            self.clipper.load_state_dict(state["clipper"])


class GradientClipping(ClipGradients):
    """Composer's `GradientClipping`, with its arguments: ``"norm"``, ``"value"`` or ``"adaptive"``.

    **Guarantees** and **edge cases** are those of `ClipGradients`; each batch is clipped as by
    `apply_gradient_clipping`.

    Args:
        clipping_type: ``"norm"``, ``"value"`` or ``"adaptive"``.
        clipping_threshold: The threshold of that rule, at least 0.
        exclude: Parameters that ``"adaptive"`` leaves alone, as for `gradguard.clip_grad_adaptive_`: ``"fc"`` for the
            last layer, also where Composer calls it ``module.fc``.
        nonfinite: As for `ClipGradients`.
        log: As for `ClipGradients`.

    Attributes:
        clipping_type: The rule.
        clipping_threshold: Its threshold.

    Raises:
        InvalidValueError: If the type or the policy is unknown, or the threshold is negative or NaN.
        InvalidTypeError: If the threshold is not a number.

    Example:
        >>> from types import SimpleNamespace
        >>> import torch
        >>> from gradguard.integrations.composer import GradientClipping
        >>> algorithm = GradientClipping(clipping_type="norm", clipping_threshold=1.0)  # for algorithms=
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> algorithm.apply("after_train_batch", SimpleNamespace(model=model), logger=None)  # what the Trainer does
        >>> model.weight.grad
        tensor([[0.6000, 0.8000]])
    """

    def __init__(
        self,
        clipping_type: ClippingType,
        clipping_threshold: float,
        *,
        exclude: Any = (),
        nonfinite: NonFinitePolicy = "propagate",
        log: bool = False,
    ) -> None:
        options = {} if isinstance(exclude, tuple | list) and not exclude else {"exclude": exclude}
        refuse(
            InvalidValueError,
            (
                clipping_type not in _CLIPPERS,
                f"clipping_type={clipping_type!r}: expected 'norm', 'value' or 'adaptive'.",
            ),
            (
                options and clipping_type != "adaptive",
                f"exclude= requires clipping_type='adaptive', but this is {clipping_type!r}: "
                "ClipGradients(gradguard.Groups(...)) leaves parameters out of the other rules.",
            ),
        )
        super().__init__(_CLIPPERS[clipping_type](clipping_threshold, **options), nonfinite=nonfinite, log=log)
        self.clipping_type, self.clipping_threshold = clipping_type, clipping_threshold

    def __repr__(self) -> str:
        """Return the call as text; Composer writes this into its checkpoints and traces."""
        chosen = getattr(self.clipper, "exclude", "")  # as text, also for modules and parameters
        shown = f", exclude={chosen!r}" if chosen else ""
        return (
            f"GradientClipping(clipping_type={self.clipping_type!r}, clipping_threshold={self.clipping_threshold!r}"
            f"{shown})"
        )


def _name(event: Any) -> str:
    return getattr(event, "value", event)
