"""One norm on any sharding: the slow twin on the vector that the processes held together, over a table of lists."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradguard as gg
from gradguard.errors import NonFiniteGradientError
from reference import EPSILON, flatten, total_norm
from sharded import LAYOUTS, LISTS, gathered, held, laid_out, local, parameter, present, same_layout

pytestmark = pytest.mark.sampled(1)  # rows of each table

ORDERS = [0.5, 1.0, 2.0, 3.0, 10.0, math.inf]
MAX_NORM = 0.1
ROUNDING = {torch.float16: 1e-3, torch.bfloat16: 1e-2}


ONLY_BY_PARAMETERS = ("all None", "everything None on one rank", "None on some ranks, other layouts")
"""Lists of which some process has no gradient that shows that all of them take part."""


def clip(entries, p, twice=False, both=True):
    """What one process sees: the norm by both functions, what it held before and what after."""
    parameters = [parameter(entry) for entry in entries]
    listed = [*parameters, *parameters[::-1]] if twice else parameters
    total = gg.get_total_norm([q.grad for q in listed], p) if both else torch.tensor(math.nan)
    before = [held(entry, q.grad) for entry, q in zip(entries, parameters, strict=True)]
    norm = gg.clip_grad_norm_(listed, MAX_NORM, p)
    assert norm.dtype == total.dtype or not both
    assert type(norm) is torch.Tensor
    after = [held(entry, q.grad) for entry, q in zip(entries, parameters, strict=True)]
    return float(norm), float(total), before, after


def clip_in_turn(name, orders, twice=False):
    return [clip(LISTS[name], p, twice, name not in ONLY_BY_PARAMETERS) for p in orders]


def check(entries, p, seen, both=True):
    """Compare what all processes saw with the slow twin."""
    norms, totals, before, after = zip(*seen, strict=True)
    there = [x for entry, *parts in zip(entries, *before, strict=True) if (x := present(entry, parts)) is not None]
    expected = total_norm(there, p)
    assert len(set(map(repr, norms))) == len(set(map(repr, totals))) == 1
    assert_norm(norms[0], expected)
    assert_norm(totals[0], expected if both else math.nan)
    coefficient = min(MAX_NORM / (expected + EPSILON), 1.0) if not math.isnan(expected) else math.nan
    for entry, *parts in zip(entries, *after, strict=True):
        whole = gathered(entry, parts)
        if whole is None:
            continue
        some = torch.cat([places for places, values in parts if values is not None]).unique()
        right = (flatten([entry.gradient]) * coefficient)[some]
        rounding = ROUNDING.get(whole.dtype, 2e-6)
        wide = torch.complex128 if whole.is_complex() else torch.float64
        torch.testing.assert_close(whole[some].to(wide), right.to(wide), rtol=rounding, atol=1e-7, equal_nan=True)


def assert_norm(norm, expected):
    if expected > torch.finfo(torch.float32).max and math.isinf(norm):
        return
    assert norm == pytest.approx(expected, rel=1e-6, abs=1e-45, nan_ok=True)


# All lists over four processes; fewer do the same with less of it.
WORLDS = [(name, world) for world, step in ((4, 1), (2, 2), (1, 4)) for name in list(LISTS)[::step]]


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("name", "world"), WORLDS)
def test_agrees_with_the_slow_twin(pool, name, world):
    by_rank = pool(world).run(clip_in_turn, name, ORDERS)
    for k, p in enumerate(ORDERS):
        check(LISTS[name], p, [seen[k] for seen in by_rank], name not in ONLY_BY_PARAMETERS)


SPREAD = [layout for layout in LAYOUTS if layout != "last"]


def norms_in_layouts(orders):
    found = {}
    for layout in SPREAD:
        parameters = [parameter(entry) for entry in same_layout(layout)]
        found[layout] = [float(gg.clip_grad_norm_(parameters, math.inf, p)) for p in orders]
    return found


def test_the_norm_does_not_depend_on_the_partition(pool):
    """The same list over 1, 2 and 4 processes and in every layout."""
    seen = [norms for world in (1, 2, 4) for norms in pool(world).run(norms_in_layouts, ORDERS)[0].values()]
    expected = [total_norm([entry.gradient for entry in same_layout("rows")], p) for p in ORDERS]
    assert len(seen) == 3 * len(SPREAD)
    for norms in seen:
        assert norms == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["fsdp x tp", "experts", "plain beside rows"])
def test_entries_that_come_twice_count_once(pool, name):
    by_rank = pool(4).run(clip_in_turn, name, [2.0], True)
    check(LISTS[name], 2.0, [seen[0] for seen in by_rank])


class Tied(nn.Module):
    """Two names for one sharded weight."""

    def __init__(self, entries):
        super().__init__()
        self.first, self.other = parameter(entries[0]), parameter(entries[1])
        self.second = self.first


def norm_of_tied():
    model = Tied(LISTS["rows, uneven"])
    result = gg.ClipByGlobalNorm(1.0)(model)
    return float(result.norm), result.names, float(gg.clip_grad_norm_(model.named_parameters(), 1.0))


def test_tied_weights_count_once(pool):
    expected = total_norm([entry.gradient for entry in LISTS["rows, uneven"][:2]])
    for norm, names, after in pool(2).run(norm_of_tied):
        assert norm == pytest.approx(expected, rel=1e-6)
        assert names == ("first", "other")
        assert after == pytest.approx(1.0, rel=1e-5)


def policies(name):
    """Under each policy: the error, whether anything was written, what is left."""
    entries, found = LISTS[name], []
    names = [f"layer{i}" for i in range(len(entries))]
    for arguments in ({"nonfinite": "raise"}, {"error_if_nonfinite": True}, {"nonfinite": "zero"}):
        parameters = [parameter(entry) for entry in entries]
        before = [None if q.grad is None else local(q.grad).clone() for q in parameters]
        try:
            gg.clip_grad_norm_(list(zip(names, parameters, strict=True)), MAX_NORM, **arguments)
            said = ""
        except NonFiniteGradientError as error:
            said = str(error)
        after = [None if q.grad is None else local(q.grad) for q in parameters]
        found.append((said, [(a, b) for a, b in zip(before, after, strict=True) if a is not None]))
    return found


@pytest.mark.parametrize(("name", "bad"), [("NaN", "layer1"), ("NaN in columns", "layer1"), ("inf", "layer1")])
def test_policies_hold_on_every_rank(pool, name, bad):
    for raised, also, zeroed in pool(4).run(policies, name):
        for said, tensors in (raised, also):
            assert f"`{bad}`" in said
            assert "layer0" not in said
            for before, after in tensors:
                torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
        assert not zeroed[0]
        assert not any(after.any() for _, after in zeroed[1])


@pytest.mark.parametrize("name", ["zero", "rows, even"])
def test_policies_leave_finite_gradients_alone(pool, name):
    for by_policy in pool(2).run(policies, name):
        assert [said for said, _ in by_policy] == [""] * 3
        assert all(after.any() == before.any() for _, tensors in by_policy for before, after in tensors)


def named_by_get_total_norm():
    gradients = {f"layer{i}": parameter(entry).grad for i, entry in enumerate(LISTS["NaN"])}
    gg.get_total_norm(gradients, error_if_nonfinite=True)


def test_get_total_norm_names_the_tensor_on_every_rank(pool):
    for error in pool(4).outcomes(named_by_get_total_norm):
        with pytest.raises(NonFiniteGradientError, match="`layer1`"):
            raise error


def clip_replaced_gradients():
    """Training replaces gradients at each step, and freezes and thaws, here on some ranks only."""
    parameters, norms = [parameter(entry) for entry in LISTS["hsdp"]], []
    for step in range(4):
        for i, (entry, q) in enumerate(zip(LISTS["hsdp"], parameters, strict=True)):
            q.grad = None if i == step else laid_out(entry.gradient * (step + 1), "hsdp")
            q.requires_grad_(i != step or dist.get_rank() == 0)
        norms.append(float(gg.clip_grad_norm_(parameters, 1.0)))
    return norms


def test_gradients_may_be_replaced_and_parameters_frozen(pool):
    gradients = [entry.gradient for entry in LISTS["hsdp"]]
    expected = [total_norm([(s + 1) * g for i, g in enumerate(gradients) if i != s]) for s in range(4)]
    for norms in pool(4).run(clip_replaced_gradients):
        assert norms == pytest.approx(expected, rel=1e-6)
