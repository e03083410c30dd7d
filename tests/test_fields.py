"""The rules of fields that foreign files have: each keeps what it must, with its type, and refuses the rest."""

import math

import pytest

from gradguard.files.foreign_fields import list_of, mapping_of, number, object_of, of_type, row_of, text, truth, whole

LARGEST = 1.7976931348623157e308
ROWS = {
    "a number": (number(), [0.5, -3, 0, -0.0, LARGEST], [True, None, "1", math.nan, math.inf, -math.inf, 10**400, [1]]),
    "an amount or null": (number(0, null=True), [0.0, None, 7, 5e-324], [-5e-324, -1, math.nan, False]),
    "a number within": (number(0, 1), [0, 1, 0.5], [1.0000000000000002, -1e-300, None]),
    "a count": (whole(), [0, 2**53 - 1], [-1, 2**53, 1.0, True, None, "1"]),
    "a whole number": (whole(-2, 2), [-2, 2], [-3, 3, 0.0]),
    "a text": (text, ["", "é"], [None, 1, ["a"]]),
    "a truth": (truth, [True, False], [0, 1, None, "true"]),
    "a type": (of_type(float), [1.0], [1, True]),
    "a list": (list_of(whole()), [[], [1, 2]], [[1, -1], [True], (1,), {}, None, "12"]),
    "a row": (row_of(text, number()), [["norm", 0.5]], [["norm"], ["norm", 0.5, 1], [0.5, "norm"], {}, None]),
    "a mapping": (mapping_of(whole()), [{}, {"dp": 2}], [{"dp": -1}, [1], None]),
    "an object": (object_of({"a": text, "b": whole()}), [{}, {"b": 1}], [{"a": 1}, [], "a"]),
}


@pytest.mark.parametrize(("rule", "kept", "refused"), ROWS.values(), ids=ROWS)
def test_a_rule_keeps_what_follows_it_and_refuses_the_rest(rule, kept, refused):
    assert [repr(rule(value)) for value in kept] == list(map(repr, kept))
    for value in refused:
        with pytest.raises(ValueError, match=r"expected a|zip\(\) argument"):
            rule(value)


def test_a_whole_number_that_floats_do_not_tell_from_its_neighbour_is_a_float():
    assert (
        repr([number()(2**53 - 1), number()(2**53), number()(-(10**200))])
        == "[9007199254740991, 9007199254740992.0, -1e+200]"
    )


def test_an_object_has_no_other_field():
    with pytest.raises(KeyError, match="c"):
        object_of({"a": text})({"c": 1})
