"""Every form of contribution, and every mix of them, against held per-sample gradients in float64."""

import itertools

import pytest
import torch
from torch import Tensor

from gradguard.per_sample import contributions
from gradguard.per_sample.contributions import (
    Contribution,
    Materialized,
    Outer,
    Recomputed,
    TableRows,
    Tied,
    blank_rows,
    row_squares,
    sample_norms,
    scale_rows,
    squared_norms_in_chunks,
    together,
    wide,
)
from per_sample.layer_calls import assert_matches

B, T, V, D = 6, 4, 5, 3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def outer(dtype: torch.dtype = torch.float64, positions: int = T, size: int = B) -> tuple[Outer, Tensor]:
    left, right = torch.randn(size, positions, V, dtype=dtype), torch.randn(size, positions, D, dtype=dtype)
    return Outer(left, right), torch.einsum("btl,btr->blr", left, right)


def rows(dtype: torch.dtype = torch.float64, positions: int = 9, size: int = B) -> tuple[TableRows, Tensor]:
    """More positions than rows of the table, so that ids meet."""
    ids, values = torch.randint(0, V, (size, positions)), torch.randn(size, positions, D, dtype=dtype)
    return TableRows(ids, values, torch.Size((V, D))), table(ids, values)


def table(ids: Tensor, values: Tensor) -> Tensor:
    held = values.new_zeros(len(ids), V, D)
    for i, t in itertools.product(range(ids.shape[0]), range(ids.shape[1])):
        held[i, ids[i, t]] += values[i, t]
    return held


def kept(dtype: torch.dtype = torch.float64, size: int = B) -> tuple[Materialized, Tensor]:
    held = torch.randn(size, V, D, dtype=dtype)
    return Materialized(held), held.clone()


class Direct(Recomputed):
    """Gradients that are read again for each purpose; it notes which."""

    def __init__(self, held: Tensor) -> None:
        self.held, self.spans = held, list[tuple[int, int]]()
        self.shape, self.batch_size, self.chunk = held.shape[1:], len(held), len(held)

    def rows(self, start: int, stop: int) -> Tensor:
        self.spans.append((start, stop))
        return wide(self.held[start:stop])

    def weighted_sum(self, factors: Tensor, bad: Tensor | None = None) -> Tensor:
        return scale_rows(self.held, factors, bad).sum(0)


def direct(dtype: torch.dtype = torch.float64, size: int = B) -> tuple[Recomputed, Tensor]:
    held = torch.randn(size, V, D, dtype=dtype)
    return Direct(held), held.clone()


FORMS = {"outer": outer, "rows": rows, "kept": kept, "direct": direct}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def poison_one(contribution: Contribution) -> Contribution:
    """NaN in all that sample 1 holds."""
    if isinstance(contribution, Outer):
        contribution.left[1], contribution.right[1] = float("nan"), float("nan")
    elif isinstance(contribution, TableRows):
        contribution.values[1] = float("nan")
    elif isinstance(contribution, Tied):
        poison_one(contribution.looked_up)
        poison_one(contribution.multiplied)
    else:
        contribution.rows(1, 2).fill_(float("nan"))
    return contribution


def assert_bad_is_nothing(contribution: Contribution, truth: Tensor) -> None:
    bad = torch.zeros(B, dtype=torch.bool)
    bad[1] = True
    squares = poison_one(contribution).squared_norms()
    assert squares.isfinite().tolist() == (~bad).tolist()
    total = contribution.weighted_sum(torch.arange(B).double(), bad)
    torch.testing.assert_close(
        total, torch.tensordot(torch.arange(B).double() * ~bad, truth, 1), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_form(form, dtype):
    contribution, truth = FORMS[form](dtype)
    assert_matches(contribution, truth, TOLERANCE[dtype])
    assert_matches(contribution.materialize(), truth, TOLERANCE[dtype])


@pytest.mark.parametrize("form", FORMS)
def test_form_with_a_bad_sample(form):
    assert_bad_is_nothing(*FORMS[form]())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [0, 1])
def test_form_of_few_samples(form, size):
    contribution, truth = FORMS[form](size=size)
    assert_matches(contribution, truth, 1e-12)
    assert contribution.materialize().gradients.shape == (size, V, D)


@pytest.mark.parametrize("form", FORMS)
def test_half_precision_is_widened(form):
    contribution, truth = FORMS[form](torch.bfloat16)
    if form == "outer":  # brute force in bfloat16 would be the one that is off
        truth = contribution.left.mT @ contribution.right
    if form == "rows":
        truth = table(contribution.ids, contribution.values.float())
    assert_matches(contribution, truth.float(), 1e-6)


def test_keep_of_kept_is_itself():
    held, _ = kept()
    assert held.materialize() is held


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("positions", [1, 2, T, 20])
@pytest.mark.parametrize("way", ["ghost", "drop"])
def test_outer_in_every_way(way, positions, dtype):
    contribution, truth = outer(dtype, positions)
    contribution.ghost = way == "ghost"
    for contribution.chunk in (1, 4, B):
        assert_matches(contribution, truth, TOLERANCE[dtype])
    assert_bad_is_nothing(*outer(torch.float64, positions))


@pytest.mark.parametrize("way", ["ghost", "drop"])
def test_outer_with_a_bad_sample_in_every_way(way):
    for wide_side in (False, True):
        contribution, truth = outer()
        if wide_side:
            contribution, truth = Outer(contribution.right, contribution.left), truth.mT
        contribution.ghost = way == "ghost"
        assert_bad_is_nothing(contribution, truth)


def squares_of(contribution: Contribution) -> Tensor:
    return sample_norms({"weight": contribution})[0]["weight"].square()


def cancelling(size: float) -> tuple[Outer, Tensor]:
    """Two long products of opposite sign, and what is left of them: one part in 1/size."""
    left, right = torch.randn(B, 1, 50), torch.randn(B, 1, 40)
    left = torch.cat([left, left], 1)
    right = torch.cat([right, -right + size * torch.randn(B, 1, 40)], 1)
    return Outer(left, right), torch.einsum("btl,btr->blr", left.double(), right.double()).square().sum((1, 2))


@pytest.mark.parametrize("size", [1e-1, 1e-2, 1e-3, 1e-4, 0.0])
def test_ghost_norms_of_cancelling_products_are_done_again(size):
    contribution, truth = cancelling(size)
    contribution.ghost = True
    torch.testing.assert_close(squares_of(contribution), truth, rtol=5e-3 if size == 1e-4 else 1e-4, atol=1e-10)


def test_ghost_alone_would_be_wrong_where_products_cancel():
    contribution, truth = cancelling(1e-4)
    grams = (contribution.left @ contribution.left.mT) * (contribution.right @ contribution.right.mT)
    assert ((grams.sum((1, 2)).double() / truth - 1).abs() > 0.1).any()


@pytest.mark.parametrize("scale", [1e-12, 1e-9, 1e9, 1e14])
def test_ghost_norms_out_of_range_are_done_again(scale):
    left, right = torch.randn(B, T, V), torch.randn(B, T, D)
    contribution = Outer(left * scale, right * scale)
    contribution.ghost = True
    truth = torch.einsum("btl,btr->blr", left.double(), right.double()).square().sum((1, 2)) * scale**4
    torch.testing.assert_close(squares_of(contribution), truth, rtol=1e-5, atol=0)


def test_one_position_of_zero_is_zero():
    contribution = Outer(torch.zeros(B, 1, V), torch.randn(B, 1, D))
    assert contribution.squared_norms().tolist() == [0.0] * B


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("ids", ["all one", "all different", "last row", "pairs"])
def test_rows_that_meet(ids, dtype):
    chosen = {
        "all one": torch.zeros(B, V, dtype=torch.long),
        "all different": torch.stack([torch.randperm(V) for _ in range(B)]),
        "last row": torch.full((B, V), V - 1),
        "pairs": torch.arange(V).repeat(B, 1) // 2,
    }[ids]
    values = torch.randn(B, V, D, dtype=dtype)
    assert_matches(TableRows(chosen, values, torch.Size((V, D))), table(chosen, values), TOLERANCE[dtype])


def test_rows_of_a_broadcast_value():
    ids, values = torch.randint(0, V, (B, T)), torch.randn(B, 1, D, dtype=torch.float64).expand(B, T, D)
    assert_matches(TableRows(ids, values, torch.Size((V, D))), table(ids, values), 1e-12)


def test_rows_without_positions():
    ids, values = torch.zeros(B, 0, dtype=torch.long), torch.zeros(B, 0, D, dtype=torch.float64)
    assert_matches(TableRows(ids, values, torch.Size((V, D))), torch.zeros(B, V, D, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("way", ["ghost", "drop"])
@pytest.mark.parametrize("positions", [1, T])
def test_tied(positions, way, dtype):
    looked_up, multiplied = rows(dtype), outer(dtype, positions)
    multiplied[0].ghost = way == "ghost"
    assert_matches(Tied(looked_up[0], multiplied[0]), looked_up[1] + multiplied[1], TOLERANCE[dtype])


def test_tied_with_a_bad_sample():
    looked_up, multiplied = rows(), outer()
    assert_bad_is_nothing(Tied(looked_up[0], multiplied[0]), looked_up[1] + multiplied[1])


@pytest.mark.parametrize("rest", [0.0, 1e-4, 1e-2])
def test_tied_uses_that_cancel_are_done_again(rest):
    """The table's row 2 gets v from the look-up and -v from the product."""
    ids, values = torch.full((B, 1), 2), torch.randn(B, 1, D)
    left = torch.zeros(B, 1, V)
    left[:, :, 2] = -1
    right = values + rest * torch.randn(B, 1, D)
    contribution = Tied(TableRows(ids, values, torch.Size((V, D))), Outer(left, right))
    truth = (values.double() - right.double()).square().sum((1, 2))
    torch.testing.assert_close(squares_of(contribution), truth, rtol=1e-5, atol=1e-30)


MIXES = [mix for length in (1, 2, 3, 4) for mix in itertools.combinations_with_replacement(FORMS, length)]


@pytest.mark.sampled(35)
@pytest.mark.parametrize("mix", MIXES, ids="+".join)
def test_together(mix):
    made = [FORMS[form]() for form in mix]
    # The order of the uses must not matter, and the uses themselves must stay as they are.
    for uses in (made, made[::-1]):
        assert_matches(together([contribution for contribution, _ in uses]), sum(truth for _, truth in made), 1e-12)
    for contribution, truth in made:
        assert_matches(contribution, truth, 1e-12)


@pytest.mark.parametrize("mix", [mix for mix in MIXES if len(mix) == 2], ids="+".join)
def test_together_with_a_bad_sample(mix):
    made = [FORMS[form]() for form in mix]
    assert_bad_is_nothing(together([contribution for contribution, _ in made]), sum(truth for _, truth in made))


def test_together_keeps_the_cheap_forms():
    kinds = {
        ("outer", "outer"): Outer,
        ("rows", "rows"): TableRows,
        ("outer", "rows"): Tied,
        ("rows", "outer", "rows"): Tied,
        ("kept", "outer"): Materialized,
        ("direct",): Direct,
    }
    for mix, kind in kinds.items():
        assert type(together([FORMS[form]()[0] for form in mix])) is kind, mix


def test_together_of_different_lengths():
    first, second = outer(positions=2), outer(positions=7)
    assert_matches(together([first[0], second[0]]), first[1] + second[1], 1e-12)


@pytest.mark.parametrize("chunk", [-1, 0, 1, 4, B, 100])
def test_chunks(chunk):
    contribution, truth = kept()
    squares = truth.square().sum((1, 2))
    torch.testing.assert_close(squared_norms_in_chunks(contribution, chunk), squares, rtol=1e-12, atol=0)


def test_direct_computes_a_chunk_at_a_time():
    contribution = Direct(torch.randn(5, V, D))
    contribution.chunk = 2
    contribution.squared_norms()
    assert contribution.spans == [(0, 2), (2, 4), (4, 5)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", [0, 1, 1023, 1024, 1025, 3077])
def test_row_squares(length, dtype):
    values = torch.randn(3, length).to(dtype)
    squares = row_squares(values)
    assert squares.dtype is torch.float64
    torch.testing.assert_close(squares, values.double().square().sum(1), rtol=5e-7, atol=0)


# float32 squares of these leave its range, or lose digits at its edge.
@pytest.mark.parametrize("scale", [1e-40, 1e-30, 1e-22, 1e-20, 1e-18, 1e-15, 1e15, 1e19, 1e25, 1e37])
@pytest.mark.parametrize("length", [3, 2055])
def test_row_squares_out_of_range(scale, length):
    values = torch.stack([torch.rand(length) * scale, torch.rand(length), torch.zeros(length)])
    torch.testing.assert_close(row_squares(values), values.double().square().sum(1), rtol=5e-7, atol=0)


def test_row_squares_with_one_huge_among_tiny():
    values = torch.full((2, 5000), 1e-25)
    values[0, 17] = 1e25
    values[1, 17] = 1.0
    torch.testing.assert_close(row_squares(values), values.double().square().sum(1), rtol=5e-7, atol=0)


def test_row_squares_of_a_long_row_are_not_too_small():
    """A flat float32 sum of four million numbers loses 1e-4 of them, always downwards: factors would be too large."""
    values = torch.rand(1, 1 << 22)
    truth = values.double().square().sum()
    assert abs(row_squares(values)[0] / truth - 1) < 1e-7


def test_row_squares_of_what_is_not_finite():
    values = torch.ones(4, 2000)
    values[1, 5], values[2, 5], values[3, 5] = float("nan"), float("inf"), -float("inf")
    squares = row_squares(values).tolist()
    assert squares[0] == pytest.approx(2000, rel=5e-7)
    assert squares[1] != squares[1]
    assert squares[2:] == [float("inf")] * 2


@pytest.mark.parametrize("shape", [(0,), (0, 3), (0, 2, 3), (3, 0), (2,), (2, 3, 4)])
def test_row_squares_of_any_shape(shape):
    values = torch.randn(shape)
    expected = values.double().reshape(shape[0], -1 if values.numel() else 0).square().sum(1)
    torch.testing.assert_close(row_squares(values), expected, rtol=1e-6, atol=0)


def test_row_squares_of_a_view():
    values = torch.randn(7, 4, 3000).transpose(0, 1)
    torch.testing.assert_close(row_squares(values), values.double().square().sum((1, 2)), rtol=5e-7, atol=0)


def test_scaled_and_blank_rows():
    values = torch.tensor([[1.0, 2.0], [float("nan"), float("inf")]], dtype=torch.bfloat16)
    bad = torch.tensor([False, True])
    assert scale_rows(values, torch.tensor([0.5, 1.0], dtype=torch.float64), bad).tolist() == [[0.5, 1.0], [0.0, 0.0]]
    assert blank_rows(values, bad).tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert blank_rows(values, None).dtype is torch.float32
    assert values.isnan().any()


def test_wide_copies_nothing_that_is_wide():
    for dtype in (torch.float32, torch.float64):
        values = torch.randn(3, dtype=dtype)
        assert wide(values) is values


def test_every_form_is_a_contribution():
    found = {name for name, kind in vars(contributions).items() if isinstance(kind, type)}
    assert {"Materialized", "Recomputed", "TableRows", "Outer", "Tied"} <= found
