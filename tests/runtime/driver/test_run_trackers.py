"""A run tells the trackers that it is asked for, and is the same run with or without them."""

from __future__ import annotations

import json

import pytest
from flows import events, metrics, module_of

from flowrl.cli import main
from flowrl.errors import UsageError

OPENED: list[Noted] = []


class Noted:
    def __init__(self, run):
        self.run, self.calls = run, []
        OPENED.append(self)

    def log(self, program, step, numbers):
        self.calls.append((program, step, numbers))

    def samples(self, program, step, rows): ...

    def close(self, status):
        self.calls.append(status)


class Fails(Noted):
    def log(self, program, step, numbers):
        raise OSError("the disk of the tracker is full")


class Alarmed(Noted):
    def event(self, kind, text, level):
        self.calls.append((kind, text, level))


@pytest.fixture(autouse=True)
def opened():
    OPENED.clear()
    module_of("small_flow")


def run(out, *trackers, **how):
    return module_of("small_flow").flow.run(out=out, quiet=True, track=trackers, **how)


def test_a_tracker_has_what_metrics_and_run_json_have(tmp_path):
    run(tmp_path / "run", f"{__name__}:Noted", steps=3, seed=5)
    [noted] = OPENED
    logged = [{"program": p, "step": s, **numbers} for p, s, numbers in noted.calls[:-1]]
    assert [{k: v for k, v in line.items() if k != "seconds"} for line in logged] == metrics(tmp_path / "run")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (noted.run.id, noted.run.name, noted.run.resumed) == (record["id"], "run", False)
    assert noted.run.configuration["seed"] == 5 and noted.run.configuration["workers"]["counter: start"] == "1.0"
    assert noted.run.graphs == record["graphs"] and noted.run.plan == record["plan"]
    assert noted.calls[-1] == "done"


def test_a_resume_goes_on_with_the_same_run(tmp_path):
    run(tmp_path / "run", f"{__name__}:Noted", steps=3)
    run(tmp_path / "run", f"{__name__}:Noted", steps=5, resume=True)
    before, after = OPENED
    assert after.run.id == before.run.id and after.run.resumed
    assert [c[1] for c in before.calls[:-1]] == [0, 1, 2] and [c[1] for c in after.calls[:-1]] == [3, 4]


def test_a_tracker_that_fails_changes_nothing_of_the_run(tmp_path):
    with_it = run(tmp_path / "with", f"{__name__}:Fails", steps=3)
    assert with_it.weights_digest == run(tmp_path / "without", steps=3).weights_digest
    said = f"tracker {__name__}:Fails failed, and the run goes on: OSError: the disk of the tracker is full"
    assert [e["text"] for e in events(tmp_path / "with", "warning")] == [said]
    assert [e["text"] for e in events(tmp_path / "with", "tracker")] == [
        f"tracker {__name__}:Fails: 3 of 3 lines did not arrive"
    ]


def test_a_run_that_fails_says_so_to_its_trackers(tmp_path):
    with pytest.raises(Exception, match="broken on purpose"):
        module_of("small_flow").flow.run("breaks", out=tmp_path / "run", quiet=True, track=f"{__name__}:Noted")
    assert OPENED[0].calls[-1] == "failed"


def test_events_of_a_run_reach_its_trackers_and_the_last_one_says_why_it_failed(tmp_path):
    with pytest.raises(Exception, match="broken on purpose"):
        module_of("small_flow").flow.run("breaks", out=tmp_path / "run", quiet=True, track=f"{__name__}:Alarmed")
    *_, (kind, text, level), status = OPENED[0].calls
    assert (kind, level, status) == ("failed", "alarm", "failed") and "broken on purpose" in text
    assert text == events(tmp_path / "run", "failed")[-1]["text"]


def test_a_resume_is_an_event_for_trackers(tmp_path):
    run(tmp_path / "run", f"{__name__}:Alarmed", steps=3)
    run(tmp_path / "run", f"{__name__}:Alarmed", steps=5, resume=True)
    assert [call[0] for call in OPENED[0].calls] == ["counted"] * 3 + ["done"] or "resumed" not in str(OPENED[0].calls)
    assert [(c[0], c[2]) for c in OPENED[1].calls if c[0] == "resumed"] == [("resumed", "note")]


def test_an_unknown_tracker_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UsageError, match="there is no such tracker"):
        run(tmp_path / "run", "tensorbord")
    assert not (tmp_path / "run").exists()


def test_trackers_of_the_command_line_are_kept_for_a_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = str(module_of("small_flow").__file__)
    words = ["--out", "run", "--quiet", "--track", f"{__name__}:Noted"]
    assert main(["run", script, "--steps", "2", *words]) == 0
    assert main(["run", script, "--resume", "--out", "run", "--steps", "3", "--quiet"]) == 0
    assert len(OPENED) == 2
