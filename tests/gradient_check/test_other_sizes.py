"""Other lengths than the one given, the edges of tiles above all."""

import pytest
import torch
import torch.nn.functional as F

import gradguard as gg
from gradguard.errors import InvalidValueError
from gradient_check.wrong_kernels import wrong

D = torch.float64
X = torch.linspace(0.5, 2, 14, dtype=D).view(7, 2)


def without_the_partial_tile(tile):
    """The rows that do not fill a tile get no gradient, if there is a full one."""

    def backward(v, y, x):
        whole = len(x) // tile * tile or len(x)
        return v * x.cos() * (torch.arange(len(x)) < whole)[:, None]

    return wrong(torch.sin, backward)


def for_one_row(v, y, x):
    return v * x.cos() * (0.0 if len(x) == 1 else 1.0)


def test_the_partial_tile_is_seen_at_its_edge_only():
    fn = without_the_partial_tile(16)
    assert gg.gradcheck(fn, X).verdict == "PASS"
    report = gg.gradcheck(fn, X, sizes={7: 16})
    assert report.verdict == "FAIL"
    assert report.findings[0].message.startswith("with 17 in place of 7")
    assert {one.index[0] for one in report.findings} == {16}


def test_one_row_is_tried():
    report = gg.gradcheck(wrong(torch.sin, for_one_row), X, sizes={7: 4})
    assert report.findings[0].message.startswith("with 1 in place of 7")


@pytest.mark.parametrize(("sizes", "tried"), [({7: 16}, {1, 15, 16, 17}), ({7: [3, 8]}, {3, 8}), ({7: 1}, {1, 2})])
def test_all_arguments_of_that_length_change_together(sizes, tried):
    seen = set()

    def fn(x, others, weight):
        assert x.dtype is D
        seen.add((len(x), len(others["y"]), weight.shape[1]))
        return x @ weight + others["y"]

    arguments = (X, {"y": X.clone()}, torch.ones(2, 2, dtype=D))
    assert gg.gradcheck(fn, *arguments, sizes=sizes).verdict == "PASS"
    lengths = {a for a, b, c in seen if a == b and c == 2}
    assert tried <= lengths


def test_a_size_that_raises_is_named():
    def fn(x):
        return F.pad(x, (0, 0, 0, 16 - len(x))).view(4, -1) if len(x) <= 16 else x.view(16, -1)

    report = gg.gradcheck(fn, X, sizes={7: 16})
    assert report.verdict == "FAIL"
    assert "with 17 in place of 7 it raises RuntimeError" in report.findings[0].message


def test_integers_keep_their_values_and_numbers_their_range():
    def fn(table, at):
        assert int(at.max()) < 3
        assert 0 < float(table.detach().min()) <= float(table.detach().max()) < 2.01
        return F.embedding(at, table)

    at = torch.tensor([0, 1, 2, 1, 0])
    assert gg.gradcheck(fn, torch.rand(3, 2, dtype=D) + 1, at, sizes={5: 3}).verdict == "PASS"


@pytest.mark.parametrize(
    ("sizes", "words"), [({9: 4}, r"sizes has the length 9, which no argument has"), ({7: 0}, "a tile of 0")]
)
def test_sizes_that_cannot_be(sizes, words):
    with pytest.raises(InvalidValueError, match=words):
        gg.gradcheck(torch.sin, X, sizes=sizes)


def test_names_of_inputs_hold_for_each_length():
    names = (name for name in ["input"])  # can be read once only
    report = gg.gradcheck(torch.sin, X, inputs_to_check=names, sizes={7: [3, 9]})
    assert report.verdict == "PASS", str(report)
