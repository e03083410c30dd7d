"""Checks for buffers that collect data: they are saved with the model, without clipping and without noise."""

import warnings

from torch import Tensor, nn

from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample.call_arguments import changes_of
from gradguard.torch_private import buffer_slots, instance_norms


def refuse_running_statistics(module: nn.Module) -> None:
    """Check that no instance normalization tracks running statistics of the samples.

    The clipper itself refuses BatchNorm.

    Raises:
        UnsupportedGradientError: If an instance normalization in training mode tracks running statistics.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, instance_norms()) and layer.training and layer.running_mean is not None:
            raise UnsupportedGradientError(
                f"{name or 'the model'} is an {type(layer).__name__} with track_running_stats=True in training mode: "
                f"its running statistics are averages over samples without noise, and are saved with the model. Make "
                f"it with track_running_stats=False, or freeze its statistics with .eval()."
            )


class BufferWatch:
    """Warn, once per buffer, of floating-point buffers that change between a batch and its step.

    The watch compares the identity and the version of each buffer; it copies nothing and reads no values.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = _buffers_of(module)
        self._warned: set[str] = set()

    def begin(self) -> None:
        """Record all buffers, before a batch is yielded.

        Raises:
            UnsupportedGradientError: If an instance normalization tracks statistics by now, after ``.train()`` for
                example.
        """
        refuse_running_statistics(self._module)
        self._before = _buffers_of(self._module)

    def check(self) -> None:
        """Warn of buffers that changed since `begin`, after the batch went through the model."""
        now = _buffers_of(self._module)
        changed = []
        for name, (buffer, version) in now.items():
            before, old_version = self._before.get(name, (buffer, version))
            if name in self._warned or (buffer is before and version == old_version):
                continue
            if buffer is not None and buffer.is_floating_point():
                changed.append(name)
        if not changed:
            return
        self._warned.update(changed)
        warnings.warn(
            f"buffer {', '.join(map(repr, changed))} of the model changed in a training step. If its values come "
            f"from the samples, epsilon does not cover them: they have no noise, later gradients may depend on them, "
            f"and they are saved with the model. Keep it constant in training, or update it from parameters only.",
            stacklevel=4,
        )


def _buffers_of(module: nn.Module) -> dict[str, tuple[Tensor | None, int]]:
    """Return each buffer by name, and how often it was written in place."""
    return {
        f"{prefix}.{slot}".lstrip("."): (buffer, 0 if buffer is None else changes_of(buffer))
        for prefix, layer in module.named_modules()
        for slot, buffer in buffer_slots(layer).items()
    }
