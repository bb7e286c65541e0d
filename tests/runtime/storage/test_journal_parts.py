"""A journal in several parts: read from the one of a checkpoint on, and nothing is lost where a kill comes between."""

from __future__ import annotations

import json
import shutil

import pytest
from direct import run_direct
from flows import events, metrics

from flowrl.batch import CallInfo
from flowrl.errors import RunError
from flowrl.placement.plan.plan import Place, Plan
from flowrl.runtime.storage import journal as journals
from flowrl.runtime.storage.journal import Journal

SPLIT = Plan({"a": "cpu", "b": "cpu", "c": "cpu"}, {"world": Place("b"), "fails": Place("c")})
INFO = CallInfo(7, "train", 0, "world.judge", 0, False)


@pytest.fixture(autouse=True)
def short_parts(monkeypatch):
    monkeypatch.setattr(journals, "PART", 600)


class Stop(Exception):
    """Thrown into a run in place of a crash."""


def write(path, calls, *, reads=True):
    """A journal with an answer and a read for each call."""
    journal = Journal(path)
    for call in calls:
        journal.keep(0, call, [(call,)], ["a"], {"x": ["b"]}, of=INFO, value=call * 2)
        if reads:
            journal.read(0, call, call / 4)
    journal.close()


def names(folder):
    return sorted(path.name for path in folder.glob("journal*.jsonl"))


def test_a_journal_goes_on_in_another_file_and_is_read_as_one(tmp_path):
    write(tmp_path / "journal.jsonl", range(20))
    write(tmp_path / "journal.jsonl", range(20, 40))
    files = names(tmp_path)
    assert files[0] == "journal.000001.jsonl" and files[-1] == "journal.jsonl" and len(files) > 5
    assert all((tmp_path / name).stat().st_size < 900 for name in files)
    found = Journal(tmp_path / "journal.jsonl")
    assert [found.answers(0, call)[0]["value"] for call in range(40)] == [2 * call for call in range(40)]
    assert [found.value(0, number) for number in range(40)] == [number / 4 for number in range(40)]
    assert not found.damage and not found.lost(0, 40) and found.lost(0, 41) == [40]


def test_parts_before_a_checkpoint_are_not_read_unless_a_value_in_them_is_asked_for(tmp_path, monkeypatch):
    write(tmp_path / "journal.jsonl", range(20))
    write(tmp_path / "journal.reward.3.jsonl", range(14), reads=False)
    written = Journal(tmp_path / "journal.jsonl", beside="journal*.jsonl")
    last = max(len(list(tmp_path.glob("journal.0*.jsonl"))), 0)
    assert written.parts(0, 20, 20) == {"journal": last, "journal.reward.3": len(names(tmp_path)) - last - 2}
    ahead = written.parts(0, 4, 20)  # calls of 4 and more are yet to come again, and have their answers there
    assert ahead["journal"] < last and ahead["journal.reward.3"] < written.parts(0, 20, 20)["journal.reward.3"]
    assert written.parts(1, 0, 0) == written.parts(0, 20, 20)
    read, real = [], journals.read_lines
    monkeypatch.setattr(journals, "read_lines", lambda path: (read.append(path.name), real(path))[1])
    found = Journal(tmp_path / "journal.jsonl", beside="journal*.jsonl", since=written.parts(0, 20, 20))
    assert len(read) == 2 and f"journal.{last:06d}.jsonl" in read and not found.lost(0, 20)
    assert found.answers(0, 19) and not found.answers(0, 2)
    assert found.value(0, 2) == 0.5 and len(read) == 2 + len(names(tmp_path)), "all of them"
    with pytest.raises(KeyError):
        found.value(0, 99)


def test_a_part_that_is_gone_is_told_of(tmp_path):
    write(tmp_path / "journal.jsonl", range(20))
    (tmp_path / "journal.000002.jsonl").unlink()
    found = Journal(tmp_path / "journal.jsonl")
    assert [text.partition(":")[0] for text in found.damage] == ["journal.000002.jsonl is missing"]
    assert found.lost(0, 20) and not Journal(tmp_path / "journal.jsonl", since={"journal": 3}).damage


def lines(folder):
    """All whole lines of the journals of a folder."""
    raws = [raw for name in names(folder) for raw in (folder / name).read_bytes().splitlines(keepends=True)]
    return [json.loads(raw) for raw in raws if raw.endswith(b"\n")]


def after_a_kill(folder, state):
    """What a kill in the middle of a new part may leave."""
    *_, before, last = sorted(folder.glob("journal*.jsonl"), key=lambda path: (path.name != "journal.jsonl", path.name))
    whole = last.read_bytes()
    if state == "no new part yet":
        last.unlink()
    elif state == "a new part without a line":
        last.write_bytes(b"")
    elif state == "half of its first line":
        last.write_bytes(whole[:50])
    elif state == "half a line at the end of the part before, and no new one":
        last.unlink()
        before.write_bytes(before.read_bytes() + whole[:50])
    else:
        last.write_bytes(whole[: whole.index(b"\n") + 1])


KILLS = ["no new part yet", "a new part without a line", "half of its first line", "a line",
         "half a line at the end of the part before, and no new one"]  # fmt: skip


@pytest.mark.parametrize("state", KILLS)
def test_a_kill_between_two_parts_loses_no_whole_line(tmp_path, state):
    write(tmp_path / "journal.jsonl", range(20))
    after_a_kill(tmp_path, state)
    whole = lines(tmp_path)
    first = max(line["call"] for line in whole if "call" in line) + 1
    write(tmp_path / "journal.jsonl", range(first, 30))
    found = Journal(tmp_path / "journal.jsonl")
    assert not found.damage, "what was cut off is gone"
    assert all(found.answers(0, call)[0]["value"] == 2 * call for call in range(30))
    assert all(found.value(0, line["read"]) == line["value"] for line in whole if "read" in line)


def crash_at(small, update):
    """Have the run die in its update of that number."""
    real, count = small.Counter.__dict__["update"].fn, 0

    def fn(self, batch, *, scale=1.0):
        nonlocal count
        count += 1
        if count == update:
            raise Stop
        return real(self, batch, scale=scale)

    fn.__annotations__ = real.__annotations__
    object.__setattr__(small.Counter.__dict__["update"], "fn", fn)
    return lambda: object.__setattr__(small.Counter.__dict__["update"], "fn", real)


@pytest.mark.parametrize("state", [*KILLS, "as it was"])
def test_a_run_goes_on_over_the_parts_and_asks_nothing_twice(small, tmp_path, state):
    def go(out, **how):
        small.flow.run("train", out=out, quiet=True, save_models=False, checkpoint_every=2, **how)

    go(tmp_path / "whole")
    small.CALLS.clear()
    crash_at(small, 8)
    with pytest.raises(RunError):
        go(tmp_path / "run")
    assert len(names(tmp_path / "run")) > 3
    asked = list(small.CALLS)
    if state != "as it was":
        after_a_kill(tmp_path / "run", state)
    kept = {tuple(key) for line in lines(tmp_path / "run") for key in line.get("keys", ())}
    assert kept and (state != "as it was" or kept == set(asked))
    go(tmp_path / "run", resume=True)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert not kept & set(small.CALLS[len(asked) :]), "answers that are there are asked for again"


def test_answers_of_calls_to_come_are_found_in_parts_before_the_checkpoint(small, tmp_path):
    """The run goes back far, is killed on its way, and goes on: what was asked before is never asked again."""

    def go(**how):
        small.flow.run("train", out=tmp_path / "run", quiet=True, save_models=False, **how)

    go(checkpoint_every=2, keep_last=9)
    asked = list(small.CALLS)
    last = metrics(tmp_path / "run")
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    for path in checkpoints[1:]:
        shutil.rmtree(path)
    for _ in range(2):
        undo = crash_at(small, 4)
        with pytest.raises(RunError):
            go(resume=True, checkpoint_every=1)
        undo()
    go(resume=True)
    assert list(small.CALLS) == asked and metrics(tmp_path / "run") == last


def test_values_that_were_read_come_from_all_parts_where_the_variables_do_not_fit(small, tmp_path):
    """As where a program is changed: it is gone through from its start."""

    def go(**how):
        small.flow.run("train", out=tmp_path / "run", quiet=True, save_models=False, checkpoint_every=3, **how)

    go()
    last = metrics(tmp_path / "run")
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    shutil.rmtree(newest)
    path = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1] / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["journal"]["journal"] > 0 and manifest["program"]["variables"]
    manifest["program"]["variables"]["same"] = "another"
    del manifest["checksum"]
    path.write_text(json.dumps(manifest))
    go(resume=True)
    assert metrics(tmp_path / "run") == last


def test_ranks_go_on_over_the_parts(small, tmp_path):
    out = tmp_path / "ranks"
    run_direct(small.flow, SPLIT, out, parameters={"train": {"steps": 6}}, checkpoint_every=2)
    asked = list(small.CALLS)
    assert len(names(out)) > 3
    newest = sorted((out / "checkpoints").iterdir())[-1]
    since = json.loads((newest / "manifest.json").read_text())["journal"]
    assert any(part > 0 for part in since.values())
    shutil.rmtree(newest)
    run_direct(small.flow, SPLIT, out, parameters={"train": {"steps": 8}}, checkpoint_every=2, resume=True)
    assert list(small.CALLS)[: len(asked)] == asked and len(small.CALLS) == len(set(small.CALLS))
    assert [line["step"] for line in metrics(out)] == list(range(8)) and not events(out, "damaged")
