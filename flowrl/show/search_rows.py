"""Rows of trajectories that a filter finds, page by page, and the prompts that they belong to."""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PAGE = 50
MANY = 20_000  # rows with a word: more are not listed but met along the order that was asked for

#: How rows can be sorted: the column, and whether it falls.
ORDERS = {
    "newest": ("step", True),
    "oldest": ("step", False),
    "best": ("reward", True),
    "worst": ("reward", False),
    "longest": ("tokens", True),
    "shortest": ("tokens", False),
}


@dataclass(frozen=True)
class Filter:
    """What rows are asked for: ``Filter("grpo", text="carry the", order="worst", least=0.5)``.

    ``after`` is the last row of the page before, as that page gave it.
    """

    program: str
    text: str = ""
    order: str = "newest"
    first: int | None = None
    last: int | None = None
    least: float | None = None
    most: float | None = None
    after: tuple[float, int] | None = None


def programs_with_rows(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """The programs that have trajectories, with how many and of which steps."""
    names = [name for (name,) in connection.execute(_DISTINCT)]
    found = []
    for name in names:
        least, most = connection.execute("SELECT min(step), max(step) FROM rows WHERE program = ?", (name,)).fetchone()
        found.append({"program": name, "first": least, "last": most})
    return found


def search_rows(connection: sqlite3.Connection, asked: Filter) -> dict[str, Any]:
    """A page of rows without their texts, how many have the words (None where nobody counted), and what comes next."""
    column, falls = ORDERS[asked.order]
    where, values = _conditions(asked, column, falls)
    pattern = match_pattern(asked.text)
    count: int | None = None
    index = column
    if asked.text and not pattern:
        return {"rows": [], "count": 0, "next": None}
    if pattern:
        found = connection.execute(
            "SELECT rowid FROM words WHERE words MATCH ? LIMIT ?", (pattern, MANY + 1)
        ).fetchall()
        if len(found) <= MANY:
            count = connection.execute(
                f"SELECT count(*) FROM rows WHERE n IN ({_listed(found)}) AND {where}", values
            ).fetchone()[0]
            where += f" AND n IN ({_listed(found)})"
            index = f"+{column}"  # the few rows are looked up and sorted
        else:
            where += " AND EXISTS (SELECT 1 FROM words WHERE words MATCH ? AND words.rowid = rows.n)"
            values = [*values, pattern]
    elif column != "step" and _few_steps(connection, asked):
        index = f"+{column}"
    way = "DESC" if falls else "ASC"
    then = "ASC" if column != "step" else way
    rows = connection.execute(
        f"SELECT n, step, prompt, key, reward, tokens, at, size FROM rows WHERE {where} "
        f"ORDER BY {index} {way}, n {then} LIMIT {PAGE + 1}",
        values,
    ).fetchall()
    names = ("n", "step", "prompt", "key", "reward", "tokens", "at", "size")
    listed: list[dict[str, Any]] = [dict(zip(names, row, strict=True)) for row in rows]
    following = [listed[PAGE - 1][column], listed[PAGE - 1]["n"]] if len(listed) > PAGE else None
    return {"rows": listed[:PAGE], "count": count, "next": following}


def search_prompts(
    connection: sqlite3.Connection, program: str, *, silent: bool, first: int | None, last: int | None, page: int
) -> dict[str, Any]:
    """A page of prompts with what their rows were rewarded with, the newest first; ``silent``: all alike."""
    where, values = "program = ?", [program]
    for bound, compare in ((first, ">="), (last, "<=")):
        if bound is not None:
            where, values = f"{where} AND step {compare} ?", [*values, bound]
    where += " AND least = most AND rows > 1" if silent else ""
    rows = connection.execute(
        f"SELECT step, prompt, rows, total, least, most FROM prompts WHERE {where} "
        f"ORDER BY step DESC, prompt LIMIT {PAGE + 1} OFFSET {PAGE * page}",
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


def rows_of_prompt(connection: sqlite3.Connection, program: str, step: int, prompt: str) -> list[dict[str, Any]]:
    """The rows of one prompt in one step, the first 64 of them."""
    names = ("n", "step", "prompt", "key", "reward", "tokens", "at", "size")
    rows = connection.execute(
        f"SELECT {', '.join(names)} FROM rows WHERE program = ? AND step = ? AND prompt = ? ORDER BY n LIMIT 64",
        (program, step, prompt),
    )
    return [dict(zip(names, row, strict=True)) for row in rows]


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


def _conditions(asked: Filter, column: str, falls: bool) -> tuple[str, list[Any]]:
    where = ["program = ?"]
    values: list[Any] = [asked.program]
    bounds = (("step >=", asked.first), ("step <=", asked.last), ("reward >=", asked.least), ("reward <=", asked.most))
    for compare, bound in bounds:
        if bound is not None:
            where.append(f"{compare} ?")
            values.append(bound)
    if column == "reward":
        where.append("reward IS NOT NULL")
    if asked.after is not None:
        sign = "<" if falls else ">"
        then = sign if column == "step" else ">"
        where.append(f"({column} {sign}= ? AND ({column} {sign} ? OR n {then} ?))")
        values += [asked.after[0], asked.after[0], asked.after[1]]
    return " AND ".join(where), values


def _few_steps(connection: sqlite3.Connection, asked: Filter) -> bool:
    """Whether the steps that are asked for have so few rows that these are sorted."""
    if asked.first is None and asked.last is None:
        return False
    counted = connection.execute(
        "SELECT count(*) FROM (SELECT 1 FROM rows WHERE program = ? AND step BETWEEN ? AND ? LIMIT ?)",
        (asked.program, asked.first or 0, asked.last if asked.last is not None else 1 << 61, MANY + 1),
    )
    return counted.fetchone()[0] <= MANY


def _listed(found: Sequence[tuple[int]]) -> str:
    return ",".join(str(n) for (n,) in found)
