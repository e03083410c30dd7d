"""Lightning: the beginning and the end of a callback that clips in the place of its Trainer."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from gradguard.errors import InvalidValueError
from gradguard.integrations.adapter import Job


class LightningClip(Job, Callback):
    """A callback that clips in the place of its Trainer.

    A subclass is of one of the jobs too, begins it at the event by which there is what the job needs, and says what
    else it refuses (``_refuse``).
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
        self.end()

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        """Give module and optimizers back: Lightning calls no ``teardown`` after an error."""
        self.end()

    def _refuse(self, trainer: Trainer, module: LightningModule) -> None:
        del module
        value = trainer.gradient_clip_val
        if value:
            rule = "ClipByValue" if trainer.gradient_clip_algorithm == "value" else "ClipByGlobalNorm"
            raise InvalidValueError(
                f"Trainer(gradient_clip_val={value}) clips too, beside the {type(self).__name__}: expected one clip. "
                f"Take gradient_clip_val away; GradGuardCallback(gg.{rule}({value})) as the only clip does what it did."
            )
