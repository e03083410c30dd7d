"""Run `gradguard check`: import the callable, draw its inputs, call `gradcheck`."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gradguard.check.function import is_autograd_function
from gradguard.check.gradcheck import gradcheck
from gradguard.check.gradient_report import GradientReport
from gradguard.check.named_call import bind_by_name
from gradguard.errors import CommandError, GradguardError

_COMPLEX = ["complex64", "complex128"]
_WHOLE = ["uint8", "int8", "int16", "int32", "int64", "bool"]
_KNOWN = ["float16", "bfloat16", "float32", "float64", *_COMPLEX, *_WHOLE]
_EXAMPLE = "as in x=2,3:float32, or x=:float64 for a single number"


def check_command(
    target: str,
    specifications: Sequence[str],
    reference: str | None = None,
    seed: int = 0,
    **options: Any,
) -> GradientReport:
    """Check the gradient of the callable that ``target`` names, at a random point.

    Args:
        target: ``package.module:name``, the name of a function, a module or a `torch.autograd.Function`. A subclass of
            `torch.nn.Module` is instantiated without arguments.
        specifications: The inputs, each as ``name=shape:dtype``.
        reference: A float64 version of the function, in the same notation as ``target``.
        seed: The seed of the inputs, the weights and the check.
        **options: Further options of `gradcheck`.

    Returns:
        The report.

    Raises:
        CommandError: If the target cannot be imported, a specification is malformed, the names do not fit the
            function's arguments, or the function itself raises.
        GradguardError: If `gradguard.gradcheck` cannot check the function.
    """
    with torch.random.fork_rng(devices=[]):
        fn = load_callable(target, seed)
        other = load_callable(reference, seed) if reference is not None else None
    inputs = make_inputs(specifications, seed)
    try:
        args, kwargs = bind_by_name(fn, inputs)
    except GradguardError as error:
        raise CommandError(f"{target}: {error}") from error
    try:
        return gradcheck(fn, *args, kwargs=kwargs, reference=other, seed=seed, **options)
    except GradguardError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise CommandError(
            f"{target} raised {type(error).__name__}: {error} ({last.filename}:{last.lineno}). Does the function "
            f"expect the shapes and dtypes of {list(specifications)}?"
        ) from error


def load_callable(target: str, seed: int = 0) -> Callable[..., Any]:
    """Import the callable ``package.module:name``, looking first in the current folder.

    A module draws its weights from ``seed``: two classes with the same shapes then have the same weights.

    Returns:
        The function, an instance of the `torch.nn.Module` subclass, or the ``apply`` of the `torch.autograd.Function`.

    Raises:
        CommandError: If the import fails, the name does not exist, or the object is not callable.
    """
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise CommandError(f"{target}: expected package.module:name, such as torch:sin.")
    if sys.path[:1] != [str(Path.cwd())]:
        sys.path.insert(0, str(Path.cwd()))  # not removed afterwards: the function may import when it is called
    torch.manual_seed(seed)
    try:
        module = importlib.import_module(module_name)
        found = reduce(getattr, path.split("."), module)
        if isinstance(found, type) and issubclass(found, nn.Module):
            torch.manual_seed(seed)  # a first import may draw random numbers, and a repeated one does not
            found = found()
    except AttributeError as error:
        raise CommandError(f"{target}: {error}.") from error
    except Exception as error:  # importing runs arbitrary code
        root = module_name.partition(".")[0]
        nowhere = isinstance(error, ModuleNotFoundError) and error.name == root
        advice = f" Type this in the folder of {root}.py, or name that folder in PYTHONPATH." if nowhere else ""
        raise CommandError(f"cannot load {target}: {type(error).__name__}: {error}.{advice}") from error
    if is_autograd_function(found):
        found = found.apply
    if not callable(found):
        raise CommandError(f"{target} is {type(found).__name__}: expected a function or a module.")
    return found


def make_inputs(specifications: Sequence[str], seed: int) -> dict[str, Tensor]:
    """Draw the inputs: standard normal numbers, or 0 and 1 for integers and bools; equal seeds draw equal inputs.

    Returns:
        The tensors by name.

    Raises:
        CommandError: If a specification is not ``name=shape:dtype``, or a name occurs twice.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs: dict[str, Tensor] = {}
    for text in specifications:
        name, is_there, rest = text.partition("=")
        if not name or not is_there:
            raise CommandError(f"--input {text}: expected name=shape:dtype, {_EXAMPLE}.")
        if name in inputs:
            raise CommandError(f"--input {text}: there is an input {name!r} already.")
        sizes, _, dtype = rest.partition(":")
        try:
            shape = tuple(map(int, sizes.split(","))) if sizes else ()
        except ValueError:
            shape = (-1,)
        if min(shape, default=0) < 0:
            raise CommandError(f"--input {text}: {sizes!r} is not a shape; expected sizes >= 0, {_EXAMPLE}.")
        dtype = dtype or "float32"
        if dtype not in _KNOWN:
            raise CommandError(f"--input {text}: unknown dtype {dtype!r}; expected one of {_KNOWN}.")
        if dtype in _WHOLE:
            drawn = torch.randint(0, 2, shape, generator=generator, device="cpu")
        else:
            wide = torch.complex128 if dtype in _COMPLEX else torch.float64
            drawn = torch.randn(shape, generator=generator, dtype=wide, device="cpu")
        inputs[name] = drawn.to(getattr(torch, dtype))
    return inputs
