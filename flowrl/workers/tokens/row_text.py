"""The text of rows in the tokens of another model: prompt and response, decoded, through that model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...batch import Column
from ...data.conversations import templated
from ...data.prompts import encode
from ...data.template_arguments import check_read, wrong_arguments
from ...errors import At, DataError, FieldError, ModelError, ProgramError
from ...graph.ops.signature import CallShape
from ...marks import values
from .packed_tokens import pack
from .prompt_template import decoded

if TYPE_CHECKING:
    from ...batch import Batch

Message = Mapping[str, Any]


def text_columns(shape: CallShape) -> str:
    """What a call that reads the text of rows reads: the conversation of an episode, else prompt and response.

    Raises ProgramError for what is for chats without one, FieldError for episodes that did not keep their conversation.
    """
    chat = shape.call.get("chat", True)
    for name in ("system", "chat_template_kwargs"):
        if shape.call.get(name) is not None and not chat:
            raise ProgramError(f"{name}= is for chats, and chat=False is plain text.", fix="Leave out one of the two.")
    if wrong := wrong_arguments(shape.call.get("chat_template_kwargs")):
        raise ProgramError(f"score_text: {wrong[0]}", fix=wrong[1])
    if chat and "conversation" in shape.have:
        return "conversation"
    if "turn_ids" in shape.have:
        raise FieldError(
            "score_text reads episodes, whose response is what was sampled and what was observed, one after the other.",
            fix="Keep their messages, rollout(..., messages=True), and score these: chat=True.",
        )
    return f"{'messages' if chat and 'messages' in shape.have else 'prompt'}, response_ids"


def read_text(
    batch: Batch,
    *,
    chat: bool,
    system: str | None,
    more: Mapping[str, Any],
    reader: Any,
    writer: Callable[[], Any],
    title: str,
) -> list[list[int]]:
    """The token ids of every row's text in the vocabulary of ``reader``.

    As a ``chat``: the messages of the row, without a system message that its source has put before them, else its
    prompt as those of a user, and its response as the assistant's, in the chat template of ``reader``, without the
    beginning of another answer. Else prompt and response as one text, with what ``reader`` puts around a text.
    ``writer`` gives the tokenizer of ``response_ids``, where they are read, and ``more`` are arguments of the template.

    Raises ModelError for response ids of another tokenizer, for a chat without a template, and for an argument that the
    template never reads; DataError, with the row,
    for messages that the template refuses, and for a row whose messages end with an answer already.
    """
    if not len(batch):
        return []
    if not chat:
        answers = decoded(batch, "response_ids", writer(), title=title)
        texts = [f"{prompt}{answer}" for prompt, answer in zip(batch["prompt"].to_list(), answers, strict=True)]
        return encode(texts, reader, special=True, at=lambda i: _at(batch, i))
    if getattr(reader, "chat_template", None) is None:
        raise ModelError(
            f"{title} reads chats, and the tokenizer of this model has no chat template.",
            fix="Write chat=False to read prompt and response as plain text, or give fl.Model(..., tokenizer=...) "
            "a tokenizer with the template that the model was trained with.",
        )
    check_read(more, reader)
    chats = _conversations(batch, writer, title)
    if system is not None:
        first = {"role": "system", "content": system}
        chats = [chat if chat and chat[0]["role"] == "system" else [first, *chat] for chat in chats]
    texts = [templated(chat, reader, _at(batch, i), answer=False, more=more) for i, chat in enumerate(chats)]
    return encode(texts, reader, special=False, at=lambda i: _at(batch, i))


def score_tokens(batch: Batch, ids: list[list[int]], *, padding: int | None, positions: int | None) -> Column:
    """``tokens`` i32[*token] of rows up to where they are scored: the last token that is not ``padding``.

    That is the token that transformers' classification models take, also where a chat template ends with the padding
    token. Raises DataError, with the row, for one without a token, or with more than the model has ``positions``.
    """
    for key, row in zip(batch.keys, ids, strict=True):
        while row and row[-1] == padding:
            row.pop()
        if not row:
            raise DataError(f"The text of row {key} has no token, so it has no score.", fix="Filter empty rows first.")
        if positions is not None and len(row) > positions:
            raise DataError(
                f"The text of row {key} has {len(row)} tokens in this model's vocabulary; the model has {positions} "
                "positions.",
                fix="Give max_tokens= or the data's max_prompt_tokens= fewer tokens, filter such rows first, or take a "
                "model with more positions. Nothing is cut.",
            )
    return pack(ids, "token")


def _conversations(batch: Batch, writer: Callable[[], Any], title: str) -> list[list[Message]]:
    """The messages of every row, its response the last one."""
    if "conversation" in batch.fields:
        return [list(messages) for messages in batch["conversation"].to_list()]
    answers = decoded(batch, "response_ids", writer(), title=title)
    if "messages" in batch.fields:
        added = [*values(batch["messages"].marks, "system")]  # for the policy
        asked: list[Sequence[Message]] = [_without(messages, added) for messages in batch["messages"].to_list()]
        for i, messages in enumerate(asked):
            if messages and messages[-1]["role"] == "assistant":
                raise DataError(
                    f"{title} puts the response behind 'messages', and those of a row end with an answer already.",
                    at=_at(batch, i),
                    fix='Leave the column out, batch.drop("messages"), where the prompt of the row is its text.',
                )
    else:
        asked = [[{"role": "user", "content": prompt}] for prompt in batch["prompt"].to_list()]
    said = zip(asked, answers, strict=True)
    return [[*messages, {"role": "assistant", "content": answer}] for messages, answer in said]


def _without(messages: Sequence[Message], added: Sequence[str]) -> Sequence[Message]:
    """Messages without a system message whose text is among ``added``."""
    first = messages[0] if messages else {"role": ""}
    return messages[1:] if first["role"] == "system" and first["content"] in added else messages


def _at(batch: Batch, number: int) -> At:
    return At(f"<row {batch.keys[number]}>", 0)
