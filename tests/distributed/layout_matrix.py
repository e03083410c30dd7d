"""Every layout of a model under every clip, against the same model on one process in float64: one row for each pair.

python tests/distributed/layout_matrix.py [--only WORDS] [--world 2 4]

A layout is how a model lies (`WAYS`, `FSDP1`, pipeline stages, the DTensors of `sharded.LAYOUTS`) and what the model is
(`MODELS`). A row holds if every process has the norm and the gradients of the one process, or if the call is refused
in the words of `REFUSED`.
"""

import argparse
import copy
import math
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import test_pipeline_stages as pipeline  # noqa: E402
import training  # noqa: E402
from pool import Pools  # noqa: E402

import gradguard as gg  # noqa: E402
import reference  # noqa: E402
from cases import random  # noqa: E402
from sharded import LAYOUTS, laid_out, local, mesh, parameter, same_layout  # noqa: E402

WORLDS = (2, 4)
CALLS = ["norm of order 1", "norm of order 2", "norm of order inf", "value", "adaptive", "audit"]
ROUNDING, THRESHOLD = 2e-5, 0.02


def _whole(model: Any) -> nn.Module:
    return model


def _frozen(model: Any) -> nn.Module:
    model.second.up.requires_grad_(False)
    return model


def _missing(model: Any) -> nn.Module:
    model.spare = nn.Linear(training.WIDTH, 5)  # nothing uses it
    return model


def _tied(model: Any) -> nn.Module:
    model.second.down.weight = model.first.down.weight
    return model


MODELS = {"": _whole, "frozen": _frozen, "missing": _missing, "tied": _tied}

WAYS: dict[str, Any] = {
    **training.WAYS,
    "DDP, unused ones looked for": lambda m: DistributedDataParallel(m, find_unused_parameters=True),
    "replicate": lambda m: replicate(m),
    "FSDP2, root alone": lambda m: fully_shard(m, mesh=mesh("row")),
    "HSDP, root alone": lambda m: fully_shard(m, mesh=mesh("hsdp")),
}
FSDP1 = {
    f"FSDP1, {strategy}, {'original parameters' if original else 'flat'}": (strategy, original)
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
    for original in (False, True)
}
EVERYWHERE = ["DDP", "FSDP2", "HSDP", "TP", "FSDP2 x TP", "FSDP1, FULL_SHARD, original parameters"]
MAY_BE = {
    "": [*WAYS, *FSDP1],
    "frozen": EVERYWHERE,
    "missing": ["DDP, unused ones looked for", *EVERYWHERE[1:]],
    "tied": ["DDP", "replicate", "FSDP2, root alone", "HSDP, root alone", *[w for w in FSDP1 if "HYBRID" not in w]],
}
"""The ways in which each model may lie: FSDP's units cannot share a weight, and freeze flat parameters whole."""

NEEDS = {f"FSDP1, HYBRID_SHARD, {kind}": 4 for kind in ("flat", "original parameters")}
"""Of how many processes a layout is made: of one that shards, FSDP1 itself adds up no copies, see `test_fsdp1.py`."""

PLACED = [layout for layout in LAYOUTS if layout != "last"]  # which needs three dimensions
LAYOUTS_OF_ALL = [
    *[f"{way}; {model}" if model else way for model, ways in MAY_BE.items() for way in ways],
    "pipeline stages",
    *[f"DTensors: {layout}" for layout in PLACED],
]
TABLE = [(layout, world) for layout in LAYOUTS_OF_ALL for world in WORLDS if world >= NEEDS.get(layout, 0)]
"""The names of all layouts, and over how many processes."""

REFUSED = {("FSDP1", "adaptive"): r"^UnsupportedGradientError: .*which flattens parameters: .* cannot find their rows"}
"""The words of calls that are no number on a layout, by the beginning of its name and the call."""


@dataclass
class Built:
    """A model with its gradients on this process, and what one process has of it in float64, by name."""

    model: nn.Module
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    now: Callable[[], dict[str, Tensor]]
    stages: dict[str, Any] = field(default_factory=dict)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The whole gradients that are there, by name, float64."""
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: training.whole(g).detach().double() for name, g in named.items()}


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().double().clone() for name, p in model.named_parameters()}


def built(layout: str) -> Built:
    if layout.startswith("DTensors"):
        return _of_dtensors(layout.partition(": ")[2])
    if layout == "pipeline stages":
        return _of_stages()
    way, _, of = layout.partition("; ")
    torch.manual_seed(0)
    model = MODELS[of](training.Network())
    twin = copy.deepcopy(model).double()
    x, y = training.batch(0)
    F.mse_loss(twin(x.double()), y.double()).backward()
    right, weights = gradients_of(twin), weights_of(twin)
    if way in FSDP1:
        model, now = _of_fsdp1(model, *FSDP1[way], tied=of == "tied")
        return Built(model, right, weights, now)
    model = WAYS[way](model)
    training.backward(model, way, 0)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if "precision" in way:  # which rounds: one process with the gradients that came of it
        right = gradients_of(inner)
    return Built(model, right, weights, lambda: gradients_of(inner))


def _of_fsdp1(model: Any, strategy: str, original: bool, tied: bool) -> Any:
    """The model in FSDP1, and its gradients as what a step of SGD subtracts: they lie in flat pieces."""
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": original}
    options |= {"device_id": torch.device("cpu"), "device_mesh": mesh("hsdp" if strategy == "HYBRID_SHARD" else "row")}
    if not tied:
        model.first = FullyShardedDataParallel(model.first, **options)
    model = FullyShardedDataParallel(model, **options)
    training.backward(model, "FSDP1", 0)

    def weights() -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(model):
            return {n.replace("_fsdp_wrapped_module.", ""): w for n, w in weights_of(model).items()}

    def now() -> dict[str, Tensor]:
        before = weights()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        return {name: before[name] - after for name, after in weights().items()}

    return model, now


def _of_stages() -> Built:
    pair: Any = pipeline.stages()
    twin: Any = copy.deepcopy(nn.Sequential(*pair)).double()
    twin[1].head.weight = twin[0].embedding.weight
    x, y = pipeline.batch(0)
    F.cross_entropy(twin(x), y).backward()
    pp, dp = pipeline.grid()["pp"], pipeline.grid()["dp"]
    number = pp.get_local_rank()
    module = pair[number]
    if dp.size() > 1:
        fully_shard(module, mesh=dp)
    stage = pipeline.PipelineStage(module, number, 2, torch.device("cpu"), group=pp.get_group())
    pipeline.backward(pipeline.ScheduleGPipe(stage, 2, loss_fn=F.cross_entropy), number, 0)
    weight = pipeline.tied(number, module)
    dist.all_reduce(local(weight.grad), group=pp.get_group())

    def now() -> dict[str, Tensor]:
        return {("0.embedding.weight" if n == "head.weight" else f"{number}.{n}"): g for n, g in own().items()}

    def own() -> dict[str, Tensor]:
        return gradients_of(module)

    return Built(module, gradients_of(twin), weights_of(twin), now, {"mesh": pp, "shared": {"embedding": weight}})


def _of_dtensors(layout: str) -> Built:
    model, right, weights = nn.Module(), {}, {}
    for i, entry in enumerate(same_layout(layout)):
        p, weights[f"p{i}"] = parameter(entry), random(*entry.gradient.shape, seed=50 + i).double()
        local(p.data).copy_(local(laid_out(weights[f"p{i}"].float(), layout)))
        right[f"p{i}"] = entry.gradient.double()
        model.register_parameter(f"p{i}", p)
    return Built(model, right, weights, lambda: gradients_of(model))


def units(weight: Tensor) -> list[Tensor]:
    """The masks of AGC's units: rows of a matrix, a whole vector."""
    numbers = torch.arange(len(weight))[:, None].expand_as(weight) if weight.dim() > 1 else torch.zeros_like(weight)
    return [numbers == k for k in numbers.unique()]


def difference(layout: str, call: str) -> str:
    """What one row has other than the one process, on this process; empty for nothing."""
    of = built(layout)
    right = list(of.gradients.values())
    order = float(call.rpartition(" ")[2]) if call.startswith("norm") else 2.0
    audit = None
    norm, largest = reference.total_norm(right, order), reference.total_norm(right, math.inf)
    match call:
        case "value":
            found, expected = norm, reference.clip_value(right, -largest / 2, largest / 2)
            gg.clip_grad_value_(of.model, largest / 2)
        case "adaptive":
            found = gg.clip_grad_adaptive_(of.model, THRESHOLD, **of.stages)
            weights = [of.weights[name] for name in of.gradients]
            pairs = zip(weights, right, strict=True)
            expected = [reference.clip_adaptive(w, g, units(w), THRESHOLD) for w, g in pairs]
        case "audit":
            clip = lambda: gg.clip_grad_norm_(of.model, 0.3 * norm, **of.stages)  # noqa: E731
            audit = gg.audit_norm(of.model, clip, max_norm=0.3 * norm)
            found, expected = audit.true_norm if audit else math.nan, right
        case _:
            found = gg.clip_grad_norm_(of.model, 0.3 * norm, order, **of.stages)
            expected = reference.clip_norm(right, 0.3 * norm, order)
    after = of.now()  # all processes together, whatever one has found
    if not math.isclose(float(found), norm, rel_tol=ROUNDING):
        return f"norm {float(found)}, on one process {norm}" if call != "audit" else str(audit)
    if call != "audit" and all(map(torch.equal, expected, right)):
        return "the row clips nothing"
    by_name = dict(zip(of.gradients, expected, strict=True))
    if layout != "pipeline stages" and (missing := set(by_name) - set(after)):
        return f"{missing} have no gradient"
    for name, gradient in after.items():
        theirs = by_name.get(name, torch.zeros_like(gradient))  # FSDP1 subtracts nothing of what has none
        try:
            torch.testing.assert_close(gradient, theirs, rtol=ROUNDING, atol=ROUNDING * largest / 10)
        except AssertionError as error:
            return f"{name}: {' '.join(str(error).split())}"
    return ""


def differences(layout: str) -> dict[str, str]:
    """Go through the calls of a layout; what is raised stands for the difference."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 and its strategies are deprecated
        for call in CALLS:
            try:
                found[call] = difference(layout, call)
            except Exception as error:
                found[call] = f"{type(error).__name__}: {error}"
    return found


def verdicts(layout: str, by_rank: list[dict[str, str]]) -> dict[str, str]:
    """``held``, ``refused``, or what is wrong on the first process where anything is, by call."""
    found = {}
    for call in CALLS:
        words = next((w for (part, of), w in REFUSED.items() if of == call and layout.startswith(part)), None)
        said = [its[call] for its in by_rank]
        if words is not None:
            right = all(re.search(words, text) for text in said)
            found[call] = "refused" if right else f"should be refused ({words}): {said}"
        else:
            found[call] = next((f"rank {rank}: {text}" for rank, text in enumerate(said) if text), "held")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="layouts whose name has these words")
    parser.add_argument("--world", type=int, nargs="+", default=WORLDS)
    args = parser.parse_args()
    counts, start = {"held": 0, "refused": 0, "wrong": 0}, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        pools = Pools(Path(folder))
        for layout, world in [row for row in TABLE if args.only in row[0] and row[1] in args.world]:
            for call, said in verdicts(layout, pools(world).run(differences, layout)).items():
                counts[said if said in counts else "wrong"] += 1
                if said not in counts:
                    print(f"{layout}, {world} processes, {call}: {said}", flush=True)
        pools.close()
    print(f"{sum(counts.values())} rows: {counts}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
