"""Checkpoints that ranks have written: their damage and a full disk are said by the driver, and the run goes on."""

from __future__ import annotations

import json
import time

import pytest
from direct import Direct, run_direct
from flows import metrics, room_for

from flowrl.errors import DiskError
from flowrl.placement.plan.plan import Place, Plan

SPLIT = Plan({"a": "cpu", "b": "cpu", "c": "cpu"}, {"world": Place("b"), "fails": Place("c")})


@pytest.fixture
def whole(small, tmp_path):
    """What a run in one process recorded: its total depends on every update."""
    small.flow.run(out=tmp_path / "local", quiet=True)
    return metrics(tmp_path / "local")


def told(out, kind):
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [line["text"] for line in lines if line["kind"] == kind]


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("file", ["counter.json", "counter.0.boxes", "live.safetensors"])
def test_what_ranks_have_written_is_checked_before_a_resume_takes_it(small, whole, tmp_path, file):
    out = tmp_path / "ranks"
    run_direct(small.flow, SPLIT, out, parameters={"train": {"steps": 6}}, checkpoint_every=2)
    newest = sorted((out / "checkpoints").iterdir())[-1]
    files = json.loads((newest / "manifest.json").read_text())["files"]
    assert set(files) == {p.name for p in newest.iterdir()} - {"manifest.json"}
    if file not in files:
        file = next(name for name in files if name.startswith("live."))
    flip(newest / file)
    run_direct(small.flow, SPLIT, out, checkpoint_every=2, resume=True)
    assert told(out, "damaged")[0].startswith(f"checkpoint {newest.name} is damaged: its {file} has other contents")
    assert metrics(out) == whole


@pytest.mark.parametrize("count", [12, 25])
def test_a_run_that_goes_back_takes_the_checkpoint_before_a_damaged_one(small, whole, tmp_path, monkeypatch, count):
    """The rank may be gone before it has written its part of the first checkpoint: then none is there to be damaged."""
    out, real, flipped = tmp_path / "ranks", Direct.restart, []

    def restart(self, ranks, within):
        if flipped:
            return real(self, ranks, within)
        end = time.monotonic() + 5
        while time.monotonic() < end:  # one that is being written is waited for: it would be a newer one
            there = sorted((out / "checkpoints").glob("*"))
            if there and all(p.name.isdigit() for p in there):
                break
            time.sleep(0.01)
        if whole_ones := sorted((out / "checkpoints").glob("[0-9]*[0-9]")):
            flip(whole_ones[-1] / "counter.json")
            flipped.append(whole_ones[-1].name)
        return real(self, ranks, within)

    monkeypatch.setattr(Direct, "restart", restart)
    run_direct(small.flow, SPLIT, out, kill=("run", count), checkpoint_every=1)
    assert flipped or count == 12
    if flipped and told(out, "recovered"):  # the rank that trains was lost
        assert told(out, "damaged")[0].startswith(f"checkpoint {flipped[0]} is damaged: its counter.json")
    assert metrics(out) == whole


@pytest.mark.parametrize("part", [0.5, 0.9])
def test_a_full_disk_of_a_rank_is_said_in_the_words_of_the_driver(small, whole, tmp_path, part):
    out = tmp_path / "ranks"
    with room_for(10**9, tmp_path / "first") as left:
        run_direct(small.flow, SPLIT, tmp_path / "first", checkpoint_every=2)
    with (
        room_for(int(part * (10**9 - left[0])), out),
        pytest.raises(DiskError, match="No space left on device") as raised,
    ):
        run_direct(small.flow, SPLIT, out, checkpoint_every=2)
    assert raised.value.report().splitlines()[-1] == "  fix  Make room, then go on with --resume."
    assert [p for p in out.rglob("*") if p.name.endswith(".part")] == []
    run_direct(small.flow, SPLIT, out, checkpoint_every=2, resume=True)
    assert metrics(out) == whole
