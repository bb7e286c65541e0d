"""Puts messages behind tokens that were sampled: what the chat template adds after an answer, and nothing before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ..errors import ModelError

_ANSWER = "FLOWRLANSWER"
_LONGEST = 60  # characters of a rendered text in a message

_NOTHING: Mapping[str, Any] = MappingProxyType({})

Messages = Sequence[Mapping[str, Any]]


def ids_behind(
    messages: Messages, tokenizer: Any, *, last: int | None, more: Mapping[str, Any] = _NOTHING
) -> list[int]:
    """The ids that follow an answer where these messages come after it, up to the beginning of the next answer.

    ``last`` is the answer's last id, or None; where it is the token that ends a turn, that token is not written again.
    The answer itself is not rendered: its ids stay as they were sampled. Without a chat template the texts follow as
    they are. ``more`` are tools and arguments of the template
    (:func:`~flowrl.data.template_arguments.template_arguments`). Raises ModelError for a template that refuses such
    messages, or that rewrites the answer.
    """
    if not has_template(tokenizer):
        return tokenizer.encode("".join(str(m.get("content") or "") for m in messages), add_special_tokens=False)
    ids = tokenizer.encode(_text_behind(messages, tokenizer, more), add_special_tokens=False)
    return ids[1:] if ids and ids[0] == last else ids


def has_template(tokenizer: Any) -> bool:
    """Whether a tokenizer has a chat template."""
    return getattr(tokenizer, "chat_template", None) is not None


def title_of(tokenizer: Any) -> str:
    """What a tokenizer is called in a message."""
    return getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__


def forgotten_text(following: Messages, tokenizer: Any, more: Mapping[str, Any] = _NOTHING) -> str:
    """What a chat template leaves out of answers, or changes in them, where these messages follow; in words.

    Each of ``following`` comes behind an answer that thinks in ``<think>`` first, and another answer comes behind it.
    An answer that is not rendered as it is, and a rendering that does not begin with the one before it, up to the end
    of its last answer, show the policy another conversation than the one that it had. The text names the turn, what
    was there and what is there then. It is empty where nothing changes, and for conversations that are refused.
    """
    messages: list[Mapping[str, Any]] = [{"role": "user", "content": "Question."}]
    before = ""
    for turn, message in enumerate([*following, None], start=1):
        said = f"<think>\nThought {turn}.\n</think>\n\nAnswer {turn}."
        try:
            asked = _rendered(messages, tokenizer, more)
            text = _rendered([*messages, {"role": "assistant", "content": said}], tokenizer, more, answer=False)
        except Exception:  # of jinja, or raised by the template: :func:`ids_behind` tells of messages that are refused
            return ""
        if not text.startswith(before):
            return _difference(before, text, following[turn - 2])
        if message is not None:
            if said not in text:
                return f"turn {turn} has {_cut(text[_parting(asked, text) :])!r} where the answer is {_cut(said)!r}"
            before = text[: text.rindex(said) + len(said)]
            messages += [{"role": "assistant", "content": said}, message]
    return ""


def _difference(before: str, after: str, message: Mapping[str, Any]) -> str:
    """Where two renderings of a conversation part, and after which message."""
    at, turn = _parting(before, after), 1
    while f"Answer {turn}." in before[:at]:
        turn += 1
    return (
        f"once a message of {message['role']} follows, turn {turn} has {_cut(after[at:])!r} "
        f"where it had {_cut(before[at:])!r}"
    )


def _parting(one: str, other: str) -> int:
    """The first character in which two texts differ."""
    apart = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(apart, min(len(one), len(other)))


def _text_behind(messages: Messages, tokenizer: Any, more: Mapping[str, Any]) -> str:
    before: list[Mapping[str, Any]] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
    try:
        text = _rendered([*before, *messages], tokenizer, more)
    except Exception as error:  # of jinja, or raised by the template
        roles = ", ".join(str(m.get("role")) for m in messages)
        raise ModelError(
            f"The chat template of {title_of(tokenizer)} refuses messages of {roles} after an answer: {error}.",
            fix="Reply with roles that it knows, or give the tokenizer another chat_template.",
        ) from error
    if text.count(_ANSWER) != 1:
        has = _in_its_place(text, tokenizer, more)
        raise ModelError(
            f"The chat template of {title_of(tokenizer)} writes an answer anew once messages follow it, so that no "
            f"turn can go on from its tokens: turn 1 has {has!r} where the answer is {_ANSWER!r}.",
            fix="Give the tokenizer a chat_template that keeps what the assistant said.",
        )
    return text.split(_ANSWER)[1]


def _in_its_place(text: str, tokenizer: Any, more: Mapping[str, Any]) -> str:
    """What a rendered conversation has where the first answer should be."""
    try:
        asked = _rendered([{"role": "user", "content": "x"}], tokenizer, more)
    except Exception:
        asked = ""
    return _cut(text[_parting(asked, text) :])


def _rendered(messages: Messages, tokenizer: Any, more: Mapping[str, Any], *, answer: bool = True) -> str:
    how = {**more, "tokenize": False, "add_generation_prompt": answer}
    return tokenizer.apply_chat_template(list(messages), **how)


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
