"""Answers in the protocol of Anthropic's messages say how they ended, whole and as a stream."""

from __future__ import annotations

import json

import pytest

from flowrl.environments.gateway.anthropic_messages import MessageEvents, read, write
from flowrl.environments.gateway.requests import Reply

CALL = {"id": "call_1", "name": "add", "arguments": {}}


@pytest.mark.parametrize(
    ("reply", "reason", "sequence"),
    [
        (Reply("1", "x", (), "stop", 1, 1), "end_turn", None),
        (Reply("1", "x", (), "stop", 1, 1, stopped_by="END"), "stop_sequence", "END"),
        (Reply("1", "x", (), "length", 1, 1), "max_tokens", None),
        (Reply("1", "x", (CALL,), "tool_calls", 1, 1, stopped_by="END"), "tool_use", None),
    ],
)
def test_how_an_answer_has_ended(reply, reason, sequence):
    request = read({"messages": [{"role": "user", "content": "?"}], "max_tokens": 9, "stop_sequences": ["END"]})
    whole = write(reply, request, 0)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)
    events = MessageEvents("1", 1, request, 0).end(reply).decode().strip().split("\n\n")
    told = [json.loads(event.split("data: ", 1)[1]) for event in events]
    [end] = [event["delta"] for event in told if event["type"] == "message_delta"]
    assert end == {"stop_reason": reason, "stop_sequence": sequence}
