"""What ``make versions`` runs: which versions of torch, with which other packages, and what it says of the outcome."""

from pathlib import Path

import pytest

import versions

LISTED = (
    "torch (2.15.0)\nAvailable versions: 2.15.0, 2.13.0+cpu, 2.12.1, 2.11.0, 2.9.1, 2.16.0rc1\n  INSTALLED: 2.13.0\n"
)


@pytest.mark.parametrize(
    ("least", "expected"), [("2.11", ["2.11.0", "2.12.1", "2.15.0"]), ("2.12.1", ["2.12.1", "2.15.0"]), ("3", [])]
)
def test_versions_from_the_oldest_allowed_to_the_newest(least, expected):
    assert versions.allowed(LISTED, f'[project]\ndependencies = ["torchx", "torch>={least}"]') == expected


def test_an_upper_bound_is_not_understood():
    with pytest.raises(SystemExit, match=r"'torch>=2,<3' in pyproject.toml: expected torch>=X"):
        versions.allowed(LISTED, '[project]\ndependencies = ["torch>=2,<3"]')


def test_pyproject_is_understood():
    assert versions.allowed(LISTED, Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))


def test_torch_brings_its_own_packages():
    text = "# why\nnumpy==2.4.6\nsetuptools==84.2.1\nJinja2==3.1.6\ntorch==2.13.0\n"
    pinned = versions.constraints(text, "2.11.0", ["setuptools<82", "jinja2", "torchless; extra == 'x'"])
    assert pinned == "numpy==2.4.6\ntorch==2.11.0\n"


@pytest.mark.parametrize(
    ("system", "machine", "expected"),
    [("linux", "x86_64", {"GRADGUARD_CUDA_BUILD": "1"}), ("linux", "aarch64", {}), ("darwin", "arm64", {})],
)
def test_where_pytorch_must_be_a_build_for_cuda(system, machine, expected):
    assert versions.cuda_build(system, machine) == expected


def test_the_outcome():
    output = "FAILED x\ndeprecated: old() (a.py:3), first seen in t\n= 1 failed, 20 passed in 61.20s (0:01:01) =\n"
    assert versions.summary(output) == (
        "1 failed, 20 passed in 61.20s (0:01:01)",
        ["old() (a.py:3), first seen in t"],
    )
    assert versions.summary("Segmentation fault") == ("no result: see the log", [])
