"""Run by test_triton_kernels.py: compiles each kernel for NVIDIA GPUs without one; prints what the assembler says."""

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

from gradguard.tensors import triton_kernels as kernels
from gradguard.tensors.triton_plan import DTYPES

TABLES = {"where": "*i64", "length": "*i64", "tensor": "*i32", "start": "*i64"}
MORE = {
    "partial_squares": {"partial": "*fp64"},
    "scale": {"coefficient": "*fp64"},
    "clamp": {"low": "*fp64", "high": "*fp64"},
    "zero": {"flag": "*fp32"},
    "nonfinite": {"place": "*i64", "counts": "*i64"},
}


def compiled(kernel, signature, constants, capability):
    """The kernel's PTX."""
    addresses = [i for i, a in enumerate(kernel.arg_names) if signature.get(a, "")[:1] == "*"]
    pointers = {(i,): [["tt.divisibility", 16]] for i in addresses}
    source = ASTSource(
        kernel,
        signature={a: signature.get(a, "constexpr") for a in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs=pointers,
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8}).asm["ptx"]


UNIT_TABLES = {"where": "*i64", "cuts": "*i64", "tensor": "*i32"}


def compiled_units(capability):
    rows, sizes = [], {"BLOCK": kernels.UNIT_BLOCK, "STEPS": kernels.UNIT_STEPS}
    for dtype in ("float32", "bfloat16", "float16"):
        for name, more, also in (
            ("unit_squares", {"partial": "*fp64"}, {"SPAN": kernels.SPAN}),
            ("unit_scale", {"factors": "*fp64"}, {}),
        ):
            constants = {"DTYPE": getattr(tl, dtype)} | sizes | also
            ptx = compiled(getattr(kernels, name), UNIT_TABLES | more, constants, capability)
            widest = min(width_of(ptx, kind) for kind in ACCESSES[name])
            rows.append([name, dtype, 16, widest, *assembled(ptx, capability)])
    signature = {"cuts": "*i64", "tensor": "*i32"} | dict.fromkeys(("partial", "norms", "factors", "squares"), "*fp64")
    signature |= {"weights": "*i64", "threshold": "i64", "eps": "i64"}
    constants = {"TOGETHER": kernels.UNITS_AT_ONCE, "TERMS": kernels.TERMS}
    nothing = dict.fromkeys(("weights", "factors", "squares"))
    alone = {name: kind for name, kind in signature.items() if name not in nothing} | {"threshold": "i32", "eps": "i32"}
    ptx = compiled(kernels.unit_norms, alone, constants | nothing | {"FACTORS": False}, capability)
    rows.append(["unit_norms, alone", "float64", 16, 128, *assembled(ptx, capability)])
    ptx = compiled(kernels.unit_norms, signature, constants | {"FACTORS": True}, capability)
    assert re.search(r"div\.rn\.f64", ptx), "a quotient that is not rounded as torch rounds it"
    return [*rows, ["unit_norms", "float64", 16, 128, *assembled(ptx, capability)]]


ACCESSES = {"partial_squares": ["ld"], "scale": ["ld", "st"], "clamp": ["ld", "st"], "zero": ["st"]}
ACCESSES |= {"unit_squares": ["ld"], "unit_scale": ["ld", "st"], "nonfinite": ["ld"]}


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


def main(capability):
    rows = []
    for name, more in MORE.items():
        for dtype in DTYPES.values():
            if name == "partial_squares" and dtype == "float64":
                continue
            for align in (16, 2):
                sizes = {"CHUNK": kernels.CHUNK, "BLOCK": kernels.BLOCK}
                constants = {"DTYPE": getattr(tl, dtype), "ALIGN": align} | sizes
                ptx = compiled(getattr(kernels, name), TABLES | more, constants, capability)
                widest = min(width_of(ptx, kind) for kind in ACCESSES[name])
                rows.append([name, dtype, align, widest, *assembled(ptx, capability)])
    signature = {"partial": "*fp64", "first": "*i64", "last": "*i64", "norms": "*fp64"}
    ptx = compiled(kernels.finish, signature, {"BLOCK": 1024}, capability)
    rows.append(["finish", "float64", 16, 128, *assembled(ptx, capability)])
    rows += compiled_units(capability)
    signature = {"norms": "*fp64", "limit": "i64", "coefficients": "*fp64", "count": "i32"}
    ptx = compiled(kernels.coefficient, signature, {"BLOCK": 256}, capability)
    assert re.search(r"(rcp|div)\.rn\.f64", ptx), "a reciprocal that is not rounded as torch rounds it"
    rows.append(["coefficient", "float64", 16, 128, *assembled(ptx, capability)])
    print(json.dumps(rows))


if __name__ == "__main__":
    main(int(sys.argv[1]))
