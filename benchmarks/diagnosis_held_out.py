"""More tasks for `diagnosis.py`, on which nothing was chosen: they were kept from the one who wrote the diagnosis."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from diagnosis_tasks import Run, Tasks, cosine, fixed, held_out, main, mlp, set_rate

TASKS = Tasks()

if __name__ == "__main__":
    main(TASKS)
