"""Uses of a block that would clip less than they seem to: each is refused, or does the whole of it."""

import copy
import dataclasses
import io

import pytest
import torch
from torch import Tensor, nn

import gradguard as gg
from gradguard.backward_clip.scopes import active
from gradguard.errors import FreedGraphError, InvalidTypeError, InvalidValueError

TIGHT = gg.ErrorClipByValue(1e-3)


def network() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.ones(5, 3)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_loss_that_is_all_compiled_is_refused():
    model, x = network()
    compiled = torch.compile(lambda: model(x).square().sum(), backend="aot_eager")
    for factor in (None, 2.0):
        loss = compiled() if factor is None else compiled() * factor
        with pytest.raises(InvalidValueError, match="attach_error_clip"), gg.error_clip(loss, TIGHT):
            loss.backward()
    loss = torch.compile(model, backend="aot_eager")(x).square().sum()
    with gg.error_clip(loss, TIGHT):  # the outputs are reached
        loss.backward()


def test_a_module_compiled_in_place_is_refused():
    model, x = network()
    model.compile(backend="aot_eager")
    with pytest.raises(InvalidTypeError, match="attach_error_clip"), gg.error_clip(model, TIGHT):
        model(x).sum().backward()


def test_each_module_of_a_list_must_be_passed():
    model, x = network()
    with (
        pytest.raises(InvalidValueError, match="nothing differentiable passed through Linear, entry 1,"),
        gg.error_clip([model[0], model[2]], TIGHT),
    ):
        model[0](x).sum().backward()
    with (
        pytest.raises(InvalidValueError, match="no backward passed through Linear, entry 0,"),
        gg.error_clip([model[0], model[2]], TIGHT),
    ):
        model[2](model[0](x).detach()).sum().backward()


def test_leaves_of_chosen_tensors_are_refused():
    x = torch.ones(3, requires_grad=True)
    hidden = x * 2
    with pytest.raises(InvalidValueError, match="put parameters"), gg.error_clip([hidden], TIGHT, leaves=True):
        pass
    assert not active


@dataclasses.dataclass
class Output:
    values: dict[str, Tensor]
    name: str = "none"


class WithDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Output:
        return Output({"hidden": self.layer(x) * 1.0})


def test_a_dataclass_among_the_outputs_of_a_module_is_looked_into():
    model, x = WithDataclass(), torch.ones(4, 3)
    with gg.error_clip(model, TIGHT):
        (model(x).values["hidden"] * 10).sum().backward()
    assert model.layer.bias.grad.tolist() == pytest.approx([4e-3, 4e-3])


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")  # torch 2.15: our error, traced
@pytest.mark.parametrize("compiled", [True, False])
def test_attach_refuses_a_dataclass(compiled):
    model, x = WithDataclass(), torch.ones(4, 3)
    attached = lambda: gg.attach_error_clip(model(x), TIGHT)  # noqa: E731
    call = torch.compile(attached, backend="aot_eager") if compiled else attached
    with pytest.raises(InvalidTypeError, match="Output is a dataclass"):
        call()


def test_a_copy_made_in_a_block_is_free_of_it():
    model, x = network()
    model(x).sum().backward()
    plain = gradients(model)
    with gg.error_clip(model, TIGHT):
        model(x).sum().backward()
        clipped = gradients(model)
        copied = copy.deepcopy(model)
        copied(x).sum().backward()
        assert same(gradients(copied), plain)
    assert not same(clipped, plain)
    copied(x).sum().backward()
    assert same(gradients(copied), plain)


def test_a_model_whose_modules_are_named_can_be_copied_and_saved():
    model, x = network()
    stats = gg.ErrorClipStats(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other(x).sum().backward()
    stats.detach()
    assert not any(module._forward_hooks for module in model.modules())


def test_what_an_inner_block_takes_from_an_outer_one_does_not_grow():
    model, x = network()
    with gg.error_clip(model, TIGHT), gg.error_clip(model, gg.ErrorClipByValue(1e-4)):
        sizes = []
        for _ in range(4):
            model(x).sum().backward()
            sizes.append(sum(len(scope.taken) for scope in active.values()))
    assert len(set(sizes[1:])) == 1


def test_minimize_that_fails_leaves_old_gradients():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], 1.0)
    loss = (weight * 2).sin().sum()
    loss.backward()
    before = weight.grad.clone()
    with pytest.raises(FreedGraphError, match="freed by an earlier backward"):
        gg.minimize(optimizer, loss)
    assert torch.equal(weight.grad, before)
    assert weight.tolist() == [1.0, 1.0]
