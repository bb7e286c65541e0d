"""What a chat template is given beside messages: tools, and arguments of its own, which it has to read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, cast

from ..errors import FlowError, ModelError, did_you_mean

FORM = 'chat_template_kwargs={"enable_thinking": False}'
_PROMPT = "Leave it out: a prompt ends where the answer begins, and a conversation to learn from with its last message."
_TOKENS = "Leave it out: flowrl makes the tokens itself, of the text of the template."
_LENGTH = "Leave it out, and write max_prompt_tokens= of the data."
_MESSAGES = "Leave it out: the messages are those of the data."
#: What is said of the parameters of ``apply_chat_template`` (transformers) that are none of the template's own.
RESERVED: Mapping[str, str] = {
    "conversation": _MESSAGES,
    "messages": _MESSAGES,
    "tools": "Give the schemas as tools= of the data, functions as tools of an environment.",
    "chat_template": "Leave it out, and give tokenizer= a function that sets tokenizer.chat_template.",
    "add_generation_prompt": _PROMPT,
    "continue_final_message": _PROMPT,
    "max_length": _LENGTH,
    "truncation": _LENGTH,
    **dict.fromkeys(("tokenize", "padding", "sanitize_control_tokens", "tokenizer_kwargs"), _TOKENS),
    **dict.fromkeys(("return_tensors", "return_dict", "return_assistant_tokens_mask"), _TOKENS),
}
#: Names that transformers gives to every template.
_OWN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
_FUNCTIONS = ("raise_exception", "strftime_now")


def template_arguments(tools: Sequence[Any] | None, chat_template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what ``apply_chat_template`` is given beside messages; without tools it is given none.

    >>> template_arguments([], {"enable_thinking": False})
    {'enable_thinking': False}
    """
    return {**(chat_template_kwargs or {}), **({"tools": list(tools)} if tools else {})}


def wrong_arguments(given: Any) -> tuple[str, str] | None:
    """Return what is wrong with ``chat_template_kwargs``, and the fix; None where a template may be given them.

    >>> wrong_arguments({"enable_thinking": False})
    >>> wrong_arguments({"tokenize": True})[0]
    "chat_template_kwargs has 'tokenize', which is no argument of the template."
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        return f"chat_template_kwargs={given!r} is no dict.", f"Write {FORM}."
    for name, value in cast("Mapping[Any, Any]", given).items():
        if not isinstance(name, str) or not name.isidentifier():
            return f"chat_template_kwargs has the key {name!r}.", f"Give each argument by its name: {FORM}."
        if name in RESERVED:
            return f"chat_template_kwargs has '{name}', which is no argument of the template.", RESERVED[name]
        if problem := _no_json(value):
            fix = "Give plain JSON: texts, finite numbers, True, False, None, and a list or dict of these."
            return f"chat_template_kwargs: '{name}' {problem}, which is no plain JSON.", fix
    return None


def check_read(more: Mapping[str, Any], tokenizer: Any, kind: type[FlowError] = ModelError) -> None:
    """Raise ``kind`` for an argument that the chat template never reads: transformers passes it over without a word.

    ``more`` is of :func:`template_arguments`; whether tools are read is not looked at.
    """
    given = [name for name in more if name != "tools"]
    if not given:
        return
    if getattr(tokenizer, "chat_template", None) is None:
        what = f"{named(tokenizer)} has no chat template, which chat_template_kwargs are for."
        raise kind(what, fix="Leave them out, or take the tokenizer of an instruction-tuned model.")
    read = template_variables(tokenizer, more.get("tools"))
    unread = None if read is None else next((name for name in given if name not in read), None)
    if read is None or unread is None:
        return
    known = own_arguments(read)
    raise kind(
        f"The chat template of {named(tokenizer)} reads no '{unread}', which chat_template_kwargs gives.",
        have=known,
        fix=did_you_mean(unread, known, "Leave it out: it is never read."),
    )


def own_arguments(read: Iterable[str]) -> list[str]:
    """Return the names among those that a template reads that are arguments of its own.

    >>> own_arguments(["messages", "enable_thinking", "bos_token"])
    ['enable_thinking']
    """
    return sorted(name for name in read if name not in _OWN and not name.endswith("_token"))


def template_variables(tokenizer: Any, tools: Sequence[Any] | None = None) -> frozenset[str] | None:
    """Return the names that a tokenizer's chat template looks up, those of messages and tools among them.

    None where it cannot be told: Jinja does not read the template, or the tokenizer does not know which of several it
    takes.
    """
    try:
        return _variables(template_of(tokenizer, tools))
    except ValueError:  # of transformers: there are several, and no default
        return None


def template_of(tokenizer: Any, tools: Sequence[Any] | None = None) -> str:
    """Return the chat template of a tokenizer; of several that for prompts with tools, or the default."""
    found: Any = tokenizer.chat_template
    return found if isinstance(found, str) else str(tokenizer.get_chat_template(tools=tools or None))


def named(tokenizer: Any) -> str:
    """Return the name of a tokenizer, or its class where it has none."""
    name = str(getattr(tokenizer, "name_or_path", "") or "")
    return f"'{name}'" if name else type(tokenizer).__name__


@lru_cache(maxsize=64)
def _variables(template: str) -> frozenset[str] | None:
    from jinja2 import Environment, TemplateSyntaxError, meta
    from jinja2.ext import Extension, loopcontrols

    class Generation(Extension):
        """The tag of transformers around what the assistant says."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja has it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=[Generation, loopcontrols])  # it renders nothing
    try:
        found = meta.find_undeclared_variables(environment.parse(template))
    except TemplateSyntaxError:  # whoever renders it says so
        return None
    return frozenset(found - environment.globals.keys() - {*_FUNCTIONS})


def _no_json(value: Any) -> str:
    """What is not plain JSON in a value; empty where all is."""
    if value is None or isinstance(value, (str, bool, int)):
        return ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"is {value}"
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value)
        wrong = next((f"has the key {key!r}" for key in entries if not isinstance(key, str)), "")
        return wrong or next(filter(None, map(_no_json, entries.values())), "")
    if isinstance(value, list):
        return next(filter(None, map(_no_json, cast("list[Any]", value))), "")
    return f"is of {type(value).__name__}"
