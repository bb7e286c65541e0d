"""Rows of trajectories that a filter finds, page by page, and the prompts that they belong to."""

from __future__ import annotations

import math
import re
import sqlite3
from dataclasses import dataclass, field
from typing import Any

from .row_labels import kinds_with

PAGE = 50
MANY = 20_000  # rows with a word: more are not listed but met along the order that was asked for
SORTED = 200_000  # rows between bounds, or with labels: more are not sorted but met along the order
_SHOWN = ("n", "step", "prompt", "key", "reward", "tokens", "at", "size")
_COLUMNS = ", ".join(_SHOWN)

#: How rows can be sorted: the column, and whether it falls.
ORDERS = {
    "newest": ("step", True),
    "oldest": ("step", False),
    "best": ("reward", True),
    "worst": ("reward", False),
    "longest": ("tokens", True),
    "shortest": ("tokens", False),
}

#: How prompts can be sorted; best and worst go by the mean reward of their rows.
PROMPT_ORDERS = {
    "newest": "step DESC, prompt DESC",
    "oldest": "step, prompt",
    "best": "total / rows DESC, step DESC, prompt DESC",
    "worst": "total / rows, step, prompt",
}


@dataclass(frozen=True)
class Filter:
    """What rows are asked for: ``Filter("grpo", text="carry the", order="worst", least=0.5)``.

    ``first`` and ``last`` are steps, ``least`` and ``most`` rewards. ``labels`` are those of row_labels.py: of each
    name the values that a row may have, as in ``{"finish_reason": ["length", "time"]}``. ``after`` is the last row of
    the page before, as that page gave it.
    """

    program: str
    text: str = ""
    order: str = "newest"
    first: int | None = None
    last: int | None = None
    least: float | None = None
    most: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    labels: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    after: tuple[float, int] | None = None

    @property
    def bounds(self) -> tuple[tuple[str, float | None, float | None], ...]:
        """What is asked of each column: the least value and the largest."""
        return (
            ("step", self.first, self.last),
            ("reward", self.least, self.most),
            ("tokens", self.min_tokens, self.max_tokens),
        )


@dataclass(frozen=True)
class _Found:
    """The rows of a filter as SQL: ``source`` has an index where these are ``few`` enough to be sorted."""

    source: str
    where: str
    values: list[Any]
    few: bool


def programs_with_rows(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """The programs that have trajectories, with how many and of which steps."""
    names = [name for (name,) in connection.execute(_DISTINCT)]
    found = []
    for name in names:
        ends = [f"(SELECT {end}(step) FROM rows WHERE program = :name)" for end in ("min", "max")]
        least, most = connection.execute(f"SELECT {', '.join(ends)}", {"name": name}).fetchone()
        found.append({"program": name, "first": least, "last": most})
    return found


def search_rows(connection: sqlite3.Connection, asked: Filter) -> dict[str, Any]:
    """A page of rows without their texts, how many there are (None where nobody counted), and what comes next.

    Few rows are looked up and sorted: those that have the words or the labels, or lie between the bounds that are asked
    for. Of many the order is walked until a page is full.
    """
    column, falls = ORDERS[asked.order]
    found = _find(connection, asked)
    if found is None:
        return {"rows": [], "count": 0, "next": None}
    where = f"{found.where} AND reward IS NOT NULL" if column == "reward" else found.where
    count = None
    if found.few and asked.after is None:
        count = connection.execute(f"SELECT count(*) FROM {found.source} WHERE {where}", found.values).fetchone()[0]
    source, order = (found.source, f"+{column}") if found.few else (f"rows INDEXED BY rows_by_{column}", column)
    way, values = "DESC" if falls else "ASC", found.values
    if asked.after is not None:
        sign = "<" if falls else ">"
        where += f" AND ({column} {sign}= ? AND ({column} {sign} ? OR n {sign} ?))"
        values = [*values, asked.after[0], asked.after[0], asked.after[1]]
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM {source} WHERE {where} ORDER BY {order} {way}, n {way} LIMIT {PAGE + 1}", values
    ).fetchall()
    listed: list[dict[str, Any]] = [dict(zip(_SHOWN, row, strict=True)) for row in rows]
    following = [listed[PAGE - 1][column], listed[PAGE - 1]["n"]] if len(listed) > PAGE else None
    return {"rows": listed[:PAGE], "count": count, "next": following}


def search_prompts(connection: sqlite3.Connection, asked: Filter, *, silent: bool, page: int) -> dict[str, Any]:
    """A page of prompts with what their rows were rewarded with, by an order of PROMPT_ORDERS; ``silent``: all alike.

    Where more than steps are asked for, they are those of which a row at least fits.
    """
    where, values = "program = ?", [asked.program]
    for bound, compare in ((asked.first, ">="), (asked.last, "<=")):
        if bound is not None:
            where, values = f"{where} AND step {compare} ?", [*values, bound]
    where += " AND least = most AND rows > 1" if silent else ""
    where += " AND least <= most" if asked.order in ("best", "worst") else ""  # others have no reward
    if asked.text or asked.labels or any(bound is not None for _, *ends in asked.bounds[1:] for bound in ends):
        found = _find(connection, asked)
        if found is None:
            return {"prompts": [], "next": None}
        if found.few:
            where += f" AND (step, prompt) IN (SELECT step, prompt FROM {found.source} WHERE {found.where})"
        else:
            same = "rows.program = prompts.program AND rows.step = prompts.step AND rows.prompt = prompts.prompt"
            where += f" AND EXISTS (SELECT 1 FROM rows INDEXED BY rows_by_step WHERE {same} AND {found.where})"
        values = [*values, *found.values]
    rows = connection.execute(
        f"SELECT step, prompt, rows, total, least, most FROM prompts WHERE {where} "
        f"ORDER BY {PROMPT_ORDERS[asked.order]} LIMIT {PAGE + 1} OFFSET {PAGE * page}",
        values,
    ).fetchall()
    listed = [
        {
            "step": step,
            "prompt": prompt,
            "rows": count,
            "mean": total / count if math.isfinite(least) else None,
            "least": least if math.isfinite(least) else None,
            "most": most if math.isfinite(most) else None,
        }
        for step, prompt, count, total, least, most in rows
    ]
    return {"prompts": listed[:PAGE], "next": page + 1 if len(listed) > PAGE else None}


def rows_of_prompt(
    connection: sqlite3.Connection, program: str, step: int, prompt: str, *, most: int = 64
) -> list[dict[str, Any]]:
    """The rows of one prompt in one step, the first of them."""
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM rows WHERE program = ? AND step = ? AND prompt = ? ORDER BY n LIMIT ?",
        (program, step, prompt, most),
    )
    return [dict(zip(_SHOWN, row, strict=True)) for row in rows]


def row_at(connection: sqlite3.Connection, n: int) -> dict[str, Any] | None:
    """The row of a number with its program; None where there is none."""
    row = connection.execute(f"SELECT program, {_COLUMNS} FROM rows WHERE n = ?", (n,)).fetchone()
    return None if row is None else dict(zip(("program", *_SHOWN), row, strict=True))


def match_pattern(text: str) -> str:
    """What a search asks the index for: all of its words, the last one as a beginning. Empty where there is no word.

    What stands between blanks or in quotes is found as it is written, but for signs and for capital letters.

    >>> match_pattern('sum: "carry the" 3+1=')
    '"sum:" "carry the" "3+1="*'
    """
    parts = [quoted or plain for quoted, plain in re.findall(r'"([^"]*)"|([^\s"]+)', text.replace("\0", " "))]
    words = [part for part in parts if re.search(r"[^\W_]", part)][:20]
    return " ".join(f'"{word}"' for word in words) + "*" * bool(words)


_DISTINCT = (
    "WITH RECURSIVE found(program) AS (SELECT min(program) FROM rows UNION ALL SELECT "
    "(SELECT min(program) FROM rows WHERE program > found.program) FROM found WHERE found.program IS NOT NULL) "
    "SELECT program FROM found WHERE program IS NOT NULL"
)


def _find(connection: sqlite3.Connection, asked: Filter) -> _Found | None:
    """The rows that a filter asks for; None where there can be none."""
    pattern = match_pattern(asked.text)
    if asked.text and not pattern:
        return None
    where = ["rows.program = ?"]
    values: list[Any] = [asked.program]
    for column, least, most in asked.bounds:
        for compare, bound in ((">=", least), ("<=", most)):
            if bound is not None:
                where.append(f"rows.{column} {compare} ?")
                values.append(bound)
    kinds, labelled = kinds_with(connection, asked.program, asked.labels) if asked.labels else ([], None)
    if asked.labels:
        where.append(f"rows.kind IN ({','.join(map(str, kinds))})")
    found = _rows_with_words(connection, pattern, asked) if pattern else None
    if found is not None and len(found) <= MANY:
        where.append(f"rows.n IN ({','.join(map(str, found))})")
        return _Found("rows NOT INDEXED", " AND ".join(where), values, few=True)
    index = _narrow_index(connection, asked, labelled, MANY if pattern else SORTED)
    if pattern:
        where.append("EXISTS (SELECT 1 FROM words WHERE words MATCH ? AND words.rowid = rows.n)")
        values.append(pattern)
    return _Found(f"rows INDEXED BY {index}", " AND ".join(where), values, few=index is not None)


def _rows_with_words(connection: sqlite3.Connection, pattern: str, asked: Filter) -> list[int]:
    """The rows with the words, in and around the steps that are asked for; one more than ``MANY`` where these are more.

    Rows are numbered in the order of their steps, so steps are a stretch of numbers.
    """
    least, most = 0, 1 << 62
    if asked.first is not None:
        least = _at_step(connection, "min", ">=", asked.program, asked.first) or most
    if asked.last is not None:
        most = _at_step(connection, "max", "<=", asked.program, asked.last) or -1
    found = connection.execute(
        "SELECT rowid FROM words WHERE words MATCH ? AND rowid BETWEEN ? AND ? LIMIT ?",
        (pattern, least, most, MANY + 1),
    )
    return [n for (n,) in found]


def _at_step(connection: sqlite3.Connection, end: str, compare: str, program: str, step: int) -> int | None:
    """The least or the largest number of the rows at the step that is nearest to ``step`` on one side."""
    nearest = f"SELECT {end}(step) FROM rows WHERE program = ? AND step {compare} ?"
    return connection.execute(
        f"SELECT {end}(n) FROM rows WHERE program = ? AND step = ({nearest})", (program, program, step)
    ).fetchone()[0]


def _narrow_index(connection: sqlite3.Connection, asked: Filter, labelled: int | None, few: int) -> str | None:
    """The index in which so few rows have the labels, or lie between bounds, that are asked for; else None."""
    if labelled is not None and labelled <= few:
        return "rows_by_kind"
    for column, least, most in asked.bounds:
        if least is None and most is None:
            continue
        between = (-(1 << 62) if least is None else least, 1 << 62 if most is None else most)
        counted = connection.execute(
            f"SELECT count(*) FROM (SELECT 1 FROM rows INDEXED BY rows_by_{column} WHERE program = ? AND {column} "
            f"BETWEEN ? AND ? LIMIT ?)",
            (asked.program, *between, few + 1),
        )
        if counted.fetchone()[0] <= few:
            return f"rows_by_{column}"
    return None
