"""From which parts on ranks read the journals for calls to come: those of the last checkpoint."""

from __future__ import annotations

import json

import pytest
from direct import Direct, place_for, run_direct
from flows import events, metrics

from flowrl.placement.plan.plan import Place, Plan
from flowrl.runtime.storage import journal as journals
from flowrl.runtime.storage.checkpoints import checkpoint_folder as checkpoint

SPLIT = Plan({"a": "cpu", "b": "cpu", "c": "cpu"}, {"world": Place("b"), "fails": Place("c")})


@pytest.fixture
def told(monkeypatch):
    """What ranks are told of where answers may lie, call by call that touches the world: title and parts."""
    found, real = [], Direct.send

    def send(self, rank, method, *args):
        if method == "run" and args[0].journal is not None:
            found.append((args[0].title, dict(args[0].journal_since)))
        return real(self, rank, method, *args)

    monkeypatch.setattr(Direct, "send", send)
    return found


def test_a_checkpoint_says_from_where_on_calls_to_come_have_their_answers(small, tmp_path):
    place = place_for(small.flow, SPLIT, tmp_path, "train")
    place.open("counter")
    assert place.client.journal_since == {}
    record = {"stage": 0, "program": None, "finished": [], "marks": {}, "seed": 0, "journal": {"journal.b.1": 4}}
    checkpoint.write(place.capture(tmp_path / "checkpoints", record, {}))
    assert place.client.journal_since == {"journal.b.1": 4}
    place.restore({"journal": {"journal.b.1": 2}})
    assert place.client.journal_since == {"journal.b.1": 2}
    place.restore({})
    assert place.client.journal_since == {}, "the run goes back to its start"
    place.close()


def test_the_next_call_of_a_run_is_told_what_the_checkpoint_says(small, tmp_path, monkeypatch, told):
    monkeypatch.setattr(journals, "PART", 300)
    run_direct(small.flow, SPLIT, tmp_path / "run", parameters={"train": {"steps": 8}}, checkpoint_every=2, keep_last=9)
    folders = sorted((tmp_path / "run" / "checkpoints").iterdir())
    manifests = [json.loads((folder / "manifest.json").read_text())["journal"] for folder in folders]
    assert len(told) == 8 and [since for _, since in told[:2]] == [{}, {}]
    assert [told[step][1] for step in (2, 4, 6)] == manifests[:3]
    assert all(told[step][1] == told[step + 1][1] for step in (2, 4, 6))
    assert manifests[2]["journal.b.1"] > manifests[0]["journal.b.1"]


def test_a_rank_that_is_started_again_late_reads_what_was_written_since_the_checkpoint(small, tmp_path, monkeypatch):
    """It asks for nothing that was asked before, and the run is that in which no rank was lost."""
    monkeypatch.setattr(journals, "PART", 300)
    how = {"parameters": {"train": {"steps": 12}}, "checkpoint_every": 2, "keep_last": 9}
    run_direct(small.flow, SPLIT, tmp_path / "whole", **how)
    small.CALLS.clear()
    read, real = [], journals.read_lines
    monkeypatch.setattr(journals, "read_lines", lambda path: (read.append(path.name), real(path))[1])
    _, place = run_direct(small.flow, SPLIT, tmp_path / "run", kill=("run", 31, 1), **how)
    assert place.ranks.restarted == [1] and metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert "of step 10" in events(tmp_path / "run", "lost")[0]["text"]
    assert len(small.CALLS) == len(set(small.CALLS))
    folders = sorted((tmp_path / "run" / "checkpoints").iterdir())
    first = json.loads((folders[4] / "manifest.json").read_text())["journal"]["journal.b.1"]  # after ten steps
    parts = [f"journal.b.1.{part:06d}.jsonl" for part in (first, first + 1)]  # the newest one then, and what came since
    assert first > 2 and [name for name in read if ".b.1." in name] == parts
