"""A conversation to learn from: its tokens, and which of them the assistant said."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import At, DataError
from .surrogates import half_error, half_of_pair
from .template_arguments import named, template_of

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ANSWERS = "Write a conversation as messages of user and assistant by turns, with an answer of the assistant."
_MARK = "Put {% generation %} and {% endgeneration %} around what the assistant says in the template"


@dataclass(frozen=True)
class Conversation:
    """The tokens of one: ``prompt`` up to the first answer, then the response, with the assistant's tokens in ``mask``.

    ``text`` is that of the prompt.
    """

    text: str
    prompt: list[int]
    response: list[int]
    mask: list[bool]


def read_conversation(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, at: At, more: Mapping[str, Any] | None = None
) -> Conversation:
    """Put a conversation through the tokenizer's chat template, and find what the assistant said.

    ``more`` are tools and arguments of the template (:func:`~flowrl.data.template_arguments.template_arguments`).

    A template that marks it (``{% generation %}``) is believed. Else it is what each answer adds to the text of the
    messages before it and the beginning of an answer; what follows the end-of-turn token of an answer is not trained.
    An answer without such a token is followed by the end-of-sequence token, where the conversation ends with it.
    DataError for a conversation without an answer, and for a template that writes the past anew.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers or not answers[0]:
        what = "begins with an answer" if answers else "has no message of the assistant to learn from"
        raise DataError(f"A conversation {what}.", at=at, fix=_ANSWERS)
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"{named(tokenizer)} does not say where in a text its tokens are.", at=at, fix="Use a fast tokenizer."
        )
    if _MARKED.search(_template(tokenizer, at, more)):
        ids, mask = _marked(messages, tokenizer, at, more)
    else:
        ids, mask = _by_difference(messages, answers, tokenizer, at, more)
    first = mask.index(True)
    text = tokenizer.decode(ids[:first], clean_up_tokenization_spaces=False)
    return Conversation(text, ids[:first], ids[first:], mask[first:])


def templated(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    at: At,
    *,
    answer: bool,
    more: Mapping[str, Any] | None = None,
) -> str:
    """The text that the chat template makes of messages, with the beginning of an ``answer`` if asked for.

    ``more`` are tools and arguments of the template (:func:`~flowrl.data.template_arguments.template_arguments`).
    """
    _template(tokenizer, at, more)
    how = {**(more or {}), "tokenize": False, "add_generation_prompt": answer}
    try:
        return tokenizer.apply_chat_template(list(messages), **how)
    except Exception as error:
        what = f"The chat template refuses these messages: {error}."
        raise DataError(what, at=at, fix="Give the messages in the order and roles that it takes.") from error


def _template(tokenizer: Any, at: At, more: Mapping[str, Any] | None) -> str:
    """The chat template of a tokenizer. DataError where it has none."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            "The prompts are chats, and the tokenizer has no chat template.",
            at=at,
            fix="Give tokenizer= that of an instruction-tuned model, or plain text and chat=False.",
        )
    return template_of(tokenizer, (more or {}).get("tools"))


def _marked(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, at: At, more: Mapping[str, Any] | None
) -> tuple[list[int], list[bool]]:
    """Tokens, and which of them the template marks as the assistant's."""
    templated(messages, tokenizer, at, answer=False, more=more)  # says what the template refuses
    how = {**(more or {}), "tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
    found = tokenizer.apply_chat_template(list(messages), **how)
    mask = [bool(m) for m in found["assistant_masks"]]
    if not any(mask):
        raise DataError(
            f"The chat template of {named(tokenizer)} marks no token of a conversation as the assistant's.",
            at=at,
            fix=f"{_MARK}.",
        )
    return list(found["input_ids"]), mask


def _by_difference(
    messages: Sequence[Mapping[str, Any]],
    answers: Sequence[int],
    tokenizer: Any,
    at: At,
    more: Mapping[str, Any] | None,
) -> tuple[list[int], list[bool]]:
    """Tokens, and which of them answers add to what comes before them."""
    whole = templated(messages, tokenizer, at, answer=False, more=more)
    spans: list[tuple[int, int]] = []
    for i in answers:
        before = templated(messages[:i], tokenizer, at, answer=True, more=more)
        after = templated(messages[: i + 1], tokenizer, at, answer=False, more=more)
        if not after.startswith(before) or not whole.startswith(after):
            raise _rewritten(tokenizer, i, len(messages), past=after.startswith(before), at=at)
        spans.append((len(before), len(after)))
    if (half := half_of_pair(whole)) is not None:
        raise half_error("A conversation", whole, half, at)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids, starts = list(encoded["input_ids"]), [start for start, _ in encoded["offset_mapping"]]
    mask, ends = [False] * len(ids), frozenset(tokenizer.all_special_ids)
    for low, high in spans:
        inside = [i for i, start in enumerate(starts) if low <= start < high]
        stops = [i for i in inside if ids[i] in ends]
        for i in inside:
            mask[i] = not stops or i <= stops[-1]
        if not stops and answers[-1] == len(messages) - 1 and (low, high) == spans[-1]:
            ids, mask = _ended(ids, mask, tokenizer)
    if not any(mask):
        raise DataError("All answers of a conversation are empty.", at=at, fix=_ANSWERS)
    return ids, mask


def _ended(ids: list[int], mask: list[bool], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """With the end-of-sequence token behind the last answer, to be learned too."""
    end = tokenizer.eos_token_id
    if end is None:
        raise DataError("The tokenizer has no end-of-sequence token.", fix="Set its eos_token.")
    return [*ids, end], [*mask, True]


def _rewritten(tokenizer: Any, number: int, count: int, *, past: bool, at: At) -> DataError:
    """What is said of a template whose text of some messages is not the beginning of its text of more."""
    if past:
        what = f"what it makes of messages 1 to {number + 1} is not the beginning of what it makes of all {count}"
    else:
        what = f"the beginning of an answer that it writes for sampling is not that of message {number + 1}"
    return DataError(
        f"The chat template of {named(tokenizer)} does not keep what it wrote: {what}.",
        at=at,
        fix=f"{_MARK}, or learn from conversations with one answer, at the end." if past else f"{_MARK}.",
    )
