"""Mutants of what looks at each step: each lets something pass that is refused without it.

A case is a model whose samples are treated apart until something changes before the third mini-batch, on which no
witness is due; or that mixes samples from the first one on, in a way that only one of the checks can see. A mutant
breaks one check, and must let one of its cases pass.
"""

from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
from torch import nn

import gradguard as gg
from gradguard.errors import UnsupportedGradientError
from gradguard.per_sample import call_tracker, rehearsal, sample_loop
from gradguard.per_sample.call_tracker import CallTracker
from gradguard.per_sample.comparison import Comparison, SampleGradient
from gradguard.per_sample.module_state import StateReader
from gradguard.per_sample.operation_trace import KnownOperations, OperationTrace
from gradguard.per_sample.witness import Witness

B, HELD = 6, {}
AT = 3  # witnesses are due on mini-batches 1, 2 and 4


class Function(torch.autograd.Function):
    """Its backward is what `HELD` says."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return HELD["backward"](g)


class Model(nn.Module):
    """Two layers, with a function between them and one behind."""

    def __init__(self, between=lambda m, h: h, behind=lambda m, h: h):
        super().__init__()
        self.a, self.act, self.b = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)
        self.register_buffer("gate", torch.zeros(()))
        self.between, self.behind = [between], [behind]

    def forward(self, x):
        return self.behind[0](self, self.b(self.between[0](self, self.act(self.a(x)))))


def clamp(bound):
    return lambda g: g.clamp(-bound, bound)


def turned_on(model):
    HELD["on"] = True


def backward(function):
    def change(model):
        HELD["backward"] = function

    return change


def held(name, value):
    def change(model):
        HELD[name] = value

    return change


def through_function(model, h):
    return Function.apply(h)


def of_two(g):
    """In batches of more than three the first sample gets some of the last one's gradient, of no size as in a trial."""
    return torch.cat([g[:1] + 0.3 * g[-1:], g[1:]]) if len(g) > 3 and g.abs().max() < 10 else g


def swapped_hook(model):
    [key] = model.act._backward_hooks
    model.act._backward_hooks[key] = lambda module, grads, outputs: (grads[0] - grads[0].mean(0),)


def hooked():
    model = Model()
    model.act.register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 1.0,))
    return model


def shares(model, h):
    return h - HELD["weight"] * h.mean(0).detach()


def last_of_many(model, h):
    """In batches of more than three the last sample is doubled."""
    is_last = torch.arange(len(h)).unsqueeze(1) == len(h) - 1
    return h * (1 + is_last * float(len(h) > 3))


def sum_decides(model, h):
    return 2 * h if h.detach()[:, 0].sum() > 3.5 else 1 * h


def outliers():
    """Alone the fourth sample is over the bound of `sum_decides`, and with any other it is not."""
    x = torch.zeros(B, 4)
    x[3], x[4] = 2.0, -2.0
    return x


def wide(model):
    """Its first feature is the sum of the inputs."""
    with torch.no_grad():
        model.a.weight.fill_(0.1)
        model.a.bias.zero_()
    model.act = nn.Identity()
    with torch.no_grad():
        model.a.weight[0].fill_(1.0)
    return model


NOTHING = lambda model: None  # noqa: E731
CASES: dict[str, tuple[Callable, Callable]] = {
    # A model, and what changes before the third mini-batch.
    "a branch": (lambda: Model(lambda m, h: h - h.mean(0) if HELD["on"] else h), turned_on),
    "a weight": (lambda: Model(lambda m, h: h - HELD["weight"] * h.mean(0)), held("weight", 0.5)),
    "a tensor in place": (lambda: Model(lambda m, h: h - HELD["tensor"] * h.mean(0)),
                          lambda m: HELD["tensor"].fill_(0.5)),
    "an operand": (lambda: Model(lambda m, h: h - (h.mean(1, keepdim=True).expand_as(h),
                                                   h.mean(0).expand_as(h))[HELD["on"]]), turned_on),
    "two samples of many": (lambda: Model(lambda m, h: Function.apply(h) if HELD["on"] else h.clone()),
                            lambda m: (turned_on(m), backward(of_two)(m))),
    "a wide clamp": (lambda: Model(lambda m, h: Function.apply(h) if HELD["on"] else h.clone()),
                     lambda m: (turned_on(m), backward(clamp(1e3))(m))),
    "a gate behind data": (lambda: Model(lambda m, h: h - m.gate * h.mean(0)), lambda m: m.gate.data.fill_(0.5)),
    "a backward hook": (hooked, swapped_hook),
}  # fmt: skip
WITNESSED: dict[str, tuple[Callable, Callable]] = {
    # Nothing shows these but a witness: on the fourth mini-batch.
    "backward": (lambda: Model(through_function), backward(lambda g: g - 0.5 * g.mean(0))),
    "backward of one bias": (lambda: Model(through_function), backward(lambda g: g - 1e-6 * g.mean(0))),
    "narrow clamp": (lambda: Model(through_function), backward(clamp(0.15))),
    "value of the output": (lambda: Model(behind=lambda m, h: h - HELD["replaced"] * h.mean(0).detach()),
                            held("replaced", torch.tensor(0.5))),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _held():
    torch.manual_seed(0)
    HELD.clear()
    HELD.update(on=False, weight=0.0, tensor=torch.zeros(()), replaced=torch.zeros(()), backward=lambda g: g)


def refused(name, at=AT):
    """Whether the case is refused on mini-batch ``at``."""
    make, change = (CASES | WITNESSED)[name]
    model = make().double()
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    for mini_batch in range(1, at + 1):
        if mini_batch == AT:
            change(model)
        clipper._tracker.witness._chosen = 0.5  # the fourth of six
        try:
            model(torch.randn(B, 4, dtype=torch.float64)).square().sum(1).mean().backward()
            clipper.clip_and_accumulate()
        except UnsupportedGradientError:
            assert mini_batch == at
            return True
        clipper.pre_step()
    return False


def refused_at_first(model, x):
    clipper = gg.PerSampleGradientClipper(model, gg.FlatNormClipper(1.0))
    clipper._tracker.witness._chosen = 0.0
    try:
        model(x).square().sum(1).mean().backward()
        clipper.clip_and_accumulate()
    except UnsupportedGradientError:
        return True
    return False


FIRST = {
    "the last of many": lambda: refused_at_first(Model(last_of_many), torch.randn(B, 4)),
    "one value decides": lambda: refused_at_first(wide(Model(sum_decides)), outliers()),
}
PROBES = {
    **{name: lambda name=name: refused(name) for name in CASES},
    **{name: lambda name=name: refused(name, 4) for name in WITNESSED},
    **FIRST,
}


@pytest.mark.parametrize("name", PROBES)
def test_each_case_is_refused(name):
    assert PROBES[name]()


def nothing(*args, **kwargs):
    return None


def without_operand(note):
    """A tensor's form without its name and the number of results since."""
    return lambda self, value: found[2:] if type(found := note(self, value)) is tuple else found


def without_functions(note):
    """A tensor's form without what made it."""
    return lambda self, value: found[3:] if type(found := note(self, value)) is tuple else found


def without_versions(note):
    def form(self, value):
        before = len(self.numbers)
        found = note(self, value)
        if isinstance(value, torch.Tensor):
            del self.numbers[before:]
        return found

    return form


def once(self, *args):
    self._next = 10**9


NO_ERROR = Comparison(0.0, "", 0.0)
MUTANTS = {
    "no mini-batch has a witness": (patch.object(Witness, "is_due", property(lambda s: False)), "backward"),
    "only the first has one": (patch.object(Witness, "_next_one", once), "backward"),
    "witnesses compare no gradients": (patch.object(SampleGradient, "compare", lambda *a: NO_ERROR), "backward"),
    "witnesses compare no outputs": (patch.object(sample_loop, "same_rows", lambda *a: True), "value of the output"),
    "witnesses see what is larger than rounding 1e4 times only": (
        patch.object(SampleGradient, "compare", lambda *a, compare=SampleGradient.compare: (
            lambda c: Comparison(c.largest, c.parameter, c.excess / 1e10))(compare(*a))), "backward of one bias"),
    "gradients of a sample alone are not scaled": (
        patch.object(sample_loop.LoopedCall, "scale_of", lambda *a: 1.0), "narrow clamp"),
    "nothing that a forward does is new": (patch.object(KnownOperations, "is_new", lambda *a: False), "a branch"),
    "numbers are not looked at": (patch.object(KnownOperations, "_changed", lambda *a: []), "a weight"),
    "Functions are not looked at": (
        patch.object(OperationTrace, "_form_of_tensor", without_functions(OperationTrace._form_of_tensor)),
        "two samples of many"),
    "operands are not looked at": (
        patch.object(OperationTrace, "_form_of_tensor", without_operand(OperationTrace._form_of_tensor)), "an operand"),
    "writing into tensors is not looked at": (
        patch.object(OperationTrace, "_form", without_versions(OperationTrace._form)), "a tensor in place"),
    "one sample stands for all that are new": (patch.object(Witness, "look_at", once), "two samples of many"),
    "what is new is not tried out": (patch.object(rehearsal, "_try", nothing), "a wide clamp"),
    "gates stay shut in the trial": (
        patch.object(rehearsal, "_float64", lambda t, g, one=rehearsal._float64: one(t, None)), "a gate behind data"),
    "attributes and hooks are not looked at": (patch.object(StateReader, "look", lambda s: 0), "a backward hook"),
    "sizes are not tried out": (patch.object(rehearsal, "_try_size", nothing), "the last of many"),
    "reading values counts for nothing": (patch.object(CallTracker, "_take_samples", nothing), "one value decides"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_lets_something_pass(name):
    mutation, case = MUTANTS[name]
    with ExitStack() as stack:
        stack.enter_context(mutation)
        if name.startswith("one sample"):
            stack.enter_context(patch.object(call_tracker.CallTracker, "_take_samples", nothing))
        assert not PROBES[case]()
