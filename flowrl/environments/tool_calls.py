"""Reads calls of tools out of what a model wrote: the formats of Hermes and Qwen, and of Llama."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
#: What a call begins with, unless it is JSON and nothing else.
MARKS = ("<tool_call>", _PYTHON_TAG)


@dataclass(frozen=True)
class ToolCall:
    """A call that a model wrote: ``ToolCall("add", {"a": 1, "b": 2})``; ``error`` says what is wrong with it."""

    name: str
    arguments: Any
    error: str = ""


def read_tool_calls(text: str, names: Collection[str] = ()) -> list[ToolCall]:
    """The calls in a text, in their order; malformed ones have an ``error``.

    Hermes and Qwen write ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as often as they like. Llama
    writes ``{"name": ..., "parameters": {...}}`` and nothing else, or several with ``;`` between, also behind
    ``<|python_tag|>``. Such a text is a call only where its name is one of ``names``: an answer may be JSON, too.
    """
    if "<tool_call>" in text:
        return [_hermes(match[1], closed=bool(match[2])) for match in _HERMES.finditer(text)]
    tagged = _PYTHON_TAG in text
    rest = text.split(_PYTHON_TAG, 1)[1] if tagged else text
    return _llama(rest.strip().removesuffix("<|eom_id|>").removesuffix("<|eot_id|>").strip(), names, tagged=tagged)


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
