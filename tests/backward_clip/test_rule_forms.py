"""The ways in which people write a rule: each works in eager and compiled code alike, or is refused with a reason."""

import copy
import dataclasses
import enum
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor

import gradguard as gg
from gradguard.errors import InvalidTypeError, InvalidValueError


class Constant(gg.BaseErrorClip):
    """Multiplies by something that is no threshold."""

    thresholds = ()

    def __init__(self, constant) -> None:
        self.constant = constant

    def clip(self, grad: Tensor) -> Tensor:
        constant = self.constant
        while isinstance(constant, list | dict):
            constant = constant[0]
        return grad if constant is None else grad * constant


class OfTheClass(gg.BaseErrorClip):
    thresholds = ("bound",)
    bound = 0.01

    def clip(self, grad: Tensor) -> Tensor:
        return grad.clamp(-self.bound, self.bound)


@dataclasses.dataclass
class Data(gg.BaseErrorClip):
    bound: float
    divisor: int = 2
    thresholds = ("bound",)

    def clip(self, grad: Tensor) -> Tensor:
        return grad.clamp(-self.bound, self.bound) / self.divisor


class Scaled(gg.BaseErrorClip):
    """A threshold that multiplies: as a float64 tensor it must not make a 0-dim gradient float64."""

    thresholds = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def clip(self, grad: Tensor) -> Tensor:
        return grad * self.factor


class Two(enum.IntEnum):
    TWO = 2


FORMS = {
    "class attribute": OfTheClass(),
    "dataclass": Data(0.5),
    "threshold that multiplies": Scaled(0.5),
    "number": Constant(0.5),
    "tensor": Constant(torch.tensor(0.5)),
    "none": Constant(None),
    "nested list": Constant([[0.5]]),
    "dict": Constant({0: 0.5}),
    "numpy number": Constant(np.float64(0.5)),
    "enum": Constant(Two.TWO),
    "infinity in a list": Constant([float("inf")]),
}


def gradient(rule, compiled: bool) -> Tensor:
    x = torch.ones(4, requires_grad=True)

    def loss(x):
        hidden = (x * 10).exp().log().sum()  # 0-dim, and no term of the loss
        return gg.attach_error_clip((hidden * hidden * 1e-3).sqrt(), rule)

    (torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss)(x).backward()
    return x.grad


@pytest.mark.parametrize("form", FORMS)
def test_compiled_code_gets_the_same_rule(form):
    torch._dynamo.reset()
    eager = gradient(FORMS[form], compiled=False)
    torch.testing.assert_close(gradient(FORMS[form], compiled=True), eager, rtol=0, atol=0)
    assert form == "none" or not torch.equal(eager, gradient(Constant(None), compiled=False))


@pytest.mark.parametrize("form", FORMS)
def test_copies_and_pickles_are_rules_of_their_own(form):
    rule = FORMS[form]
    for other in (copy.copy(rule), copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):
        assert torch.equal(gradient(other, compiled=False), gradient(rule, compiled=False))
        assert {"_inputs", "_kind"}.isdisjoint(other.__getstate__())


def test_a_copy_s_threshold_is_its_own():
    rule = gg.ErrorClipByValue(0.5)
    other = copy.deepcopy(rule)
    other.max = 0.1
    torch._dynamo.reset()
    for compiled in (False, True):
        assert not torch.equal(gradient(other, compiled), gradient(rule, compiled))


def test_an_attribute_may_become_another_kind_of_thing():
    torch._dynamo.reset()
    rule = Constant(torch.tensor(0.5))
    for constant in (None, 2.0, torch.tensor(3.0), [[0.25]]):
        rule.constant = constant
        assert torch.equal(gradient(rule, compiled=True), gradient(rule, compiled=False))
    del rule.constant
    with pytest.raises(AttributeError, match="constant"):
        gradient(rule, compiled=False)


def test_objects_are_kept_no_longer_than_the_rule():
    class Big:
        pass

    rule = Constant(Big())
    big = weakref.ref(rule.constant)
    del rule
    gc.collect()
    assert big() is None


def test_a_clip_of_one_s_own_has_no_bounds_of_another():
    class Doubled(gg.ErrorClipByValue):
        def clip(self, grad: Tensor) -> Tensor:
            return 2 * super().clip(grad)

    x = torch.ones(2, requires_grad=True)
    expected = None
    for options in ({}, {"stats": gg.ErrorClipStats()}):
        loss = (x * 3).relu().view(2).sum() * 0.1
        with gg.error_clip(loss, Doubled(5.0), **options):
            (found,) = torch.autograd.grad(loss, x)
        expected = found if expected is None else expected
        assert torch.equal(found, expected)
    assert found.tolist() == pytest.approx([2.4, 2.4])  # 0.1, doubled at view, relu and x * 3


def refused_slots():
    @dataclasses.dataclass(slots=True)
    class Slots(gg.BaseErrorClip):
        bound: float


def refused_property():
    class Property(gg.BaseErrorClip):
        thresholds = ("bound",)
        bound = property(lambda self: 1.0)


def refused_text():
    class Text(gg.BaseErrorClip):
        thresholds = "bound"


def refused_frozen():
    @dataclasses.dataclass(frozen=True)
    class Frozen(gg.BaseErrorClip):
        bound: float

    Frozen(0.5)


def refused_typo():
    class Typo(OfTheClass):
        thresholds = ("bonud",)

    gradient(Typo(), compiled=False)


def refused_class_attribute():
    class Wrong(OfTheClass):
        bound = "much"

    gradient(Wrong(), compiled=False)


REFUSED = {
    "__slots__": refused_slots,
    "a property": refused_property,
    r"expected a tuple of names, as in \('bound',\)": refused_text,
    "frozen=True": refused_frozen,
    "names 'bonud'": refused_typo,
    "bound": refused_class_attribute,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_refused(message):
    with pytest.raises((InvalidTypeError, InvalidValueError), match=message):
        REFUSED[message]()
