"""Which fields of rows are labels to filter by, and which rows have them: few short values, however hostile."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from show_runs import HOSTILE, lines, row, run_folder

from flowrl.show import row_labels
from flowrl.show.index_run import Indexer
from flowrl.show.row_labels import kinds_with, labels_of
from flowrl.show.search_rows import Filter, search_prompts, search_rows
from flowrl.show.store import Store


def indexed(tmp_path: Path, rows: list[dict[str, Any]]) -> Store:
    run = run_folder(tmp_path / "run", steps=0)
    lines(run, "trajectories", *rows)
    (tmp_path / "cache").mkdir(exist_ok=True)
    store = Store(run, "test", tmp_path / "cache")
    indexer = Indexer(store)
    while indexer.small() or indexer.trajectories():
        pass
    return store


def labels(store: Store, program: str = "grpo") -> dict[str, dict[str, int]]:
    with store.reading() as connection:
        return labels_of(connection, program)


def test_short_values_are_labels_and_long_or_many_ones_are_not(tmp_path: Path) -> None:
    more = [
        {
            "finish_reason": "stop" if n else "length",
            "source": "math",
            "level": n % 3,
            "proved": n > 5,
            "answer": f"{n}",
        }
        | {"note": "x" * 61 if n == 39 else "short", "score": n / 2, "turn_rewards": [1.0]}
        for n in range(40)
    ]
    found = labels(indexed(tmp_path, [row(n, n, 0, **each) for n, each in enumerate(more)]))
    assert found == {
        "finish_reason": {"stop": 39, "length": 1},
        "source": {"math": 40},
        "level": {"0": 14, "1": 13, "2": 13},
        "proved": {"true": 34, "false": 6},
    }, "40 answers are too many, one note is too long, scores are measures"
    assert list(found)[:2] == ["finish_reason", "source"], "what is filtered by most comes first"


def test_programs_have_labels_of_their_own_and_lines_without_one_are_left_out(tmp_path: Path) -> None:
    rows = [row(0, 0, 0, source="a", outcome=None), row(0, 1, 0, program="evaluate", source="b", outcome="")]
    store = indexed(tmp_path, rows)
    assert labels(store)["source"] == {"a": 1} and labels(store, "evaluate")["source"] == {"b": 1}
    assert "outcome" not in labels(store) and "outcome" not in labels(store, "evaluate")


def test_hostile_labels_are_texts_or_none(tmp_path: Path) -> None:
    short, half = "' OR 1=1; --\u202e\0", "\ud800"
    rows = [
        row(0, 0, 0, source=short, level=10**40),
        row(0, 3, 0, level=-(10**40)),
        row(0, 1, 0, **{half: "a", "b": half, HOSTILE: "c"}),
    ]
    store = indexed(tmp_path, [*rows, row(0, 2, 0, source="x", opponent=HOSTILE)])
    found = labels(store)
    assert found["source"] == {short: 1, "x": 1} and found["level"] == {str(-(1 << 62)): 1, str(1 << 62): 1}
    assert not {half, "b", HOSTILE, "opponent"} & set(found)
    with store.reading() as connection:
        assert [
            each["key"] for each in search_rows(connection, Filter("grpo", labels={"source": [short]}))["rows"]
        ] == ["[0, 0]"]


def test_kinds_stay_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels that go together in too many ways lose the one with most values; the others are found as before."""
    monkeypatch.setattr(row_labels, "KINDS", 8)
    rows = [row(n, n, 0, answer=None, a=n % 7, b=n % 5, c=n % 2) for n in range(70)]
    store = indexed(tmp_path, rows)
    found = labels(store)
    assert "a" not in found and found["c"] == {"0": 35, "1": 35}
    with store.reading() as connection:
        assert connection.execute("SELECT count(*) FROM kinds").fetchone()[0] < 40
        assert kinds_with(connection, "grpo", {"c": ["1"]})[1] == 35
        taken = search_rows(connection, Filter("grpo", labels={"c": ["1"]}))
    assert taken["count"] == 35 and {each["step"] % 2 for each in taken["rows"]} == {1}


def test_fields_that_are_no_labels_leave_the_number_of_kinds_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row with many long texts, each given up for its length, has no more kinds than another; nor when it is reopened."""
    monkeypatch.setattr(row_labels, "KINDS", 8)
    long = {f"text {n}": "x" * 61 for n in range(9)}
    rows = [row(n, n, 0, answer=None, a=n % 7, b=n % 5, c=n % 2, **long) for n in range(70)]
    store = indexed(tmp_path, rows)
    assert "a" not in labels(store) and labels(store)["c"] == {"0": 35, "1": 35}
    with store.reading() as connection:
        assert connection.execute("SELECT count(*) FROM kinds").fetchone()[0] <= 3 * 8
        kinds = row_labels.KindsOfRows(connection)
        live = [found for (_, found) in kinds._ids if kinds._are_labels("grpo", found)]
        assert kinds._kinds["grpo"] == len(live) <= 8
        assert "a" not in kinds._values["grpo"], "what was given up stays so"


def test_many_names_leave_room_for_the_known_ones(tmp_path: Path) -> None:
    many = {f"name {n}": "x" for n in range(20)}
    found = labels(indexed(tmp_path, [row(0, 0, 0, **many, finish_reason="stop", source="a")]))
    assert len(found) == row_labels.NAMES + 2 and {"finish_reason", "source"} <= set(found)


@pytest.mark.parametrize(("many", "sorted_"), [(20_000, 200_000), (3, 5), (0, 0)])
def test_filters_go_together_by_every_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int, sorted_: int
) -> None:
    """Held against a plain look at all rows, and at all prompts."""
    monkeypatch.setattr("flowrl.show.search_rows.MANY", many)
    monkeypatch.setattr("flowrl.show.search_rows.SORTED", sorted_)
    ends, sources = ("stop", "length", "time"), ("math", "code")
    rows = [
        row(s, s, p, rewards=(s * p) % 5 / 4, response=f"says {'even' if s % 2 else 'odd'}", response_ids=[7] * (s + p))
        | {"finish_reason": ends[(s + p) % 3], "source": sources[s % 2]}
        for s in range(10)
        for p in range(4)
    ]
    store = indexed(tmp_path, rows)
    asked = product(
        ("", "even"),
        (None, ["length"], ["stop", "time"]),
        (None, ["code"]),
        (None, 3),
        (None, 6),
        (None, 0.5),
        (None, 4),
    )
    for text, reasons, source, short, long, least, first in asked:
        wanted = [
            each
            for each in rows
            if text in each["response"]
            and (reasons is None or each["finish_reason"] in reasons)
            and (source is None or each["source"] in source)
            and (short is None or len(each["response_ids"]) >= short)
            and (long is None or len(each["response_ids"]) <= long)
            and (least is None or each["rewards"] >= least)
            and (first is None or each["step"] >= first)
        ]
        chosen = {n: v for n, v in (("finish_reason", reasons), ("source", source)) if v is not None}
        bounds = {"min_tokens": short, "max_tokens": long, "least": least, "first": first}
        said = Filter("grpo", text, "oldest", labels=chosen, **bounds)  # type: ignore[arg-type]
        with store.reading() as connection:
            got = search_rows(connection, said)
            prompts = search_prompts(connection, said, silent=False, page=0)["prompts"]
        assert [each["key"] for each in got["rows"]] == [f"[{s}, {p}]" for s, p in (e["key"] for e in wanted)], said
        assert got["count"] in (None, len(wanted)), said
        assert {each["prompt"] for each in prompts} == {str(each["key"][0]) for each in wanted}, said


def test_prompts_are_sorted_by_the_mean_reward_of_their_rows(tmp_path: Path) -> None:
    given = {0: (0.0, 1.0), 1: (1.0, 1.0), 2: (0.0, 0.0), 3: (None, None), 4: (0.25, 0.25)}
    rows = [row(step, step, k, rewards=reward) for step, two in given.items() for k, reward in enumerate(two)]
    store = indexed(tmp_path, rows)

    def listed(order: str, *, silent: bool = False, page: int = 0, **asked: Any) -> list[int]:
        with store.reading() as connection:
            found = search_prompts(connection, Filter("grpo", order=order, **asked), silent=silent, page=page)
        return [each["step"] for each in found["prompts"]]

    assert listed("newest") == [4, 3, 2, 1, 0] and listed("oldest") == [0, 1, 2, 3, 4]
    assert listed("best") == [1, 0, 4, 2] and listed("worst") == [2, 4, 0, 1], "one without a reward is in neither"
    assert listed("best", silent=True) == [1, 4, 2] and listed("worst", first=1, most=0.5) == [2, 4]
    assert listed("best", page=1) == []
