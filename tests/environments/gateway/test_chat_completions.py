"""Requests of OpenAI's chat completions are read, and streams have the chunks that its clients expect."""

import json

import pytest

from flowrl.environments.gateway import chat_completions
from flowrl.environments.gateway.requests import Refused, Reply

ASKED = {"messages": [{"role": "user", "content": "1+1?"}]}


def chunks(**more):
    """The data of the chunks of an answer to a request with these entries more."""
    request = chat_completions.read({**ASKED, "stream": True, **more})
    events = chat_completions.ChatEvents("1", 4, request, 0)
    sent = events.text("two ") + events.end(Reply("1", "two it is", (), "stop", 4, 3))
    *found, done, rest = sent.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in found]


@pytest.mark.parametrize("more", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
def test_each_chunk_has_a_choice(more):
    found = chunks(**more)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in found) == "two it is"
    assert found[-1]["choices"][0]["finish_reason"] == "stop" and not any("usage" in chunk for chunk in found)


def test_the_usage_is_a_last_chunk_where_it_is_asked_for():
    *found, last = chunks(stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    assert [chunk["choices"] for chunk in found] == [chunk["choices"] for chunk in chunks()]


@pytest.mark.parametrize("options", ["x", {"include_usage": "yes"}])
def test_options_of_a_stream_that_are_none_are_refused(options):
    with pytest.raises(Refused, match="stream_options|include_usage"):
        chunks(stream_options=options)


@pytest.mark.parametrize(
    ("more", "most"),
    [
        ({}, None),
        ({"max_tokens": 16}, 16),
        ({"max_completion_tokens": 8, "max_tokens": 16}, 8),
        ({"max_completion_tokens": None, "max_tokens": 16}, 16),
        ({"max_completion_tokens": None}, None),
    ],
)
def test_either_name_says_the_most_tokens(more, most):
    assert chat_completions.read({**ASKED, **more}).max_tokens == most
    with pytest.raises(Refused, match="no whole number"):
        chat_completions.read({**ASKED, "max_completion_tokens": 0, "max_tokens": 16})
