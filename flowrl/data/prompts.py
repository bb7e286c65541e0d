"""How rows of data become a batch: text or messages through the tokenizer, the other columns as they are."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..batch import Batch, Column
from ..errors import At, DataError, near
from ..marks import IDS, Marks, marks, vocabulary
from .conversations import read_conversation, templated
from .documents import cut_documents
from .surrogates import half_error, half_of_pair
from .template_arguments import check_read, template_arguments

if TYPE_CHECKING:
    from .source import Reading
    from .stores import Row

_log = logging.getLogger("flowrl.data")
_SUPERVISED = ("response_ids", "tokens", "response_mask")
_PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Prompts:
    """How the rows of one source are read.

    ``made`` are the fields that reading adds, ``kept`` the columns that stay as they are. ``messages``: prompts of
    this source are lists of messages.
    """

    reading: Reading
    made: tuple[str, ...]
    kept: tuple[str, ...]
    messages: bool

    @staticmethod
    def of(reading: Reading, columns: Mapping[str, bool], *, title: str) -> Prompts:
        """For data with these columns (by name: whether they hold lists). DataError for one that is not there."""
        whole = "text" if reading.text else "messages" if reading.messages else None
        for option in (whole,) if whole else ("prompt", "response", "rejected"):
            _check_column(
                getattr(reading, option), columns, f"{title} has no column '{{}}', which is its {option}.", option
            )
        for name in reading.columns or ():
            _check_column(name, columns, f"{title} has no column '{{}}'.", "columns")
        messages = columns[reading.column] and not reading.text
        if reading.messages and not messages:
            raise DataError(
                f"The column '{reading.messages}' of {title} holds no lists, and messages= names one of conversations.",
                fix='Write a conversation as [{"role": "user", "content": "..."}, {"role": "assistant", ...}].',
            )
        if reading.system is not None and not (reading.chat or messages):
            raise DataError("system= is for chats, and the prompts are plain text.", fix="Add chat=True.")
        for option in ("tools", "chat_template_kwargs"):
            if getattr(reading, option) is not None and not (reading.chat or messages):
                raise DataError(f"{option}= is for chats, and the prompts are plain text.", fix="Add chat=True.")
        supervised = _SUPERVISED if reading.response or whole else ()
        learned = (*supervised, *(["preferred"] if reading.rejected else ()))
        made = ("prompt", "prompt_ids", *learned, *(["messages"] if messages else ()))
        packed = reading.text is not None and reading.pack
        wanted = (() if packed else list(columns)) if reading.columns is None else reading.columns
        kept = tuple(name for name in wanted if name != reading.column)
        taken = next((name for name in kept if name in made), None)
        if taken is not None:
            others = [n for n in kept if n != taken]
            raise DataError(
                f"{title}: the column '{taken}' has the name of a field that reading the data adds.",
                fix=f"Rename it, or leave it out with columns={others}.",
            )
        return Prompts(reading, made, kept, messages)

    def batch(self, rows: Sequence[Row], uids: Sequence[int], tokenizer: Any, *, at: Callable[[int], At]) -> Batch:
        """Rows as a batch; row i has the key (uids[i],).

        Its ids know the tokenizer that made them, and its messages the system message of the source.
        """
        if tokenizer is None:
            raise DataError("There is no tokenizer for the prompts.", fix="Give the source tokenizer=.")
        made, ids = self._read(rows, uids, tokenizer, at=at), marks(tokenizer=vocabulary(tokenizer))
        known: dict[str, Marks] = {name: ids for name in IDS}
        if self.messages:
            known["messages"] = marks(system=self.reading.system or "")
        return Batch(made.keys, {n: c.marked(known.get(n, c.marks)) for n, c in made.columns.items()}, made.call)

    def _read(self, rows: Sequence[Row], uids: Sequence[int], tokenizer: Any, *, at: Callable[[int], At]) -> Batch:
        for row in rows:
            lacking = next((name for name in self.reading.columns or () if name not in row), None)
            if lacking is not None:
                what = f"A row has no column '{lacking}', which columns= names."
                raise DataError(what, at=at(row.index), have=row, fix="Add it to the row; null is a value, too.")
        if self.reading.text:
            return self._documents(rows, uids, tokenizer, at)
        if self.reading.messages:
            return self._conversations(rows, uids, tokenizer, at)
        if self.chat:
            chats = [self._chat(row, at) for row in rows]
            more = self._more
            texts = [
                templated(c, tokenizer, at(row.index), answer=True, more=more)
                for c, row in zip(chats, rows, strict=True)
            ]
        else:
            chats, texts = [], [self._value(row, at, str) for row in rows]
        ids = encode(texts, tokenizer, special=not self.chat, at=lambda i: at(rows[i].index))
        kept = self._fitting(rows, ids, at)
        rows, ids = [rows[i] for i in kept], [ids[i] for i in kept]
        values = [row[self.reading.prompt] for row in rows]
        columns: dict[str, list[Any]] = {}
        columns["prompt"] = [v if isinstance(v, str) else texts[i] for v, i in zip(values, kept, strict=True)]
        if self.messages:
            columns["messages"] = [chats[i] for i in kept]
        batch = self._batch([(uids[i],) for i in kept], rows, columns, ids, at)
        if self.reading.response is None:
            return batch
        if self.reading.rejected is None:
            texts = self._texts(rows, (self.reading.response,), at)
            return batch.with_columns(_supervised(texts, ids, tokenizer, lambda i: at(rows[i].index)))
        texts = self._texts(rows, (self.reading.response, self.reading.rejected), at)
        twice = [prompt for prompt in ids for _ in range(2)]
        preferred = Column.of([True, False] * len(ids), dtype="bool")
        return batch.expand(2).with_columns(
            {**_supervised(texts, twice, tokenizer, lambda i: at(rows[i // 2].index)), "preferred": preferred}
        )

    def _batch(
        self,
        keys: Sequence[tuple[int, ...]],
        rows: Sequence[Row],
        columns: dict[str, list[Any]],
        ids: list[list[int]],
        at: Callable[[int], At],
    ) -> Batch:
        """Rows with their prompts' tokens, the given columns and those that are kept as they are."""
        kept = {name: [_plain(row.get(name), name, row, at) for row in rows] for name in self.kept}
        objects = {name: Column.of(values, dtype="any") for name, values in {**columns, **kept}.items()}
        return Batch(keys, objects | {"prompt_ids": Column.of(ids, dim="prompt", dtype="i32")})

    def _documents(self, rows: Sequence[Row], uids: Sequence[int], tokenizer: Any, at: Callable[[int], At]) -> Batch:
        """Documents in rows of a bounded length, all tokens but the first of a row to be learned."""
        assert self.reading.length is not None, "text= comes with length="
        end = end_of(tokenizer)
        begin = end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        texts = [self._value(row, at, str) for row in rows]
        encoded = encode(texts, tokenizer, special=False, at=lambda i: at(rows[i].index))
        documents = [ids if ids[-1:] == [end] else [*ids, end] for ids in encoded]
        pieces = cut_documents(documents, begin=begin, length=self.reading.length, pack=self.reading.pack)
        prompts, responses = [p.tokens[:1] for p in pieces], [p.tokens[1:] for p in pieces]
        keys = [(uids[p.document], p.part) for p in pieces]
        columns: dict[str, list[Any]] = {"prompt": [tokenizer.decode(ids) for ids in prompts]}
        batch = self._batch(keys, [rows[p.document] for p in pieces], columns, prompts, at)
        return batch.with_columns(_learned(responses, prompts, [[True] * len(r) for r in responses]))

    def _conversations(
        self, rows: Sequence[Row], uids: Sequence[int], tokenizer: Any, at: Callable[[int], At]
    ) -> Batch:
        """Whole conversations: what the assistant says in them is to be learned."""
        chats = [self._chat(row, at) for row in rows]
        more = self._more
        read = [read_conversation(chat, tokenizer, at(row.index), more) for chat, row in zip(chats, rows, strict=True)]
        ids = [conversation.prompt for conversation in read]
        kept = self._fitting(rows, ids, at)
        chosen = [read[i] for i in kept]
        columns = {"prompt": [c.text for c in chosen], "messages": [chats[i] for i in kept]}
        prompts = [ids[i] for i in kept]
        batch = self._batch([(uids[i],) for i in kept], [rows[i] for i in kept], columns, prompts, at)
        return batch.with_columns(_learned([c.response for c in chosen], prompts, [c.mask for c in chosen]))

    def check_template(self, tokenizer: Any) -> None:
        """Raise DataError for an argument that the tokenizer's chat template never reads."""
        check_read(self._more, tokenizer, DataError)

    @property
    def _more(self) -> dict[str, Any]:
        """What the chat template is given beside messages."""
        return template_arguments(self.reading.tools, self.reading.chat_template_kwargs)

    @property
    def chat(self) -> bool:
        """Whether the tokenizer's chat template is used."""
        return self.reading.chat or self.messages

    def _value(self, row: Row, at: Callable[[int], At], kinds: Any) -> Any:
        """The prompt as the data has it."""
        name, value = self.reading.column, row.get(self.reading.column)
        if value and isinstance(value, kinds):
            return value
        if isinstance(value, (list, tuple)) and value:
            said, fix = "is a list, and the first rows hold text", "Add chat=True."
            said, fix = ("is a list", "Give text.") if self.reading.text else (said, fix)
        else:
            said = "is empty" if value in ("", [], ()) else "is missing" if value is None else f"is {value!r}"
            fix = "Give text." if self.reading.text else "Give text, or a list of messages."
        what = "document" if self.reading.text else "conversation" if self.reading.messages else "prompt"
        raise DataError(f"The {what} '{name}' of a row {said}.", at=at(row.index), fix=fix)

    def _chat(self, row: Row, at: Callable[[int], At]) -> list[dict[str, Any]]:
        """The prompt as messages, a system message first where one was given."""
        value = self._value(row, at, (str, list, tuple))
        if isinstance(value, str):
            messages = [{"role": "user", "content": value}]
        elif all(isinstance(m, Mapping) and "role" in m and "content" in m for m in value):
            messages = [dict(m) for m in value]
        else:
            raise self._no_message(at(row.index), value)
        if self.reading.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.reading.system})
        return messages

    def check_messages(self, row: Row) -> None:
        """Raise DataError where the messages of a row lack what a chat template asks of them."""
        value = row.get(self.reading.column)
        if isinstance(value, (list, tuple)) and not all(
            isinstance(m, Mapping) and "role" in m and "content" in m for m in value
        ):
            raise self._no_message(None, value)

    def _no_message(self, at: At | None, messages: Sequence[Any]) -> DataError:
        return DataError(
            f"A message of '{self.reading.column}' lacks 'role' or 'content'.",
            at=at,
            fix='Write messages as {"role": "user", "content": "..."}.',
        )

    def _fitting(self, rows: Sequence[Row], ids: list[list[int]], at: Callable[[int], At]) -> list[int]:
        """Numbers of the rows whose prompts are short enough; cuts them where asked to."""
        longest, overlong = self.reading.max_prompt_tokens, self.reading.overlong
        if longest is None:
            return list(range(len(rows)))
        kept = []
        for i, row in enumerate(rows):
            length = len(ids[i])
            if length > longest and overlong == "error":
                raise DataError(
                    f"A prompt has {length} tokens; max_prompt_tokens is {longest}.",
                    at=at(row.index),
                    fix="Raise max_prompt_tokens, or write overlong='drop' or 'truncate'.",
                )
            if length > longest and overlong == "drop":
                _log.warning("dropped a prompt of %d tokens (at most %d): %s", length, longest, at(row.index))
                continue
            ids[i] = ids[i][-longest:]
            kept.append(i)
        return kept

    def _texts(self, rows: Sequence[Row], names: Sequence[str], at: Callable[[int], At]) -> list[str]:
        """The responses of each row, one after the other."""
        for row in rows:
            for name in names:
                if not isinstance(row.get(name), str):
                    what = f"The response '{name}' of a row is {row.get(name)!r}, not text."
                    raise DataError(what, at=at(row.index), fix="Give text.")
        return [row[name] for row in rows for name in names]


def _supervised(
    texts: list[str], prompts: list[list[int]], tokenizer: Any, at: Callable[[int], At]
) -> dict[str, Column]:
    """Texts to learn from, ended by the end-of-sequence token, each behind its prompt."""
    end = end_of(tokenizer)
    encoded = encode(texts, tokenizer, special=False, at=at)
    responses = [tokens if tokens[-1:] == [end] else [*tokens, end] for tokens in encoded]
    return _learned(responses, prompts, [[True] * len(r) for r in responses])


def end_of(tokenizer: Any) -> int:
    """Return the end-of-sequence token. Raises DataError where the tokenizer has none."""
    if tokenizer.eos_token_id is None:
        raise DataError("The tokenizer has no end-of-sequence token.", fix="Set its eos_token.")
    return tokenizer.eos_token_id


def _learned(responses: list[list[int]], prompts: list[list[int]], masks: list[list[bool]]) -> dict[str, Column]:
    """The fields of responses that are given, each behind its prompt."""
    return {
        "response_ids": Column.of(responses, dim="response", dtype="i32"),
        "tokens": Column.of([p + r for p, r in zip(prompts, responses, strict=True)], dim="token", dtype="i32"),
        "response_mask": Column.of(masks, dim="response", dtype="bool"),
    }


def _check_column(name: str | None, columns: Mapping[str, bool], what: str, option: str) -> None:
    if name is not None and name not in columns:
        meant = near(name, columns) or "the column"
        fix = f"Write {option}='{meant}'." if option != "columns" else f"Did you mean '{meant}'?"
        raise DataError(what.format(name), have=columns, fix=fix)


def encode(
    texts: list[str], tokenizer: Any, *, special: bool, at: Callable[[int], At] | None = None
) -> list[list[int]]:
    """The token ids of texts; ``special`` adds what the tokenizer puts around a text, such as a begin token.

    DataError, ``at`` the number of the text, for one with half of a surrogate pair, which is no character.
    """
    try:
        return tokenizer(texts, add_special_tokens=special)["input_ids"] if texts else []
    except (TypeError, UnicodeError) as error:
        for number, text in enumerate(texts):
            if (half := half_of_pair(text)) is not None:
                raise half_error("A text", text, half, at(number) if at is not None else None) from error
        raise


def _plain(value: Any, name: str, row: Row, at: Callable[[int], At]) -> Any:
    """The value as JSON can hold it, so that it can be journalled."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return {str(k): _plain(v, name, row, at) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, name, row, at) for v in value]
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    if hasattr(value, "tolist"):  # of numpy
        return value.tolist()
    raise DataError(
        f"The column '{name}' holds {type(value).__name__}, which is neither text nor number, list nor dict.",
        at=at(row.index),
        fix="Leave it out: columns=[...] names those to keep.",
    )
