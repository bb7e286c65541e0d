"""What follows an answer in a conversation: the messages of a reply, and what a tool gave as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]


class Replied(str):
    """An observation: the messages that follow an answer, and their texts as one. Without text they are there too."""

    messages: Sequence[Message]

    def __bool__(self) -> bool:
        return True

    @staticmethod
    def of(messages: Sequence[Message]) -> Replied:
        """From the messages of one turn."""
        made = Replied("\n".join(str(message.get("content") or "") for message in messages))
        made.messages = messages
        return made


def messages_of(said: Any) -> list[Message]:
    """A reply as messages. Raises TypeError for another thing, and ValueError for a message of the assistant."""
    if said is None:
        return []
    several = [{"role": "user", "content": said}] if isinstance(said, str) else said
    several = [several] if isinstance(several, Mapping) else several
    if not isinstance(several, (list, tuple)) or not all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in several
    ):
        raise TypeError(f"respond returned {said!r}; it gives a text, a message, a list of messages, or None")
    if any(message["role"] == "assistant" for message in several):
        raise ValueError("respond returned a message of the assistant, which only the policy speaks for")
    return [dict(message) for message in several]


def text_of(given: Any) -> str:
    """What a tool gave, as text."""
    if isinstance(given, str):
        return given
    try:
        return json.dumps(given, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(given)
