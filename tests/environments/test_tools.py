"""Tools: schemas of typed functions, odd signatures, and the calls that models write in their formats."""

from __future__ import annotations

import json
from typing import Any, Literal, Optional

import pytest

import flowrl as fl
from flowrl.environments.tool_calls import ToolCall, read_tool_calls
from flowrl.environments.tools import BadCall, Tool, fits
from flowrl.errors import WorkerError


def search(query: str, most: int = 5, kind: Literal["page", "image"] = "page", tags: Optional[list[str]] = None) -> str:  # noqa: UP045
    """Find pages
    of the web.

    Args:
        query: words to look for,
            in any order
        most (int): how many

    Returns:
        query: what was found
    """
    return query


def test_a_schema_is_that_of_signature_and_docstring():
    assert Tool.of(search).schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find pages of the web.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "words to look for, in any order"},
                    "most": {"type": "integer", "description": "how many"},
                    "kind": {"enum": ["page", "image"]},
                    "tags": {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
                },
                "required": ["query"],
            },
        },
    }


def test_it_is_what_transformers_makes_of_a_plain_function():
    from transformers.utils import get_json_schema

    def add(a: int, b: float, words: list[str], table: dict[str, int], sure: bool) -> str:
        """
        Add.

        Args:
            a: one
            b: two
            words: three
            table: four
            sure: five
        """
        return ""

    made, theirs = Tool.of(add).schema["function"], get_json_schema(add)["function"]
    assert made["name"] == theirs["name"] and made["description"] == theirs["description"]
    assert made["parameters"]["properties"] == theirs["parameters"]["properties"]
    assert made["parameters"]["required"] == theirs["parameters"]["required"]


def nothing():
    pass


def star(*words: str):
    pass


def stars(**words: str):
    pass


def untyped(a, b: int):
    pass


def positional(a: int, /):
    pass


def strange(a: complex):
    pass


def keyed(a: dict[int, str]):
    pass


def unknown(a: NotThere):  # noqa: F821
    pass


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (star, "'*words: 'str'' has no name that a call could give"),
        (stars, "'**words: 'str'' has no name"),
        (untyped, "parameter 'a' has no type"),
        (positional, "'a: 'int'' has no name that a call could give"),
        (strange, "parameter 'a' is a <class 'complex'>, which JSON cannot say"),
        (keyed, "which JSON cannot say"),
        (unknown, "its types cannot be read: name 'NotThere' is not defined"),
    ],
)
def test_a_signature_that_no_schema_can_say_is_refused_where_it_is_declared(fn, said):
    with pytest.raises(WorkerError) as error:
        fl.Flow("f").worker(type("Task", (fl.environments.Environment,), {"tools": (fn,)}))
    assert said in error.value.what and error.value.fix


def test_a_text_is_no_tool():
    class Named(fl.environments.Environment):
        tools = ("search",)  # type: ignore[assignment]

    with pytest.raises(WorkerError, match="A tool is a function, not 'search'"):
        fl.Flow("named").worker(Named)


def test_a_function_without_parameters_is_a_tool():
    tool = Tool.of(nothing)
    assert tool.parameters == {"type": "object", "properties": {}, "required": []} and tool.arguments({}) == {}


@pytest.mark.parametrize(
    ("hint", "right", "wrong"),
    [
        (int, [1, -3], [1.0, "1", True, None]),
        (float, [1, 1.5], ["1", True, None]),
        (bool, [True], [1, "true"]),
        (str, ["", "a"], [1, None, ["a"]]),
        (list, [[], [1, "a"]], ["a", {}]),
        (list[int], [[], [1]], [["a"], [1.5], 1]),
        (dict[str, int], [{}, {"a": 1}], [{"a": "b"}, []]),
        (int | None, [1, None], ["1"]),
        (Literal["a", 1], ["a", 1], ["b", True, 1.0]),
        (Any, [1, "a", None, {}], []),
    ],
)
def test_arguments_are_held_against_their_types(hint, right, wrong):
    def fn(value):
        pass

    fn.__annotations__ = {"value": hint}
    schema = Tool.of(fn).parameters["properties"]["value"]
    assert all(fits(value, schema) for value in right) and not any(fits(value, schema) for value in wrong)
    for value in wrong:
        with pytest.raises(BadCall, match="the argument 'value' of fn is"):
            Tool.of(fn).arguments({"value": value})


# -- calls ----------------------------------------------------------------------------------------------------------

GOOD = ToolCall("add", {"a": 1, "b": 2})
BODY = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
LLAMA = BODY.replace("arguments", "parameters")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"<tool_call>\n{BODY}\n</tool_call>", [GOOD]),
        (f"I think.<tool_call>{BODY}</tool_call> and <tool_call>{BODY}</tool_call>", [GOOD, GOOD]),
        (f"<think>{{</think><tool_call>{BODY}</tool_call>", [GOOD]),
        (f"<think>I use <tool_call> to add.</think>\n<tool_call>\n{BODY}\n</tool_call>", [GOOD]),
        (f"I use <tool_call> to add.</think>\n<tool_call>\n{BODY}\n</tool_call>", [GOOD]),
        (f"I use <tool_call> to add: <tool_call>{BODY}</tool_call>", [GOOD]),
        (f"<think>maybe <tool_call>{BODY}</tool_call>? no.</think>\nDone.", []),
        (f"maybe <tool_call>{BODY}</tool_call> or {LLAMA}? no.</think>\nDone.", []),
        (f"<think>maybe <tool_call>{BODY}</tool_call>, but", []),
        ("<think>maybe <tool_call> or <|python_tag|>?</think>Done.", []),
        (f"<think>a</think>\n<tool_call>{BODY}</tool_call><think>b</think><tool_call>{BODY}</tool_call>", [GOOD]),
        (f"<think>a</think>\n{LLAMA}", [GOOD]),
        (f"<think>a</think>\n<|python_tag|>{LLAMA}", [GOOD]),
        (LLAMA, [GOOD]),
        (f"  {LLAMA}<|eot_id|>", [GOOD]),
        (f"<|python_tag|>{LLAMA}<|eom_id|>", [GOOD]),
        (f"{LLAMA}; {LLAMA}", [GOOD, GOOD]),
        (BODY, [GOOD]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', [GOOD]),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        ('<|python_tag|>{"name": "other", "parameters": {}}', [ToolCall("other", {})]),
        ("", []),
        ("the answer is 3", []),
        ('{"answer": 3}', []),
        ('{"name": "Ada", "parameters": {}}', []),
        ("{not JSON", []),
        ("[1, 2]", []),
        ("</tool_call>", []),
    ],
)
def test_calls_are_read_in_the_formats_of_hermes_and_llama(text, calls):
    assert read_tool_calls(text, {"add"}) == calls


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"<tool_call>{BODY}", "no </tool_call>"),
        ("<tool_call></tool_call>", "no JSON"),
        ("<tool_call>{'name': 'add'}</tool_call>", "no JSON"),
        ("<tool_call>[1]</tool_call>", 'no object with a "name"'),
        ('<tool_call>{"name": 5}</tool_call>', 'no object with a "name"'),
        ('<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON"),
        ('<tool_call>{"name": "add", "arguments": "a=1"}</tool_call>', "a text that is no JSON"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "no JSON"),
        (f"<tool_call>{BODY}<tool_call>[1]</tool_call>", "no object"),
        (f"<tool_call>{BODY}<tool_call>{BODY}", "no </tool_call>"),
        (f"<think>a</think><tool_call>{BODY} and so on</tool_call>", "no JSON"),
        ("<|python_tag|>print(1)", "there is no JSON"),
        (f"<|python_tag|>{LLAMA}; {{", "no JSON"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_with_it(text, said):
    assert said in read_tool_calls(text, {"add"})[-1].error


def test_what_a_call_has_is_what_json_says():
    marks = ("</think>", "<tool_call>", "</tool_call>", "<think>")
    for value in (1, 2.5, "x;y", None, [1, {"a": []}], "</tool", 'a"b', *marks):
        text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': {'value': value}})}</tool_call>"
        assert read_tool_calls(text) == [ToolCall("f", {"value": value})]
