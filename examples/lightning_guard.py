"""A Lightning Trainer with a clip that chooses its threshold, and that skips and reports a non-finite step."""

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

import gradguard as gg
from gradguard.integrations.lightning import GradGuardCallback


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        return (self.layer(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


torch.manual_seed(0)
x, y = torch.randn(800, 4), torch.randn(800, 1)
x[404, 0], y[600] = float("nan"), 1e4
callback = GradGuardCallback(gg.ClipByMedian())
trainer = Trainer(accelerator="cpu", max_epochs=1, callbacks=[callback], logger=False, enable_checkpointing=False)
trainer.fit(Model(), DataLoader(TensorDataset(x, y), batch_size=8))
print(f"{callback.guards[0].skipped_steps} of {callback.guards[0].steps} steps skipped")
print({name: round(float(value), 3) for name, value in trainer.callback_metrics.items()})
