"""Answers that are texts, numbers or letters are found in a response and compared."""

import pytest

from flowrl.environments import verify


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So \boxed{4} and then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"It is \boxed{7}, not \boxed{8", "7"),
        ("Sum: 3\n#### 42 ", "42"),
        ("<answer> B </answer> or <ANSWER>C</ANSWER>", "C"),
        ("  plain ", "plain"),
        ("", ""),
        (r"\boxed{" * 2000, r"\boxed{" * 2000),
    ],
)
def test_the_final_answer_is_found(response, answer):
    assert verify.final_answer(response) == answer


def test_texts_are_compared_without_their_white_space():
    assert verify.exact("#### a\n  b", "a b") == 1 and verify.exact("#### A b", "a b") == 0
    assert verify.exact("#### A b", "a B", ignore_case=True) == 1


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("They pay $1,234.50 in all", "1234.5", 1),
        ("#### 3/4", 0.75, 1),
        (r"\boxed{75%}", "0.75", 1),
        ("it is -6.02e23", "-602000000000000000000000", 1),
        ("first 3, then 4", "3", 0),
        ("no number", "0", 0),
        ("1/0", "0", 0),
        ("1e999999999", "1", 0),
        ("9" * 9000, "9", 0),
        ("0.3000000001", "0.3", 1),
        ("0.31", "0.3", 0),
        (".5", "1/2", 1),
    ],
)
def test_numbers_are_compared_by_value(response, answer, right):
    assert verify.numeric(response, answer) == right


def test_numbers_may_differ_by_as_much_as_is_said():
    assert verify.numeric("10.4", "10", relative=0.05) == verify.numeric("0.4", "0", absolute=0.5) == 1
    with pytest.raises(ValueError, match="the expected answer 'none' is no number"):
        verify.numeric("1", "none")


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("A or B? The answer is (B).", 1),
        ("B", 1),
        (r"\boxed{B}", 1),
        ("**B**", 1),
        ("b", 0),
        ("A", 0),
        ("", 0),
        ("BC", 0),
    ],
)
def test_the_letter_that_is_chosen_counts(response, right):
    assert verify.choice(response, "B") == verify.choice(response, "(B)") == right


def test_a_letter_is_expected():
    with pytest.raises(ValueError, match="no letter of a choice"):
        verify.choice("B", "B or C")
