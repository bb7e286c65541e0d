"""What is shown of an answer under way is always what the whole answer begins with."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from flowrl.environments.gateway.agent_environment import _read, _until
from flowrl.environments.gateway.requests import Request
from flowrl.environments.gateway.shown_text import sure_text
from flowrl.workers.policy_calls import Answer

ASKED = [{"role": "user", "content": "?"}]
TOOL = {"type": "function", "function": {"name": "add"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'


class Bytes:
    """A token for each byte."""

    def decode(self, ids, skip_special_tokens=False):
        return bytes(ids).decode(errors="replace")


def shown(text, request):
    """What is shown after each byte, also behind a text that stops, and the content of the whole answer."""
    ids = [*text.encode()]
    answer = Answer(0, ids, [0.0] * len(ids), [0.0] * len(ids), [0] * len(ids), 1.0, stopped=True)
    _, said, _ = _until(answer, request.stop, Bytes())
    content, calls = _read(said, request)
    return [sure_text(Bytes().decode(ids[:count]), request) for count in range(len(ids) + 1)], content, calls


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain", "plain", 0),
        ("  plain \n", "  plain \n", 0),
        (CALL, "", 1),
        (f"I add.\n\n{CALL}{CALL}", "I add.", 2),
        (f" I add.<tool_{CALL}", " I add.<tool_", 1),
        ("I add. <tool_call>{broken}</tool_call>", "I add. <tool_call>{broken}</tool_call>", 0),
        ("a <tool", "a <tool", 0),
        (f"<think>I use <tool_call>.</think> So. {CALL}", "<think>I use <tool_call>.</think> So.", 1),
        (f"I use <tool_call> and\n</think>\n{CALL}", "I use <tool_call> and\n</think>", 1),
        (f"<think>{CALL}</think> No.", f"<think>{CALL}</think> No.", 0),
        (f"<think>{CALL[:30]}</think> No.", f"<think>{CALL[:30]}</think> No.", 0),
        (f"<think>a</think>\n\n{LLAMA}", "<think>a</think>", 1),
        (f"Use <tool_call>: {CALL}", "Use <tool_call>:", 1),
        (CALL.replace("1", '"</think>"'), "", 1),
        (LLAMA.replace("1", '"</think>"'), "", 1),
        (LLAMA, "", 1),
        (f" {LLAMA}; {LLAMA}", "", 2),
        (f"<|python_tag|>{LLAMA}", "", 1),
        (f"So. <|python_tag|>{LLAMA}", "So.", 1),
        ('{"an": "answer"}', '{"an": "answer"}', 0),
        ("", "", 0),
    ],
)
def test_calls_of_tools_are_held_back(text, content, calls):
    found, whole, made = shown(text, Request(ASKED, [TOOL]))
    assert (whole, len(made)) == (content, calls)
    assert all(content.startswith(each) for each in found)
    assert all(len(a) <= len(b) for a, b in pairwise(found)), "nothing is taken back"
    assert CALL not in found[-1] or not calls


def test_all_that_is_sure_is_shown():
    found, *_ = shown("Grüße, 世界 🙂", Request(ASKED))
    assert found[-1] == "Grüße, 世界 🙂" and "Gr" in found and "Grü" in found and "Grüße, 世" in found
    found, *_ = shown(f"I add. {CALL}", Request(ASKED, [TOOL]))
    assert found[:8] == ["", "I", "I", "I a", "I ad", "I add", "I add.", "I add."] and found[-1] == "I add."
    assert sure_text("a <tool_calling", Request(ASKED)) == "a <tool_calling", "without tools it is text"


@pytest.mark.parametrize(
    ("text", "stops", "content"),
    [
        ("I look.\nObservation: 7", ("Observation:",), "I look.\n"),
        ("Obs Obs Observe", ("Observation:",), "Obs Obs Observe"),
        ("aab aaab", ("aab",), ""),
        ("xaabc", ("b", "abc"), "xaa"),
        ("ende", ("é", "nd"), "e"),
        ("ab\n\n\nc", ("\n\n\n", "c"), "ab"),
    ],
)
def test_a_text_that_stops_is_never_shown(text, stops, content):
    found, whole, _ = shown(text, Request(ASKED, stop=stops))
    assert whole == content and all(content.startswith(each) for each in found)


def test_where_a_long_answer_stops_is_found_in_a_few_looks():
    looked = []

    class Counts(Bytes):
        def decode(self, ids, skip_special_tokens=False):
            looked.append(len(ids))
            return super().decode(ids)

    ids = [*b"x" * 700, *b"stop and stop", *b"y" * 900]
    answer = Answer(0, ids, [0.0] * len(ids), [0.0] * len(ids), [0] * len(ids), 1.0, stopped=False)
    kept, said, stopped_by = _until(answer, ("y", "op", "stop"), Counts())
    assert (len(kept.ids), said, stopped_by, kept.stopped) == (704, "x" * 700, "stop", True) and len(looked) < 20
    looked.clear()
    assert _until(answer, (), Counts())[1:] == (bytes(ids).decode(), "") and looked == [len(ids)]


@pytest.mark.parametrize("seed", range(200))
def test_of_any_answer_what_is_shown_stays(seed):
    draw = random.Random(seed)
    parts = ["a", " ", "\n", "é", "🙂", "<", "<tool", "<tool_call>", CALL, LLAMA, "{", "<|python_tag|>", "stop", "st"]
    parts += ["<think>", "</think>", CALL.replace("1", '"</think>"'), LLAMA.replace("1", '"<tool_call>"')]
    text = "".join(draw.choice(parts) for _ in range(draw.randrange(9)))
    stops = tuple(draw.sample(["stop", "top", "a ", "🙂é", "\n\n"], draw.randrange(4)))
    request = Request(ASKED, [TOOL] if draw.random() < 0.6 else [], stop=stops)
    found, content, _ = shown(text, request)
    assert all(content.startswith(each) for each in found), (text, request.stop, found, content)
    assert stops or all(len(a) <= len(b) for a, b in pairwise(found)), "nothing is taken back"
