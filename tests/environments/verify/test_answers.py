"""Answers that are texts, numbers or letters are found in a response and compared."""

import pytest

from flowrl.environments import verify
from flowrl.environments.verify.answers import number_in


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"So \boxed{4} and then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"It is \boxed{7}, not \boxed{8", "7"),
        ("Sum: 3\n#### 42 ", "42"),
        ("<answer> B </answer> or <ANSWER>C</ANSWER>", "C"),
        ("I write <answer> tags, </answer> too: <answer>B</answer>.", "B"),
        ("Between <answer> tags. <answer>B</answer>", "B"),
        ("<answer>B</answer> It stands between <answer> and its end.", "B"),
        ("  plain ", "plain"),
        ("", ""),
        (r"\boxed{" * 2000, r"\boxed{" * 2000),
        ("<answer>" * 2000, "<answer>" * 2000),
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
        ("It is 3/4.", "3/4", 1),
        ("It is 3/4.", "4", 0),
        ("#### 3/4.", "3/4", 1),
        (r"\boxed{75\%}", "75%", 1),
        (r"\boxed{1{,}234}", "1234", 1),
        (r"\boxed{1{,}234}", "234", 0),
        ("−5", "-5", 1),
        ("−5", "5", 0),
        (r"\boxed{- 5}", "-5", 1),
        (r"\boxed{\frac{3}{4}}", "3/4", 1),
        (r"\boxed{\frac{3}{4}}", "4", 0),
        (r"\boxed{12 \text{ cm}^2}", "12", 1),
        (r"\boxed{12 \text{ cm}^2}", "2", 0),
        ("between 3-5", "5", 1),
        ("between 3-5", "-5", 0),
        (r"\boxed{1e3/2}", "500", 1),
        ("#### 5", r"\frac{10}{2}", 1),
        ("#### 0", "-0.0", 1),
    ],
)
def test_numbers_are_compared_by_value(response, answer, right):
    assert verify.numeric(response, answer) == right


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[
            (text, 5.0)
            for text in ("5.", "x = 5", "4 or 5", "**5**", "It is 5!", "5^{th}", r"5^{\circ}", "#5", "Two:\n- 5")
        ],
        *[(text, -5.0) for text in ("-5", "–5", "x=-5", "= - 5", "$-5$", r"-\$5", "(-5)", "-(5)", "-5.0.", "3 -5")],
        *[
            (text, 5.0)
            for text in (
                "3–5",
                "3--5",
                "$3-$5",
                "$3$-$5$",
                "3%-5",
                "x-5",
                "(2)-5",
                "10 - 5",
                "so - 5",
                "**So** - 5",
                r"10 \text{ cm} - 5",
            )
        ],
        *[
            (text, 0.5)
            for text in (
                ".5",
                "0.5.",
                "1/2.",
                "1 / 2",
                "½",
                r"\frac12",
                r"\dfrac{1}{2}",
                r"\tfrac 1 2",
                "50 %",
                r"50\%.",
            )
        ],
        *[(text, -0.5) for text in ("-.5", "−1/2", "−½", r"-\frac{1}{2}", r"\frac{−1}{2}", r"\frac{1}{-2}", "-50%")],
        *[(text, 0.5) for text in ("1/2.0", ".5/1", r"\frac{1{,}000}{2{,}000}", r"\left(\frac{1}{2}\right)")],
        (r"-\left(\frac{1}{2}\right)", -0.5),
        *[(text, 2.5) for text in ("2 1/2", "2½", r"2\frac{1}{2}", r"2\tfrac12 \text{ cups}", "2 1/2.")],
        ("-2 1/2", -2.5),
        ("1,000 1/2", 1000.5),
        ("2 7/2", 3.5),
        *[(text, 1234.5) for text in ("$1,234.50", r"\$1{,}234.50", r"1\,234.5", "1\u202f234.5", r"1,\!234.5")],
        ("-$1,234.50.", -1234.5),
        (r"5,\,600", 600.0),
        *[
            (text, 1500.0)
            for text in (r"1.5 \times 10^3", r"1.5\cdot10^{3}", "1.5 × 10³", "1.5*10**3", "1.5 x 10^3", "1.5E3")
        ],
        *[(text, 0.004) for text in (r"4 \times 10^{-3}", "4 × 10⁻³", "4e−3")],
        *[
            (text, 12.0)
            for text in ("12 cm^2", "12 cm²", "12 m/s^{2}", r"12\,\mathrm{m}^2", "12 m s^{-1}", "y = x^2 + 12")
        ],
        *[
            (text, None)
            for text in ("2^3", "2³", "10^{3}", "2**3", r"\sqrt{2}", r"\sqrt[3]{2}", "√2", r"3\sqrt{2}", "(3)^2")
        ],
        *[
            (text, None)
            for text in (r"2\pi", "2π", r"\frac{\pi}{2}", r"\frac{\sqrt{3}}{2}", r"\frac{2}{x}", r"\frac{1+2}{3}")
        ],
        *[(text, None) for text in ("x/2", "(1+2)/3", r"1/2 \times 10^3", "e^{-2}", "1/0", "", ".", "-")],
    ],
)
def test_how_numbers_are_written(text, value):
    found = number_in(text)
    assert found == (None if value is None else pytest.approx(value, rel=1e-12))


@pytest.mark.parametrize(
    "part", ["9", "1,", "111,", "1/", "1 1/", "- ", "^(", "x^{", r"\frac{", r"\frac{1}", "} ", "5³", ".1", "1e"]
)
def test_no_response_holds_up_who_reads_numbers(part):
    for text in (part * 10_000, part * 10_000 + "x"):
        number_in(text)


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
        ("The answer is B. I am sure of it.", 1),
        ("B. I’m sure.", 1),
        ("B. I'm sure; a B’s a B", 1),
        ("B. A triangle", 1),
        (r"\boxed{B. 10 N}", 1),
        (r"\boxed{\text{B}}", 1),
        (r"\boxed{\textbf{(B) } 10 \text{ N}}", 1),
        ("#### (B) A triangle", 1),
        ("Answer: B\nExplanation: A is wrong", 1),
        ("**Answer:** B\n\nA is wrong.", 1),
        ("**Final answer:**\n\n**(B)** A triangle", 1),
        ("B, not A", 1),
        ("The answer is A? No, it is B.", 1),
        ("The correct choice is: **B**, since (A) is too long", 1),
        ("The answer must be option B. I did not see C.", 1),
        ("First I thought the answer is A. But no: the answer is B.", 1),
        ("A) is too short\nB) is right\nSo it is B, I think.", 1),
        ("A. too short\nB. right\nSo I take (B). A short one.", 1),
        ("A: no, B: yes. So B it is.", 1),
        ("I, for one, choose B.", 1),
        ("Answer: I think B", 1),
        ("I choose B because A is wrong", 1),
        ("P(A) = 1, so (B). I am sure.", 1),
        ("I would say a triangle", 0),
        ("It is (B), which A triangle is not", 1),
    ],
)
def test_the_letter_that_is_chosen_counts(response, right):
    assert verify.choice(response, "B") == verify.choice(response, "(B)") == right


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("B, not A", "A", 0),
        ("The answer is B. I am sure of it.", "I", 0),
        ("B. A triangle", "A", 0),
        ("A", "A", 1),
        ("A is right.", "A", 1),
        ("The answer is A because of this. I checked.", "A", 1),
        ("A. I am sure.", "A", 1),
        ("I am not sure", "I", 0),
        ("The answer is I.", "I", 1),
        ("I. Because of this.", "I", 1),
        (r"\boxed{I}", "I", 1),
        ("Hence (I)", "I", 1),
        ("The answer is J, I think.", "J", 1),
    ],
)
def test_letters_that_are_words_too_count_where_they_are_chosen(response, answer, right):
    assert verify.choice(response, answer) == right


@pytest.mark.parametrize(
    "part", [" ", "answer is ", "Answer: the ", "A", "(A) ", "A) ", "A\n", "*", r"\text{", "\n", "I ", "the "]
)
def test_no_response_holds_up_who_reads_letters(part):
    for text in (part * 10_000, "Answer: " + part * 10_000):
        verify.choice(text, "B")


def test_a_letter_is_expected():
    with pytest.raises(ValueError, match="no letter of a choice"):
        verify.choice("B", "B or C")
