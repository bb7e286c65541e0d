"""Checkpoints are written while the training goes on, and are those of the moment at which they were begun."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from direct import run_direct
from flows import events, metrics, module_of

from flowrl.backends import open_engine
from flowrl.errors import DiskError
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.work import Role, Workload
from flowrl.placement.cost.worker_memory import reading, training
from flowrl.placement.model.model_shape import ModelShape
from flowrl.placement.plan.plan import Place, Plan
from flowrl.runtime.driver.run_position import RunPosition
from flowrl.runtime.local.executor import LocalExecutor
from flowrl.runtime.storage.checkpoints import background_writer as writer
from flowrl.runtime.storage.checkpoints import checkpoint_folder as checkpoint
from flowrl.runtime.storage.checkpoints import snapshot
from flowrl.runtime.storage.recorder import Recorder
from flowrl.runtime.storage.run_record import with_checksum, without_checksum
from flowrl.schedule.events import Memory

ONE = Plan({"a": "cpu"})
SPLIT = Plan({"a": "cpu", "b": "cpu", "c": "cpu"}, {"world": Place("b"), "fails": Place("c")})
STEPS = 6


@pytest.fixture(scope="module")
def stale():
    """A flow with models."""
    return module_of("stale_flow")


@pytest.fixture(scope="module")
def whole(stale, tmp_path_factory):
    """The weights and the metrics of the undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return run(stale, out).weights_digest, numbers(out)


def run(module, out, **how):
    return module.flow.run("stale", out=out, quiet=True, save_models=False,
                           **{"parameters": {"stale": {"steps": STEPS}}, **how})  # fmt: skip


def lines(out: Path) -> int:
    file = out / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def hold_files(monkeypatch, out: Path, until: int, then=lambda: None) -> list[int]:
    """Have files of workers wait until the run has recorded so many steps. Returns when they were asked for."""
    real, asked = snapshot.write_shards, []

    def write_shards(*args):
        asked.append(lines(out))
        end = time.monotonic() + 60
        while lines(out) < until:
            assert time.monotonic() < end, "the training waits for the checkpoint"
            time.sleep(0.005)
        then()
        return real(*args)

    monkeypatch.setattr(snapshot, "write_shards", write_shards)
    return asked


def test_a_manifest_is_of_that_moment_too(stale, tmp_path, monkeypatch):
    """What metrics were seen, and the record of the run, change while the files are written."""
    hold_files(monkeypatch, tmp_path / "run", until=3)
    taken, written = [], []
    record, write = RunPosition.record, checkpoint._write_manifest

    def noted_record(position, *said):
        found = record(position, *said)
        taken.append(json.dumps(found))
        return found

    def noted_write(folder, manifest):
        written.append(manifest)
        return write(folder, manifest)

    monkeypatch.setattr(RunPosition, "record", noted_record)
    monkeypatch.setattr(checkpoint, "_write_manifest", noted_write)
    run(stale, tmp_path / "run", checkpoint_every=2)
    first = json.loads(taken[0])
    assert first["seen"] and {name: written[0][name] for name in first} == first


def test_a_checksum_is_that_of_what_is_written_whoever_changes_it_meanwhile():
    class Grows(dict):
        def items(self):
            self["x"] = self.get("x", 0) + 1
            return super().items()

    grows = Grows(x=0)
    raw = json.dumps(with_checksum({"a": grows, "b": 1})).encode()
    assert without_checksum(raw) == {"a": {"x": 1}, "b": 1}


class Broken(Exception):
    """Thrown into a run in place of a crash."""


@pytest.fixture
def break_at():
    """Have the next run break off when it has done the call that has this step recorded, before it is."""
    with pytest.MonkeyPatch.context() as patched:
        real = Recorder.commit

        def at(step: int) -> None:
            def commit(recorder, program, done, tokenizer):
                if done.number == step:
                    patched.undo()
                    raise Broken
                return real(recorder, program, done, tokenizer)

            patched.setattr(Recorder, "commit", commit)

        yield at


def numbers(out: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if not k.endswith("tokens_per_second")} for line in metrics(out)]


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_what_was_written_while_the_training_went_on_is_resumed_bit_for_bit(
    stale, whole, tmp_path, monkeypatch, break_at, runtime
):
    """The step after it has changed weights and moments before a file is written."""
    asked = hold_files(monkeypatch, tmp_path / "run", until=3)
    break_at(3)
    with pytest.raises(Broken):
        run(stale, tmp_path / "run", checkpoint_every=2, runtime=runtime)
    assert asked[0] < 3, "it was begun before that step"
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["000000"], "the error has waited for it"
    monkeypatch.undo()
    again = run(stale, tmp_path / "run", resume=True, runtime=runtime)
    assert events(tmp_path / "run", "resumed")[0]["text"].startswith("stale from step 2")
    assert (again.weights_digest, numbers(tmp_path / "run")) == whole


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "in turns"])
def test_on_ranks_too_and_from_where_weights_have_made_way_for_others(
    stale, whole, tmp_path, monkeypatch, break_at, tight
):
    memory = None
    if tight:
        shape = replace(ModelShape.from_config(stale.SMALL), dtype_bytes=4)
        actor, ref, load = Role("actor", shape, trains=True), Role("ref", shape), Workload(12, 6, 5)
        sizes = {"actor.train": training(actor, Mesh(), load).staying, "ref.train": reading(ref, Mesh(), load).staying}
        memory = {"a": Memory(sizes["actor.train"], sizes)}
    how = {"parameters": {"stale": {"steps": STEPS}}, "memory": memory, "save_models": False}
    hold_files(monkeypatch, tmp_path / "run", until=3)
    break_at(3)
    with pytest.raises(Broken):
        run_direct(stale.flow, ONE, tmp_path / "run", "stale", checkpoint_every=2, **how)
    monkeypatch.undo()
    again, _ = run_direct(stale.flow, ONE, tmp_path / "run", "stale", resume=True, **how)
    assert events(tmp_path / "run", "resumed")[0]["text"].startswith("stale from step 2")
    assert (again.weights_digest, numbers(tmp_path / "run")) == whole


def test_checkpoints_that_come_faster_than_they_are_written_wait_for_each_other(small, tmp_path, monkeypatch):
    real, now, most, numbers_ = checkpoint.write, [0], [0], []

    def write(begun, commit):
        now[0] += 1
        most[0] = max(most[0], now[0])
        time.sleep(0.03)
        target = real(begun, commit)
        numbers_.append(target.name)
        now[0] -= 1
        return target

    monkeypatch.setattr(checkpoint, "write", write)
    small.flow.run("train", out=tmp_path / "run", quiet=True, checkpoint_every=1)
    assert most == [1] and numbers_ == [f"{n:06d}" for n in range(10)]  # ten steps, the last of them the end
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == numbers_[-2:]


def test_a_disk_that_is_full_behind_the_training_ends_it_with_one_line(stale, whole, tmp_path, monkeypatch):
    out = tmp_path / "run"

    def full():
        if len(asked) > 3:  # those of the three workers in the first checkpoint are there
            raise DiskError(out / "checkpoints" / "x", 28, "No space left on device")

    asked = hold_files(monkeypatch, out, until=3, then=full)
    with pytest.raises(DiskError, match="No space left on device"):
        run(stale, out, checkpoint_every=2, parameters={"stale": {"steps": 40}})
    assert 4 <= lines(out) < 40, "steps went on, and it was told at the end of one"
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["000000"]
    monkeypatch.undo()
    assert (run(stale, out, resume=True, allow_changed=True).weights_digest, numbers(out)) == whole


def test_a_signal_waits_for_the_checkpoint_that_is_being_written_and_takes_another(small, tmp_path, monkeypatch):
    calm = small.flow.run("train", out=tmp_path / "calm", quiet=True)
    out, sent = tmp_path / "run", []

    def stop():
        if not sent:
            sent.append(lines(out))
            signal.raise_signal(signal.SIGTERM)

    hold_files(monkeypatch, out, until=4, then=stop)
    stopped = small.flow.run("train", out=out, quiet=True, checkpoint_every=3)
    assert (stopped.status, stopped.exit_status) == ("interrupted", 143)
    manifests = [checkpoint.load_manifest(p) for p in sorted((out / "checkpoints").iterdir())]
    assert [m["program"]["steps"] for m in manifests] == [3, lines(out)] and lines(out) > 3
    done = small.flow.run("train", out=out, quiet=True, resume=True)
    assert done.weights_digest == calm.weights_digest and metrics(out) == metrics(tmp_path / "calm")


def test_a_checkpoint_that_is_lost_with_a_rank_is_taken_again(small, tmp_path):
    small.flow.run("train", out=tmp_path / "calm", quiet=True)
    small.CALLS.clear()
    out = tmp_path / "run"
    run_direct(small.flow, SPLIT, out, kill=("write_captured", 4), checkpoint_every=2)
    assert metrics(out) == metrics(tmp_path / "calm")
    assert len(small.CALLS) == len(set(small.CALLS)), "the world was touched twice for a row"
    assert len(list((out / "checkpoints").glob("*/manifest.json"))) == 2
    assert not list((out / "checkpoints").glob(".*"))


def test_without_memory_for_a_copy_steps_wait_and_it_is_said_once(stale, whole, tmp_path, monkeypatch, break_at):
    monkeypatch.setattr(snapshot, "AT_A_TIME", 0)
    monkeypatch.setattr(snapshot, "free_memory", lambda: 0)
    driver = threading.get_ident()

    def look():
        frame, names = sys._current_frames()[driver], []
        while frame is not None:
            names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        waits.append("CheckpointWriter.begin" in names)

    waits: list[bool] = []
    hold_files(monkeypatch, tmp_path / "run", until=0, then=look)
    break_at(4)
    with pytest.raises(Broken):
        run(stale, tmp_path / "run", checkpoint_every=1)
    assert len(waits) >= 4 and all(waits)
    told = [e["text"] for e in events(tmp_path / "run", "warning") if "host memory" in e["text"]]
    assert len(told) == 1 and told[0].startswith("steps wait until checkpoints are written: a copy of the state lacks ")
    assert (run(stale, tmp_path / "run", resume=True).weights_digest, numbers(tmp_path / "run")) == whole


def test_what_was_given_up_does_not_count_and_leaves_nothing(tmp_path, monkeypatch):
    """As a second Ctrl-C does it; the folder may be another run's afterwards."""
    go, worker = threading.Event(), Held()
    real = snapshot.write_shards
    monkeypatch.setattr(snapshot, "write_shards", lambda *args: go.wait(30) and real(*args))
    held = writer.CheckpointWriter(tmp_path)
    executor = LocalExecutor({}, open_engine, workers={"held": worker})
    held.begin(lambda after: executor.capture(tmp_path, {"program": None}, {}, after=after))
    held.give_up()
    go.set()
    with pytest.raises((DiskError, Exception)):
        held.wait()
    assert list(tmp_path.iterdir()) == []


class Held:
    stamp = 0

    def state_shards(self):
        return [], {}


#: Ends its own process by SIGKILL in its second checkpoint, at the moment that is named.
KILLED = """
import os, signal, sys
sys.path.insert(0, {beside!r})
from flows import module_of
from flowrl.runtime.storage.checkpoints import checkpoint_folder as checkpoint
from flowrl.runtime.storage.checkpoints import snapshot

def ends(module, name, when):
    real, count = getattr(module, name), 0
    def fn(*args):
        nonlocal count
        count += 1
        if when == "before" and count == {count}:
            os.kill(os.getpid(), signal.SIGKILL)
        found = real(*args)
        if when == "after" and count == {count}:
            os.kill(os.getpid(), signal.SIGKILL)
        return found
    setattr(module, name, fn)

ends(*{where})
small = module_of("small_flow")
small.flow.run("train", out={out!r}, quiet=True, checkpoint_every=2)
"""


@pytest.mark.parametrize(
    ("where", "count", "step"),
    [
        ("snapshot, 'write_record', 'before'", 3, 2),
        ("checkpoint, '_appear', 'before'", 2, 2),
        ("checkpoint, '_appear', 'after'", 2, 4),
        ("checkpoint, 'remove', 'before'", 1, 6),
    ],
)
def test_a_kill_at_any_moment_leaves_the_checkpoint_before_whole(small, tmp_path, where, count, step):
    calm = small.flow.run("train", out=tmp_path / "calm", quiet=True)
    out = tmp_path / "run"
    script = KILLED.format(beside=str(Path(__file__).parents[2]), out=str(out), where=f"({where})", count=count)
    killed = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = small.flow.run("train", out=out, quiet=True, resume=True, checkpoint_every=2)
    assert events(out, "resumed")[0]["text"].startswith(f"train from step {step}")
    assert done.weights_digest == calm.weights_digest and metrics(out) == metrics(tmp_path / "calm")
    assert [p.name for p in (out / "checkpoints").iterdir() if p.name.startswith(".")] == []
