"""What the gap doctor tries of chat templates: each of a template's own arguments, as somebody else may have given it."""

from __future__ import annotations

from letters import build_tokenizer

from flowrl.backends.hf.gap_doctor.gap_causes import _rendered

TEXTS = ["ab", "c"]


def tried(template):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    found = {what.removeprefix("the chat template "): prompts for what, prompts in _rendered(tokenizer, TEXTS)}
    return {what: [tokenizer.decode(ids).replace(" ", "") for ids in prompts] for what, prompts in found.items()}


def test_a_template_without_arguments_has_none_to_try():
    assert [*tried("{{ messages[0].content }}{{ bos_token }}")] == [
        "the text of the prompt as it is",
        "with the beginning of an answer",
        "without the beginning of an answer",
    ]


def test_switches_and_efforts_are_tried():
    found = tried("{{ messages[0].content }}{{ 'd' if enable_thinking is false else 'e' }}{{ reasoning_effort }}")
    assert found["with enable_thinking=False"] == ["abd", "cd"] and found["with enable_thinking=True"] == ["abe", "ce"]
    assert [what for what in found if "effort" in what] == [
        f"with reasoning_effort={value!r}" for value in ("low", "medium", "high")
    ]


def test_a_value_that_the_template_cannot_take_is_left_out():
    """And one that needs an argument is tried with it alone."""
    assert not any("name" in what for what in tried("{{ messages[0].content }}{{ 'd' + name if name is defined }}"))
    needs = "{{ messages[0].content }}{{ effort[:1] }}"
    assert [what for what in tried(needs) if "answer" in what] == [] and len(tried(needs)) == 4
