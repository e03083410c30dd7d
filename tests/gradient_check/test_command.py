"""`gradguard check` as a person types it."""

import json
import sys
from pathlib import Path

import pytest
import torch

from forked_python import run_python
from gradguard.check.command import make_inputs
from gradguard.cli import main

SOURCE = """
import torch
from torch import nn


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor=1.0):
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class Nearly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2.0001 * grad * ctx.saved_tensors[0]


class Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        if x.dtype is not torch.bfloat16:
            raise RuntimeError("bfloat16 only")
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        return self.fc(x).tanh()


class WrongNet(Net):
    def forward(self, x):
        return Wrong.apply(self.fc(x))


class Needs(nn.Module):
    def __init__(self, size):
        super().__init__()


def pick(weight, idx):
    return weight[idx]


def only(a, b, /):
    return a * b


def scaled(x, y):
    return x * y.exp()


def matmul(x, y):
    return x @ y


net = Net()
number = 3
"""


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """Write the module, run ``gradguard check`` beside it; returns the exit code, what it printed and its complaint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("checked").mkdir()
    Path("checked/ops.py").write_text(SOURCE)
    for name in ("checked", "checked.ops"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def go(*arguments):
        code = main(["check", *arguments])
        return code, *capsys.readouterr()

    yield go
    for name in ("checked", "checked.ops"):
        sys.modules.pop(name, None)


CODES = {
    "by name": ("checked.ops:scaled --input x=2,3:float64 --input y=3:float64", 0, "PASS"),
    "positions only": ("checked.ops:only --input b=2 --input a=2", 0, "PASS"),
    "no signature": ("torch:mul --input u=2 --input v=2", 0, "PASS"),
    "a class": ("checked.ops:Net --input x=4,3", 0, "PASS"),
    "an instance": ("checked.ops:net --input x=4,3 --seed 3", 0, "PASS"),
    "a method": ("checked.ops:net.forward --input x=4,3", 0, "PASS"),
    "integers": ("checked.ops:pick --input weight=5,3:float64 --input idx=4:int64", 0, "PASS"),
    "0-dim": ("torch:sin --input x=:float64", 0, "PASS"),
    "complex": ("torch:exp --input x=3:complex128", 0, "PASS"),
    "every element": ("checked.ops:scaled --input x=2 --input y=2 --exhaustive", 0, "PASS"),
    "second order": ("torch:sin --input x=3:float64 --order 2", 0, "PASS"),
    "wrong": ("checked.ops:Wrong --input x=3:float64", 1, "FAIL"),
    "undecided": ("checked.ops:Half --input x=3:bfloat16", 3, "INCONCLUSIVE"),
    "with a reference": ("checked.ops:Half --input x=3:bfloat16 --reference torch:square", 0, "PASS"),
}


@pytest.mark.parametrize("case", CODES)
def test_the_verdict_is_printed_and_is_the_exit_code(check, case):
    line, code, verdict = CODES[case]
    found, printed, complaint = check(*line.split())
    assert (found, complaint) == (code, "")
    assert printed.splitlines()[0].startswith(verdict)


def test_a_report_as_json(check):
    code, printed, complaint = check("checked.ops:Wrong", "--input", "x=3:float64", "--json")
    assert (code, complaint, printed.count("\n")) == (1, "", 1)
    report = json.loads(printed, parse_constant=pytest.fail)
    assert report["verdict"] == "FAIL"
    first = report["findings"][0]
    assert (first["kind"], len(first["index"])) == ("mismatch", 1)
    assert first["analytical"] == pytest.approx(first["numerical"] / 2)
    assert json.loads(check("checked.ops:Half", "--input", "x=3:bfloat16", "--json")[1])["power"] is None  # infinite


def test_a_declared_error(check):
    assert check("checked.ops:Nearly", "--input", "x=3:float64")[0] == 1
    assert check("checked.ops:Nearly", "--input", "x=3:float64", "--rtol", "1e-3")[0] == 0
    code, shown, _ = check("checked.ops:Wrong", "--input", "x=3:float64", "--rtol", "0.6")
    assert (code, "would show only from" in shown) == (3, True)  # so wide a tolerance verifies nothing
    assert "rtol is 2.0" in check("torch:sin", "--input", "x=3:float64", "--rtol", "2")[2]


COMPLAINTS = {
    "no colon": ("checked.ops", "expected package.module:name, such as torch:sin"),
    "no name": ("checked.ops:", "expected package.module:name"),
    "no module": ("checked.nothing:f", "cannot load checked.nothing:f: ModuleNotFoundError: No module named"),
    "no attribute": ("checked.ops:nothing", "module 'checked.ops' has no attribute 'nothing'."),
    "nothing to call": ("checked.ops:number", "checked.ops:number is int: expected a function or a module."),
    "a class with arguments": ("checked.ops:Needs", "TypeError: Needs.__init__() missing"),
    "no shape": ("checked.ops:net --input x", "--input x: expected name=shape:dtype, as in x=2,3:float32"),
    "a word for a shape": ("checked.ops:net --input x=two", "--input x=two: 'two' is not a shape; expected sizes >= 0"),
    "a negative size": ("checked.ops:net --input x=2,-3", "'2,-3' is not a shape"),
    "a comma too many": ("checked.ops:net --input x=2,,3", "'2,,3' is not a shape"),
    "an unknown dtype": ("checked.ops:net --input x=2:float23", "unknown dtype 'float23'; expected one of ['float16'"),
    "no dtype of tensors": ("checked.ops:net --input x=2:nn", "unknown dtype 'nn'"),
    "twice": ("checked.ops:net --input x=2 --input x=3", "there is an input 'x' already"),
    "another name": ("checked.ops:scaled --input z=2", "scaled cannot be called with ['z']: missing a required"),
    "shapes that do not fit": (
        "checked.ops:matmul --input x=2,3 --input y=2,3",
        "checked.ops:matmul raised RuntimeError",
    ),
    "nothing to check": ("checked.ops:only --input a=2:int64 --input b=2:int64", "there is nothing to check"),
    "a reference that is absent": (
        "checked.ops:net --input x=4,3 --reference nowhere:f",
        "cannot load nowhere:f: ModuleNotFoundError",
    ),
}


@pytest.mark.parametrize("case", COMPLAINTS)
def test_what_cannot_be_carried_out_ends_with_two_and_no_traceback(check, case):
    line, words = COMPLAINTS[case]
    code, printed, complaint = check(*line.split())
    assert (code, printed) == (2, "")
    assert complaint.startswith("gradguard: error: ")
    assert words in complaint


def test_a_module_that_breaks_on_import(check):
    Path("checked/broken.py").write_text("1 / 0")
    code, _, complaint = check("checked.broken:f")
    assert code == 2
    assert "cannot load checked.broken:f: ZeroDivisionError: division by zero" in complaint


@pytest.mark.parametrize("target", ["checked.ops:Wrong", "checked.ops:WrongNet"])
def test_the_same_seed_gives_the_same_inputs_and_weights(check, target):
    found = [check(target, "--input", "x=3:float32", "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert found[0] == found[1] != found[2]
    assert found[0].startswith("FAIL")


def test_random_numbers_of_the_caller_go_on(check):
    before = torch.get_rng_state()
    check("checked.ops:Net", "--input", "x=4,3")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("x=2,3", (2, 3), torch.float32),
        ("x=", (), torch.float32),
        ("x=:float64", (), torch.float64),
        ("x=0,2:bfloat16", (0, 2), torch.bfloat16),
        ("x=4:complex64", (4,), torch.complex64),
        ("x=4:uint8", (4,), torch.uint8),
        ("x=4:bool", (4,), torch.bool),
    ],
)
def test_inputs(text, shape, dtype):
    (value,) = make_inputs([text], seed=0).values()
    assert (tuple(value.shape), value.dtype) == (shape, dtype)
    if not (dtype.is_floating_point or dtype.is_complex):
        assert set(value.tolist()) <= {0, 1}


@pytest.mark.slow
def test_as_a_command(check):
    command = ["-m", "gradguard", "check", "checked.ops:Wrong", "--input", "x=3:float64"]
    done = run_python(*command, cwd=Path.cwd(), check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("FAIL")
    assert done.stderr == ""
