"""Reads calls of tools out of what a model wrote: the formats of Hermes and Qwen, and of Llama."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_OPENS, _CLOSES, _PYTHON_TAG, _THINKS, _THOUGHT = "<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>"
#: What a call begins with, unless it is JSON and nothing else.
MARKS = (_OPENS, _PYTHON_TAG)
_MARK, _SPACE = re.compile("|".join(map(re.escape, MARKS))), re.compile(r"\s*")


@dataclass(frozen=True)
class ToolCall:
    """A call that a model wrote: ``ToolCall("add", {"a": 1, "b": 2})``; ``error`` says what is wrong with it."""

    name: str
    arguments: Any
    error: str = ""


def read_tool_calls(text: str, names: Collection[str] = ()) -> list[ToolCall]:
    """The calls in a text, in their order; malformed ones have an ``error``. What is thought is no call.

    Hermes and Qwen write ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as often as they like. Llama
    writes ``{"name": ..., "parameters": {...}}`` and nothing else, or several with ``;`` between, also behind
    ``<|python_tag|>``. Such a text is a call only where its name is one of ``names``: an answer may be JSON, too.
    """
    return split_calls(text, names)[1]


def split_calls(text: str, names: Collection[str] = ()) -> tuple[str, list[ToolCall]]:
    """The text before the first call, with what was thought; and the calls, as :func:`read_tool_calls` gives them.

    >>> split_calls('<think>A <tool_call>?</think>Now.<tool_call>{"name": "now"}</tool_call>')
    ('<think>A <tool_call>?</think>Now.', [ToolCall(name='now', arguments={}, error='')])
    """
    begin = thought_end(text)
    if (first := text.find(_OPENS, begin)) >= 0:
        found = _hermes_calls(text, first)
        return text[: found[0][0]], [call for _, call in found]
    tag = text.find(_PYTHON_TAG, begin)
    rest = text[begin:] if tag < 0 else text[tag + len(_PYTHON_TAG) :]
    rest = rest.strip().removesuffix("<|eom_id|>").removesuffix("<|eot_id|>").strip()
    return text[: begin if tag < 0 else tag], _llama(rest, names, tagged=tag >= 0)


def thought_end(text: str, *, goes_on: bool = False) -> int:
    """Where the thoughts of a text end: behind the last ``</think>`` that is in no argument of a call.

    A text may begin with ``<think>``, or within the thought, as the prompt may end so; one that is not closed is all of
    the text. ``goes_on``: more text may follow, so that what is no call yet may become one.
    """
    if text.lstrip()[:1] == "{":  # JSON and nothing else
        return 0
    end = at = 0
    while (closed := text.find(_THOUGHT, at)) >= 0:
        mark = _MARK.search(text, at, closed)
        if mark is None:
            end = at = closed + len(_THOUGHT)
            continue
        behind = _json_end(text, mark.end())
        if behind is None and goes_on and text[mark.end() :].lstrip()[:1] == "{":
            return closed if text[end:].lstrip().startswith(_THINKS) else end
        at = mark.end() if behind is None else behind
    return len(text) if text[end:].lstrip().startswith(_THINKS) else end


def _hermes_calls(text: str, at: int) -> list[tuple[int, ToolCall]]:
    """The calls from the mark at a place on, and where each begins. A mark is spoken of where another one follows it
    and no object does."""
    found: list[tuple[int, ToolCall]] = []
    while at >= 0:
        begin = at + len(_OPENS)
        behind = _json_end(text, begin)
        after = begin if behind is None else behind
        another, close = text.find(_OPENS, after), text.find(_CLOSES, after)
        end = min((place for place in (another, close) if place >= 0), default=len(text))
        if behind is not None or end != another:
            found.append((at, _hermes(text[begin:end], closed=end == close)))
        at = text.find(_OPENS, end)
    return found


def _json_end(text: str, at: int) -> int | None:
    """Where the object ends that a text has at a place, or behind white space there; None where it has none."""
    space = _SPACE.match(text, at)
    assert space is not None, "it matches nothing, too"
    if text[space.end() : space.end() + 1] != "{":
        return None
    try:
        return json.JSONDecoder(parse_constant=_no_constant).raw_decode(text, space.end())[1]
    except (ValueError, RecursionError):
        return None


def _hermes(body: str, *, closed: bool) -> ToolCall:
    if not closed:
        return ToolCall("", None, "the call has no </tool_call>")
    try:
        found = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        return ToolCall("", None, f"the call is no JSON: {error}")
    return _call(found, "arguments")


def _llama(text: str, names: Collection[str], *, tagged: bool) -> list[ToolCall]:
    if not text.startswith("{"):
        return [ToolCall("", None, "behind <|python_tag|> there is no JSON")] if tagged else []
    decoder, calls, place = json.JSONDecoder(parse_constant=_no_constant), list[ToolCall](), 0
    while place < len(text):
        try:
            found, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            return [*calls, ToolCall("", None, f"the call is no JSON: {error}")] if tagged or calls else []
        call = _call(found, "parameters" if isinstance(found, dict) and "parameters" in found else "arguments")
        if not tagged and call.name not in names:
            return []
        calls.append(call)
        while place < len(text) and text[place] in "; \n\t":
            place += 1
    return calls


def _call(found: Any, arguments: str) -> ToolCall:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return ToolCall("", None, 'the call is no object with a "name"')
    given = found.get(arguments, {})
    if isinstance(given, str):  # some models write the object as a text
        try:
            given = json.loads(given, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            return ToolCall(found["name"], None, f'its "{arguments}" are a text that is no JSON')
    return ToolCall(found["name"], given)


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
