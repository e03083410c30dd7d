"""Parts of a graph: modules, chosen tensors, and which rule a value has where blocks are nested."""

from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import gradguard as gg
from gradguard.errors import InvalidValueError


class Noted(gg.BaseErrorClip):
    """Writes its name down for each gradient that it is given."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def clip(self, grad: Tensor) -> Tensor:
        self.log.append(self.name)
        return grad.clone()


class Inner(nn.Module):
    """One value: exp."""

    def forward(self, x: Tensor) -> Tensor:
        self.value = x.exp()
        return self.value


class Outer(nn.Module):
    """Three values: tanh, the inner one, sin."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.tanh()).sin()


def in_blocks(blocks: list[str]) -> str:
    """Enter ``blocks`` in turn, and return the rules of sum's input (*3), sin, exp, tanh and the module's input (*2).

    A block is a letter for what it is for, then the name of its rule, ``-`` for None: W the whole graph, O and I the
    outer and the inner module, T the value of the inner module, X the input of the outer.
    """
    log: list[str] = []
    model, x = Outer(), torch.ones(2, requires_grad=True)
    order = [block[0] for block in blocks]
    with ExitStack() as stack:

        def enter(allowed: str, **targets: object) -> None:
            while order and order[0] in allowed:
                letter, name = blocks[-len(order)][:2]
                stack.enter_context(gg.error_clip(targets[letter], None if name == "-" else Noted(name, log)))
                del order[0]

        value = x * 2
        enter("XOI", X=[value], O=model, I=model.inner)
        loss = (model(value) * 3).sum()
        enter("XWT", X=[value], W=loss, T=[model.inner.value])
        assert not order
        seen = []
        for marked in (loss.grad_fn.next_functions[0][0], *_nodes_below(loss.grad_fn.next_functions[0][0], 4)):
            handles = [marked.register_prehook(lambda grads: log.append("."))]
            seen += handles
        loss.backward(retain_graph=True)
    rules = "".join(log).split(".")
    log.clear()
    loss.backward()
    assert set(log) <= {"."}, "something stayed attached"
    return "".join(rule or "-" for rule in rules[:5])


def _nodes_below(node, count: int):
    found = []
    for _ in range(count):
        node = node.next_functions[0][0]
        found.append(node)
    return found


NESTED = {
    "whole graph": (["Ww"], "wwwww"),
    "outer module: its subtree, its output, not its input": (["Oo"], "-ooo-"),
    "inner module": (["Ii"], "--i--"),
    "chosen tensor": (["Xx"], "----x"),
    "two chosen tensors": (["Xx", "Tt"], "--t-x"),
    "module before whole graph": (["Oo", "Ww"], "wooow"),
    "inner module inside outer": (["Oo", "Ii"], "-oio-"),
    "outer module inside inner": (["Ii", "Oo"], "-ooo-"),
    "tensor before module": (["Oo", "Tt"], "-oto-"),
    "tensor before module, also from further out": (["Xx", "Oo", "Ii", "Ww"], "woiox"),
    "tensor before whole graph, also from further out": (["Tt", "Ww"], "wwtww"),
    "innermost whole graph": (["Ww", "Wv"], "vvvvv"),
    "innermost list of tensors": (["Tt", "Tu"], "--u--"),
    "None exempts a module": (["O-", "Ww"], "w---w"),
    "None exempts a tensor": (["Ww", "T-"], "ww-ww"),
    "None exempts the inner module of an outer": (["Oo", "I-"], "-o-o-"),
    "None exempts the whole graph": (["Oo", "W-"], "-ooo-"),
    "None inside, for the whole graph": (["Ww", "W-"], "-----"),
    "all": (["Oo", "Ii", "Ww", "Tt", "Xx"], "wotox"),
}


@pytest.mark.parametrize(("blocks", "expected"), NESTED.values(), ids=NESTED)
def test_each_value_has_the_rule_of_one_block(blocks, expected):
    assert in_blocks(blocks) == expected


def test_a_whole_graph_inside_another_owns_only_what_lies_behind_its_own_loss():
    x = torch.ones(1, requires_grad=True)
    h = x * 1
    first, second = (h * 5).sum(), (h.exp() * 7).sum()
    with gg.error_clip(first + second, gg.ErrorClipByValue(100.0)), gg.error_clip(first, gg.ErrorClipByValue(0.5)):
        (first + second).backward()
    assert x.grad.item() == 0.5  # h lies behind both: the inner block's


def test_the_block_further_out_goes_on_after_the_inner_one():
    x = torch.ones(1, requires_grad=True)
    loss = (x * 1 * 10).sum()
    with gg.error_clip(loss, gg.ErrorClipByValue(5.0)):
        for inner in (gg.error_clip(loss, gg.ErrorClipByValue(2.0)), gg.error_clip([loss], None)):
            with inner:
                pass
        with gg.error_clip(loss, gg.ErrorClipByValue(3.0)):
            assert torch.autograd.grad(loss, x, retain_graph=True)[0].item() == 3.0
        assert torch.autograd.grad(loss, x, retain_graph=True)[0].item() == 5.0
    assert torch.autograd.grad(loss, x)[0].item() == 10.0


def test_a_module_that_runs_several_times_and_several_backwards():
    model, x = Inner(), torch.zeros(1, requires_grad=True)
    with gg.error_clip(model, gg.ErrorClipByValue(0.5)):
        for _ in range(3):
            (model(x) * 10 + model(x * 1) * 10).sum().backward()
    assert x.grad.item() == 3.0
    (model(x) * 10).sum().backward()
    assert x.grad.item() == 13.0


class TwoOutputs(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = x * 2
        return {"hidden": hidden, "positive": hidden.relu()}


class Remembers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.hidden = x * 2
        return self.hidden.relu()


@pytest.mark.parametrize("kind", [TwoOutputs, Remembers])
def test_a_value_of_a_module_that_is_used_outside_as_well_is_clipped(kind):
    model, x = kind(), torch.ones(1, requires_grad=True)
    with gg.error_clip(model, gg.ErrorClipByValue(0.5)):
        made = model(x)
        hidden, positive = made.values() if isinstance(made, dict) else (model.hidden, made)
        (positive + 100 * hidden).sum().backward()
    assert x.grad.item() == 1.0


def test_a_loss_that_a_module_returns_is_not_clipped_and_its_other_outputs_are():
    class WithLoss(nn.Module):
        def forward(self, x):
            logits = x * 1
            return (logits * 0.3).sum(), logits

    model, x = WithLoss(), torch.ones(1, requires_grad=True)
    with gg.error_clip(model, gg.ErrorClipByValue(0.5)):
        loss, logits = model(x)
        (loss * 2).backward(retain_graph=True)  # 2, 0.5 and 0.15 on the way if the loss itself is left alone
        first = x.grad.item()
        (logits * 10).sum().backward()
    assert first == pytest.approx(0.15)
    assert x.grad.item() == pytest.approx(0.65)


def test_a_chosen_leaf_is_clipped_in_backward_and_grad():
    x = torch.ones(1, requires_grad=True)
    loss = (x * 3 + x * 4).sum()
    with gg.error_clip([x], gg.ErrorClipByValue(5.0)):
        assert torch.autograd.grad(loss, x, retain_graph=True)[0].item() == 5.0
        loss.backward(retain_graph=True)
    assert x.grad.item() == 5.0
    assert torch.autograd.grad(loss, x)[0].item() == 7.0


def test_one_output_of_many_is_chosen():
    x = torch.ones(4, requires_grad=True)
    first, second = (x * 1).chunk(2)
    loss = (first * 10 + second * 20).sum()
    with gg.error_clip([second], gg.ErrorClipByValue(5.0)):
        loss.backward()
    assert x.grad.tolist() == [10.0, 10.0, 5.0, 5.0]


def test_a_chosen_loss_is_clipped_for_it_was_chosen():
    x = torch.ones(1, requires_grad=True)
    loss = (x * 3).sum()
    with gg.error_clip([loss], gg.ErrorClipByValue(0.5)):
        loss.backward()
    assert x.grad.item() == 1.5


def _no_forward(model: nn.Module, x: Tensor) -> None:
    pass


def _forward_without_grad(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def _no_backward(model: nn.Module, x: Tensor) -> None:
    model(x)


def _backward_elsewhere(model: nn.Module, x: Tensor) -> None:
    model(x)
    (x * 2).sum().backward()


NOTHING_DONE = {
    "no forward": (_no_forward, "nothing differentiable passed through Inner"),
    "forward under no_grad": (_forward_without_grad, "nothing differentiable passed through Inner"),
    "nothing requires a gradient": (lambda model, x: model(x.detach()), "nothing differentiable passed through"),
    "no backward": (_no_backward, "no backward passed through Inner"),
    "backward of something else": (_backward_elsewhere, "no backward passed through Inner"),
}


@pytest.mark.parametrize(("act", "words"), NOTHING_DONE.values(), ids=NOTHING_DONE)
def test_a_block_for_a_module_that_did_nothing_is_an_error(act, words):
    model, x = Inner(), torch.ones(1, requires_grad=True)
    with pytest.raises(InvalidValueError, match=words), gg.error_clip(model, gg.ErrorClipByValue(1.0)):
        act(model, x)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_an_exception_in_the_forward_is_passed_on_and_nothing_stays_attached():
    class Fails(nn.Module):
        def forward(self, x):
            raise KeyError("of the user")

    model = nn.Sequential(Inner(), Fails())
    with pytest.raises(KeyError, match="of the user"), gg.error_clip(model, gg.ErrorClipByValue(1.0)):
        model(torch.ones(1, requires_grad=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_forward_that_failed_does_not_disturb_the_next_one():
    class FailsOnce(nn.Module):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 1:
                raise KeyError("of the user")
            return x * 1

    model, x = FailsOnce(), torch.ones(1, requires_grad=True)
    with gg.error_clip(model, gg.ErrorClipByValue(0.5)):
        with pytest.raises(KeyError, match="of the user"):
            model(x)
        below = x * 1
        (model(below) * 10).sum().backward()
    assert x.grad.item() == 0.5


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner


class Private:
    __slots__ = ("__inner",)

    def __init__(self, inner):
        self.__inner = inner


def holding_itself(y):
    found = {"y": y}
    found["self"] = found
    return found


CONTAINERS = {
    "a dict that holds itself": holding_itself,
    "beside a Python module": lambda y: SimpleNamespace(y=y, module=torch),
    "a partial call": lambda y: partial(print, y),
    "a private slot": Private,
    "a plain object": lambda y: SimpleNamespace(y=y),
    "in an object's list": lambda y: SimpleNamespace(layers=[None, {"y": y}]),
    "slots": Slotted,
    "an object in a tuple": lambda y: (1, SimpleNamespace(y=Slotted(y))),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_objects_that_a_module_returns_are_looked_into(kind):
    class Inner(nn.Module):
        def forward(self, x):
            self.y = (x * 3).exp()
            return CONTAINERS[kind](self.y)

    model, x = Inner(), torch.zeros(2, requires_grad=True)
    with gg.error_clip(model, gg.ErrorClipByValue(0.5)):
        model(x)
        (100 * model.y.sum()).backward()
    assert x.grad.tolist() == [1.5, 1.5]  # 100 is clipped to 0.5 at y, and passes 3 * x


@pytest.mark.parametrize("closed", [lambda y: lambda: y, lambda y: (one for one in [y])], ids=["function", "generator"])
def test_an_output_that_cannot_be_looked_into_says_so(closed):
    class Inner(nn.Module):
        def forward(self, x):
            return closed(x * 3)

    with (
        pytest.raises(InvalidValueError, match=r"nothing differentiable passed through Inner .*let it return tensors"),
        gg.error_clip(model := Inner(), gg.ErrorClipByValue(0.5)),
    ):
        model(torch.zeros(2, requires_grad=True))
