"""What parameters and optimizers of several networks are called: the same in each run of a program."""

import gc
import random
from itertools import pairwise, starmap

import pytest
import torch
from torch import nn

from gradguard.monitoring.observe import meta
from gradguard.monitoring.record.file import Record
from gradguard.monitoring.record.step_rows import label_of
from gradguard.optimizer_hooks import parameters_of

pytestmark = pytest.mark.usefixtures("others_unseen")


def network(*sizes: int) -> nn.Module:
    return nn.Sequential(*starmap(nn.Linear, pairwise(sizes)))


@pytest.mark.parametrize("seed", range(6))
def test_names_do_not_depend_on_the_order_in_which_the_collector_holds_things(monkeypatch, tmp_path, seed):
    critic, actor, scale = network(2, 3), network(2, 5, 1), nn.Parameter(torch.zeros(()))
    optimizers = [torch.optim.Adam(parameters) for parameters in (critic.parameters(), actor.parameters(), [scale])]
    living = meta.alive
    shuffle = random.Random(seed).sample
    shuffled = lambda *of, **which: (found := living(*of, **which)) and shuffle(found, len(found))  # noqa: E731
    monkeypatch.setattr(meta, "alive", shuffled)
    gc.collect()
    order = meta.living_optimizers(optimizers[1])
    assert [optimizers.index(one) for one in order] == [1, 2, 0]
    held = [p for one in order for p in parameters_of(one)]
    names = meta.name_parameters(held, meta.living_modules())
    own = ["Sequential#0.0.weight", "Sequential#0.0.bias", "1.weight", "1.bias"]
    assert names == [*own, "parameter 4", "Sequential#1.0.weight", "Sequential#1.0.bias"]
    facts = {"t": "meta", "optimizers": ["Adam"] * 3, "params": meta.described(names, held, order, None)}
    record = Record(tmp_path, facts, [], [], [], None, False)
    assert [label_of(record, place) for place in (0, 1, 2, 3, None)] == [
        "optimizer 0 (Adam, Sequential#0.0.weight ...)",
        "optimizer 1 (Adam, parameter 4)",
        "optimizer 2 (Adam, Sequential#1.0)",
        "optimizer 3 (that came later)",
        "optimizer 0 (Adam, Sequential#0.0.weight ...)",
    ]
