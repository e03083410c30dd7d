"""Build the kernels into one shared library: ``python native/build.py [FILE]``. It needs a C++ compiler, nothing else.

Warnings are errors where ``--strict`` is given. ``CXX`` names the compiler.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = HERE.parent / "src" / "gradguard" / "_native.so"

FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-fno-math-errno",
         "-fno-trapping-math", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi",
         "-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # of GCC's own header of AVX-512  # fmt: skip
"""No fused multiply-add, and no order of additions of the compiler's own: every processor gets the same bits."""

LEVELS = {
    "x86_64": {
        1: ["-march=x86-64"],
        3: ["-march=x86-64-v3"],
        4: ["-march=x86-64-v4", "-mprefer-vector-width=512"],
    },
    "aarch64": {1: ["-march=armv8-a"]},
}


def build(target: Path = LIBRARY, *, strict: bool = False, machine: str | None = None) -> None:
    """Compile everything into ``target``, which is replaced only when that has succeeded.

    Raises:
        RuntimeError: Why there is no library, in one sentence.
    """
    machine = machine or platform.machine()
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    if sys.platform != "linux" or machine not in LEVELS:
        raise RuntimeError(
            f"the kernels are written for Linux on {' and '.join(LEVELS)}, not {sys.platform} on {machine}"
        )
    if compiler is None:
        raise RuntimeError("there is no C++ compiler (g++, c++ or clang++ on the path, or CXX)")
    flags = [*FLAGS, "-Werror"] if strict else FLAGS
    with tempfile.TemporaryDirectory() as folder:
        objects: list[str] = []
        commands: list[list[str]] = []
        for level, options in LEVELS[machine].items():
            objects.append(str(Path(folder, f"kernels_{level}.o")))
            commands.append([*flags, *options, f"-DISA={level}", "-c", str(HERE / "kernels.cpp"), "-o", objects[-1]])
        library = Path(folder, "library.so")
        commands.append(
            [
                *flags,
                str(HERE / "gradguard.cpp"),
                *objects,
                "-shared",
                "-nodefaultlibs",
                "-lgcc",
                "-lc",
                "-Wl,-z,defs",
                "-s",
                "-o",
                str(library),
            ]
        )
        for command in commands:
            _run([*compiler.split(), *command])
        made = target.with_suffix(f".{os.getpid()}")
        shutil.copyfile(library, made)
        os.replace(made, target)  # a process that has loaded the old one keeps it


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    arguments = [a for a in sys.argv[1:] if a != "--strict"]
    build(*map(Path, arguments), strict="--strict" in sys.argv)
