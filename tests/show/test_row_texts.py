"""A row as the page shows it: what is long is cut, numbers by token lie beside their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from show_runs import row

from flowrl.show.row_texts import TEXT, TOKENS, by_token, conversation, field_of, preview, tokens_of, whole_row


class Letters:
    """Token 1 is b, token 2 is c."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + id) for id in ids)


def test_numbers_by_token_lie_beside_their_tokens() -> None:
    strip = tokens_of(row(2, 0, 1), Letters(), 0)
    assert (strip["count"], strip["prompt"], strip["texts"]) == (7, 4, list("fghibcd"))
    assert strip["columns"]["rollout_logprobs"] == [None] * 4 + [-0.5, -1.0, -2.0]
    assert strip["columns"]["versions"][-1] == 2.0 and strip["columns"]["response_mask"][-1] == 0.0


def test_gap_and_ratio_come_of_two_log_probabilities() -> None:
    columns = by_token(row(0, 0, 0, old_logprobs=[-0.4, -1.0, -2.5], ref_logprobs=[-0.5, -2.0, -2.0]))
    assert columns["gap"][4:] == pytest.approx([0.1, 0.0, -0.5])
    assert columns["ratio"][4:] == pytest.approx([math.exp(0.1), 1.0, math.exp(-0.5)])
    assert columns["gap to the reference"][4:] == pytest.approx([0.0, -1.0, 0.0])


def test_without_a_read_gap_and_ratio_come_of_what_the_update_found() -> None:
    columns = by_token(row(0, 0, 0, trained_logprobs=[-0.4, None, -2.5], entropies=[0.5, None, 1.5]))
    assert columns["gap"][:5] == [None] * 4 + [pytest.approx(0.1)] and columns["gap"][5] is None
    assert columns["ratio"][6] == pytest.approx(math.exp(-0.5)) and columns["ratio"][5] is None
    assert columns["entropies"][4:] == [0.5, None, 1.5]
    both = by_token(row(0, 0, 0, trained_logprobs=[-0.4, None, -2.5], old_logprobs=[-0.5, -1.0, -2.0]))
    assert both["gap"][4:] == [0.0, 0.0, 0.0], "what the program has read comes first"


def test_among_the_tokens_that_could_be_drawn_the_gap_is_to_what_was_sampled_from() -> None:
    drawn = {"sampling_logprobs": [-0.1, -0.2, -0.3], "support_ids": [1, 2, 3]}
    columns = by_token(row(0, 0, 0, trained_logprobs=[-0.1, -0.2, -0.8], **drawn))
    assert columns["gap"][4:] == pytest.approx([0.0, 0.0, -0.5])


def test_an_advantage_of_the_row_counts_for_each_token() -> None:
    assert by_token(row(0, 0, 0, advantages=-2.0))["advantages"] == [None] * 4 + [-2.0] * 3


def test_turns_are_told_apart_by_the_mask() -> None:
    said = [(part["who"], part["text"]) for part in conversation(row(0, 3, 0), Letters())]
    assert said == [("prompt", "3+1="), ("model", "bc"), ("environment", "d")]
    assert [part["text"] for part in conversation(row(0, 3, 0), None)] == ["3+1=", "says 0"], "without a tokenizer"


def test_messages_are_shown_as_they_are() -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}, {"content": [1]}]
    assert [part["text"] for part in conversation({"messages": messages}, None)] == ["Hi", "", "[1]"]
    for shown, answer in ((messages[:1], ["Yes"]), (messages[:2], [""])):
        found = conversation({"messages": shown, "response": "Yes"}, None)
        assert [part["text"] for part in found] == ["Hi", *answer], "a prompt is followed by its response"


def test_what_is_long_is_cut_and_says_how_long_it_is() -> None:
    long = row(0, 0, 0, response="y" * 10_000_000, tokens=list(range(5000)))
    shown = {field["name"]: field for field in whole_row(long, None)["fields"]}
    assert len(shown["response"]["text"]) == TEXT and shown["response"]["size"] == 10_000_000
    assert len(field_of(long, "response")) == 10_000_000 and len(preview(long)["response"]) < 1000
    strip = tokens_of(long, None, 4000)
    assert len(strip["ids"]) == 1000 and len(tokens_of(long, None, 0)["ids"]) == TOKENS


@pytest.mark.parametrize(
    "strange",
    [
        {},
        {"tokens": "no list", "response_ids": None},
        {"tokens": [None, "x", -5, 1 << 70], "versions": [None, True, 1.5, 2]},
        {"response_ids": [1, 2], "response_mask": [True], "prompt": {"a": 1}},
        {"messages": [], "prompt": [], "rewards": [[1]]},
    ],
)
def test_strange_rows_are_shown_all_the_same(strange: dict) -> None:
    whole_row(strange, Letters())
    tokens_of(strange, None, 0)
    preview(strange)
