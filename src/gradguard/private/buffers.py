"""Buffers that data gets into: nothing clips them and nothing adds noise to them, and they are saved with the model."""

import warnings

from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.torch_private import InstanceNormalization, buffer_slots, instance_norms, version_of


def refuse_running_statistics(module: nn.Module) -> None:
    """Check that no layer keeps statistics of the samples.

    Raises:
        UnsupportedGradientError: If an instance normalization does, in training mode. (BatchNorm is refused anyway.)
    """
    for name, layer in module.named_modules():
        if isinstance(layer, instance_norms()) and layer.training and _is_tracking(layer):
            raise UnsupportedGradientError(
                f"{name or 'the model'} is an {type(layer).__name__} with track_running_stats=True in training mode: "
                f"its running statistics are averages over samples without noise, and are saved with the model. Make "
                f"it with track_running_stats=False, or freeze its statistics with .eval()."
            )


class BufferWatch:
    """Warns, once for each, of floating-point buffers that change between a batch and its step.

    It looks at which tensor a buffer is and at the tensor's version, so nothing is copied and no value is read.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._places = [
            (f"{prefix}.{slot}" if prefix else slot, layer, slot)
            for prefix, layer in module.named_modules()
            for slot in buffer_slots(layer)
        ]
        self._instance_norms = [m for m in module.modules() if isinstance(m, instance_norms())]
        self._before: dict[str, tuple[Tensor | None, int]] = {}

    def begin(self) -> None:
        """A batch is handed out.

        Raises:
            UnsupportedGradientError: If a layer has begun to keep statistics: the model was set to training mode.
        """
        if self._instance_norms:
            refuse_running_statistics(self._module)
        self._before = {name: _state(layer, slot) for name, layer, slot in self._places}

    def check(self) -> None:
        """The batch has gone through the model."""
        changed = [name for name, layer, slot in self._places if self._has_changed(name, layer, slot)]
        if not changed:
            return
        self._places = [place for place in self._places if place[0] not in changed]
        warnings.warn(
            f"buffer {', '.join(map(repr, changed))} of the model changed in a training step. If what it holds comes "
            f"from the samples, epsilon does not cover it: it has no noise, later gradients may depend on it, and it "
            f"is saved with the model. Keep it constant in training, or update it from parameters only.",
            stacklevel=4,
        )

    def _has_changed(self, name: str, layer: nn.Module, slot: str) -> bool:
        before, version = self._before.get(name, (None, 0))
        now, new_version = _state(layer, slot)
        if now is None or not now.is_floating_point():
            return False
        return now is not before or new_version != version


def _is_tracking(layer: InstanceNormalization) -> bool:
    return layer.running_mean is not None or layer.running_var is not None


def _state(layer: nn.Module, slot: str) -> tuple[Tensor | None, int]:
    """The tensor that is a buffer now, and its version; tensors of inference mode have none and never change."""
    buffer = buffer_slots(layer).get(slot)
    return buffer, 0 if buffer is None or buffer.is_inference() else version_of(buffer)
