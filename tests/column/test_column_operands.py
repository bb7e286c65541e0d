"""What no operator of Python takes is refused by a column in words that name both sides."""

import operator

import pytest

import flowrl as fl
from flowrl.errors import FieldError

NUMBERS = fl.Column.of([1.0, 2.0], dtype="f32")
TEXTS = fl.Column.of(["a", "b"], dtype="any")
RECORDS = fl.Column.of([{"a": 1}, None], dtype="any")


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (lambda: NUMBERS + "x", "f32[] cannot be combined with 'x'"),
        (lambda: "x" + NUMBERS, "f32[] cannot be combined with 'x'"),
        (lambda: NUMBERS - None, "f32[] cannot be combined with None"),
        (lambda: TEXTS + 1, "'add' does not take 'a' and 1"),
        (lambda: TEXTS * TEXTS, "'mul' does not take 'a' and 'a'"),
        (lambda: NUMBERS + TEXTS, "'add' does not take 1.0 and 'a'"),
        (lambda: TEXTS < 1, "'lt' does not take 'a' and 1"),
        (lambda: -TEXTS, "'neg' does not take 'a'"),
        (lambda: abs(RECORDS), "'abs' does not take {'a': 1}"),
        (lambda: RECORDS + 1, "'add' does not take {'a': 1} and 1"),
        (lambda: ~NUMBERS, "'invert' does not take a column of f32"),
        (lambda: NUMBERS & NUMBERS, "'and' does not take a column of f32 and a column of f32"),
    ],
)
def test_wrong_operands_are_named(do, said):
    with pytest.raises(FieldError) as error:
        do()
    assert error.value.what.startswith(said)


def test_what_python_takes_stays():
    assert (TEXTS + "c").to_list() == ["ac", "bc"]
    assert (TEXTS == "a").to_list() == [True, False]
    assert operator.or_(NUMBERS > 1, NUMBERS < 0).to_list() == [False, True]
