"""What a checkpoint says of the run is on the disk before it is."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flowrl.runtime.driver.take_checkpoint import Checkpoints
from flowrl.runtime.storage.recorder import STREAMS, Recorder
from flowrl.runtime.values.step_records import Point


def test_records_are_on_the_disk_before_a_checkpoint_that_counts_them(tmp_path, monkeypatch):
    """After a power loss they were shorter than it says, and their steps are not done again."""
    done: list[str] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        fsync(handle)

    class Captured(Exception):
        pass

    def capture(*_: Any, **__: Any) -> None:
        done.append("capture")
        raise Captured

    recorder = Recorder(tmp_path, groups=1, every=1)
    recorder.begin()
    recorder.write("metrics", {"program": "p", "step": 0})
    gap_alarm = SimpleNamespace(rang=False)
    watches = SimpleNamespace(score=SimpleNamespace(take=lambda: None), health=SimpleNamespace(gap_alarm=gap_alarm))
    inputs = SimpleNamespace(record={})
    settings = SimpleNamespace(out=tmp_path, keep_last=1, keep_best=0, checkpoint_every=1, seed=0, inputs=inputs)
    checkpoints = Checkpoints(
        cast("Any", settings),
        cast("Any", SimpleNamespace(sync=lambda: done.append("journals"), capture=capture)),
        recorder,
        cast("Any", SimpleNamespace(record=lambda marks, calls, reads: {"marks": marks})),
        cast("Any", watches),
        check=lambda: None,
        warn=lambda text: None,
    )
    checkpoints.overdue = True
    monkeypatch.setattr(os, "fsync", noted)
    with pytest.raises(Captured):
        checkpoints.take(Point(None, {}, recorder.marks()))
    assert done[-1] == "capture" and {f"{name}.jsonl" for name in STREAMS} | {"journals"} <= set(done[:-1])
    recorder.close()
