"""The Triton kernels without a GPU: values in the interpreter, registers and widths by the assembler, the dispatch.

On a GPU they have never run; `gradguard.tensors.triton_plan` compares them with torch before it uses a device.
"""

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from gradguard.tensors import triton_plan
from gradguard.tensors.triton_plan import DeviceList, UnitList, coefficients_on_device

FOLDER = Path(__file__).parent
with_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not sys.platform.startswith("linux"), reason="needs Triton, on Linux"
)


def is_the_interpreter_too_old():
    """Triton's own, before 3.7, calls ``int`` on arrays of one dimension: NumPy warns, and 2.4 refuses."""
    return tuple(map(int, version("triton").split(".")[:2])) < (3, 7)


def run(script, *arguments, **environment):
    path = os.pathsep.join([str(FOLDER.parent), *sys.path])
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::RuntimeWarning", FOLDER / script, *arguments],
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@with_triton
@pytest.mark.slow
@pytest.mark.parametrize("script", ["triton_on_cpu.py", "triton_units_on_cpu.py"])
def test_values_are_those_of_torch_and_of_the_slow_twin(script):
    if is_the_interpreter_too_old():
        pytest.skip("the interpreter of Triton before 3.7 does what NumPy warns of, and from 2.4 on refuses")
    ran = run(script, TRITON_INTERPRET="1", GRADGUARD_NATIVE="0")
    assert ran.stdout == "as torch\n", ran.stderr


@with_triton
@pytest.mark.slow
@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.exhaustive), pytest.param(90, marks=pytest.mark.exhaustive), 100]
)
def test_compiled_code_spills_nothing_and_moves_16_bytes_at_a_time(capability, tmp_path):
    """128 registers let two programs of 256 threads share a processor."""
    ran = run("triton_compiled.py", str(capability), TRITON_CACHE_DIR=str(tmp_path))
    rows = json.loads(ran.stdout or f'"{ran.returncode}"'), ran.stderr
    for kernel, dtype, align, width, registers, spilled in rows[0]:
        assert spilled == 0, (kernel, dtype)
        assert registers <= 128, (kernel, dtype, registers)
        assert align != 16 or width == 128, (kernel, dtype, width)


BLOCKS = {
    "float32": (lambda: [torch.ones(3), torch.ones(0)], True, True),
    "float64": (lambda: [torch.ones(3).double()], False, True),
    "permuted": (lambda: [torch.ones(3, 4).t()], True, True),
    "strided": (lambda: [torch.ones(3, 4)[:, ::2]], False, False),
    "expanded": (lambda: [torch.ones(1).expand(3)], False, False),
    "complex": (lambda: [torch.ones(3, dtype=torch.complex64)], False, False),
    "integers": (lambda: [torch.ones(3, dtype=torch.int64)], False, False),
    "sparse": (lambda: [torch.ones(3).to_sparse()], False, False),
    "a subclass": (lambda: [torch.ones(3).as_subclass(Own)], False, False),
    "elsewhere": (lambda: [torch.ones(3), torch.ones(3, device="meta")], False, False),
    "negated": (lambda: [torch.ones(1, dtype=torch.complex64).conj().imag], False, False),
    "twice the same": (lambda: [torch.ones(3)] * 2, True, False),
}


class Own(torch.Tensor):
    pass


@pytest.mark.parametrize("case", BLOCKS)
def test_what_the_kernels_take(case):
    make, read, write = BLOCKS[case]
    taken = [triton_plan.are_blocks(make(), torch.device("cpu"), writes, writes) for writes in (False, True)]
    assert taken == [read, write]


def test_tensors_of_the_cpu_are_left_to_others():
    assert DeviceList.of([torch.ones(3)]) is None
    assert DeviceList.of([]) is None


class Cuda:
    """A tensor of a GPU, as far as the dispatch looks."""

    is_cuda, device, dtype = True, torch.device("cuda:0"), torch.float64

    def is_contiguous(self):
        return True


OBSTACLES = ["not asked for", "no triton", "an old GPU", "not CUDA", "a capture", "a wrong result", "an error"]


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_torch_does_it_where_the_kernels_cannot(obstacle, monkeypatch):
    lookups = {
        "no triton": (triton_plan.importlib.util, "find_spec", lambda _: None),
        "an old GPU": (torch.cuda, "get_device_capability", lambda _: (7, 5)),
        "not CUDA": (torch.version, "cuda", None),
        "a capture": (triton_plan, "is_captured", lambda _: True),
        "a wrong result": (triton_plan, "differs_from_torch", lambda _: "norms differ"),
        "an error": (triton_plan, "differs_from_torch", fails),
    }
    monkeypatch.setattr(triton_plan, "_serves", triton_plan._serves.__wrapped__)
    monkeypatch.setenv("GRADGUARD_TRITON", "1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(triton_plan.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(triton_plan, "is_captured", lambda _: False)
    monkeypatch.setattr(triton_plan, "differs_from_torch", lambda _: "")
    monkeypatch.setattr(triton_plan, "are_blocks", lambda *_: True)
    monkeypatch.setattr(triton_plan.DeviceList, "__init__", lambda *_: None)
    monkeypatch.setattr(triton_plan, "_coefficients", lambda *_: "coefficients")
    assert DeviceList.of([Cuda()]) is not None
    assert coefficients_on_device(Cuda(), 1.0) == "coefficients"
    if obstacle == "not asked for":
        monkeypatch.delenv("GRADGUARD_TRITON")
    else:
        monkeypatch.setattr(*lookups[obstacle])
    for ask in (lambda: DeviceList.of([Cuda()]), lambda: coefficients_on_device(Cuda(), 1.0)):
        if obstacle in ("a wrong result", "an error"):
            with pytest.warns(UserWarning, match="are not used on cuda:0, where torch's do the same"):
                assert ask() is None
        else:
            assert ask() is None


def fails(_):
    raise RuntimeError("no assembler")


def bad_in(x):
    return [int(x.isnan().sum()), int(x.isinf().sum())]


def units_clipped(grads, weights, threshold, eps, wrong):
    """As the kernels are to do it, but for one of four things: the norm of all, a norm, a factor, the writing."""
    norms, limits = (
        torch.cat([torch.linalg.vector_norm(x, dim=(1, 3), dtype=torch.float64).flatten() for x in some._tensors])
        for some in (grads, weights)
    )
    bound = limits.clamp(min=eps) * threshold
    factors = torch.where(norms > bound, bound / norms, 1.0)
    if wrong in (1, 2):
        (norms if wrong == 1 else factors)[7] *= 1.001
    shapes = grads.shapes
    for x, factor in zip(grads._tensors, factors.split([g * u for g, _, u, _ in shapes]), strict=True):
        if wrong != 3:
            x.copy_(x * factor.float().view(x.shape[0], 1, x.shape[2], 1))
    return torch.linalg.vector_norm(norms) * (1.001 if wrong == 0 else 1), norms, factors


def test_the_first_use_compares_with_torch(monkeypatch):
    """On kernels that do nothing: each of them is missed."""
    monkeypatch.setattr(DeviceList, "norms", lambda self: torch.zeros(len(self._tensors), dtype=torch.float64))
    monkeypatch.setattr(DeviceList, "norm", lambda _: torch.zeros((), dtype=torch.float64))
    monkeypatch.setattr(triton_plan, "_coefficients", lambda norms, _: torch.zeros_like(norms))
    assert triton_plan.differs_from_torch(torch.device("cpu")) == "norms differ"
    right = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in triton_plan._values(torch.device("cpu"))]
    monkeypatch.setattr(DeviceList, "norms", lambda self: torch.stack(right[: len(self._tensors)]))
    assert triton_plan.differs_from_torch(torch.device("cpu")) == "the norm of all differs"
    whole = lambda self: torch.cat([x.double().flatten() for x in self._tensors]).norm()  # noqa: E731
    monkeypatch.setattr(DeviceList, "norm", whole)
    assert triton_plan.differs_from_torch(torch.device("cpu")) == "coefficients differ"
    monkeypatch.setattr(triton_plan, "_coefficients", lambda norms, limit: (limit / (norms + 1e-6)).clamp(max=1))
    monkeypatch.setattr(DeviceList, "nonfinite", lambda self: torch.zeros(len(self._tensors), 2))
    assert triton_plan.differs_from_torch(torch.device("cpu")) == "counts differ"
    monkeypatch.setattr(DeviceList, "nonfinite", lambda self: torch.tensor(list(map(bad_in, self._tensors))))
    for wrong, error in {0: "norms", 1: "norms", 2: "factors", 3: "scale"}.items():
        monkeypatch.setattr(UnitList, "clip_", lambda *a, wrong=wrong: units_clipped(*a, wrong=wrong))
        assert triton_plan.differs_from_torch(torch.device("cpu")).startswith(error), wrong
    monkeypatch.setattr(UnitList, "clip_", lambda *a: units_clipped(*a, wrong=None))
    for name, does in (
        ("scale", lambda self, factor: [t.copy_(t * factor.to(triton_plan._wide(t))) for t in self._tensors]),
        ("clamp", lambda self, low, high: [t.clamp_(low, high) for t in self._tensors]),
        ("zero", lambda self, flag: [t.masked_fill_(flag, 0) for t in self._tensors]),
    ):
        monkeypatch.setattr(DeviceList, f"{name}_", lambda *_: None)
        assert triton_plan.differs_from_torch(torch.device("cpu")) == f"{name} differs"
        monkeypatch.setattr(DeviceList, f"{name}_", does)
    assert triton_plan.differs_from_torch(torch.device("cpu")) == ""
