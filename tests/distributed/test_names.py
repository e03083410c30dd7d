"""A parameter is called as in the model inside its wrappers: rules by name and histories move between layouts."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradguard as gg
from gradguard.distributed.wrappers import named_parameters, plain_names
from gradguard.monitoring.observe.meta import name_parameters


class Model(nn.Module):
    """With a part whose own name is what DDP calls the model."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 3)
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(3, 1))

    def forward(self, x):
        return self.head(self.module(x))


NAMES = ("module.weight", "module.bias", "head.1.weight", "head.1.bias")


def within(model):
    model.head, model.module = checkpoint_wrapper(model.head), torch.compile(model.module, backend="eager")
    return model


def each_by_itself(model):
    model.module, model.head = DistributedDataParallel(model.module), DistributedDataParallel(model.head)
    return model


WRAPPED = {
    "nothing": lambda model: model,
    "DDP": DistributedDataParallel,
    "DataParallel": nn.DataParallel,
    "compile": lambda model: torch.compile(model, backend="eager"),
    "DDP of compile": lambda model: DistributedDataParallel(torch.compile(model, backend="eager")),
    "compile of DDP": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
    "inside": within,
    "each by itself": each_by_itself,
    "checkpoint of DataParallel": lambda model: checkpoint_wrapper(nn.DataParallel(model)),
    "DDP, inside": lambda model: DistributedDataParallel(within(model)),
    "FSDP1": lambda model: FullyShardedDataParallel(
        model, use_orig_params=True, device_id=torch.device("cpu"), auto_wrap_policy=lambda module, recurse, **_: True
    ),
    "FSDP2": fully_shard,
}


def names(way):
    model = WRAPPED[way](Model())
    model(torch.ones(4, 2)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = name_parameters(list(model.parameters()), [model])
    clipped = gg.Groups({"head.*": gg.ClipByGlobalNorm(0.1)}, rest=gg.ClipByGlobalNorm(0.2))(model).names
    with gg.Guard(optimizer, gg.AdaGC(), model=model) as guard:
        optimizer.step()
    return tuple(watched), clipped, guard.last.names


@pytest.mark.slow
@pytest.mark.parametrize("way", WRAPPED)
def test_names_are_those_of_the_model_inside(pool, way):
    assert pool(2).run(names, way) == [(NAMES, NAMES, NAMES)] * 2


class Odd(nn.Module):
    """Whose own parts are called almost as wrappers call theirs."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.register_module(name, part)


def linear():
    return nn.Linear(1, 1, bias=False)


class Scaled(nn.DataParallel):
    def __init__(self):
        super().__init__(Odd(scale=linear()))
        self.scale = linear()


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Odd(net_orig_mod=linear()), ["net_orig_mod.weight"]),
        (Odd(net_orig_mod=linear(), net=linear()), ["net_orig_mod.weight", "net.weight"]),
        (Odd(module=Odd(module=linear())), ["module.module.weight"]),
        (nn.DataParallel(Odd(module=linear())), ["module.weight"]),
        (Scaled(), ["module.scale.weight", "scale.weight"]),  # not one name for two
    ],
)
def test_what_only_looks_like_a_wrapper_keeps_its_name(module, expected):
    assert [name for name, _ in named_parameters(module)] == expected


@pytest.mark.parametrize("way", ["DataParallel", "compile", "checkpoint of DataParallel"])
def test_what_is_saved_is_called_as_in_the_model_inside_too(way):
    """The checkpoint wrapper leaves itself out of the names of a ``state_dict``, and the others do not."""
    model = WRAPPED[way](within(Model()))
    assert tuple(plain_names(model, list(model.state_dict())).values()) == NAMES
    names = [name for name, _ in model.named_modules()]
    assert {"", "module", "head", "head.1"} == set(plain_names(model, names).values()) - {"head.0"}
