"""Random runs in which the presence and the layout of each gradient change from step to step, against a slow twin.

python tests/distributed/test_steps_that_change.py --runs 200 [--seed 0]
"""

import argparse
import math
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import gradguard as gg  # noqa: E402

WORLD, STEPS, PATIENCE = 2, 6, 20.0
SHAPES = [(4, 2), (5, 3), (1, 4)]
LAYOUTS = [Shard(0), Shard(1), Replicate(), Partial(), Partial("avg")]
SHOW = "--show" in sys.argv


class Gradient:
    """One gradient of one step: how it lies, and on which processes it is present."""

    def __init__(self, draw, shape, of_parameter, since):
        both, one, none = [(True, True)], [(True, False), (False, True)], [(False, False)]
        self.of_parameter, self.present = of_parameter, draw.choice(3 * both + one + none)
        self.layout = of_parameter if since < 0 or draw.random() < 0.4 else draw.choice(LAYOUTS)
        if since == 0:
            self.layout, self.present = Partial(), both[0]
        numbers = torch.Generator().manual_seed(draw.getrandbits(30))
        self.summands = torch.randint(-8, 9, (WORLD, *shape), generator=numbers).double()

    def on(self, rank, mesh):
        """What the process has; None if nothing."""
        if not self.present[rank]:
            return None
        if self.layout.is_partial():
            return DTensor.from_local(self.summands[rank].float(), mesh, [self.layout])
        return distribute_tensor(self.summands[0].float(), mesh, [self.layout], src_data_rank=None)

    @property
    def is_refused(self):
        """Whether one process lacks a part that cannot be told from zeros; a sum just has a summand less."""
        return self.present[0] != self.present[1] and self.layout not in (self.of_parameter, Partial())

    def is_due(self, rank):
        """Whether the process must have its part afterwards."""
        return self.present[rank] or (self.layout == Partial() and any(self.present))

    def whole(self):
        """All of it, as far as processes have it."""
        there = torch.tensor(self.present, dtype=torch.float64)
        if self.layout == Partial():
            return (self.summands * there[:, None, None]).sum(0)
        if self.layout == Partial("avg"):
            return self.summands.mean(0) * there.amin()
        if self.layout == Replicate():
            return self.summands[0] * there.amax()
        parts = self.summands[0].chunk(WORLD, self.layout.dim)
        kept = [part * there[rank] for rank, part in enumerate(parts)]
        return torch.cat(kept, self.layout.dim)


def part_of(whole, layout, rank):
    if layout == Replicate():
        return whole
    parts = [*whole.chunk(WORLD, layout.dim)]
    return parts[rank] if rank < len(parts) else whole.narrow(layout.dim, 0, 0)


CLIPS = {
    "function": lambda parameters: lambda: gg.clip_grad_norm_(parameters, 1.0),
    "inf": lambda parameters: lambda: gg.clip_grad_norm_(parameters, 1.0, math.inf),
    "guard": lambda parameters: Guarded(parameters),
}


class Guarded:
    """The norm that a guard measures at a step of an optimizer which writes nothing."""

    def __init__(self, parameters):
        self.optimizer = torch.optim.SGD(parameters, lr=0.0, foreach=False)
        self.guard = gg.Guard(self.optimizer, gg.ClipByGlobalNorm(1.0), nonfinite="propagate")

    def __call__(self):
        self.optimizer.step()
        assert self.guard.last is not None
        return self.guard.last.norm


def one_run(seed, mesh):
    """What is wrong at each step of one run, or ``right``, ``refused``."""
    draw, rank, said = random.Random(seed), dist.get_rank(), []
    shapes = [draw.choice(SHAPES) for _ in range(draw.randint(1, 3))]
    layouts = [draw.choice(LAYOUTS[:3]) for _ in shapes]
    parameters = [
        nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [layout], src_data_rank=None))
        for shape, layout in zip(shapes, layouts, strict=True)
    ]
    name = draw.choice(list(CLIPS))
    clip = CLIPS[name](parameters)
    start = draw.choice([0, 0, 2])  # when gradients are laid out anew, for the first time on all processes
    for step in range(STEPS):
        since = [step - start, *[step - start or 1] * 2]
        gradients = [Gradient(draw, *one) for one in zip(shapes, layouts, since, strict=False)]
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient.on(rank, mesh)
        said.append(verdict(clip, name, parameters, layouts, gradients, rank))
    return said


def verdict(clip, name, parameters, layouts, gradients, rank):
    wholes = [gradient.whole() for gradient in gradients]
    must_refuse = any(gradient.is_refused for gradient in gradients)
    order = math.inf if name == "inf" else 2.0
    right = float(torch.linalg.vector_norm(torch.cat([whole.flatten() for whole in wholes]), order))
    try:
        norm = float(clip())
    except gg.errors.GradguardError as error:
        return f"refused: {error}" if must_refuse else f"refused without a reason: {error}"
    if must_refuse:
        return "not refused"
    if not math.isclose(norm, right, rel_tol=1e-5, abs_tol=1e-6):
        return f"norm {norm} instead of {right}"
    coefficient = min(1.0, 1.0 / (right + 1e-6))
    for p, layout, gradient, whole in zip(parameters, layouts, gradients, wholes, strict=True):
        if not gradient.is_due(rank):
            continue
        if p.grad is None:
            return "a part of a sum is missing"
        found = p.grad.to_local().double()
        expected = coefficient * part_of(whole, layout, rank)
        if p.grad.placements != (layout,) or not torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
            return f"gradient {found.tolist()} instead of {expected.tolist()}"
    return "right"


def runs(seeds):
    mesh = init_device_mesh("cpu", (WORLD,))
    return [one_run(seed, mesh) for seed in seeds]


def judged(processes, seeds):
    """Return how often each thing was said, by all alike; what is wrong is there with its seed."""
    counts = Counter()
    for seed, *said in zip(seeds, *processes.run(runs, seeds, seconds=PATIENCE + 6 * len(seeds)), strict=True):
        for step, words in enumerate(zip(*said, strict=True)):
            kinds = {one.partition(":")[0] for one in words}
            if SHOW:
                print(seed, step, words)
            is_sound = len(kinds) == 1 and kinds <= {"right", "refused"}
            counts[kinds.pop() if is_sound else f"run {seed}, step {step}: {words}"] += 1
    return counts


def test_each_step_is_right_or_refused_by_all(pool):
    with pool.fresh(WORLD) as processes:
        counts = judged(processes, range(25))
    assert set(counts) == {"right", "refused"}, counts
    assert counts["right"] > counts["refused"]


def main():
    from pool import Pool

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        processes = Pool(WORLD, Path(folder))
        try:
            for said, count in judged(processes, range(args.seed, args.seed + args.runs)).most_common():
                print(f"{count:6} {said}")
        finally:
            processes.close()


if __name__ == "__main__":
    main()
