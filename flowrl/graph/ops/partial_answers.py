"""Answers of the world handed over row by row, while a call goes on: what is there is kept, whatever comes after it."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, cast

from ...batch import Batch, Key
from ...errors import WorkerError


class Answers(Protocol):
    """What a call of an op that touches the world hands its answers to, as they come.

    ``known`` are rows made of those of the call (its episodes) that have their answers from an earlier process: the
    fields that the op adds, by the names that it gives them. None where rows are handed to the call only if they lack
    an answer.
    """

    @property
    def known(self) -> Batch | None: ...

    def keep(self, keys: Sequence[Key], adds: Mapping[str, Any]) -> None:
        """Take what the op adds to some rows of the call, or to rows made of them: a list for each field, or a column
        where there are marks to be kept with it."""
        ...

    def fail(self, keys: Sequence[Key]) -> None:
        """Learn that rows have failed: what the op adds to them is no answer until the call as a whole is taken."""
        ...


_FORM = 'Yield each row once, by its place from 0 on: yield 0, {"grade": 1.0}.'
_ANSWERS: ContextVar[Answers | None] = ContextVar("answers", default=None)


@contextmanager
def handed_to(answers: Answers) -> Generator[None]:
    """Have ``answers`` take those of a call as they come."""
    token = _ANSWERS.set(answers)
    try:
        yield
    finally:
        _ANSWERS.reset(token)


def answers_of_call() -> Answers | None:
    """Return what takes the answers of this call, asked in the thread of the call; None outside of a run."""
    return _ANSWERS.get()


def gathered(title: str, rows: Batch, given: Iterable[Any], names: Collection[str]) -> dict[str, list[Any]]:
    """The fields that an op adds, from the pairs (row, its fields) that it yields; each is handed over when it comes.

    Raises WorkerError for a row that is not there, that comes twice or not at all, and for other fields than ``names``.
    """
    answers, fields = answers_of_call(), dict[int, Mapping[str, Any]]()
    for pair in given:
        row, adds = _parts(title, pair)
        if not 0 <= row < len(rows) or row in fields:
            what = "yielded twice" if row in fields else f"not one of the {len(rows)} rows of its batch"
            raise WorkerError(f"{title}: row {row} was {what}.", fix=_FORM)
        if set(adds) != set(names):
            raise WorkerError(
                f"{title} yielded {sorted(adds)} for row {row}, and declares that it adds {sorted(names)}.",
                fix="Make adds= and what is yielded name the same fields.",
            )
        fields[row] = adds
        if answers is not None:
            answers.keep([rows.keys[row]], {name: [value] for name, value in adds.items()})
    if len(fields) < len(rows):
        first = next(row for row in range(len(rows)) if row not in fields)
        raise WorkerError(
            f"{title} yielded {len(fields)} of {len(rows)} rows; row {first} is the first that is missing.",
            fix=_FORM,
        )
    return {name: [fields[row][name] for row in range(len(rows))] for name in names}


def _parts(title: str, pair: Any) -> tuple[int, Mapping[str, Any]]:
    """Return a row and its fields. Raises WorkerError for what is no such pair."""
    match pair:
        case (int() as row, Mapping()) if isinstance(pair, tuple):
            return row, cast("Mapping[str, Any]", pair[1])
        case _:
            raise WorkerError(f"{title} yielded {pair!r}, no pair of a row and its fields.", fix=_FORM)
