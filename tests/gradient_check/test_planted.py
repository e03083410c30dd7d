"""Planted mistakes and sound functions, drawn as tables: a part of each here, all of them when that is asked for."""

import warnings

import pytest

import gradguard as gg
from gradient_check.healthy import HEALTHY
from gradient_check.planted import PLANTED
from gradient_check.problem import Case



def drawn(cases: list[Case], stride: int) -> list:
    return [
        pytest.param(case, id=f"{case.category}: {case.name}", marks=() if i % stride == 0 else pytest.mark.exhaustive)
        for i, case in enumerate(cases)
    ]


def checked(case: Case, seed: int = 0) -> gg.types.GradientReport:
    problem = case.problem(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return gg.gradcheck(problem.fn, *problem.inputs, **problem.options)


@pytest.mark.parametrize("case", drawn(PLANTED, 4))
def test_a_planted_mistake_is_found(case):
    report = checked(case)
    assert report.verdict != "PASS", str(report)
    if case.category != "element" or "float32" not in case.name:
        assert report.verdict == "FAIL", str(report)


@pytest.mark.parametrize("case", drawn(HEALTHY, 9))
def test_a_sound_function_is_not_rejected(case):
    report = checked(case)
    assert report.verdict == "PASS" or (case.may_be_undecided and report.verdict == "INCONCLUSIVE"), str(report)


@pytest.mark.parametrize(("cases", "least"), [(PLANTED, 150), (HEALTHY, 400)], ids=["planted", "healthy"])
def test_the_tables_are_large_and_their_names_distinct(cases, least):
    assert len(cases) >= least
    assert len({(case.category, case.name) for case in cases}) == len(cases)
