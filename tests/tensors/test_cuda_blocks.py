"""The Triton kernels without a GPU: values in the interpreter, registers and widths by the assembler, the dispatch."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gradguard.tensors import cuda_blocks
from gradguard.tensors.cuda_blocks import CudaBlocks

FOLDER = Path(__file__).parent
with_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not sys.platform.startswith("linux"), reason="needs Triton, on Linux"
)


def run(script, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::RuntimeWarning", FOLDER / script, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER.parent), *sys.path])} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@with_triton
@pytest.mark.slow
@pytest.mark.parametrize("combinations", [[], pytest.param(["all"], marks=pytest.mark.exhaustive)], ids=str)
def test_values_are_those_of_torch_and_of_the_slow_twin(combinations):
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of Triton before 3.7 does what NumPy warns of, and from 2.4 on refuses")
    ran = run("cuda_on_cpu.py", *combinations, TRITON_INTERPRET="1", GRADGUARD_NATIVE="0")
    assert ran.stdout == "as torch\n", ran.stderr


@with_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.exhaustive), 90])
def test_compiled_code_spills_nothing_and_moves_16_bytes_at_a_time(capability, tmp_path):
    """64 registers let eight programs of 128 threads share a processor; of `finish` there are few programs."""
    ran = run("cuda_compiled.py", str(capability), "float32", "bfloat16", TRITON_CACHE_DIR=str(tmp_path))
    assert ran.returncode == 0, ran.stderr
    rows = json.loads(ran.stdout)
    assert len(rows) == 10
    for kernel, dtype, width, registers, spilled in rows:
        assert (width, spilled) == (128, 0), (kernel, dtype)
        assert registers <= (96 if kernel == "finish" else 64), (kernel, dtype)


# The dispatch, on tensors of the CPU that say that they are on a GPU.


class OnGpu(torch.Tensor):
    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


class Own(OnGpu):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def gpu(tensor):
    return tensor.as_subclass(OnGpu)


@pytest.fixture(autouse=True)
def ready(monkeypatch):
    """A GPU that serves, and a kernel of ``CHUNK`` 4 that nobody starts."""
    monkeypatch.setattr(cuda_blocks, "_serves", lambda device, dtype: True)
    monkeypatch.setattr(cuda_blocks, "is_captured", lambda device: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setitem(sys.modules, "gradguard.tensors.cuda_kernels", SimpleNamespace(CHUNK=4))
    for table in (cuda_blocks._addresses, cuda_blocks._cut):
        table.cache_clear()
    yield
    for table in (cuda_blocks._addresses, cuda_blocks._cut):
        table.cache_clear()


LISTS = {
    "nothing": (list, False, False),
    "dense": (lambda: [gpu(torch.ones(3)), gpu(torch.ones(0)), gpu(torch.ones(3, 4).t())], True, True),
    "on the CPU": (lambda: [torch.ones(3)], False, False),
    "two dtypes": (lambda: [gpu(torch.ones(3)), gpu(torch.ones(3).double())], False, False),
    "two devices": (lambda: [gpu(torch.ones(3)), torch.ones(3, device="meta")], False, False),
    "strided": (lambda: [gpu(torch.ones(3, 4)[:, ::2])], False, False),
    "expanded": (lambda: [gpu(torch.ones(1).expand(3))], False, False),
    "integers": (lambda: [gpu(torch.ones(3, dtype=torch.int64))], False, False),
    "complex": (lambda: [gpu(torch.ones(3, dtype=torch.complex64))], False, False),
    "negated": (lambda: [gpu(torch.ones(1, dtype=torch.complex64).conj().imag)], False, False),
    "of a class that replaces operations": (lambda: [torch.ones(3).as_subclass(Own)], False, False),
    "the same twice": (lambda: [gpu(torch.ones(3))] * 2, True, False),
    "overlapping": (lambda: [gpu(x) for x in (lambda y: (y[:5], y[4:]))(torch.ones(9))], True, False),
    "side by side": (lambda: [gpu(x) for x in torch.ones(9).split([5, 4])], True, True),
}


@pytest.mark.parametrize("case", LISTS)
def test_what_the_kernels_take(case):
    make, reads, writes = LISTS[case]
    assert [CudaBlocks.of(make(), writes=w) is not None for w in (False, True)] == [reads, writes]


def test_more_programs_than_a_table_should_hold_are_not_taken(monkeypatch):
    monkeypatch.setattr(cuda_blocks, "MOST", 2)
    assert CudaBlocks.of([gpu(torch.ones(8))]) is not None
    assert CudaBlocks.of([gpu(torch.ones(9))]) is None


def test_torch_does_it_while_operations_are_watched_recorded_or_traced(monkeypatch):
    x = [gpu(torch.ones(3))]
    assert CudaBlocks.of(x) is not None
    with TorchDispatchMode():
        assert CudaBlocks.of(x) is None
    for holder, name in ((cuda_blocks, "is_captured"), (torch.compiler, "is_compiling")):
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, lambda *_: True)
            assert CudaBlocks.of(x) is None
    with monkeypatch.context() as patch:
        patch.setattr(cuda_blocks, "_serves", lambda device, dtype: dtype is not torch.float32)
        assert CudaBlocks.of(x) is None


def cut(sizes, rows):
    tensors = [gpu(torch.ones(n)) for n in sizes]
    blocks = CudaBlocks.of(tensors, rows)
    where, cuts, tensor = blocks._tables
    assert where.tolist() == [t.data_ptr() for t in tensors]
    return cuts.tolist(), tensor.tolist(), blocks._begin.tolist()


def test_tables():
    cuts, tensor, begin = cut([9, 0, 10, 4], [1, 1, 2, 1])
    # the length of a unit, its chunks, the first program, the first unit
    assert cuts == [[9, 3, 0, 0], [0, 0, 3, 1], [5, 2, 3, 2], [4, 1, 7, 4]]
    assert tensor == [0, 0, 0, 2, 2, 2, 2, 3]
    assert begin == [0, 8, 0, 3, 3, 5, 7, 8]


def test_tables_are_sent_only_when_something_has_changed(monkeypatch):
    sent, send = [], cuda_blocks._sent
    monkeypatch.setattr(cuda_blocks, "_sent", lambda table, device: sent.append(table) or send(table, device))
    memory = torch.ones(64)

    def step(*spans):
        sent.clear()
        blocks = CudaBlocks.of([gpu(memory[a:b]) for a, b in spans], writes=True)
        return blocks, len(sent)

    first, count = step((0, 9), (16, 20))
    assert count == 4
    again, count = step((0, 9), (16, 20))
    assert count == 0
    assert again._tables[0] is first._tables[0]
    moved, count = step((32, 41), (16, 20))  # allocated elsewhere
    assert count == 1
    assert moved._tables[0].tolist() == [memory[32:].data_ptr(), memory[16:].data_ptr()]
    other, count = step((0, 12), (16, 20))  # at the same address with another size
    assert count == 4
    assert other._tables[1].tolist() == [[12, 3, 0, 0], [4, 1, 3, 1]]
    assert step((0, 17), (16, 20))[0] is None  # and with one that reaches into the next
    with monkeypatch.context() as patch:  # the copy to the device is ordered on one stream alone
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=8))
        assert step((0, 9), (16, 20))[1] == 4
    for k in range(200):
        step((k % 50, k % 50 + 1 + k % 7))
    assert cuda_blocks._addresses.cache_info().currsize <= 64
    assert cuda_blocks._cut.cache_info().currsize <= 16


REASONS = ["switched off", "no triton", "an old GPU", "not NVIDIA's", "a wrong result", "an error"]


@pytest.mark.parametrize("reason", REASONS)
def test_devices_that_do_not_serve(reason, monkeypatch):
    monkeypatch.undo()  # the fixture's
    serves, device = cuda_blocks._serves.__wrapped__, torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(cuda_blocks.importlib.util, "find_spec", lambda _: True)
    monkeypatch.setattr(cuda_blocks, "differs_from_torch", lambda *_: "")
    monkeypatch.setattr(cuda_blocks, "_serving", set())
    assert serves(device, torch.float32)
    assert cuda_blocks._serving == {device}
    monkeypatch.setattr(cuda_blocks, "_serving", set())
    match reason:
        case "switched off":
            monkeypatch.setenv("GRADGUARD_TRITON", "0")
        case "no triton":
            monkeypatch.setattr(cuda_blocks.importlib.util, "find_spec", lambda _: None)
        case "an old GPU":
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
        case "not NVIDIA's":
            monkeypatch.setattr(torch.version, "cuda", None)
        case "a wrong result":
            monkeypatch.setattr(cuda_blocks, "differs_from_torch", lambda *_: "clamp differs")
        case "an error":
            monkeypatch.setattr(cuda_blocks, "differs_from_torch", lambda *_: 1 / 0)
    if reason in ("a wrong result", "an error"):
        with pytest.warns(UserWarning, match="are not used on cuda:0; torch's.*(clamp differs|ZeroDiv)"):
            assert not serves(device, torch.float32)
    else:
        assert not serves(device, torch.float32)
    assert not cuda_blocks._serving


@pytest.mark.parametrize("wrong", ["norms", "norm", "coefficient", "scale", "scale by units", "scale by 1", "clamp"])
def test_the_first_use_finds_what_is_wrong(wrong, monkeypatch):
    """On kernels in torch, of which one does something else."""

    class Wrong:
        def __init__(self, tensors, rows):
            self.units = [u for x, n in zip(tensors, rows, strict=True) for u in (x.view(n, -1) if n > 1 else [x])]

        def norms(self, p):
            padded = [torch.nn.functional.pad(u.double(), (0, 1)) for u in self.units]
            return torch.stack([torch.linalg.vector_norm(u, p) for u in padded]) * (1.001 if wrong == "norms" else 1)

        def norm(self, p):
            return self.norms(p).norm() * (1.001 if wrong == "norm" else 1)

        def scale_(self, factors):
            kind = "scale by units" if factors.dim() else "scale by 1" if factors == 1 else "scale"
            for u, factor in zip(self.units, factors.expand(len(self.units)).float(), strict=True):
                u.mul_(factor * (1.01 if wrong == kind else 1))

        def clamp_(self, low, high):
            for u in self.units:
                u.clamp_(low, math.inf if wrong == "clamp" else high)

    monkeypatch.setattr(cuda_blocks, "CudaBlocks", Wrong)
    add = 1e-6 if wrong != "coefficient" else 0.0
    monkeypatch.setattr(cuda_blocks, "_coefficient", lambda norm, limit: limit / (norm + add))
    assert "differ" in cuda_blocks.differs_from_torch(torch.device("cpu"), torch.float32)


def test_coefficients_of_other_norms_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(cuda_blocks, "_coefficient", lambda norm, limit: "in one launch")
    norm = torch.ones((), dtype=torch.float64)
    assert cuda_blocks.coefficients_on_device(norm, 1.0) is None  # of the CPU
    there = SimpleNamespace(is_cuda=True, dtype=torch.float64, device=torch.device("cuda", 0))
    assert cuda_blocks.coefficients_on_device(there, 1.0) is None  # of a device that has not been tried


@pytest.mark.parametrize("said", [0, 1, 2])
def test_waits_are_allowed_where_they_are_forbidden_and_nothing_is_set_elsewhere(monkeypatch, said):
    """PyTorch warns of each change, which would be the first thing that a user of a GPU sees."""
    changes = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: said)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", changes.append)
    with cuda_blocks._waits_unseen():
        assert len(changes) == bool(said)
    assert changes == (["default", said] if said else [])
