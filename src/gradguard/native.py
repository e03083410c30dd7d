"""The compiled CPU kernels: load them, call them, and say whether they are in use.

The kernels are one shared library, built from ``native/`` in the source. Wheels for Linux contain it; an installation
from source builds it if there is a C++ compiler. Without it torch's own kernels compute all results, within the same
error bounds, in more time. ``GRADGUARD_NATIVE=0`` in the environment disables the library; it is read once, at first
use.
"""

import ctypes
import hashlib
import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from gradguard.torch_private import exchange_table, parallel_for

__all__ = ["NativeStatus", "status"]

LIBRARY = Path(__file__).parent / "lib" / "libgradguard.so"
INTERFACE = 5
"""The version of the C interface below; the library reports the version that it was built with."""

_LEVELS = {
    "x86_64": {1: "x86-64", 3: "x86-64-v3 (AVX2)", 4: "x86-64-v4 (AVX-512)"},
    "aarch64": {1: "aarch64 (NEON)"},
}


@dataclass(frozen=True, slots=True)
class NativeStatus:
    """Whether the compiled kernels are in use.

    Attributes:
        in_use: Whether the kernels are in use.
        why: The instruction set that they use, or the reason why they are not in use.
    """

    in_use: bool
    why: str

    def __str__(self) -> str:
        return f"{'in use' if self.in_use else 'not in use'}: {self.why}"


def status() -> NativeStatus:
    """Return whether the compiled kernels are in use in this process, and why.

    **Guarantees.** Never raises. The answer does not change as long as the process runs. It concerns dense float32,
    float64, bfloat16 and float16 tensors on the CPU; torch's own kernels always handle all others.

    Returns:
        The status: print it, or read ``.in_use``.

    Example:
        >>> import gradguard as gg
        >>> gg.native.status().in_use in (True, False)
        True
    """
    found = _loaded()
    return NativeStatus(False, found) if isinstance(found, str) else NativeStatus(True, found.instruction_set())


class List(ctypes.Structure):
    """Addresses, lengths and dtypes of tensors: ``List`` of native/gradguard.cpp."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("numel", ctypes.c_void_p),
        ("dtype", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


class SampleList(ctypes.Structure):
    """Some elements of each of several tensors: ``SampleList`` of native/gradguard.cpp."""

    _fields_ = (
        ("at", ctypes.c_void_p),
        ("numel", ctypes.c_void_p),
        ("stride", ctypes.c_void_p),
        ("before", ctypes.c_void_p),
        ("changes", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


class _Threads(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int64), ("parallel", ctypes.c_void_p))


class _Python(ctypes.Structure):
    _fields_ = (("exchange", ctypes.c_void_p), ("list_item", ctypes.c_void_p), ("clear_error", ctypes.c_void_p))


_P, _L, _D, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int
_SIGNATURES = {
    "gg_norm": [_P, _I, _P, _P, _P],
    "gg_scale": [_P, _D, _P],
    "gg_clamp": [_P, _P, _P, _P, _P],
    "gg_exceeds": [_P, _P, _P, _P, _P],
    "gg_nonfinite": [_P, _P, _P, _P],
    "gg_take": [_P, _P],
    "gg_moved": [_P, _P, _P],
    "gg_unit_norms": [_P, _P, _P],
    "gg_unit_scale": [_P, _P, _P],
    "gg_unit_clip": [_P, _P, _D, _D, _P, _P, _P, _P],
    "gg_add_normal": [_P, _P, ctypes.c_uint64, _D, _D, _P],
    "gg_use_level": [_I],
    "gg_check_level": [],
    "gg_interface": [],
}


class Library:
    """The loaded library: its functions, and the addresses of the functions of torch and Python that they call."""

    def __init__(self, path: Path, exchange: int, parallel: int) -> None:
        self._free, held = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))  # the first releases the GIL in a call
        if self._free.gg_interface() != INTERFACE:
            raise OSError("it was built from other sources")
        for name, arguments in _SIGNATURES.items():
            function = getattr(self._free, name)
            function.restype, function.argtypes = _I, arguments
        if dtype := self._free.gg_check_level():
            name = ("float32", "bfloat16", "float16", "float64")[dtype - 1]
            raise OSError(f"its {self.instruction_set()} kernels for {name} give other bits here than the plain ones")
        self._parallel = parallel
        api = ctypes.pythonapi
        address = [ctypes.cast(f, _P).value for f in (api.PyList_GetItem, api.PyErr_Clear)]
        self._python = _Python(exchange, *address)
        self._where = ctypes.addressof(self._python)
        self._collect, self._collect_units = held.gg_collect, held.gg_collect_units
        self._collect.restype = self._collect_units.restype = _L
        self._collect.argtypes = [_P, ctypes.py_object, _L, _I, _P, _P, _P]
        self._collect_units.argtypes = [_P, ctypes.py_object, _L, _P, _P, _P, _P, _P]

    def call(self, name: str, *arguments: object) -> None:
        """Call a function with as many threads as torch uses.

        Raises:
            MemoryError: If the function cannot allocate its work list.
        """
        threads = _Threads(torch.get_num_threads(), self._parallel)
        if getattr(self._free, name)(*arguments, ctypes.addressof(threads)):
            raise MemoryError("the compiled kernels have no memory for their list of work")

    def collect(self, tensors: list, gpu: int, *room: int) -> bool:
        """Fill ``room`` with addresses, lengths and dtypes; False unless all are dense, on the CPU (-1) or that GPU."""
        return self._collect(self._where, tensors, len(tensors), gpu, *room) == len(tensors)

    def collect_units(self, tensors: list, *room: int) -> bool:
        """Fill ``room``, which holds the units, with addresses, shapes and dtypes; False as in `collect`."""
        return self._collect_units(self._where, tensors, len(tensors), *room) == len(tensors)

    def use_level(self, level: int) -> int:
        """Use the best instruction set of this machine up to ``level``, and return its level. For tests."""
        return self._free.gg_use_level(level)

    def instruction_set(self) -> str:
        """Return the instruction set that the kernels are compiled for."""
        machine = platform.machine()
        return _LEVELS.get(machine, {}).get(self.use_level(4), machine)


def library() -> Library | None:
    """Return the library; None where it is not in use."""
    found = _loaded()
    return None if isinstance(found, str) else found


def _check_whole(path: Path) -> None:
    """Check the library before it is mapped: reading a page that the file lacks would kill the process.

    Raises:
        OSError: If the file's last 32 bytes are not the SHA-256 of all bytes before, as ``native/build.py`` writes it.
    """
    held = path.read_bytes()
    if hashlib.sha256(held[:-32]).digest() != held[-32:]:
        raise OSError(f"its {len(held):,} bytes are not those that were built (cut short or changed); install it again")


@cache
def _loaded() -> Library | str:
    if os.environ.get("GRADGUARD_NATIVE") == "0":
        return "GRADGUARD_NATIVE=0 is set"
    if not LIBRARY.exists():
        return "this installation has no compiled library (a wheel for Linux has; from source, it takes a C++ compiler)"
    exchange, parallel = exchange_table(), parallel_for()
    if exchange is None or parallel is None:
        return f"torch {torch.__version__} lacks names that they need: DLPack's exchange table and torch_parallel_for"
    try:
        _check_whole(LIBRARY)
        found = Library(LIBRARY, exchange, parallel)
    except (OSError, AttributeError) as error:
        return f"{LIBRARY.name} cannot be used: {error}"
    return found
