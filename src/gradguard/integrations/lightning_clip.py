"""Lightning: the beginning and the end of a callback that clips in the place of its Trainer."""

from typing import Any

from gradguard.errors import InvalidValueError
from gradguard.integrations.one_clip import OnlyClip
from gradguard.integrations.versions import require

require("lightning", "2.6", "2.7", "lightning")

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402


class TrainersClip(OnlyClip, Callback):
    """A callback that clips in the place of its Trainer.

    A subclass says what it refuses (``_refuse``), what a callback has whose training has not begun (``_not_begun``),
    and how the module and the optimizers are given back (``_detach``).
    """

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy begins with, without the module's methods that Lightning has set on the callback."""
        return {name: value for name, value in super().__getstate__().items() if name not in ("log", "log_dict")}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse, before anything is trained, what cannot be right."""
        if stage == "fit":
            self._refuse(trainer, pl_module)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Give module and optimizers back; what was learned and counted can still be read and saved."""
        self._detach()

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        """Give module and optimizers back: Lightning calls no ``teardown`` after an error."""
        self._detach()

    def _detach(self) -> None:
        raise NotImplementedError

    def _refuse(self, trainer: Trainer, module: LightningModule) -> None:
        del module
        value = trainer.gradient_clip_val
        if value:
            rule = "ClipByValue" if trainer.gradient_clip_algorithm == "value" else "ClipByGlobalNorm"
            raise InvalidValueError(
                f"Trainer(gradient_clip_val={value}) clips too, beside the {type(self).__name__}: expected one clip. "
                f"Take gradient_clip_val away; GradGuardCallback(gg.{rule}({value})) as the only clip does what it did."
            )
