"""Statistics that gather samples without noise are refused, or warned of."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from gradguard.errors import UnsupportedGradientError
from private.runs import private_run

NORMALIZATIONS = {
    1: lambda **options: nn.InstanceNorm1d(2, **options),
    2: lambda **options: nn.InstanceNorm2d(2, **options),
    3: lambda **options: nn.InstanceNorm3d(2, **options),
}


def images(dims):
    torch.manual_seed(1)
    return TensorDataset(torch.randn(60, 2, *[3] * dims), torch.arange(60) % 3)


def normalized(dims, **options):
    torch.manual_seed(2)
    return nn.Sequential(NORMALIZATIONS[dims](**options), nn.Flatten(), nn.Linear(2 * 3**dims, 3))


def train(private, model):
    for x, y in private.loader:
        F.cross_entropy(model(x), y).backward()
        private.step()


@pytest.mark.parametrize("dims", NORMALIZATIONS)
@pytest.mark.parametrize("affine", [True, False])
def test_running_statistics_of_samples_are_refused(dims, affine):
    model = normalized(dims, affine=affine, track_running_stats=True)
    words = rf"0 is an InstanceNorm{dims}d with track_running_stats=True.*track_running_stats=False, or .*\.eval\(\)"
    with pytest.raises(UnsupportedGradientError, match=words):
        private_run(model, data=images(dims))
    assert not any(layer._forward_hooks for layer in model.modules())


@pytest.mark.parametrize("options", [{"track_running_stats": False}, {"affine": True}])
def test_normalization_without_running_statistics_trains_without_a_warning(options):
    private, model = private_run(normalized(1, **options), data=images(1))
    train(private, model)
    assert private.steps == 5


def test_frozen_running_statistics_stay_until_training_mode():
    model = normalized(1, track_running_stats=True, affine=True)
    model[0].eval()
    private, _ = private_run(model, data=images(1))
    train(private, model)
    assert model[0].running_mean.tolist() == [0.0, 0.0]
    model.train()
    with pytest.raises(UnsupportedGradientError, match="0 is an InstanceNorm1d with track_running_stats=True"):
        train(private, model)
    assert model[0].running_mean.tolist() == [0.0, 0.0]
    assert private.steps == 5


class Remembers(nn.Module):
    """A model with buffers, one of which ``change`` changes in forward."""

    def __init__(self, change):
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Sequential(nn.Linear(4, 3))
        self.layer.register_buffer("mean", torch.zeros(4))
        self.layer.register_buffer("last", None)
        self.layer.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.layer.register_buffer("constant", torch.ones(4))
        self.change = change

    def forward(self, x):
        if self.training:
            self.change(self.layer, x.detach())
        return self.layer(x * self.layer.constant)


def in_place(layer, x):
    layer.mean.mul_(0.9).add_(x.mean(0))


def anew(layer, x):
    layer.mean = x.mean(0)


def in_inference_mode(layer, x):
    with torch.inference_mode():
        layer.mean = x.mean(0)


def for_the_first_time(layer, x):
    layer.last = x.mean(0)


CHANGES = {in_place: "mean", anew: "mean", in_inference_mode: "mean", for_the_first_time: "last"}


@pytest.mark.parametrize("change", CHANGES)
def test_a_buffer_that_changes_in_a_training_step_is_warned_of_once(change):
    private, model = private_run(Remembers(change))
    with pytest.warns(UserWarning, match=rf"buffer 'layer.{CHANGES[change]}' of the model changed in a train") as found:
        train_rows(private, model)
    assert len(found) == 1
    assert found[0].filename == __file__
    assert private.steps == 5


def test_another_buffer_is_warned_of_too():
    private, model = private_run(Remembers(in_place))
    with pytest.warns(UserWarning, match=r"buffer 'layer.mean' of"):
        train_rows(private, model)
    model.change = for_the_first_time
    with pytest.warns(UserWarning, match=r"buffer 'layer.last' of"):
        train_rows(private, model)


def test_the_warning_as_an_error_loses_nothing():
    private, model = private_run(Remembers(in_place))
    x, y, _ = next(iter(private.loader))
    F.cross_entropy(model(x), y).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"buffer 'layer.mean' of the model changed"):
            private.step()
    assert private.step()


def count(layer, x):
    layer.calls += 1


def nothing(layer, x):
    pass


@pytest.mark.parametrize("change", [count, nothing])
def test_counters_and_constants_are_not_warned_of(change):
    private, model = private_run(Remembers(change))
    train_rows(private, model)
    assert private.steps == 5


def test_what_changes_between_steps_is_not_warned_of():
    private, model = private_run(Remembers(nothing))
    for x, y, _ in private.loader:
        F.cross_entropy(model(x), y).backward()
        private.step()
        model.load_state_dict(model.state_dict())
        model.layer.mean = torch.zeros(4)
    assert private.steps == 5


def train_rows(private, model):
    for x, y, _ in private.loader:
        F.cross_entropy(model(x), y).backward()
        private.step()
