"""Prompts that are written of the columns of a batch: a text with names in braces, filled in row by row."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import TYPE_CHECKING, Any

from ...batch import Column
from ...data.conversations import templated
from ...data.prompts import encode
from ...data.template_arguments import check_read, wrong_arguments
from ...errors import At, FieldError, ModelError, ProgramError, did_you_mean
from ...graph.ops.field_types import STANDARD
from ...graph.ops.signature import CallShape
from ...marks import marks, other_ids, values, vocabulary
from .packed_tokens import pack

if TYPE_CHECKING:
    from ...batch import Batch

#: The names that stand for text made of token ids, and the fields that have them.
DECODED = {"prompt": "prompt_ids", "response": "response_ids"}


def asked_columns(shape: CallShape) -> str:
    """What a call of ``ask`` reads, by the names in its text.

    Raises ProgramError for a text that cannot be filled, FieldError for a name that is no column.
    """
    for name in ("system", "chat_template_kwargs"):
        if shape.call.get(name) is not None and not shape.call.get("chat"):
            raise ProgramError(f"{name}= is for chats, and this is plain text.", fix="Add chat=True.")
    if wrong := wrong_arguments(shape.call.get("chat_template_kwargs")):
        raise ProgramError(f"ask: {wrong[0]}", fix=wrong[1])
    names = _names(shape.call["template"])
    for name in names:
        if name not in shape.have and name not in DECODED:
            texts = sorted({*DECODED, *shape.have} - set(STANDARD))  # what a text may be made of
            what = f"the text of ask reads '{name}', which no op before it adds."
            otherwise = "{prompt} is the text of the prompt, {response} that of the response; other names are columns."
            raise FieldError(what, have=texts, fix=did_you_mean(name, texts, otherwise))
    wanted = [_field(name, shape.have) for name in names]
    return ", ".join(dict.fromkeys(wanted))


def asked_fields(shape: CallShape) -> str:
    """What a call of ``ask`` adds: a chat has its messages besides."""
    return f"prompt: any, prompt_ids: i32[*prompt]{', messages: any' if shape.call.get('chat') else ''}"


def written(
    batch: Batch,
    template: str,
    *,
    chat: bool,
    system: str | None,
    more: Mapping[str, Any],
    reader: Any,
    writer: Any,
) -> Mapping[str, Any]:
    """``prompt`` (text) and ``prompt_ids`` of every row, in the tokens of ``reader``, and ``messages`` of a chat.

    These know their system message. ``writer`` is the tokenizer of the rows' own token ids, and ``more`` are arguments
    of the chat template. Raises FieldError for a column of other token ids, ModelError for an argument that the
    template never reads.
    """
    if not len(batch):  # of nothing, transformers makes one empty text
        nothing = Column.of([], dtype="any")
        return {"prompt": nothing, "prompt_ids": pack([], "prompt"), **({"messages": nothing} if chat else {})}
    columns: dict[str, Any] = {}
    for name in _names(template):
        field = _field(name, frozenset(batch.fields))
        column = batch[field]
        if field == DECODED.get(name):
            columns[name] = decoded(batch, field, writer, title="ask")
        elif column.lengths is not None:
            raise FieldError(
                f"ask: '{name}' is {column.type}, which is no text.",
                have=[n for n, c in batch.columns.items() if c.lengths is None],
                fix="Name a column with one value per row, or {prompt} and {response}.",
            )
        else:
            columns[name] = column.to_list()
    texts = [
        Formatter().vformat(template, (), dict(zip(columns, row, strict=True)))
        for row in zip(*columns.values(), strict=True)
    ]
    messages: dict[str, Column] = {}
    if chat:
        check_read(more, reader)
        first = [] if system is None else [{"role": "system", "content": system}]
        chats = [[*first, {"role": "user", "content": text}] for text in texts]
        messages["messages"] = Column.of(chats, dtype="any").marked(marks(system=system or ""))
        texts = [
            templated(said, reader, At(f"<row {key}>", 0), answer=True, more=more)
            for key, said in zip(batch.keys, chats, strict=True)
        ]
    ids = encode(texts, reader, special=not chat, at=lambda i: At(f"<row {batch.keys[i]}>", 0))
    empty = next((key for key, row in zip(batch.keys, ids, strict=True) if not row), None)
    if empty is not None:
        raise ModelError(f"ask: the prompt of row {empty} has no token.", fix="Give the text some words of its own.")
    return {"prompt": Column.of(texts, dtype="any"), "prompt_ids": pack(ids, "prompt"), **messages}


def decoded(batch: Batch, field: str, writer: Any, *, title: str) -> list[str]:
    """The text of each row's token ids in ``field``, which ``writer`` is the tokenizer of, without special tokens.

    Raises ModelError for ids that are known to be another tokenizer's; ``title`` names the call in it.
    """
    column = batch[field]
    if (own := vocabulary(writer)) and values(column.marks, "tokenizer") - {own}:
        raise other_ids(title, field)
    return writer.batch_decode(column.to_list(), skip_special_tokens=True)


def _field(name: str, have: frozenset[str]) -> str:
    """The field behind a name: the text of a prompt where there is one, else its tokens."""
    return name if name in have else DECODED.get(name, name)


def _names(template: str) -> list[str]:
    """The names in braces, each once."""
    try:
        names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ProgramError(f"ask: the text cannot be read: {error}.", fix="Write {{ and }} for braces.") from None
    wrong = next((name for name in names if not name.isidentifier()), None)
    if wrong is not None:
        raise ProgramError(
            f"ask: '{{{wrong}}}' in the text names no column.", fix="Write a column's name, and {{ and }} for braces."
        )
    if not names:
        raise ProgramError("ask: the text names no column, so every row would be asked the same.", fix=_FORM)
    return list(dict.fromkeys(names))


_FORM = 'Write judge.ask(batch, "Question: {prompt} Answer: {response} Is it right?").'
