"""What cannot be clipped is refused by the name of its parameter, with and without the compiled kernels alike."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradguard as gg
from cases import parameter, random
from forked_python import run_python
from gradguard import native
from gradguard.errors import UnsupportedGradientError

ENGINES = ["kernels", "torch"] if native.status().in_use else ["torch"]


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(native, "library", lambda: None)
    return request.param


def held(gradient: Tensor) -> Tensor:
    """A tensor whose ``.grad`` is ``gradient``, whatever that is."""

    class Holding(Tensor):
        grad = gradient  # type: ignore[assignment]

    return torch.zeros(3).as_subclass(Holding)


def masked() -> Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))


def nested() -> Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


UNFIT = {
    "float8": (lambda: torch.ones(3).to(torch.float8_e4m3fn), "of dtype torch.float8_e4m3fn"),
    "whole numbers": (lambda: torch.ones(3, dtype=torch.int64), "of dtype torch.int64"),
    "truth values": (lambda: torch.ones(3, dtype=torch.bool), "of dtype torch.bool"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8), "of dtype torch.quint8"),
    "nested": (nested, "a nested tensor of layout torch.strided"),
    "masked": (masked, "a MaskedTensor"),
}
CALLS = {
    "norm": lambda named: gg.clip_grad_norm_(named, 0.1),
    "order 3": lambda named: gg.clip_grad_norm_(named, 0.1, 3.0),
    "value": lambda named: gg.clip_grad_value_(named, 0.1),
    "value, low": lambda named: gg.clip_grad_value_(named, 0.1, min_value=-0.2),
    "adaptive": lambda named: gg.clip_grad_adaptive_(named, 0.1),
    "raise": lambda named: gg.clip_grad_norm_(named, 0.1, nonfinite="raise"),
    "object": lambda named: gg.ClipByGlobalNorm(0.1)(named),
    "each": lambda named: gg.ClipByNorm(0.1)(named),
    "by value": lambda named: gg.ClipByValue(0.1)(named),
    "groups": lambda named: gg.Groups({"*": gg.ClipByNorm(0.1)})(named),
    "measured": lambda named: gg.get_total_norm([(name, t.grad) for name, t in named]),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", UNFIT)
def test_what_no_engine_takes(kind, call, engine):
    make, words = UNFIT[kind]
    good, bad = parameter(torch.full((3,), 5.0)), held(make())
    with pytest.raises(UnsupportedGradientError, match=f"`worse`: the gradient is {words}.*expected a strided"):
        CALLS[call]([("good", good), ("worse", bad)])
    assert good.grad.tolist() == [5.0] * 3


def test_a_nested_tensor_without_a_name(engine):
    with pytest.raises(UnsupportedGradientError, match=r"parameter 1 \(shape nested, no name.*a nested tensor of"):
        gg.get_total_norm([torch.ones(2), nested()])


@pytest.mark.parametrize("call", [call for call in CALLS if call != "measured"])
def test_a_gradient_of_inference_mode_outside_of_it(call, engine):
    with torch.inference_mode():
        gradient = torch.full((3,), 5.0)
    p = parameter(torch.zeros(3))
    p.grad = gradient
    with pytest.raises(UnsupportedGradientError, match=r"`p`: the gradient is an inference tensor"):
        CALLS[call]([("p", p)])
    assert p.grad.tolist() == [5.0] * 3
    assert float(gg.get_total_norm([p.grad])) == pytest.approx(75**0.5)
    with torch.inference_mode():
        CALLS[call]([("p", p)])
    assert max(p.grad.tolist()) < 5


def by_norm(g: Tensor) -> Tensor:
    return g / torch.linalg.vector_norm(g)


def by_value(low: float) -> Callable[[Tensor], Tensor]:
    return lambda g: torch.complex(g.real.clamp(low, 0.5), g.imag.clamp(low, 0.5))


CONJUGATES = {
    "norm": (lambda p: gg.clip_grad_norm_([p], 1.0), by_norm),
    "value": (lambda p: gg.clip_grad_value_([p], 0.5), by_value(-0.5)),
    "value, low": (lambda p: gg.clip_grad_value_([p], 0.5, min_value=-0.1), by_value(-0.1)),
    "object": (lambda p: gg.ClipByValue(0.5, -0.1)([p]), by_value(-0.1)),
    "each": (lambda p: gg.ClipByNorm(1.0)([p]), by_norm),
    "adaptive": (
        lambda p: gg.clip_grad_adaptive_([p], 1.0, eps=1.0),
        lambda g: g / torch.linalg.vector_norm(g, dim=1, keepdim=True),
    ),
    "zero": (lambda p: gg.clip_grad_norm_([p], 1.0, nonfinite="zero"), by_norm),
}


@pytest.mark.parametrize("call", CONJUGATES)
def test_a_conjugate_view_is_clipped_where_it_lies(call, engine):
    """What shares its memory is clipped with it: `.grad` was replaced, in silence."""
    memory = torch.complex(random(4, 5), random(4, 5, seed=1)) * 3
    p = nn.Parameter(torch.zeros(4, 5, dtype=torch.complex64))
    p.grad = memory.conj()
    clip, right = CONJUGATES[call]
    expected, gradient = right(p.grad.resolve_conj().clone()), p.grad
    clip(p)
    assert p.grad is gradient
    assert p.grad.is_conj()
    torch.testing.assert_close(p.grad.resolve_conj(), expected)
    torch.testing.assert_close(memory.conj().resolve_conj(), expected)


PROGRAM = """
import gradguard as gg, torch
from torch import nn
torch.set_num_threads(2)
def numbers(dtype, size):
    small = {torch.float64: 3e-320, torch.float16: 1.2e-6}.get(dtype, 3e-39)
    x = torch.full((size,), small, dtype=torch.float64).to(dtype)
    x[:5] = 1.0
    return x
lists = [numbers(dtype, 300_000) for dtype in (torch.float32, torch.float16, torch.float64, torch.bfloat16)]
alone = [x[5:] for x in lists]
THEN
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
norms = [gg.get_total_norm([x]) for x in alone]
print(gg.native.status().in_use, [norm.view(BITS[norm.dtype.itemsize]).item() for norm in norms])
for x in lists:
    p = nn.Parameter(torch.zeros_like(x))
    p.grad = x.clone()
    gg.clip_grad_norm_([p], 0.9)
    print(sorted(set(p.grad.view(BITS[x.dtype.itemsize]).tolist())))
FLUSHES
"""
FLUSH = "assert torch.set_flush_denormal(True)"


def with_flush(when: bool, **environment: str) -> str:
    program = PROGRAM.replace("THEN", FLUSH if when else "")
    left = "assert torch.full((4,), 1e-40).mul(0.5).count_nonzero() == 0" if when else ""
    done = run_python(
        "-c", program.replace("FLUSHES", left), cwd=Path.cwd(), env={"GRADGUARD_NATIVE": "1"} | environment
    )
    return done.stdout


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor cannot flush subnormal numbers")
@pytest.mark.skipif(not native.status().in_use, reason=str(native.status()))
def test_flushing_subnormal_numbers_changes_no_bit_and_is_left_as_it_was():
    """It turned the kernels off with a wrong reason, or changed what some threads did."""
    plain = with_flush(False)
    assert plain.startswith("True")
    assert len(plain.splitlines()) == 5
    assert with_flush(True) == plain
    without = with_flush(True, GRADGUARD_NATIVE="0")
    assert without.splitlines()[1:] == plain.splitlines()[1:]
