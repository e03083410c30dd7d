"""Buffers that data gets into: nothing clips them and nothing adds noise to them, and they are saved with the model."""

import warnings

from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.call_arguments import changes_of
from gradguard.torch_private import buffer_slots, instance_norms


def refuse_running_statistics(module: nn.Module) -> None:
    """Check that no layer keeps statistics of the samples.

    Raises:
        UnsupportedGradientError: If an instance normalization does, in training mode. (BatchNorm is refused anyway.)
    """
    for name, layer in module.named_modules():
        if isinstance(layer, instance_norms()) and layer.training and layer.running_mean is not None:
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
        self._before = _buffers_of(module)
        self._told: set[str] = set()

    def begin(self) -> None:
        """A batch is handed out.

        Raises:
            UnsupportedGradientError: If a layer has begun to keep statistics: the model was set to training mode.
        """
        refuse_running_statistics(self._module)
        self._before = _buffers_of(self._module)

    def check(self) -> None:
        """The batch has gone through the model."""
        now = _buffers_of(self._module)
        changed = []
        for name, (buffer, version) in now.items():
            before, old_version = self._before.get(name, (buffer, version))
            if name in self._told or (buffer is before and version == old_version):
                continue
            if buffer is not None and buffer.is_floating_point():
                changed.append(name)
        if not changed:
            return
        self._told.update(changed)
        warnings.warn(
            f"buffer {', '.join(map(repr, changed))} of the model changed in a training step. If what it holds "
            f"comes from the samples, epsilon does not cover it: it has no noise, later gradients may depend on it, "
            f"and it is saved with the model. Keep it constant in training, or update it from parameters only.",
            stacklevel=4,
        )


def _buffers_of(module: nn.Module) -> dict[str, tuple[Tensor | None, int]]:
    """Each buffer, and how often it was written into."""
    return {
        f"{prefix}.{slot}".lstrip("."): (buffer, 0 if buffer is None else changes_of(buffer))
        for prefix, layer in module.named_modules()
        for slot, buffer in buffer_slots(layer).items()
    }
