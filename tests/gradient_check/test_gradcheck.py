"""`gradcheck` as a caller sees it: the report, names, structures, and what it leaves as it was."""

import copy
import dataclasses
import itertools
import random
import re
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradguard as gg
from gradient_check.wrong import sine
from gradient_check.wrong_kernels import wrong

D = torch.float64


def normal(*shape, dtype=D, seed=1):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def numbers(*values):
    return torch.tensor(values, dtype=D)


def scaled_sine(factor):
    """The sine, whose gradient is multiplied by a factor, or by what a function of the input returns."""
    return sine(lambda v, x: v * x.cos() * (factor(x) if callable(factor) else factor))


HALVED = scaled_sine(0.5)
LAST_BITS = itertools.cycle((1.0, 1.0, 1 + 2**-52, 1.0, 1 + 2**-52, 1.0, 1.0))


# the report


def test_a_passing_report():
    report = gg.gradcheck(torch.sin, normal(7))
    assert (report.verdict, report.findings, report.notes, report.dtype) == ("PASS", (), (), "float64")
    assert report
    assert 0 < report.power < 1e-7
    assert report.directions == 1
    assert 0 < report.forwards < 200
    assert report.backwards > 0
    assert report.seconds > 0
    assert str(report).startswith("PASS")
    assert f"{report.forwards} forwards, {report.backwards} backwards, float64" in str(report)
    assert f"a wrong element of typical size would show from {report.power:.0e} relative" in str(report)


def test_a_failing_report():
    x = normal(3, 4)
    report = gg.gradcheck(scaled_sine(lambda x: 1 - 0.5 * F.one_hot(torch.tensor(9), 12).view(3, 4)), x)
    assert report.verdict == "FAIL"
    assert not report
    (found,) = report.findings
    assert (found.kind, found.index, found.place) == ("mismatch", (2, 1), f"{found.input}[2, 1]")
    assert found.analytical == pytest.approx(found.numerical / 2, rel=1e-9)
    assert 0 <= found.bar < 1e-9 * abs(found.numerical)
    assert found.step > 0
    assert "ratio 0.5000" in found.guess

    line = str(report).splitlines()[0]
    assert line.startswith("FAIL ")
    for said in (found.place, f"analytical {found.analytical:.6g}", f"numerical {found.numerical:.6g} ± ", found.guess):
        assert said in line


@pytest.mark.parametrize("factor", [1 + 1e-6, 1 - 3e-7, 1.0001, 2.0])
def test_a_message_has_as_many_digits_as_show_the_difference(factor):
    found = gg.gradcheck(scaled_sine(factor), normal(6)).findings[0]
    analytical, numerical = re.search(r"analytical (\S+)  numerical (\S+)", str(found)).groups()
    assert float(analytical) / float(numerical) - 1 == pytest.approx(factor - 1, rel=0.1)
    ratio = re.search(r"ratio (\S+?),?(\s|$)", str(found))[1]
    assert float(ratio) - 1 == pytest.approx(factor - 1, rel=0.1)


def test_a_report_and_its_findings_cannot_be_changed():
    report = gg.gradcheck(HALVED, normal(3))
    with pytest.raises(dataclasses.FrozenInstanceError, match="verdict"):
        report.verdict = "PASS"
    with pytest.raises(dataclasses.FrozenInstanceError, match="kind"):
        report.findings[0].kind = "note"


def test_the_seed_alone_decides_about_the_random_numbers():
    first = gg.gradcheck(HALVED, normal(9))
    torch.manual_seed(77)
    assert gg.gradcheck(HALVED, normal(9)) == first
    assert gg.gradcheck(HALVED, normal(9), seed=3) == gg.gradcheck(HALVED, normal(9), seed=3) != first


NOTES = {
    "kink": (torch.relu, numbers(0, 1, -1)),
    "jump": (lambda x: x.floor() + x, numbers(0, 1.5, -1)),
    "singular": (torch.sqrt, numbers(0, 1.5)),
    "outputs": (lambda x: (x.detach().sin(), x.cos()), numbers(1, 2)),
    "non-determinism": (sine(lambda v, x: v * x.cos() * next(LAST_BITS)), normal(50)),
}


@pytest.mark.parametrize("kind", NOTES)
def test_what_is_worth_knowing_is_a_note(kind):
    fn, x = NOTES[kind]
    report = gg.gradcheck(fn, x)
    assert report.verdict == "PASS"
    assert kind in {note.kind for note in report.notes}
    assert "\nnote " in str(report)


def test_a_tie_counts_as_a_kink():
    report = gg.gradcheck(lambda x: x.max(-1).values, numbers(1, 1, -1))
    assert report.verdict == "PASS"
    assert {(note.kind, note.index) for note in report.notes} <= {("kink", (0,)), ("kink", (1,))} != set()


@pytest.mark.parametrize("fn", [torch.reciprocal, torch.log], ids=["1/x", "log"])
def test_a_pole_is_no_wrong_gradient(fn):
    assert gg.gradcheck(fn, numbers(0, 1.5, 2)).verdict != "FAIL"


GUESSES = {
    "sign": (scaled_sine(-1.0), normal(20)),
    "zero": (scaled_sine(0.0), normal(20)),
    "ratio 0.5000": (HALVED, normal(20)),
    "only the last 6 of 70 columns": (scaled_sine(lambda x: 1 - 0.5 * (torch.arange(70) >= 64)), normal(4, 70)),
    "only the first 3 of 70 rows": (scaled_sine(lambda x: 1 - 0.5 * (torch.arange(70) < 3)[:, None]), normal(70, 4)),
    "only where x < 0": (scaled_sine(lambda x: torch.where(x < 0, 0.5, 1.0)), normal(40)),
    "only where x > 0": (scaled_sine(lambda x: torch.where(x > 0, 0.5, 1.0)), normal(40)),
    "only 1 of 12 elements": (scaled_sine(lambda x: 1 - 0.5 * F.one_hot(x.argmin(), 12)), normal(12)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("guess", GUESSES)
def test_what_the_wrong_elements_have_in_common(guess):
    fn, x = GUESSES[guess]
    report = gg.gradcheck(fn, x)
    assert report.verdict == "FAIL"
    assert guess in report.findings[0].guess
    assert guess in str(report)


# names and structure


class Scaled(nn.Module):
    """A module with a submodule whose weight gets half its gradient."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3, dtype=D)

    def forward(self, x):
        return x.sin() @ HALVED(self.inner.weight) + self.inner.bias


def varied(x, pair, options):
    return x + pair[0] * pair[1] + HALVED(options["w"][1]) + options["n"]


NAMED = {
    "second": (lambda first, second: first * HALVED(second), (normal(3), normal(3)), {}),
    "xs[1]": (lambda *xs: xs[0] + HALVED(xs[1]), (normal(3), normal(3)), {}),
    "w": (lambda x, *, w: x * HALVED(w), (normal(3),), {"kwargs": {"w": normal(3)}}),
    "options['w'][1]": (varied, (normal(3), (normal(3), normal(3)), {"w": [normal(3), normal(3)], "n": 2}), {}),
    "pair[0]": (lambda pair, x: HALVED(pair[0]) * x, ((normal(3), 4), normal(3)), {}),
    "inner.weight": (Scaled(), (normal(4, 3),), {}),
    "input": (nn.Sequential(nn.Tanh(), nn.Identity()), (normal(3),), {}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [name for name in NAMED if name != "input"])
def test_a_wrong_input_is_named_as_in_the_signature(name):
    fn, inputs, options = NAMED[name]
    report = gg.gradcheck(fn, *inputs, **options)
    assert {one.input for one in report.findings} == {name}
    assert f"{name}[" in str(report)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("chosen", ["name", ["name"], ("name",)], ids=["str", "list", "tuple"])
@pytest.mark.parametrize("name", NAMED)
def test_only_the_inputs_that_are_asked_for_are_checked(name, chosen):
    fn, inputs, options = NAMED[name]
    chosen = name if chosen == "name" else type(chosen)([name])
    report = gg.gradcheck(fn, *inputs, inputs_to_check=chosen, **options)
    assert report.verdict == ("PASS" if name == "input" else "FAIL")


def test_a_wrong_input_that_is_not_asked_for_is_not_seen():
    fn, inputs, _ = NAMED["second"]
    assert gg.gradcheck(fn, *inputs, inputs_to_check="first").verdict == "PASS"
    assert gg.gradcheck(Scaled(), normal(4, 3), inputs_to_check=["inner.bias", "x"]).verdict == "PASS"


@dataclass
class Outputs:
    left: torch.Tensor
    right: dict


STRUCTURES = {
    "lone tuple": (lambda a, b: a * HALVED(b), ((normal(3), normal(3)),)),
    "dataclass of a dict": (lambda x: Outputs(x.cos(), {"k": HALVED(x)}), (normal(3),)),
    "list with integers": (lambda x: [x.argmax(), 3, None, HALVED(x)], (normal(3),)),
    "integers among the inputs": (lambda x, index, mode: HALVED(x)[index], (normal(5), torch.tensor([0, 3]), "mode")),
    "real and complex": (lambda a, z: HALVED(a).sum() * z, (normal(3), normal(4, dtype=torch.complex128))),
    "complex": (wrong(torch.mul, lambda v, y, a, b: (v * b, v * a)), (normal(2, 3, dtype=torch.complex128),) * 2),
    "real and complex outputs": (lambda x: (x[:3].cos(), torch.polar(x, HALVED(x))), (normal(4),)),
    "no dimensions": (HALVED, (normal(),)),
    "strided input": (HALVED, (normal(4, 3).T,)),
    "expanded input": (HALVED, (normal(1, 3).expand(4, 3),)),
    "an empty input beside": (lambda a, b: a.sum() + HALVED(b), (normal(0, 3), normal(2))),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_of_inputs_and_outputs(name, monkeypatch):
    fn, inputs = STRUCTURES[name]
    assert gg.gradcheck(fn, *inputs).verdict == "FAIL"
    right = torch.sin if fn is HALVED else torch.mul if name == "complex" else fn
    monkeypatch.setitem(globals(), "HALVED", torch.sin)
    assert gg.gradcheck(right, *inputs).verdict == "PASS"


def test_only_inputs_that_require_a_gradient_if_any_does():
    fn = lambda x, w: HALVED(x) * w  # noqa: E731
    assert gg.gradcheck(fn, normal(3), normal(3).requires_grad_()).verdict == "PASS"
    assert gg.gradcheck(fn, normal(3).requires_grad_(), normal(3)).verdict == "FAIL"


def test_frozen_parameters_are_not_checked():
    module = Scaled()
    module.inner.weight.requires_grad_(False)
    assert gg.gradcheck(module, normal(4, 3)).verdict == "PASS"


@pytest.mark.parametrize("activation", [torch.tanh, HALVED], ids=["right", "wrong"])
def test_a_parameter_used_twice_is_one_input(activation):
    first, second = nn.Linear(3, 3, dtype=D), nn.Linear(3, 3, dtype=D)
    second.weight = first.weight

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x):
            return self.second(activation(self.first(x)))

    report = gg.gradcheck(Tied(), normal(2, 3))
    assert report.verdict == ("PASS" if activation is torch.tanh else "FAIL")
    assert "second.weight" not in {one.input for one in report.findings}


# what is left as it was


def test_a_module_in_train_mode_stays_as_it_was():
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 3)).double().train()
    before = copy.deepcopy(module.state_dict())
    assert gg.gradcheck(module, normal(6, 4)).verdict == "PASS"
    assert all(m.training for m in module.modules())
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert all(p.requires_grad and p.grad is None for p in module.parameters())


def test_buffers_in_a_closure_stay_as_they_were():
    norm = nn.BatchNorm1d(3, dtype=D)
    assert gg.gradcheck(lambda x: norm(x).sin(), normal(6, 3)).verdict == "PASS"
    assert (norm.num_batches_tracked, norm.running_mean.tolist()) == (0, [0, 0, 0])


def test_the_callers_tensors_stay_as_they_were():
    given = normal(3).requires_grad_(), normal(3), (2 * normal(3).requires_grad_())
    given[0].grad = torch.ones(3, dtype=D)
    before = [t.detach().clone() for t in given]
    for fn in (lambda a, b, c: a * b + c, lambda a, b, c: b.mul_(2) * a + c):
        assert gg.gradcheck(fn, *given).verdict in ("PASS", "FAIL")
    assert [t.requires_grad for t in given] == [True, False, True]
    assert given[0].grad.tolist() == [1, 1, 1]
    assert given[1].grad is None
    torch.testing.assert_close([t.detach() for t in given], before, rtol=0, atol=0)


RANDOM = {
    "sine": torch.sin,
    "dropout": lambda x: F.dropout(x, 0.5),
    "a NumPy draw": lambda x: x * float(np.random.rand()),
    "a Python draw": lambda x: x * random.random(),
}


@pytest.mark.parametrize("name", RANDOM)
def test_the_callers_random_numbers_stay_as_they_were(name):
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1:3]
    assert gg.gradcheck(RANDOM[name], normal(40)).verdict == "PASS"
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    np.testing.assert_equal(np.random.get_state()[1:3], before[2])


def test_the_first_check_of_a_process_imports_neither_the_compiler_nor_its_algebra():
    code = """
import sys, torch, gradguard as gg
for forget in (False, True):
    fn = lambda x, y: x * (y.detach() if forget else y)
    report = gg.gradcheck(fn, torch.ones(3), torch.ones(3))
    assert report.verdict == ("FAIL" if forget else "PASS"), report
print([name for name in ("sympy", "torch._dynamo", "torch._inductor", "functorch") if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_a_direction_that_tells_nothing_is_followed_by_one_that_does():
    """The first moves small factors of the product by the mean of all, where differences say nothing."""
    x = 10 ** torch.linspace(-12, 12, 25, dtype=torch.float64)
    report = gg.gradcheck(torch.prod, x)
    assert report.verdict == "PASS", str(report)
    assert report.power < 1e-6
    assert report.directions == 2


def test_level_elements_whose_gradient_is_0_are_something_to_compare_with():
    x = torch.ones(2, 2, dtype=torch.float64)
    assert gg.gradcheck(torch.nn.functional.l1_loss, x, x.clone()).verdict == "PASS"


@pytest.mark.parametrize("where", ["an input", "a parameter"])
def test_tensors_without_numbers_are_refused(where):
    fn = torch.nn.Linear(2, 2, device="meta" if where == "a parameter" else "cpu")
    with pytest.raises(gg.errors.InvalidTypeError, match="on the meta device, which holds no numbers"):
        gg.gradcheck(fn, torch.ones(3, 2, device="meta" if where == "an input" else "cpu"))
