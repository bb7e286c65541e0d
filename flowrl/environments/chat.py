"""Puts messages behind tokens that were sampled: what the chat template adds after an answer, and nothing before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ModelError

_ANSWER = "FLOWRLANSWER"


def ids_behind(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    last: int | None,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """The ids that follow an answer where these messages come after it, up to the beginning of the next answer.

    ``last`` is the answer's last id, or None; where it is the token that ends a turn, that token is not written again.
    The answer itself is not rendered: its ids stay as they were sampled. Without a chat template the texts follow as
    they are. Raises ModelError for a template that refuses such messages, or that rewrites the answer.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return tokenizer.encode("".join(str(m.get("content") or "") for m in messages), add_special_tokens=False)
    ids = tokenizer.encode(_text_behind(messages, tokenizer, tools), add_special_tokens=False)
    return ids[1:] if ids and ids[0] == last else ids


def _text_behind(messages: Sequence[Mapping[str, Any]], tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
    more = {"tools": list(tools)} if tools else {}
    title = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    try:
        text = tokenizer.apply_chat_template([*before, *messages], tokenize=False, add_generation_prompt=True, **more)
    except Exception as error:  # of jinja, or raised by the template
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise ModelError(
            f"The chat template of {title} refuses messages of {roles} after an answer: {error}.",
            fix="Reply with roles that it knows, or give the tokenizer another chat_template.",
        ) from error
    if text.count(_ANSWER) != 1:
        raise ModelError(
            f"The chat template of {title} writes an answer anew once messages follow it, so that no turn can go on "
            "from its tokens.",
            fix="Give the tokenizer a chat_template that keeps what the assistant said.",
        )
    return text.split(_ANSWER)[1]
