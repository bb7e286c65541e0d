"""What a source of prompts is: a store of rows, the order in which they are drawn, how they are read; a place in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from ..batch import Batch
from ..errors import DataError, FlowError, ProgramError, did_you_mean
from ..graph.ops.allowed import Allowed, check_values, flag, one_of, text, whole
from ..graph.ops.field_types import STANDARD, FieldType
from ..graph.script.site import caller
from .orders import shuffled
from .prompts import Prompts
from .stores import Generated, Row, read_each
from .streamed import Stream, StreamCursor
from .template_arguments import wrong_arguments

if TYPE_CHECKING:
    from .stores import Store

OVERLONG = ("error", "drop", "truncate")
ON_BAD = ("error", "skip")
TOLD = 20  # bad rows of a source that are told of one by one
_log = logging.getLogger("flowrl.data")
_BATCH = "Give batch=, the rows per step, at least 1."
#: What the options may be, besides the columns and the tokenizer, which the data tell.
OPTIONS: Mapping[str, Allowed] = {
    "batch": whole(least=1, fix=_BATCH),
    "prompt": text(),
    "response": text() | None,
    "rejected": text() | None,
    "messages": text() | None,
    "text": text() | None,
    "length": whole(least=2, fix="Give the tokens of a row, 2 or more.") | None,
    "pack": flag(),
    "chat": flag(),
    "system": text() | None,
    "shuffle": flag(),
    "seed": whole(),
    "repeat": flag(),
    "max_prompt_tokens": whole(least=1, fix="Give 1 or more, or None.") | None,
    "overlong": one_of(*OVERLONG),
    "on_bad": one_of(*ON_BAD),
}
#: What well-known chat templates read, for who gives it to the data.
_OF_TEMPLATES = ("enable_thinking", "thinking", "reasoning_effort")
_ANY = FieldType("any")
_CHATS = ("prompt", "response", "rejected", "chat")
_FOR_CHATS = ("system", "tools", "chat_template_kwargs")
#: Options that name a column of whole examples: what these are, and the options that are for others.
_WHOLE = (
    ("messages", "whole conversations", _CHATS),
    ("text", "whole documents", (*_CHATS, "messages", *_FOR_CHATS, "max_prompt_tokens", "overlong")),
)


class Options(TypedDict, total=False):
    """What every constructor of :mod:`flowrl.data` takes; only ``batch`` is required.

    >>> fl.data.rows([{"q": "1+2=", "a": "3"}], batch=1, prompt="q", response="a", seed=7).batch
    1
    """

    batch: int  # rows per step
    prompt: str  # the column of the prompt: text, or a list of {"role", "content"}; default "prompt"
    response: str | None  # a column of text to learn from: adds response_ids, tokens, response_mask
    rejected: str | None  # a column of a worse response: a row becomes two, the better one first; adds preferred
    messages: str | None  # a column of whole conversations to learn from, in the place of prompt and response
    text: str | None  # a column of documents to learn from, in the place of prompt and response; needs length
    length: int | None  # the tokens of a row of documents, at most
    pack: bool  # put documents one after the other into rows (the default); False: a row has tokens of one
    chat: bool  # put text prompts through the tokenizer's chat template; lists of messages always are
    system: str | None  # the system message of chats that have none
    tools: Sequence[Any] | None  # JSON schemas of functions that the chat template shows to the model
    chat_template_kwargs: Mapping[str, Any] | None  # arguments of the template, such as {"enable_thinking": False}
    columns: Sequence[str] | None  # the other columns to keep; None keeps all
    shuffle: bool  # a new seeded order in every epoch (the default), or the order of the data
    seed: int  # of that order, which depends on nothing else
    repeat: bool  # go on with the next epoch (the default), or end with the data
    max_prompt_tokens: int | None  # the longest prompt
    overlong: str  # what becomes of a longer one: "error", "drop", or "truncate", which keeps its end
    on_bad: str  # what becomes of a row that cannot be read: "error", or "skip", which counts it in source.skipped
    tokenizer: Any  # a name, a folder, a function that builds one, a tokenizer; None takes the actor's


class BadRow(NamedTuple):
    """A row of a source that cannot be read: ``BadRow(source, 7, DataError("A line is no JSON."))``."""

    source: Source
    index: int  # its number in the data
    error: DataError

    def skip(self) -> None:
        """Count it, and log it the first time."""
        self.source.skip(self.index, self.error)


@dataclass(frozen=True)
class Reading:
    """The options of one source, checked: ``Reading(batch=16, prompt="question")``. See :class:`Options`."""

    batch: int = 0
    prompt: str = "prompt"
    response: str | None = None
    rejected: str | None = None
    messages: str | None = None
    text: str | None = None
    length: int | None = None
    pack: bool = True
    chat: bool = False
    system: str | None = None
    tools: Sequence[Any] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    columns: Sequence[str] | None = None
    shuffle: bool = True
    seed: int = 0
    repeat: bool = True
    max_prompt_tokens: int | None = None
    overlong: str = "error"
    on_bad: str = "error"
    tokenizer: Any = None

    @staticmethod
    def of(options: Mapping[str, Any]) -> Reading:
        """The options as given by a user; DataError for a wrong one."""
        at, names = caller(), [f.name for f in fields(Reading)]
        for name, value in options.items():
            if name not in names:
                fix = did_you_mean(name, names, form="Write {}=.")
                fix = f"Write chat_template_kwargs={{{name!r}: {value!r}}}." if name in _OF_TEMPLATES else fix
                raise DataError(f"A data source has no option '{name}'.", at=at, have=names, fix=fix)
        reading = Reading(**options)
        if "batch" not in options:
            raise DataError("A data source with no batch=.", at=at, fix=_BATCH)
        if isinstance(reading.columns, str):
            what = f"A data source: columns={reading.columns!r} is one text."
            raise DataError(what, at=at, fix=f"Write columns=[{reading.columns!r}].")
        check_values("A data source", options, OPTIONS, DataError)
        if wrong := wrong_arguments(reading.chat_template_kwargs):
            raise DataError(f"A data source: {wrong[0]}", at=at, fix=wrong[1])
        if reading.rejected is not None and reading.response is None:
            what = f"rejected='{reading.rejected}' is worse than another response, and there is none."
            raise DataError(what, at=at, fix="Give response=, the column of the better one.")
        for name, what, others in _WHOLE:
            beside = [other for other in others if other in options]
            if name in options and options[name] is not None and beside:
                what = f"{name}='{options[name]}' are {what}, and {beside[0]}= is given too."
                raise DataError(what, at=at, fix=f"Leave out {beside[0]}=, or {name}=.")
        beside = [name for name in ("length", "pack") if name in options]
        if reading.text is None and beside:
            what = f"{beside[0]}= is of documents to learn from, and no column of them is named."
            raise DataError(what, at=at, fix="Give text=, the column of the documents.")
        if reading.text is not None and reading.length is None:
            what = f"text='{reading.text}' are documents of any length."
            raise DataError(what, at=at, fix="Give length=, the tokens of a row: length=2048.")
        if reading.text is not None and reading.pack and reading.columns:
            what = f"A row of packed documents has parts of several, and columns={list(reading.columns)} are of one."
            raise DataError(what, at=at, fix="Leave out columns=, or write pack=False.")
        return reading

    @property
    def column(self) -> str:
        """The column that is read: of prompts, of conversations, or of documents."""
        return self.text or self.messages or self.prompt


class Source:
    """Prompts to draw from. Made by :func:`rows`, :func:`jsonl`, :func:`parquet`, :func:`hf`, :func:`generated`.

    ``schema()`` names the columns of its batches, ``cursor()`` is a place in it, ``to_batch()`` reads drawn rows.
    ``dropped`` counts the prompts left out by ``overlong="drop"``, ``skipped`` the rows by ``on_bad="skip"``.

    >>> source = fl.data.rows([{"prompt": "a"}, {"prompt": "b"}], batch=1, shuffle=False)
    >>> source.batch, source.endless
    (1, True)
    >>> {name: str(type) for name, type in source.schema().items()}
    {'prompt': 'any', 'prompt_ids': 'i32[*prompt]'}
    """

    def __init__(self, store: Store, options: Mapping[str, Any]) -> None:
        self.reading = Reading.of(options)
        self.made_at = caller()
        self.dropped = 0
        self.skipped = 0
        self._told: set[int] = set()  # numbers of bad rows
        self._store = store
        self._store.skips = self.reading.on_bad == "skip"
        self._prompts: Prompts | None = None

    def __repr__(self) -> str:
        return f"<{self._store.title}, {self.reading.batch} rows a step>"

    def __iter__(self) -> Iterator[Any]:
        raise ProgramError(
            "a source is not iterated over: rows are drawn by steps.",
            at=caller(),
            fix="Write for step, batch in flow.steps(source, steps).",
        )

    @property
    def store(self) -> Store:
        """Where its rows lie."""
        return self._store

    @property
    def endless(self) -> bool:
        """Whether it never ends: it begins again, or its function gives rows for all numbers."""
        return self.reading.repeat or (isinstance(self._store, Generated) and self._store.size is None)

    @property
    def tokenizer(self) -> Any:
        """What the user gave; None asks for the tokenizer of the actor."""
        return self.reading.tokenizer

    @property
    def batch(self) -> int:
        """Rows per step."""
        return self.reading.batch

    def schema(self) -> dict[str, FieldType]:
        """Return columns of the batches and their types, known without reading the data or loading a tokenizer.

        ``prompt`` (text), ``prompt_ids`` ``i32[*prompt]``, with ``response=`` or ``messages=`` also ``response_ids``
        ``i32[*response]``, ``tokens`` ``i32[*token]`` and ``response_mask`` ``bool[*response]``, with ``rejected=``
        ``preferred`` bool[]; every other column is ``any``.
        Raises DataError for a file, column or row that is not as asked.
        """
        prompts = self._reader()
        return {name: STANDARD.get(name, _ANY) for name in prompts.made} | {n: _ANY for n in prompts.kept}

    def cursor(self) -> Cursor | StreamCursor:
        """Return a place at the beginning of the source."""
        return StreamCursor(self, self._store) if isinstance(self._store, Stream) else Cursor(self)

    def to_batch(self, rows: Sequence[Row], first_uid: int, tokenizer: Any) -> Batch:
        """Return the batch of drawn rows, with the keys (first_uid,), (first_uid + 1,), ... Raises DataError.

        With ``rejected=`` a drawn row has the keys (uid, 0) and (uid, 1), and with ``text=`` a document has (uid, 0),
        (uid, 1), ... DataError also where none is left.
        """
        batch, bad = self.read(rows, first_uid, tokenizer)
        if bad and not len(batch):
            with self.placing():
                raise bad[0].error
        if rows and not len(batch):
            longest = self.reading.max_prompt_tokens
            raise DataError(
                f"All {len(rows)} prompts of a step are longer than max_prompt_tokens={longest}.",
                at=self._store.at(rows[0].index),
                fix="Raise max_prompt_tokens.",
            )
        for row in bad:
            row.skip()
        return batch

    def read(self, rows: Sequence[Row], first_uid: int, tokenizer: Any) -> tuple[Batch, list[BadRow]]:
        """The same, of which nothing may be left, and the rows that cannot be read, which are not counted yet."""
        prompts = self._reader()
        uids = range(first_uid, first_uid + len(rows))

        def read(numbers: Sequence[int]) -> Batch:
            return prompts.batch([rows[i] for i in numbers], [uids[i] for i in numbers], tokenizer, at=self._store.at)

        with self.placing():
            prompts.check_template(tokenizer)
            batch, errors = self._skipping(rows, read) if self._store.skips else (read(range(len(rows))), {})
        if self.reading.overlong == "drop":
            self.dropped += len(rows) - len(errors) - len(batch.groups())
        return batch, [BadRow(self, rows[i].index, error) for i, error in sorted(errors.items())]

    def _skipping(
        self, rows: Sequence[Row], read: Callable[[Sequence[int]], Batch]
    ) -> tuple[Batch, Mapping[int, DataError]]:
        """The batch of the rows that can be read, and the errors of the others by their numbers."""
        errors = {i: row.error for i, row in enumerate(rows) if row.error is not None}
        good, batch = [i for i in range(len(rows)) if i not in errors], None
        try:
            batch = read(good)
        except DataError:
            for i in good:
                try:
                    read([i])
                except DataError as error:
                    errors[i] = error
        return read([i for i in good if i not in errors]) if batch is None else batch, errors

    def skip(self, index: int, error: DataError) -> None:
        """Count a bad row, and log it the first time."""
        self.skipped += 1
        if index in self._told or len(self._told) >= TOLD:
            return
        self._told.add(index)
        where = error.at or self._store.at(index)
        _log.warning("skipped a row: %s  at   %s", error.what, where)
        if len(self._told) == TOLD:
            _log.warning("%d rows of %s were skipped; further ones are counted only", TOLD, self._store.title)

    def look(self) -> Sequence[Mapping[str, Any]]:
        """A few rows of the data, without opening it; none of a source that would have to be read or fetched."""
        with self.placing():
            return self._store.look()

    def open_store(self) -> Store:
        """The store, ready to be read; DataError with the driver's line if it has no row."""
        with self.placing():
            self._store.open()
            if self._store.size == 0:
                raise DataError(f"{self._store.title} has no rows.", fix="Give it rows.")
        return self._store

    def _reader(self) -> Prompts:
        if self._prompts is None:
            with self.placing():
                prompts = Prompts.of(self.reading, self._store.columns(), title=self._store.title)
                if (
                    prompts.messages and self._store.size and not self._store.skips
                ):  # rows that are there before anything is read
                    prompts.check_messages(self._store.read([0])[0])
                self._prompts = prompts
        return self._prompts

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Errors that know no better place are at the line where the source was made."""
        try:
            yield
        except FlowError as error:
            error.at = error.at or self.made_at
            raise


class Cursor:
    """A place in a source: epoch, and rows drawn in it. Draws the same rows after ``load_state(state())``.

    >>> cursor = fl.data.rows([{"prompt": "a"}, {"prompt": "b"}], batch=1, shuffle=False).cursor()
    >>> _ = cursor.draw()
    >>> cursor.state()
    {'epoch': 0, 'index': 1, 'rows': 2}
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.epoch = 0
        self.index = 0
        self._rows: int | None = None  # of the data that a loaded state was in
        self._order: tuple[int, Sequence[int]] | None = None

    def state(self) -> dict[str, Any]:
        """Return the place, as a JSON record: ``{"epoch": 0, "index": 32, "rows": 1000}``."""
        return {"epoch": self.epoch, "index": self.index, "rows": self._rows}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to a place that :meth:`state` gave. Raises DataError for one in a stream."""
        if "buffer" in state:
            raise DataError(
                "This place is in a stream, and now the rows are drawn by number.",
                at=self.source.made_at,
                fix="Resume with streaming=True, as the run began.",
            )
        self.epoch, self.index, self._rows = state["epoch"], state["index"], state["rows"]

    def draw(self, n: int | None = None) -> list[Row]:
        """Return the next n rows (a step's, if None); fewer, and then none, at the end of a source."""
        store = self.source.open_store()
        self._same_data(store.size)
        places: list[int] = []
        wanted = self.source.batch if n is None else n
        while len(places) < wanted:
            if self.index == store.size:
                if not self.source.reading.repeat:
                    break
                self.epoch, self.index = self.epoch + 1, 0
            end = self.index + wanted - len(places)
            end = end if store.size is None else min(end, store.size)
            places += self._places(self.index, end, store.size)
            self.index = end
        return read_each(store, places)

    def _same_data(self, rows: int | None) -> None:
        if self._rows is not None and rows != self._rows:
            raise DataError(
                f"This place is in a data set of {self._rows} rows, and now there are {rows}.",
                at=self.source.made_at,
                fix="Resume with the data that the run began with.",
            )
        self._rows = rows

    def _places(self, start: int, end: int, size: int | None) -> Sequence[int]:
        """Row numbers of the epoch's draws from start to end."""
        reading = self.source.reading
        if size is None or not reading.shuffle:
            return range(start, end)
        if self._order is None or self._order[0] != self.epoch:
            self._order = (self.epoch, shuffled(size, reading.seed, self.epoch))
        return self._order[1][start:end]
