"""What a question may say: a filter that says nothing is refused in words that name it and what there is."""

from __future__ import annotations

import pytest

from flowrl.show.read_question import BadQuestionError, filter_of
from flowrl.show.search_rows import Filter

LABELS = {"finish_reason": {"stop": 3, "length": 1}, "source": {"math": 4}}


def asked(**words: object) -> Filter:
    return filter_of({n.replace("__", "."): v if isinstance(v, list) else [str(v)] for n, v in words.items()}, LABELS)


def test_all_of_it_is_read() -> None:
    words = {"program": "grpo", "text": "a", "order": "best", "first": 1, "last": 2, "least": -0.5, "most": "1e3"}
    more = {"min_tokens": 4, "max_tokens": "9.0", "after": ["0.5", "7"], "is__finish_reason": ["stop", "length"]}
    wanted = Filter("grpo", "a", "best", 1, 2, -0.5, 1000.0, 4, 9, {"finish_reason": ["stop", "length"]}, (0.5, 7))
    assert asked(**words, **more) == wanted
    assert asked() == Filter("") and asked(first="", text="") == Filter(""), "an empty word is none"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"order": "sideways"}, "There is no order 'sideways'; there are newest, oldest, best,"),
        ({"lenght": 3}, "There is no filter 'lenght'; there are first, last, least, most, min_tokens, max_tokens, is."),
        ({"min_tokens": "many"}, "min_tokens=many is no number."),
        ({"max_tokens": "1.5"}, "max_tokens=1.5 is no whole number."),
        ({"first": "nan"}, "first=nan is no number that can be asked for."),
        ({"least": "1e400"}, "least=1e400 is no number that can be asked for."),
        ({"last": str(1 << 63)}, "is no number that can be asked for."),
        ({"first": 9, "last": 3}, "No steps are from 9 to 3: first is above last."),
        ({"least": 0.5, "most": -1}, "No rewards are from 0.5 to -1: least is above most."),
        ({"min_tokens": 8, "max_tokens": 7}, "No numbers of tokens are from 8 to 7: min_tokens is above max_tokens."),
        ({"is__opponent": "x"}, "Rows are not filtered by 'opponent'; they are by finish_reason, source."),
        ({"is__": "x"}, "Rows are not filtered by ''; they are by finish_reason, source."),
        ({"is__source": "poems"}, "No row has 'poems' as its source; there are math."),
        ({"is__source": "' OR 1=1 --"}, "No row has '' OR 1=1 --' as its source; there are math."),
        ({"is__source": "x" * 5000}, "xxx...' as its source"),
        ({"first": ["1", "2"]}, "first= is there 2 times, and one of them would count."),
        ({"text": ["a", "b", "a"]}, "text= is there 3 times"),
        ({"after": ["1"]}, "after= is there twice"),
        ({"after": ["1", "x"]}, "after=x is no number."),
        ({"after": ["1", "2", "3"]}, "after= is there twice"),
    ],
)
def test_what_says_nothing_is_refused_in_words(words: dict[str, object], said: str) -> None:
    with pytest.raises(BadQuestionError) as raised:
        asked(**words)
    assert said in str(raised.value) and raised.value.status == 400
    assert len(str(raised.value)) < 500


def test_labels_are_not_judged_while_there_are_no_rows() -> None:
    assert filter_of({"is.source": ["math"]}, {}).labels == {"source": ["math"]}
