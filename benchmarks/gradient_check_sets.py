"""The wrong and the correct functions of the tests, under `gg.gradcheck` and PyTorch's own check, slow and fast.

python benchmarks/gradient_check_sets.py [--seeds 1]
python benchmarks/gradient_check_sets.py --out AFTER.json --against BEFORE.json

With --out, `gg.gradcheck` alone judges these and the planted and healthy tables, 1,128 problems: the verdict of each,
its findings and notes are kept. With --against too, the exit code is 1 where a verdict differs from that of an earlier
run.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import gradguard as gg

sys.path.remove(str(Path(__file__).resolve().parent))  # there is a gradient_check in this folder too
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from gradient_check.correct import CORRECT
from gradient_check.healthy import HEALTHY
from gradient_check.planted import PLANTED
from gradient_check.problem import Problem
from gradient_check.wrong import WRONG


def ours(problem: Problem) -> bool:
    """Tell whether the backward is rejected."""
    return gg.gradcheck(problem.fn, *problem.inputs, **problem.options).verdict == "FAIL"


def torchs(fast: bool) -> Callable[[Problem], bool]:
    def rejects(problem: Problem) -> bool:
        fn, inputs = as_torch_wants(problem)
        try:
            return not torch.autograd.gradcheck(fn, inputs, fast_mode=fast)
        except Exception:  # it raises where it rejects, and also where it cannot take the function
            return True

    return rejects


def as_torch_wants(problem: Problem) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return a function of tensors alone: a module's parameters come after its inputs."""
    kwargs, fn = problem.options.get("kwargs", {}), problem.fn

    def leaf(value: Any) -> Any:
        differentiable = isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
        return value.detach().clone().requires_grad_() if differentiable else value

    inputs = tuple(tree_map(leaf, problem.inputs))
    if not isinstance(fn, nn.Module):
        return lambda *args: fn(*args, **kwargs), inputs
    names, count = [name for name, _ in fn.named_parameters()], len(inputs)

    def call(*args: Any) -> Any:
        return torch.func.functional_call(fn, dict(zip(names, args[count:], strict=True)), args[:count], kwargs)

    return call, (*inputs, *(leaf(parameter) for parameter in fn.parameters()))


def said_of(problem: Problem) -> list[Any]:
    """Return the verdict of `gg.gradcheck`, and the words of its findings and notes."""
    try:
        report = gg.gradcheck(problem.fn, *problem.inputs, **problem.options)
    except Exception as error:  # is a verdict too
        return ["error", [f"{type(error).__name__}: {error}"]]
    return [report.verdict, list(map(str, report.findings + report.notes))]


def verdicts(seeds: range) -> dict[str, list[Any]]:
    """Return what is said of each problem, by its name."""
    sets = {"wrong": WRONG, "correct": CORRECT, "planted": PLANTED, "healthy": HEALTHY}
    named = [(name, case, seed) for name, cases in sets.items() for case in cases for seed in seeds]
    return {f"{name}, {c.category}, {c.name}, seed {seed}": said_of(c.problem(seed)) for name, c, seed in named}


def compare(before: dict[str, list[Any]], after: dict[str, list[Any]]) -> int:
    """Print the problems of which something else is said; return how many have another verdict."""
    changed = {name: (was, after[name]) for name, was in before.items() if name in after and was != after[name]}
    for name, (was, now) in changed.items():
        print(f"{'! ' if was[0] != now[0] else ''}{name}\n    - {was}\n    + {now}")
    count = sum(was[0] != now[0] for was, now in changed.values())
    print(
        f"{len(before)} problems before, {len(after)} after: {count} other verdicts, {len(changed) - count} other words"
    )
    return count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", type=Path, help="keep what gradguard says of each problem in this file")
    parser.add_argument("--against", type=Path, help="compare it with such a file")
    options = parser.parse_args()
    seeds = range(options.seeds)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.out is not None:
        said = verdicts(seeds)
        options.out.write_text(json.dumps(said, indent=1))
        if options.against is not None:
            sys.exit(min(1, compare(json.loads(options.against.read_text()), said)))
        return
    table = Table(
        "checker", f"wrong ones rejected, of {len(WRONG) * len(seeds)}", f"correct ones, of {len(CORRECT) * len(seeds)}"
    )
    for name, rejects in (("gradguard", ours), ("torch, slow", torchs(False)), ("torch, fast", torchs(True))):
        counts = [sum(rejects(case.problem(seed)) for case in cases for seed in seeds) for cases in (WRONG, CORRECT)]
        table.add_row(name, *map(str, counts))
    Console().print(table)


if __name__ == "__main__":
    main()
