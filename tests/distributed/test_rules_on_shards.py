"""Every rule on shards over many steps: what it decides, remembers and writes is what it does on whole tensors."""

import math

import pytest
import torch
import torch.distributed as dist
from rules import RULES
from torch import nn

import gradguard as gg
from cases import random
from sharded import LISTS, Entry, gathered, held, laid_out, parameter

STEPS = 30
LIST = [
    Entry(random(7, 5), "fsdp, tp rows"),
    Entry(random(3, seed=1), "rows"),
    Entry(random(4, 6, seed=2), "hsdp"),
    Entry(random(5, 2, seed=3), "copies"),
    Entry(random(5, seed=4), "plain"),
    Entry(random(1, 3, seed=5), "other order"),
]


def gradients_of(step):
    """Noise whose size wanders, with spikes, and a step that holds NaN."""
    size = (0.3 + 0.2 * math.sin(step)) * (20.0 if step in (12, 19) else 1.0)
    found = [random(*entry.gradient.shape, seed=100 * step + i, scale=size) for i, entry in enumerate(LIST)]
    if step == 15:
        found[0][-1, -1] = math.nan
    return found


def numbers(result, present, asked):
    """What a result tells; of the tensors that have a gradient, if the norm of each was asked for."""
    return {
        "norm": float(result.norm),
        "coefficient": float(result.coefficient),
        "clipped": bool(result.clipped),
        "nonfinite": bool(result.nonfinite),
        "locked in": None if result.locked_in is None else bool(result.locked_in),
        "threshold": None if result.threshold is None else float(result.threshold),
        "norms": asked
        and [x for name, x in zip(result.names, result.tensor_norms.tolist(), strict=True) if name in present],
        "groups": {name: float(x) for name, x in (result.group_norms or {}).items()},
    }


class Run:
    """One clipper over the steps, on shards or on whole tensors."""

    def __init__(self, rule, sharded):
        self.clipper, self.sharded = RULES[rule](), sharded
        layouts = [entry.layout if sharded else "plain" for entry in LIST]
        self.entries = [Entry(entry.gradient, layout) for entry, layout in zip(LIST, layouts, strict=True)]
        self.named = [(f"layer{i}.weight", parameter(entry)) for i, entry in enumerate(self.entries)]

    def step(self, step, absent=()):
        for i, ((_, p), entry, whole) in enumerate(zip(self.named, self.entries, gradients_of(step), strict=True)):
            p.grad = None if i in absent else laid_out(whole, entry.layout)
        present = {name for name, p in self.named if p.grad is not None}
        asked = step % 2 == 0  # whether or not makes no difference to what is decided
        told = numbers(self.clipper(self.named), present, asked)
        return told, [held(e, p.grad) for e, (_, p) in zip(self.entries, self.named, strict=True)]


def run_both(rule):
    """All steps; half-way the rule on shards goes on in a new object that was given its state."""
    sharded, whole, again = Run(rule, True), Run(rule, False), Run(rule, True)
    steps, first = [], dist.get_rank() == 0
    for step in range(STEPS):
        found, expected = sharded.step(step), whole.step(step) if first else None
        if step == STEPS // 2:
            again.clipper.load_state_dict(sharded.clipper.state_dict())
        if step > STEPS // 2:
            assert repr(again.step(step)[0]) == repr(found[0])
        steps.append((found, expected))
    return steps, sharded.clipper.state_dict(), whole.clipper.state_dict()


def same(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-6, equal_nan=True)


def plain(state):
    """A state as nested lists, dicts and numbers."""
    if isinstance(state, torch.Tensor):
        return state.double().tolist()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(value) for value in state] if isinstance(state, list | tuple) else state


@pytest.mark.sampled(2)
@pytest.mark.parametrize("rule", RULES)
def test_thirty_steps_are_those_of_whole_tensors(pool, rule):
    by_rank = pool(4).run(run_both, rule)
    for step in range(STEPS):
        at = [steps[step] for steps, _, _ in by_rank]
        assert len({repr(found[0]) for found, _ in at}) == 1, step
        found, expected = at[0][0][0], at[0][1][0]
        assert [found[k] for k in ("clipped", "nonfinite", "locked in")] == [
            expected[k] for k in ("clipped", "nonfinite", "locked in")
        ], step
        for key in ("norm", "coefficient", "threshold", "norms", "groups"):
            assert_close(found[key], expected[key])
        for i, entry in enumerate(LIST):
            whole = gathered(entry, [sharded[1][i] for sharded, _ in at])
            right = at[0][1][1][i][1]
            assert (whole is None) == (right is None)
            if right is not None:
                same(whole, right)
    states = [plain(state) for _, state, _ in by_rank]
    assert all(repr(state) == repr(states[0]) for state in states)
    assert_close(states[0], plain(by_rank[0][2]))


def assert_close(found, expected):
    """Numbers in lists and dicts, to rounding."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_close(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=2e-5, abs=1e-9, nan_ok=True)
    else:
        assert found == expected


def run_with_gaps(rule):
    """Some tensors have no gradient on any rank in some steps."""
    sharded, whole = Run(rule, True), Run(rule, False)
    for step in range(12):
        absent = {2} if step % 3 == 1 else {0, 1, 2} if step % 3 == 2 else set()
        sharded.step(step, absent)
        whole.step(step, absent)
    return sharded.clipper.state_dict(), whole.clipper.state_dict()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rule", ["global norm", "norm", "value", "median", "AdaGC", "groups"])
def test_what_nobody_has_leaves_no_trace(pool, rule):
    states = [(plain(sharded), plain(whole)) for sharded, whole in pool(4).run(run_with_gaps, rule)]
    assert len({repr(state) for state, _ in states}) == 1
    assert_close(*states[0])


CLAMPS = [(1.0, None), (0.5, -0.25), (0.0, None), (2.0, 0.5)]


def clamp(name):
    found = []
    for high, low in CLAMPS:
        parameters = [parameter(entry) for entry in LISTS[name]]
        gg.clip_grad_value_(parameters, high, min_value=low)
        found.append([held(entry, p.grad) for entry, p in zip(LISTS[name], parameters, strict=True)])
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    "name", ["rows, fewer than ranks", "fsdp x tp", "experts", "partial", "None on some ranks", "inf", "mixed dtypes"]
)
def test_a_clamp_of_shards_is_that_of_the_whole(pool, name, world):
    by_rank = pool(world).run(clamp, name)
    for k, (high, low) in enumerate(CLAMPS):
        for entry, *parts in zip(LISTS[name], *[found[k] for found in by_rank], strict=True):
            whole = gathered(entry, parts)
            if whole is None:
                continue
            some = torch.cat([places for places, values in parts if values is not None]).unique()
            right = entry.gradient.flatten()[some].clamp(-high if low is None else low, high)
            torch.testing.assert_close(whole[some], right, rtol=1e-6, atol=1e-7)


class Model(nn.Module):
    def __init__(self, entries):
        super().__init__()
        self.layer0, self.layer1, self.layer2 = (nn.Module() for _ in range(3))
        for layer, entry in zip((self.layer0, self.layer1, self.layer2), entries, strict=True):
            layer.weight = parameter(entry)


def culprits():
    model = Model(LISTS["NaN in columns"])
    result = gg.ClipByGlobalNorm(1.0)(model)
    return result.culprits(), dist.get_rank()


def test_culprits_are_named_on_every_rank(pool):
    assert [list(found) for found, _ in pool(4).run(culprits)] == [["layer1.weight"]] * 4


def groups_of_a_model():
    """By module, by parameter and by pattern."""
    entries = LISTS["rows, uneven"]
    model = Model(entries)
    clipper = gg.Groups(
        [([model.layer0], gg.ClipByGlobalNorm(1.0)), ([model.layer1.weight], None), ("layer2", gg.ClipByNorm(0.5))]
    )
    result = clipper(model)
    return [float(x) for x in result.group_norms.values()], float(gg.clip_grad_norm_(model, math.inf))


def test_groups_of_modules_and_parameters(pool):
    norms = [entry.gradient.norm().item() for entry in LISTS["rows, uneven"]]
    after = math.hypot(1.0, norms[1], 0.5)
    for found, total in pool(4).run(groups_of_a_model):
        assert found == pytest.approx(norms, rel=1e-6)
        assert total == pytest.approx(after, rel=1e-5)
