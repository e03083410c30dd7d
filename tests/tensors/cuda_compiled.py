"""Run by test_cuda_blocks.py: compiles each kernel for NVIDIA GPUs without one; prints what the assembler says."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
import triton.language as tl
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gradguard.tensors import cuda_kernels as kernels

TABLES = {"where": "*i64", "cuts": "*i64", "tensor": "*i32"}
SIZES = {"CHUNK": kernels.CHUNK, "BLOCK": kernels.BLOCK}


def compiled(kernel, signature, constants, capability):
    """The kernel's PTX, nothing being known of the tables' alignment."""
    source = ASTSource(
        kernel,
        signature={a: signature.get(a, "constexpr") for a in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]


def width_of(ptx, kind):
    """Bits of the widest load or store of several elements."""
    found = re.findall(rf"{kind}\.global\S*\.v(\d)\.b(\d+)", ptx)
    return max((int(n) * int(bits) for n, bits in found), default=0)


def assembled(ptx, capability):
    """Registers, and bytes spilled."""
    name = "ptxas-blackwell" if capability >= 100 else "ptxas"
    folder = Path(nvidia.__file__).parent / "bin"
    target = re.search(r"\.target (sm_\w+)", ptx)[1]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        program = folder / name if (folder / name).exists() else folder / "ptxas"
        ran = subprocess.run(
            [program, "-v", f"-arch={target}", file.name, "-o", "/dev/null"], capture_output=True, text=True, check=True
        )
    return int(re.search(r"Used (\d+) registers", ran.stderr)[1]), int(re.search(r"(\d+) bytes spill", ran.stderr)[1])


def main(capability, dtypes):
    rows = []
    for dtype in dtypes:
        for kernel, more, constants, accesses in (
            (kernels.measure, {"partial": "*fp64"}, {"LARGEST": False}, ["ld"]),
            (kernels.measure, {"partial": "*fp64"}, {"LARGEST": True}, ["ld"]),
            (kernels.scale, {"factors": "*fp64"}, {"EACH": True}, ["ld", "st"]),
            (kernels.clamp, {"low": "fp64", "high": "fp64"}, {}, ["ld", "st"]),
        ):
            ptx = compiled(kernel, TABLES | more, {"DTYPE": getattr(tl, dtype)} | SIZES | constants, capability)
            assert ".ftz" not in ptx, "subnormal numbers become 0"
            widest = min(width_of(ptx, kind) for kind in accesses)
            rows.append([kernel.__name__, dtype, widest, *assembled(ptx, capability)])
    signature = {"partial": "*fp64", "begin": "*i64", "norms": "*fp64", "units": "i32"}
    for units in (1, kernels.UNITS):
        constants = {"LARGEST": False, "UNITS": units, "TERMS": kernels.TERMS // units}
        ptx = compiled(kernels.finish, signature, constants, capability)
        assert "sqrt.rn.f64" in ptx, "a square root that is not rounded as torch rounds it"
        rows.append(["finish", "float64", 128, *assembled(ptx, capability)])
    ptx = compiled(kernels.coefficient, {"norm": "*fp64", "found": "*fp64", "limit": "fp64"}, {}, capability)
    assert re.search(r"(rcp|div)\.rn\.f64", ptx), "a reciprocal that is not rounded as torch rounds it"
    print(json.dumps(rows))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
