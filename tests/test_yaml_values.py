"""A value of the command line, as YAML says it."""

from __future__ import annotations

import math

import pytest

from flowrl.errors import PlanError, UsageError
from flowrl.yaml_values import compose_value, read_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2e-6", 2e-6),  # PyYAML takes it for a text
        ("1E3", 1000.0),
        ("-.5e2", -50.0),
        ("3", 3),
        ("3.0", 3.0),
        ("4_000", 4000),
        ("true", True),
        ("False", False),
        ("null", None),
        ("none", "none"),
        ("~", None),
        ("None", None),
        ("cosine", "cosine"),
        ("'null'", "null"),
        ('"3"', "3"),
        ('""', ""),
        ("2026-01-31", "2026-01-31"),
        ("-.inf", -math.inf),
        ("no", "no"),  # YAML 1.1 has another word for False, and so on
        ("on", "on"),
        ("Yes", "Yes"),
        ("010", "010"),
        ("0x1f", "0x1f"),
        ("1:30", "1:30"),
        ("=", "="),
        ("[no, 010, 0, 1:30, null]", ["no", "010", 0, "1:30", None]),
        ("r: 16", {"r": 16}),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("[0.9, 1e-1]", [0.9, 0.1]),
        ("{r: 16, targets: [q_proj, v_proj]}", {"r": 16, "targets": ["q_proj", "v_proj"]}),
        ('{"r": 16}', {"r": 16}),
    ],
)
def test_values(text, value):
    read = read_value(text, "--arg x")
    assert read == value and type(read) is type(value)


@pytest.mark.parametrize(
    "text",
    ["What: now", "a: b: c", "- a", "a # b", "# a", "*a*", "@a", "!a b", "a\nb", " a ", "|", "no", "3 of 4", "\x1b[A"],
)
def test_a_plain_text_stays_as_it_is(text):
    assert read_value(text, "--arg x", plain_texts=True) == text


@pytest.mark.parametrize("text", ["3", " 2e-6 ", "true", "null", "'a: b'", '"3"', "[1, {a: b}]", "{a: no}"])
def test_what_is_no_plain_text_is_the_same_with_them(text):
    assert read_value(text, "--arg x", plain_texts=True) == read_value(text, "--arg x")


@pytest.mark.parametrize(
    "text", ["[1, 2", "{r: ", "a: b: c", "*other", "!!python/name:os.system", "!!int x", "[" * 9999]
)
def test_what_is_no_yaml(text):
    with pytest.raises(UsageError, match="is no YAML") as raised:
        read_value(text, "--arg x")
    assert str(raised.value.at) == "--arg x" and "in quotes" in str(raised.value.fix)
    assert len(raised.value.what) < 300


@pytest.mark.parametrize(
    ("text", "shown"), [("\x1b[A", r"\x1b[A"), ("a\x7f", r"a\x7f"), ("\0", r"\x00"), ("\udc80", r"\udc80")]
)
def test_characters_that_yaml_does_not_allow_are_written_out(text, shown):
    with pytest.raises(UsageError) as raised:
        read_value(text, f"--arg a.b={text}")
    assert raised.value.what == f"{shown} is no YAML: special characters are not allowed."
    assert str(raised.value.at) == f"--arg a.b={shown}"
    assert read_value(r'"\x1b[A"', "--arg a.b") == "\x1b[A" and r'"\x1b[A"' in str(raised.value.fix)
    with pytest.raises(PlanError, match="special characters"):
        compose_value(text, "--set x", PlanError)


def test_a_node_knows_what_it_is_called_and_its_error_is_of_the_kind_asked_for():
    assert compose_value("{a: 1}", "--set x").start_mark.name == "--set x"
    assert compose_value("", "--set x").tag.endswith(":null")
    with pytest.raises(PlanError, match="is no YAML"):
        compose_value("[", "--set x", PlanError)
