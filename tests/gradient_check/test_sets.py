"""Every wrong backward of the set is caught, no correct function is flagged.

All cases run at seed 0; a different ninth of them runs at each of the seeds 1 to 9. To run every case at every one of
ten seeds, which takes minutes: ``GRADCHECK_SEEDS=10 python -m pytest tests/gradient_check/test_sets.py``.
"""

import os
import warnings

import pytest
import torch

import gradguard as gg
from gradient_check.correct import CORRECT
from gradient_check.problem import Case
from gradient_check.wrong import WRONG

SEEDS = int(os.environ.get("GRADCHECK_SEEDS", "0"))
STRIDE = 27
"""Of the seeds that are sampled, each takes one case in so many, other ones than its neighbours do."""

CATEGORIES_OF_WRONG = (
    "formula reduction linear_algebra attention mask branch single_element boundary off-by-eps normalisation indexing "
    "state missing_path non-determinism cotangent_handling layout contract mutation precision approximation "
    "tiny_gradients complex NaN kink"
)


def at_seeds(cases: list[Case]) -> list:
    """All cases at seed 0, and some, or all, at other seeds."""
    chosen = [pytest.param(case, 0, id=case.name) for case in cases]
    for seed in range(1, SEEDS or 10):
        some = cases if SEEDS else cases[seed::STRIDE]
        chosen += [pytest.param(case, seed, id=f"{case.name}-{seed}", marks=pytest.mark.slow) for case in some]
    return chosen


def checked(case: Case, seed: int) -> gg.results.GradientReport:
    problem = case.problem(seed)
    return gg.gradcheck(problem.fn, *problem.inputs, **problem.options)


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("case", "seed"), at_seeds(WRONG))
def test_a_wrong_backward_is_caught(case, seed):
    report = checked(case, seed)
    assert report.verdict == "FAIL", f"{case.category}: {case.name}\n{report}"
    assert report.findings
    assert not report


@pytest.mark.sampled(16)
@pytest.mark.parametrize(("case", "seed"), at_seeds(CORRECT))
def test_a_correct_function_is_not_flagged(case, seed):
    report = checked(case, seed)
    allowed = {"PASS", "INCONCLUSIVE"} if case.may_be_undecided else {"PASS"}
    assert report.verdict in allowed, f"{case.category}: {case.name}\n{report}"


@pytest.mark.parametrize("cases", [WRONG, CORRECT], ids=["wrong", "correct"])
def test_the_sets_are_large_and_their_names_distinct(cases):
    assert len(cases) >= 40
    assert len({case.name for case in cases}) == len(cases)


def test_few_correct_functions_may_be_undecided():
    assert sum(case.may_be_undecided for case in CORRECT) <= 0.05 * len(CORRECT)
    assert not any(case.may_be_undecided for case in WRONG)


def test_every_category_of_wrong_backwards_is_there():
    assert {case.category for case in WRONG} == {one.replace("_", " ") for one in CATEGORIES_OF_WRONG.split()}


def test_every_seed_looks_at_other_cases():
    sampled = [{case.name for case in WRONG[seed::STRIDE]} for seed in range(1, 10)]
    assert sum(map(len, sampled)) == len(set.union(*sampled))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", [*WRONG[::9], *CORRECT[::9]], ids=lambda case: case.name)
def test_a_problem_is_the_same_at_every_call(case):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = case.problem(3).inputs, case.problem(3).inputs
    torch.testing.assert_close(_tensors(first), _tensors(second), rtol=0, atol=0, equal_nan=True)


def _tensors(inputs) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
