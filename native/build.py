"""Build the kernels into one shared library: ``python native/build.py [FILE]``. It needs a C++ compiler, nothing else.

Warnings are errors where ``--strict`` is given. ``CXX`` names the compiler; ``CXXFLAGS`` and ``LDFLAGS`` are what it
gets beside the flags below, which come last. The SHA-256 of the library is its last 32 bytes: one that was cut short is
told from a whole one before it is loaded.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIBRARY = HERE.parent / "src" / "gradguard" / "lib" / "libgradguard.so"

FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-fno-math-errno",
         "-fno-trapping-math", "-ffp-contract=off", "-Wall", "-Wextra", "-Wno-psabi",
         "-Wno-uninitialized", "-Wno-maybe-uninitialized"]  # of GCC's own header of AVX-512  # fmt: skip
"""No fused multiply-add, and no order of additions of the compiler's own: every processor gets the same bits."""

HARDENING = ["-fstack-protector-strong", "-fstack-clash-protection", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]
OF_MACHINE = {"x86_64": ["-fcf-protection"], "aarch64": ["-mbranch-protection=standard"]}
LINKED = ["-shared", "-nodefaultlibs", "-lgcc", "-lc", "-s"]  # no C++ runtime
LINKER = ["-Wl,-z,defs", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,noexecstack"]

OTHER_BITS = ("-ffast-math", "-Ofast", "-funsafe-math-optimizations", "-fassociative-math", "-freciprocal-math",
              "-ffinite-math-only", "-fno-signed-zeros", "-ffp-contract=", "-frounding-math")  # fmt: skip
"""What would give other results than those that are tested."""

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
    compiler = _compiler()
    if sys.platform != "linux" or machine not in LEVELS:
        raise RuntimeError(f"they are written for Linux on {' and '.join(LEVELS)}, not {sys.platform} on {machine}")
    if compiler is None:
        raise RuntimeError("there is no C++ compiler (g++, c++ or clang++ on the path, or CXX)")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "library.so")
        for arguments in commands(library, machine, "gradguard.cpp", [*LINKED, *_given("LDFLAGS"), *LINKER]):
            _run([*compiler, *_given("CXXFLAGS"), *arguments, *(["-Werror"] if strict else [])])
        built = library.read_bytes()
        target.parent.mkdir(exist_ok=True)
        made = target.with_suffix(f".{os.getpid()}")
        made.write_bytes(built + hashlib.sha256(built).digest())
        os.replace(made, target)  # a process that has loaded the old one keeps it


def commands(target: Path, machine: str, source: str, linked: list[str]) -> list[list[str]]:
    """Return the arguments of each call of a compiler that makes ``target`` of ``source`` and the kernels."""
    flags = [*FLAGS, *HARDENING, *OF_MACHINE[machine]]
    objects = {level: str(target.with_name(f"kernels_{level}.o")) for level in LEVELS[machine]}
    kernels = [
        [*flags, *options, f"-DISA={level}", "-c", str(HERE / "kernels.cpp"), "-o", objects[level]]
        for level, options in LEVELS[machine].items()
    ]
    return [*kernels, [*flags, str(HERE / source), *objects.values(), *linked, "-o", str(target)]]


def build_if_older() -> None:
    """Build the library of the source tree, unless it is newer than all that it is built from."""
    sources = [HERE / name for name in ("build.py", "gradguard.cpp", "kernels.cpp", "kernels.h")]
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < max(source.stat().st_mtime for source in sources):
        build()


def _compiler() -> list[str] | None:
    """The compiler's command: ``CXX`` is one path, spaces included, or a command with its arguments."""
    named = os.environ.get("CXX")
    if named:
        return [named] if shutil.which(named) else shlex.split(named)
    found = next(filter(shutil.which, ("g++", "c++", "clang++")), None)
    return None if found is None else [found]


def _given(name: str) -> list[str]:
    """The flags of an environment variable."""
    flags = shlex.split(os.environ.get(name, ""))
    others = [flag for flag in flags if flag.startswith(OTHER_BITS)]
    if others:
        raise RuntimeError(f"{name} has {' '.join(others)}, which would give other bits than the tested ones")
    return flags


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
