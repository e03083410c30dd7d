"""Train a tiny language model with the Transformers Trainer; a clipper without a threshold replaces the Trainer's clip.

It runs offline, in some seconds on one CPU core::

    python examples/transformers_guard.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gradguard as gg
from gradguard.integrations.transformers import GradGuardCallback

torch.manual_seed(0)
torch.set_num_threads(1)
counting = (torch.arange(16) + torch.randint(0, 64, (256, 1))) % 64  # sequences such as 5, 6, 7, ...
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=40, logging_steps=10, learning_rate=5e-3, use_cpu=True, report_to=[], save_strategy="no"
    )  # fmt: skip
    callback = GradGuardCallback(gg.ClipByMedian(k=3.0, window=20, warmup=5))
    data = [{"input_ids": row, "labels": row} for row in counting]
    Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=[callback]).train()

print(f"{callback.guard.steps} steps, {callback.guard.skipped_steps} of them skipped")
