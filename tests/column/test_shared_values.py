"""What is computed of each value of a list is computed once for each object, and never of one in the place of another."""

from flowrl.column import of_each


def test_each_object_is_computed_once() -> None:
    text, asked = "".join(["a", "b"]), []

    def compute(value: str) -> int:
        asked.append(value)
        return len(value)

    assert of_each([text, "c", text], compute) == [2, 1, 2]
    assert asked == ["ab", "c"]


def test_equal_values_of_other_kinds_are_told_apart() -> None:
    assert of_each([1, True, 1.0, 0.0, -0.0], repr) == ["1", "True", "1.0", "0.0", "-0.0"]


def test_values_that_cannot_be_hashed() -> None:
    shared = [1]
    assert of_each([shared, {"a": 1}, shared], repr) == ["[1]", "{'a': 1}", "[1]"]


def test_no_values() -> None:
    assert of_each([], len) == []
