"""What an agent asks for and is answered, whichever protocol it speaks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...data.template_arguments import wrong_arguments

_ROLES = ("system", "user", "assistant", "tool")
_MOST = 4096  # messages, tools, or calls in a message


class Refused(Exception):
    """A request that is not answered: ``Refused(400, "messages are missing")``, with the status of HTTP."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


@dataclass(frozen=True)
class Request:
    """A request as the policy takes it: ``Request([{"role": "user", "content": "1+1?"}])``.

    Messages and tools are those of chat templates, as are ``chat_template_kwargs``, arguments of the template.
    ``stop`` are texts that end the answer and are not a part of it.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    logprobs: bool = False
    model: str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Reply:
    """An answer: ``Reply("call-1", "2", (), "stop", 12, 1)``; ``reason`` is ``stop``, ``length`` or ``tool_calls``.

    ``stopped_by`` is the text of the request that has stopped it, if one has.
    """

    id: str
    content: str
    tool_calls: Sequence[Mapping[str, Any]]
    reason: str
    prompt_tokens: int
    sampled_tokens: int
    logprobs: Sequence[tuple[str, float]] = field(default=())
    stopped_by: str = ""

    @property
    def message(self) -> dict[str, Any]:
        """As it stands in the conversation."""
        return message_of("assistant", self.content, self.tool_calls)


def message_of(
    role: str, content: str, tool_calls: Sequence[Mapping[str, Any]] = (), name: str | None = None
) -> dict[str, Any]:
    """A message as chat templates take it. ``tool_calls`` have an ``id``, a ``name`` and ``arguments``."""
    found: dict[str, Any] = {"role": role, "content": content}
    if tool_calls:
        found["tool_calls"] = [
            {"type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in tool_calls
        ]
    if name is not None:
        found["name"] = name
    return found


def key_of(message: Mapping[str, Any]) -> str:
    """What two messages have in common that say the same: white space around a text does not count."""
    parts = [message["role"], message["content"].strip(), message.get("tool_calls", []), message.get("name")]
    return json.dumps(parts if message["role"] != "assistant" else parts[:3], sort_keys=True)


def read_body(body: bytes) -> dict[str, Any]:
    """The object of a request. Raises Refused."""
    try:
        found = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}"[:300]) from None
    if not isinstance(found, dict):
        raise Refused(400, "the body is no object")
    return found


def text(found: Any, what: str) -> str:
    """A text. Raises Refused."""
    if not isinstance(found, str):
        raise Refused(400, f"{what} is no text")
    try:
        found.encode()
    except UnicodeEncodeError:
        raise Refused(400, f"{what} has half of a surrogate pair") from None
    return found


def listed(found: Any, what: str) -> list[Any]:
    """A list that is not too long. Raises Refused."""
    if not isinstance(found, list):
        raise Refused(400, f"{what} is no list")
    if len(found) > _MOST:
        raise Refused(400, f"{what} has more than {_MOST} entries")
    return found


def entry(found: Any, what: str) -> dict[str, Any]:
    """An object. Raises Refused."""
    if not isinstance(found, dict):
        raise Refused(400, f"{what} is no object")
    return found


def template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the chat template that a request gives, as it does to vLLM and SGLang. Raises Refused."""
    found = entry(body.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    if wrong := wrong_arguments(found):
        raise Refused(400, " ".join(wrong))
    return found


def role(found: Any) -> str:
    """A role. Raises Refused."""
    known = "system" if found == "developer" else found
    if known not in _ROLES:
        raise Refused(400, f"the role {found!r:.50} is none of {', '.join(_ROLES)}")
    return known


def texts_of(content: Any, what: str) -> str:
    """The text of a content that is a text or a list of parts with text. Raises Refused."""
    if content is None:
        return ""
    if isinstance(content, str):
        return text(content, what)
    found: list[str] = []
    for part in listed(content, what):
        kind = entry(part, f"a part of {what}").get("type")
        if kind not in ("text", "input_text", "output_text"):
            raise Refused(400, f"a part of {what} is {kind!r:.50}, and the policy reads text alone")
        found.append(text(part.get("text"), f"a part of {what}"))
    return "\n".join(found)


def whole(found: Any, what: str) -> int | None:
    """A whole number above 0, or None. Raises Refused."""
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise Refused(400, f"{what} is no whole number above 0")
    return found


def flag(found: Any, what: str) -> bool:
    """True or false; None is false. Raises Refused."""
    if found is not None and not isinstance(found, bool):
        raise Refused(400, f"{what} is neither true nor false")
    return bool(found)


def stops(found: Any, what: str) -> tuple[str, ...]:
    """Texts that end an answer. Raises Refused."""
    several = [found] if isinstance(found, str) else listed(found or [], what)
    made = tuple(text(one, what) for one in several)
    if len(made) > 16 or any(not one or len(one) > 1000 for one in made):
        raise Refused(400, f"{what} are more than 16 texts, or one is empty or too long")
    return made


def arguments_of(found: Any, what: str) -> Any:
    """The arguments of a call: an object, also as a text of JSON; a text that is none stays one. Raises Refused."""
    if not isinstance(found, str):
        return entry(found, what)
    try:
        return json.loads(text(found, what) or "{}", parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return found


def conversation(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Messages that can be answered. Raises Refused."""
    if not messages:
        raise Refused(400, "there are no messages")
    if messages[-1]["role"] == "assistant":
        raise Refused(400, "the last message is one of the assistant, and an answer cannot be begun for it")
    return messages


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
