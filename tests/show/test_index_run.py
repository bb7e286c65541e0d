"""The index of a run: whole lines alone, once each, as they grow, and anew where a file was written anew."""

from __future__ import annotations

import fcntl
import json
import sqlite3
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from show_runs import HOSTILE, hostile_folder, lines, row, run_folder

from flowrl.show import read_lines
from flowrl.show.curves import curves, metric_names
from flowrl.show.index_run import Indexer
from flowrl.show.lanes import chain, lanes, memory, pool_waits, step_times
from flowrl.show.search_rows import Filter, search_rows
from flowrl.show.store import VERSION, Store
from flowrl.show.summaries import counts, events, lags, ledger
from flowrl.trackers.tracker import LEVELS


def indexed(run: Path, cache: Path) -> Store:
    """A store with all that a run has."""
    cache.mkdir(exist_ok=True)
    store = Store(run, "test", cache)
    take_in(store)
    return store


def take_in(store: Store) -> None:
    indexer = Indexer(store)
    while indexer.small() or indexer.trajectories():
        pass


def rewards(store: Store) -> list[float]:
    with store.reading() as connection:
        return [value for loop in curves(connection, "grpo", ["reward"])["reward"] for value in loop["mean"]]


def found(store: Store, **asked: object) -> list[dict]:
    with store.reading() as connection:
        return search_rows(connection, Filter("grpo", **asked))["rows"]  # type: ignore[arg-type]


def test_a_run_is_all_in_its_index(tmp_path: Path) -> None:
    store = indexed(run_folder(tmp_path / "run"), tmp_path / "cache")
    assert rewards(store) == [0.0, 0.1, 0.2]
    assert len(found(store)) == 12
    with store.reading() as connection:
        assert metric_names(connection)[0]["names"] == ["reward", "entropy", "seconds"]
        assert sum(bar["rank"] < 0 for bar in lanes(connection, None, None)["bars"]) == 6
        assert lags(connection, "grpo") == [(0, 3), (1, 3)]
        assert ledger(connection, "grpo")["lines"][-1]["rows"]["trained"] == 8
        assert [event["text"] for event in events(connection, "", None)["events"]] == ["entropy fell"]
        assert counts(connection)["rows"] == 12 and counts(connection)["reward"] == 0.2


def test_half_a_last_line_waits_for_its_end(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", status="running")
    whole = json.dumps({"program": "grpo", "step": 3, "reward": 0.3}) + "\n"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(whole[:20])
    store = indexed(run, tmp_path / "cache")
    assert len(rewards(store)) == 3
    with (run / "metrics.jsonl").open("a") as file:
        file.write(whole[20:])
    take_in(store)
    assert rewards(store) == [0.0, 0.1, 0.2, 0.3]
    take_in(store)
    assert len(rewards(store)) == 4


def test_a_question_sees_one_state_of_the_index(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", status="running")
    store = indexed(run, tmp_path / "cache")
    with store.reading() as connection:
        assert counts(connection)["lines"] == 3
        lines(run, "metrics", {"program": "grpo", "step": 3, "reward": 0.3})
        take_in(store)
        assert counts(connection)["lines"] == 3
    with store.reading() as connection:
        assert counts(connection)["lines"] == 4


def test_a_file_that_was_cut_back_is_read_anew(tmp_path: Path) -> None:
    """A resume cuts the files back to a checkpoint and does the steps again, which may come out otherwise."""
    run = run_folder(tmp_path / "run")
    store = indexed(run, tmp_path / "cache")
    for name, last in (("metrics", {"program": "grpo", "step": 2, "reward": 0.9}), ("trajectories", row(2, 4, 0))):
        path = run / f"{name}.jsonl"
        kept = path.read_text().splitlines(keepends=True)
        path.write_text("".join(kept[: len(kept) * 2 // 3]))
        lines(run, name, last)
    take_in(store)
    assert rewards(store) == [0.0, 0.1, 0.9]
    assert len(found(store)) == 9
    assert {each["prompt"] for each in found(store, text="says")} == {"0", "1", "2", "3", "4"}
    assert len(found(store, text="says")) == 9, "the words of rows that are gone find nothing"


def test_lines_that_are_no_records_are_left_out_and_counted(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'no json\n[1, 2]\n\xff\xfe\n{"program": "grpo", "step": 3, "reward": 0.5, "count": 1e999}\n')
    store = indexed(run, tmp_path / "cache")
    assert rewards(store) == [0.0, 0.1, 0.2, 0.5]
    with store.reading() as connection:
        assert connection.execute("SELECT skipped FROM files WHERE name = 'metrics'").fetchone() == (3,)


def test_rows_with_long_lists_are_found_by_their_lengths_words_and_rewards(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps=0)
    text = 'he wrote "tokens": [' + "1, " * 60 + "1] and \\"
    long = {"response_ids": [7] * 90, "rollout_logprobs": [-0.25] * 90, "response_mask": [True, False] * 45}
    lines(run, "trajectories", row(0, 0, 0, **long, response=text, rewards=[0.5] * 40 + [2.5], **{"last\\": [3] * 99}))
    lines(run, "trajectories", row(0, 0, 1, response_ids=[], response="after it"))
    store = indexed(run, tmp_path / "cache")
    assert [(r["tokens"], r["reward"], r["key"]) for r in found(store)] == [(0, 1.0, "[0, 1]"), (90, 2.5, "[0, 0]")]
    assert len(found(store, text='"1 1 1 1 1 1 and"')) == 1


_numbers = st.lists(st.one_of(st.integers(), st.floats(), st.booleans()), max_size=40)
_anything = st.recursive(
    st.one_of(st.none(), st.text(), st.integers(), _numbers),
    lambda inside: st.dictionaries(st.text(), inside, max_size=4),
)


@given(st.dictionaries(st.text('": [],\\ab1', max_size=8), st.one_of(_anything, st.text('": [],\\ab1')), max_size=6))
def test_only_long_lists_of_numbers_are_left_out(record: dict) -> None:
    kept, lengths = read_lines.count_long_lists(json.dumps(record).encode())
    assert same(json.loads(kept), record)
    for name, value in record.items():
        once = '"' not in name and json.dumps(record).count(json.dumps(name)) == 1
        if once and value and json.loads(kept)[name] == []:
            assert lengths[json.dumps(name)[1:-1]] == len(value)


def same(kept: object, record: object) -> bool:
    """Whether what was kept is the record but for lists of numbers that are long."""
    if isinstance(record, dict) and isinstance(kept, dict):
        return list(kept) == list(record) and all(same(kept[name], record[name]) for name in record)
    if isinstance(record, list) and record and kept == []:
        return len(json.dumps(record)) > read_lines.LONG_LIST
    return json.dumps(kept) == json.dumps(record)


@pytest.mark.parametrize("portion", [100, 3000, 1 << 24])
def test_a_line_that_is_too_long_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    monkeypatch.setattr(read_lines, "LONGEST_LINE", 2000)
    monkeypatch.setattr("flowrl.show.index_run.PORTION_BYTES", portion)
    run = run_folder(tmp_path / "run")
    lines(run, "trajectories", row(3, 6, 0, response="x" * 9000), row(3, 6, 1, response="after it"))
    store = indexed(run, tmp_path / "cache")
    assert [each["key"] for each in found(store, text="after")] == ["[6, 1]"] and len(found(store)) == 13


def test_a_run_without_a_step_is_empty(tmp_path: Path) -> None:
    store = indexed(run_folder(tmp_path / "run", steps=0), tmp_path / "cache")
    assert rewards(store) == [] and found(store) == []
    with store.reading() as connection:
        assert lanes(connection, None, None)["lanes"] == [] and metric_names(connection) == []


def test_a_program_that_counts_anew_has_another_curve(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    lines(run, "metrics", *({"program": "grpo", "step": step, "reward": 1.0} for step in (0, 1)))
    store = indexed(run, tmp_path / "cache")
    with store.reading() as connection:
        assert [loop["step"] for loop in curves(connection, "grpo", ["reward"])["reward"]] == [[0, 1, 2], [0, 1]]


def test_many_points_become_few_with_their_range(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps=0)
    lines(run, "metrics", *({"program": "grpo", "step": step, "reward": step % 2} for step in range(1000)))
    store = indexed(run, tmp_path / "cache")
    with store.reading() as connection:
        (loop,) = curves(connection, "grpo", ["reward"], points=100)["reward"]
    assert len(loop["mean"]) == 100 and loop["count"] == 1000
    assert set(loop["mean"]) == {0.5} and set(loop["low"]) == {0.0} and set(loop["high"]) == {1.0}


def test_rows_are_sorted_filtered_and_paged(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps=0)
    rows = [row(step, step, place, rewards=step + place / 10) for step in range(30) for place in range(4)]
    lines(run, "trajectories", *rows)
    store = indexed(run, tmp_path / "cache")
    taken, after = [], None
    while True:
        with store.reading() as connection:
            page = search_rows(connection, Filter("grpo", order="best", after=after))
        taken += [each["reward"] for each in page["rows"]]
        if page["next"] is None:
            break
        after = tuple(page["next"])
    assert taken == sorted((each["rewards"] for each in rows), reverse=True)
    assert [each["step"] for each in found(store)][:5] == [29, 29, 29, 29, 28]
    assert {each["step"] for each in found(store, first=3, last=4, order="worst")} == {3, 4}
    assert [each["reward"] for each in found(store, least=2.0, most=2.15, order="oldest")] == [2.0, 2.1]


@pytest.mark.parametrize(("many", "sorted_"), [(20_000, 200_000), (3, 5), (0, 0)])
def test_every_way_finds_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int, sorted_: int
) -> None:
    """Few rows are looked up and sorted, of many the order is walked: held against a plain look at all rows."""
    monkeypatch.setattr("flowrl.show.search_rows.MANY", many)
    monkeypatch.setattr("flowrl.show.search_rows.SORTED", sorted_)
    run = run_folder(tmp_path / "run", steps=0)
    rows = [
        row(s, s, p, rewards=(s * p) % 5 / 4, response=f"says {'even' if s % 2 else 'odd'} {p}")
        for s in range(12)
        for p in range(4)
    ]
    lines(run, "trajectories", *rows)
    store = indexed(run, tmp_path / "cache")
    signs = {"newest": -1, "oldest": 1, "best": -1, "worst": 1}
    for text, order, first, last, least, most in product(
        ("", "says", "even"), signs, (None, 3), (None, 5, -1), (None, 0.3), (None, 0.8)
    ):
        wanted = [
            (number, each)
            for number, each in enumerate(rows)
            if text in each["response"]
            and (first is None or each["step"] >= first)
            and (last is None or each["step"] <= last)
            and (least is None or each["rewards"] >= least)
            and (most is None or each["rewards"] <= most)
        ]
        by = "step" if order in ("newest", "oldest") else "rewards"
        wanted.sort(key=lambda one: (one[1][by], one[0]), reverse=signs[order] < 0)
        got = found(store, text=text, order=order, first=first, last=last, least=least, most=most)
        said = (text, order, first, last, least, most)
        assert [each["key"] for each in got] == [json.dumps(each["key"]) for _, each in wanted], said


@pytest.mark.parametrize("portion", [1, 300, 5000, 1 << 24])
def test_a_large_file_is_taken_in_from_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, portion: int) -> None:
    """The newest rows are there first, and the index comes out the same whatever the portions are."""
    monkeypatch.setattr("flowrl.show.index_run.PORTION_BYTES", portion)
    run = run_folder(tmp_path / "run", steps=0)
    rows = [
        row(step, step, place, response=f"says {step} " + "x" * step * 40) for step in range(12) for place in (0, 1)
    ]
    lines(run, "trajectories", *rows[:7])
    with (run / "trajectories.jsonl").open("ab") as file:
        file.write(b"no json\n")
    lines(run, "trajectories", *rows[7:])
    with (run / "trajectories.jsonl").open("a") as file:
        file.write('{"program": "grpo", "st')
    (tmp_path / "cache").mkdir()
    store = Store(run, "test", tmp_path / "cache")
    indexer, seen = Indexer(store), []
    while indexer.trajectories():
        seen.append([each["key"] for each in found(store)])
    wanted = [json.dumps(each["key"]) for each in reversed(rows)]
    assert seen[-1] == wanted
    if portion < 1000:
        assert len(seen) > 6 and all(some == wanted[: len(some)] for some in seen), "from the newest on"
    assert [each["key"] for each in found(store, text="says", order="oldest")] == wanted[::-1]
    assert [each["key"] for each in found(store, text="says", first=3, last=4)] == wanted[14:18]
    with store.reading() as connection:
        assert connection.execute("SELECT skipped FROM files WHERE name = 'trajectories'").fetchone() == (1,)
        assert counts(connection)["rows"] == 24
    with (run / "trajectories.jsonl").open("a") as file:
        file.write('ep": 12, "key": [12, 0], "response": "after it"}\n')
    assert indexer.trajectories() and found(store)[0]["key"] == "[12, 0]"
    assert not indexer.trajectories()


def test_what_comes_while_earlier_rows_are_taken_in_is_there_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrl.show.index_run.PORTION_BYTES", 1000)
    run = run_folder(tmp_path / "run", steps=9, status="running")
    (tmp_path / "cache").mkdir()
    store = Store(run, "test", tmp_path / "cache")
    indexer = Indexer(store)
    assert indexer.trajectories() and indexer.trajectories()
    before = len(found(store))
    assert 0 < before < 36
    lines(run, "trajectories", row(9, 18, 0))
    assert indexer.trajectories()
    assert [each["step"] for each in found(store)][:2] == [9, 8] and len(found(store)) == before + 1
    while indexer.trajectories():
        pass
    assert len(found(store)) == 37
    other = Indexer(store)  # as a process that starts later
    assert not other.trajectories()


def test_a_file_that_is_written_anew_meanwhile_begins_anew_and_no_number_means_two_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrl.show.index_run.PORTION_BYTES", 1000)
    run = run_folder(tmp_path / "run", steps=9)
    (tmp_path / "cache").mkdir()
    store = Store(run, "test", tmp_path / "cache")
    indexer = Indexer(store)
    for _ in range(4):
        indexer.trajectories()
    numbers = {each["n"] for each in found(store)}
    (run / "trajectories.jsonl").unlink()
    lines(run, "trajectories", *(row(step, 50 + step, 0) for step in range(9)))
    while indexer.trajectories():
        pass
    assert [each["step"] for each in found(store)] == list(range(8, -1, -1))
    assert numbers and not numbers & {each["n"] for each in found(store)}
    assert all(each["n"] < 1 << 53 for each in found(store)), "JavaScript has these numbers as they are"


def test_what_stands_in_quotes_stands_together(tmp_path: Path) -> None:
    store = indexed(run_folder(tmp_path / "run"), tmp_path / "cache")
    assert {each["key"] for each in found(store, text="3+1=")} == {"[3, 0]", "[3, 1]"}
    assert {each["key"] for each in found(store, text='"3 1"')} == {"[3, 0]", "[3, 1]"}
    assert len(found(store, text="say", order="worst")) == 12, "the last word may be a beginning"
    assert found(store, text="says nothing") == [] and found(store, text="+-=") == []
    assert found(store, text='" OR 1=1 --') == [] and len(found(store, text="says*")) == 12


def test_many_bars_become_shares_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pool works half of the time in many calls, another one is in a single call for most of it."""
    monkeypatch.setattr("flowrl.show.lanes.BARS", 100)
    run = run_folder(tmp_path / "run", steps=0)
    where = {"program": "grpo", "step": 0, "rows": 1, "tokens": 1}
    many = [{**where, "node": "a", "pool": "p", "start": n, "end": n + 0.5} for n in range(1000)]
    lines(run, "timeline", *many, {**where, "node": "b", "pool": "q", "start": 100, "end": 900})
    with indexed(run, tmp_path / "cache").reading() as connection:
        whole = lanes(connection, None, None)
        near = lanes(connection, 200.0, 210.0)
    worked = {pool: sum(s["share"] for s in whole["shares"] if s["pool"] == pool) * whole["wide"] for pool in "pq"}
    assert worked == pytest.approx({"p": 500, "q": 800}, rel=0.01)
    assert max(share["share"] for share in whole["shares"]) <= 1.0 + 1e-9
    assert {bar["node"] for bar in near["bars"]} == {"a", "b"} and len(near["bars"]) == 11


def test_a_rank_has_a_lane_of_its_own_below_its_pool(tmp_path: Path) -> None:
    with indexed(run_folder(tmp_path / "run"), tmp_path / "cache").reading() as connection:
        found = lanes(connection, None, None)
    assert [(lane["pool"], lane["rank"]) for lane in found["lanes"]] == [
        ("main", -1),
        ("main", 0),
        ("main", 1),
        ("cpu", -1),
    ]
    part = next(bar for bar in found["bars"] if bar["rank"] == 1 and bar["step"] == 2)
    assert (part["node"], part["start"], part["ready"], part["end"]) == ("actor.generate", 4.0, 4.1, 4.65)


def test_a_call_is_told_with_those_that_let_it_begin(tmp_path: Path) -> None:
    with indexed(run_folder(tmp_path / "run"), tmp_path / "cache").reading() as connection:
        last = next(b for b in lanes(connection, None, None)["bars"] if b["node"] == "reward.score" and b["step"] == 2)
        assert last["producer"] | {"at": 0} == {
            "at": 0,
            "node": "actor.generate",
            "step": 2,
            "pool": "main",
            "start": 4.0,
            "end": 4.9,
        }
        told = [(bar["node"], bar["step"], bar["kind"]) for bar in chain(connection, last["at"])]
        assert told[:3] == [("reward.score", 2, "rows"), ("actor.generate", 2, "weights"), ("reward.score", 1, "rows")]
        assert len(told) == 6 and chain(connection, 1 << 40) == []
        waits = {(wait["pool"], wait["producer"]): wait for wait in pool_waits(connection)}
    assert waits["main", "reward.score"]["calls"] == 2 and waits["main", "reward.score"]["seconds"] == pytest.approx(
        2.2
    )
    assert waits["cpu", "actor.generate"]["seconds"] == pytest.approx(2.2)


def test_memory_is_the_most_of_each_part_of_the_time(tmp_path: Path) -> None:
    with indexed(run_folder(tmp_path / "run", steps=1000), tmp_path / "cache").reading() as connection:
        known = lanes(connection, None, None)
        found = memory(connection, known["from"], known["to"])
        begin, end = step_times(connection, "grpo", 500) or (0.0, 0.0)
        near = memory(connection, begin, end)
        assert step_times(connection, "grpo", 1000) is None
    assert set(found) == {"driver", "rank 0"} and len(found["driver"]) <= 401
    assert found["driver"][-1]["resident"] == 10**9 + 999 and found["driver"][-1]["device"] is None
    assert [one["resident"] for one in near["driver"]] == [10**9 + 500]
    assert begin <= 1000.0 and end >= 1001.9 and end - begin < 2.2


def test_many_bars_of_ranks_become_shares_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.show.lanes.BARS", 20)
    with indexed(run_folder(tmp_path / "run", steps=100), tmp_path / "cache").reading() as connection:
        found = lanes(connection, None, None)
    worked = {rank: sum(s["share"] for s in found["shares"] if s["rank"] == rank) * found["wide"] for rank in (0, 1)}
    assert worked == pytest.approx({0: 90.0, 1: 65.0}, rel=0.01)


def test_hostile_texts_are_kept_as_texts(tmp_path: Path) -> None:
    store = indexed(hostile_folder(tmp_path / "run"), tmp_path / "cache")
    kept = HOSTILE.encode(errors="replace").decode()
    with store.reading() as connection:
        assert kept in [one["program"] for one in metric_names(connection)]
        assert curves(connection, kept, [kept])[kept][0]["count"] == 4
        assert search_rows(connection, Filter(kept, text="pwned"))["count"] == 1


def test_a_second_process_reads_what_the_first_one_writes(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    first = indexed(run, tmp_path / "cache")
    second = Store(run, "test", tmp_path / "cache")
    assert first.writes and not second.writes
    assert rewards(second) == [0.0, 0.1, 0.2]
    first.close()
    assert second.writes


def test_an_index_that_is_damaged_is_made_anew(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    store = indexed(run, tmp_path / "cache")
    store.close()
    store.path.write_bytes(b"nothing that sqlite knows" * 100)
    assert rewards(indexed(run, tmp_path / "cache")) == [0.0, 0.1, 0.2]


@pytest.mark.parametrize("seen_by", ["question", "indexer"])
def test_an_index_that_is_damaged_behind_its_head_is_made_anew(tmp_path: Path, seen_by: str) -> None:
    run = run_folder(tmp_path / "run")
    indexed(run, tmp_path / "cache").close()
    path = tmp_path / "cache" / f"test.v{VERSION}.sqlite"
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xa5" * (len(whole) - 4096))
    store = Store(run, "test", tmp_path / "cache")
    indexer = Indexer(store)
    with pytest.raises(sqlite3.DatabaseError, match="malformed"):
        rewards(store) if seen_by == "question" else indexer.small()
    while (store.writes and indexer.small()) or indexer.trajectories():
        pass
    assert rewards(store) == [0.0, 0.1, 0.2] and len(found(store)) == 12 and store.made == 1
    store.close()
    assert Store(run, "test", tmp_path / "cache").made == 0, "it is kept"


def test_an_index_that_is_deleted_while_the_page_is_served_is_made_anew(tmp_path: Path) -> None:
    store = Store(run_folder(tmp_path / "run"), "test", tmp_path)
    indexer = Indexer(store)
    while indexer.small() or indexer.trajectories():
        pass
    store.path.unlink()
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        rewards(store)
    while (store.writes and indexer.small()) or indexer.trajectories():
        pass
    assert rewards(store) == [0.0, 0.1, 0.2] and len(found(store)) == 12


def test_alarms_are_the_events_that_trackers_call_so(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    for kind in (*LEVELS, "resumed"):
        lines(run, "events", {"time": 1.7e9, "kind": kind, "text": kind})
    with indexed(run, tmp_path / "cache").reading() as connection:
        assert counts(connection)["alarms"] == 1 + [*LEVELS.values()].count("alarm") == 7
        told = {event["kind"]: event["level"] for event in events(connection, "", None)["events"]}
    assert told == {**LEVELS, "resumed": "note"}


def test_an_index_of_an_older_flowrl_is_made_anew(tmp_path: Path) -> None:
    """It is removed, unless a process of that flowrl still keeps it."""
    run, cache = run_folder(tmp_path / "run"), tmp_path / "cache"
    cache.mkdir()
    old, other = cache / f"test.v{VERSION - 1}.sqlite", cache / f"another.v{VERSION - 1}.sqlite"
    for path in (old, other, Path(f"{old}-wal")):
        path.write_bytes(b"of other tables")
    with old.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store = indexed(run, cache)
        assert rewards(store) == [0.0, 0.1, 0.2] and old.exists()
        store.close()
    assert rewards(indexed(run, cache)) == [0.0, 0.1, 0.2]
    assert sorted(path.name for path in cache.glob(f"*.v{VERSION - 1}.*")) == [other.name]
