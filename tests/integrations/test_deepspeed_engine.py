"""What is read from a DeepSpeed engine: in real engines on the CPU, each in a process of its own, and in stand-ins."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from forked_python import run_ranks
from gradguard.errors import InvalidTypeError, MissingPackageError

try:
    from gradguard.integrations.deepspeed import last_clip
except MissingPackageError as error:  # too old or too new is a failure
    pytest.skip(str(error), allow_module_level=True)

TRAIN = """
import contextlib, json, logging, sys
import torch, deepspeed
import gradguard as gg
from gradguard.integrations.deepspeed import last_clip, tell_clips
from gradguard.monitoring.observe.observer import Observer
from gradguard.script_events import listening

logging.disable(logging.WARNING)
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it compiles C++ for a minute; gloo does without
stage, kind, threshold = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
twin = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
twin.load_state_dict(model.state_dict())
configuration = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_clipping": threshold,
    "zero_optimization": {"stage": stage},
    "zero_allow_untested_optimizer": True,
}
if kind != "fp32":
    configuration[kind] = {"enabled": True}
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=configuration
)
before = last_clip(engine)
end = tell_clips(engine)
x = torch.ones(8, 4) * (1 + 2 * engine.global_rank)
engine.backward(engine(x.to(next(engine.parameters()).dtype)).float().square().sum())
lines = []
observer = Observer(None, {})
observer._buffer.sinks._open.append(type("Lines", (), {"push": lambda self, new: lines.extend(new), "name": "lines"})())
with listening(observer):
    engine.step()
observer.flush()
end()
for rank in range(engine.world_size):  # averaged over processes
    (twin(torch.ones(8, 4) * (1 + 2 * rank)).square().sum() / engine.world_size).backward()
result = last_clip(engine)
true = gg.clip_grad_norm_(twin, threshold or float("inf"))
context = deepspeed.zero.GatheredParameters(list(model.parameters())) if stage == 3 else contextlib.nullcontext()
with context:
    pairs = list(zip(twin.parameters(), model.parameters(), strict=True))
    error = gg.get_total_norm([(old.detach() - new.detach().float()) / 0.1 - old.grad for old, new in pairs])
print()
print(json.dumps({
    "before": before is None,
    "true": float(true),
    "error": float(error),  # of the gradient that the engine has stepped by
    "norm": None if result is None else float(result.norm),
    "coefficient": None if result is None else float(result.coefficient),
    "steps": [line for line in lines if line["t"] == "step"],
    "given back": "unscale_and_clip_grads" not in vars(engine.optimizer),
    "clipped": None if result is None else bool(result.clipped),
}))
"""


def train(world, folder, *arguments):
    """What each process found."""
    settings = {"DS_ACCELERATOR": "cpu"}
    ranks = run_ranks(world, "-c", TRAIN, *map(str, arguments), cwd=folder, env=settings, preloaded="deepspeed")
    said = [rank.stdout.splitlines() for rank in ranks]
    return [json.loads([line for line in lines if line.startswith("{")][-1]) for lines in said]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "stage", "kind", "threshold"),
    [(2, 1, "bf16", 0.5), (2, 2, "fp32", 0.5), (2, 3, "fp32", 0.5), (2, 2, "fp32", 0.0)],
    ids=str,
)
def test_the_engine_is_read(world, stage, kind, threshold, tmp_path):
    limit = threshold or math.inf
    for found in train(world, tmp_path, stage, kind, threshold):
        assert found["before"]
        assert found["norm"] == pytest.approx(found["true"], rel=1e-5 if kind == "fp32" else 0.02)
        assert found["clipped"] == (limit < found["true"])
        (step,) = found["steps"]  # what gradguard's watchers write: the norm of the whole, on each process
        assert step["norm"] == pytest.approx(found["norm"])
        assert step.get("threshold", math.inf) == pytest.approx(limit)
        assert step.get("coefficient", 1.0) == pytest.approx(found["coefficient"], rel=1e-4)
        assert found["given back"]
        # Weights in bfloat16 tell a step to some 10 % only; a norm of one process' part would be off by more.
        assert found["error"] < (1e-4 if kind == "fp32" else 0.25) * min(limit, found["true"])
        assert found["coefficient"] == pytest.approx(min(1.0, limit / found["norm"]))


def engine(norm, threshold):
    return SimpleNamespace(get_global_grad_norm=lambda: norm, gradient_clipping=lambda: threshold)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("norm", "threshold", "expected"),
    [
        (5.0, 1.0, (5.0, 0.2, True, False)),
        (torch.tensor(5.0), 1.0, (5.0, 0.2, True, False)),
        (torch.tensor(5.0, dtype=torch.float64), 10.0, (5.0, 1.0, False, False)),
        (5.0, 0.0, (5.0, 1.0, False, False)),
        (5.0, None, (5.0, 1.0, False, False)),
        (-1.0, 1.0, (math.inf, 1.0, False, True)),
        (float("inf"), 1.0, (math.inf, 1.0, False, True)),
        (float("nan"), 1.0, (math.nan, 1.0, False, True)),
        (0.0, 1.0, (0.0, 1.0, False, False)),
    ],
)
def test_each_kind_of_norm(norm, threshold, expected):
    result = last_clip(engine(norm, threshold))
    found = tuple(float(x) for x in (result.norm, result.coefficient, result.clipped, result.nonfinite))
    assert found == pytest.approx(tuple(map(float, expected)), nan_ok=True)
    assert (result.threshold is None) == (not threshold)
    assert result.names == ("all parameters",)
    assert result.tensor_norms.shape == (1,)


def test_no_norm_is_none():
    assert last_clip(engine(None, 1.0)) is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("other", [torch.optim.SGD([torch.ones(1)]), None, SimpleNamespace(gradient_clipping=1.0)])
def test_anything_else_is_refused(other):
    with pytest.raises(InvalidTypeError, match=r"expected the engine"):
        last_clip(other)
