"""The samples of long tables: every value of every parameter, by position, in any process."""

import pytest

from samples import sample

KINDS, SIZES, PATHS = [f"kind {i}" for i in range(12)], [1, 1.0, True, 2], [[1], [2], None]
PRODUCT = [{"kind": kind, "size": size, "path": path} for kind in KINDS for size in SIZES for path in PATHS]


@pytest.mark.parametrize("count", [12, 20, 48])
def test_every_value_of_every_parameter_is_drawn(count):
    drawn = [PRODUCT[i] for i in sample(PRODUCT, count)]
    assert len(drawn) == count
    assert {row["kind"] for row in drawn} == set(KINDS)
    assert {(type(row["size"]), row["size"]) for row in drawn} == {(type(size), size) for size in SIZES}
    assert {str(row["path"]) for row in drawn} == {str(path) for path in PATHS}


def test_every_pair_of_values_comes_soon():
    """48 rows hold the 48 pairs of kind and size; a few more hold all pairs."""
    drawn = [PRODUCT[i] for i in sample(PRODUCT, 48)]
    assert len({(row["kind"], type(row["size"]), row["size"]) for row in drawn}) == 48
    assert len({(row["kind"], str(row["path"])) for row in drawn}) == 36


def test_a_value_of_one_row_alone_is_drawn_first():
    rows = [*PRODUCT[:60], {"kind": "rare", "size": 7, "path": None}, *PRODUCT[60:]]
    assert 60 in sample(rows, 5)


@pytest.mark.parametrize(("length", "count"), [(10, 3), (100, 7), (1000, 10)])
def test_a_table_of_one_column_is_drawn_from_all_its_length(length, count):
    drawn = sample([{"case": i} for i in range(length)], count)
    gaps = [b - a for a, b in zip([0, *drawn], [*drawn, length], strict=True)]
    assert len(drawn) == count
    assert max(gaps) < 2.7 * length / count


def test_tests_that_share_a_table_cover_more_of_it_together():
    rows = [{"case": i} for i in range(180)]
    drawn = [sample(rows, 20, shift) for shift in range(5)]
    assert all(len(one) == 20 for one in drawn)
    assert len({i for one in drawn for i in one}) > 80


def test_names_do_not_matter():
    renamed = [{**row, "kind": f"other {row['kind']}"} for row in PRODUCT]
    assert sample(PRODUCT, 20) == sample(renamed, 20)


def test_without_a_number_there_are_twelve_or_as_many_as_hold_each_value():
    assert len(sample(PRODUCT)) == 12
    few = [row for row in PRODUCT if row["kind"] in KINDS[:2]]
    assert len(sample(few)) == 12
    assert len(sample(few[:7])) == 7
    rows = [{"case": i, "size": size} for i in range(30) for size in SIZES]
    drawn = [rows[i] for i in sample(rows)]
    assert [row["case"] for row in drawn] == [*range(30)]
    assert len({(type(row["size"]), row["size"]) for row in drawn}) == 4


@pytest.mark.parametrize("count", [1, 3, 200])
def test_no_more_than_asked_for(count):
    assert len(sample(PRODUCT, count)) == min(count, len(PRODUCT))
    assert sample([], count) == []
