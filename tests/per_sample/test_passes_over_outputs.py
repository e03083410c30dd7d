"""The check of a loss looks at large outputs a few times, not dozens of times: counted, not timed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradguard as gg

B, T, V = 4, 8, 3000
TARGETS = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(0))
TEACHER = torch.full((B, T, V), 1 / V)
MASK = torch.ones(B, T, dtype=torch.bool)

LOSSES = {
    "in one list": lambda o: F.cross_entropy(o.flatten(0, 1), TARGETS.flatten()),
    "shifted": lambda o: F.cross_entropy(o[:, :-1].reshape(-1, V), TARGETS[:, 1:].flatten()),
    "of a temperature": lambda o: F.cross_entropy((o / 2.0).flatten(0, 1), TARGETS.flatten()),
    "capped": lambda o: F.cross_entropy((30 * torch.tanh(o / 30)).flatten(0, 1), TARGETS.flatten()),
    "smoothed": lambda o: F.cross_entropy(o.flatten(0, 1), TARGETS.flatten(), label_smoothing=0.1),
    "in float64": lambda o: F.cross_entropy(o.double().flatten(0, 1), TARGETS.flatten()),
    "of a teacher": lambda o: F.kl_div(o.log_softmax(-1), TEACHER, reduction="none").sum((1, 2)).mean(),
    "squares": lambda o: ((o - TEACHER) ** 2).mean(),
    "shifted squares": lambda o: F.mse_loss(o * 0.5 + 0.1, TEACHER),
    "of a sigmoid": lambda o: F.binary_cross_entropy(o.sigmoid(), TEACHER),
    "masked": lambda o: ((o - TEACHER).square() * MASK[..., None]).sum((1, 2)).mean(),
}


MOST_PASSES = {
    "in one list": 2,
    "shifted": 3,
    "of a temperature": 3,
    "capped": 5,
    "smoothed": 2,
    "in float64": 3,
    "of a teacher": 10,
    "squares": 14,
    "shifted squares": 16,
    "of a sigmoid": 3,
    "masked": 20,
}


class Passes(TorchDispatchMode):
    """Counts the values that operations return, in passes over outputs [B, T, V]."""

    def __init__(self):
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        given = {
            one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)
        }
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        self.values += sum(one.numel() for one in made if one.untyped_storage().data_ptr() not in given)
        return result

    @property
    def passes(self):
        return self.values / (B * T * V)


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, V)

    def forward(self, ids):
        return self.head(self.table(ids))


def passes_of_fourth_step(loss, clipped):
    torch.manual_seed(0)
    model, ids = Scores(), torch.randint(20, (4, B, T))
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0)) if clipped else None
    for batch in ids:
        value = loss(model(batch))
        with Passes() as counted:
            value.backward()
        if clipper is not None:
            clipper.clip_and_accumulate()
            clipper.pre_step()
    return counted.passes


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_is_read_in_few_passes(loss):
    """Comparisons with what operations must have made of the outputs were 27 to 70 passes for most of these."""
    ours, plain = (passes_of_fourth_step(LOSSES[loss], clipped) for clipped in (True, False))
    assert ours - plain < MOST_PASSES[loss]
