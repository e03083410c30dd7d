"""A tiny model, a Trainer that takes samples in order, and the same training as a loop by hand."""

import torch
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments

STEPS, BATCH = 8, 2
INPUTS = torch.randn(64, 3, generator=torch.Generator().manual_seed(1)) * 3


class Model(nn.Module):
    """The sum of three numbers, to be learned; batches with a NaN make gradients of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, x):
        return {"loss": ((self.head(torch.tanh(self.body(x))) - x.sum(1, keepdim=True)) ** 2).mean()}


class InOrder(Trainer):
    """Takes the samples one after the other, as a loop by hand does."""

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


def trainer(folder, callbacks=(), *, kind=InOrder, model=None, inputs=INPUTS, optimizers=(None, None), **options):
    defaults = {
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1,
        "max_steps": STEPS, "per_device_train_batch_size": BATCH, "optim": "sgd", "learning_rate": 0.02,
        "lr_scheduler_type": "constant", "logging_nan_inf_filter": False,
    }  # fmt: skip
    return kind(
        model or Model(),
        TrainingArguments(str(folder), **(defaults | options)),
        train_dataset=[{"x": x} for x in inputs],
        callbacks=list(callbacks),
        optimizers=optimizers,
    )


def by_hand(clipper, *, optimizer=None, accumulation=1, steps=STEPS, precision=None):
    """Train without a Trainer; return the weights and what each clip did."""
    model, results = Model(), []
    optimizer = (optimizer or (lambda p: torch.optim.SGD(p, lr=0.02)))(model.parameters())
    batches = iter(INPUTS.split(BATCH))
    for _ in range(steps):
        for _ in range(accumulation):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
                loss = model(next(batches))["loss"]
            (loss / accumulation).backward()
        results.append(clipper(model))
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), results


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def logged(done, name):
    return [line[name] for line in done.state.log_history if name in line]


def fused_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.0, fused=True)
