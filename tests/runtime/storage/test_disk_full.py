"""A disk that is full at any moment ends the run with one line; with room, it goes on to the same weights."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from flows import metrics, module_of, room_for

from flowrl.errors import DiskError

REASONS = {
    errno.ENOSPC: "No space left on device",
    errno.EDQUOT: "Disk quota exceeded",
    errno.EIO: "Input/output error",
    errno.EROFS: "Read-only file system",
}


@pytest.fixture(scope="module")
def flow():
    for name in ("small_flow", "kept_flow"):
        module_of(name)
    return module_of("damage_flow")


@pytest.fixture(scope="module")
def whole(flow, tmp_path_factory):
    """The folder of the undisturbed run, its weights, and how many bytes it wrote."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with room_for(10**9, out) as left:
        outcome = run(flow, out)
    return out, outcome.weights_digest, 10**9 - left[0]


def run(module, out, **how):
    return module.flow.run(out=out, quiet=True, checkpoint_every=2, **how)


def check_it_goes_on(module, out, whole, error):
    """A run that a disk has ended: nothing is half there, and the same weights and records come of it."""
    before, digest, _ = whole
    what, *_, fix = error.report().splitlines()  # a line of the program may stand between them
    assert what.startswith(f"DiskError: {out}/") and " could not be written: " in what
    assert fix.endswith("then go on with --resume.")
    assert [p for p in out.rglob("*") if p.name.endswith(".part")] == []
    for path in out.glob("*.jsonl"):
        text = path.read_text().splitlines()
        assert all(json.loads(line) for line in text if line.strip()), "no line is half there"
    if (out / "run.json").exists():
        outcome = run(module, out, resume=True)
        assert not [e for e in events(out) if e["kind"] == "damaged"]
    else:  # it had not begun
        outcome = run(module, out, overwrite=True)
    assert outcome.weights_digest == digest and metrics(out) == metrics(before)


def events(out):
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("part", range(6))
def test_a_run_goes_on_wherever_its_disk_was_full(flow, whole, tmp_path, part):
    out = tmp_path / "run"
    with room_for(part * whole[2] // 6 + 37 * part, out), pytest.raises(DiskError) as raised:
        run(flow, out)
    assert "No space left on device (" in raised.value.what and " free)." in raised.value.what
    check_it_goes_on(flow, out, whole, raised.value)


@pytest.mark.parametrize("number", REASONS)
def test_whatever_keeps_a_disk_from_taking_a_checkpoint_is_said(flow, whole, tmp_path, number):
    out = tmp_path / "run"
    with room_for(whole[2] // 2, out, number), pytest.raises(DiskError, match=REASONS[number]) as raised:
        run(flow, out)
    assert raised.value.number == number
    check_it_goes_on(flow, out, whole, raised.value)


def test_a_disk_that_is_still_full_says_so_again_and_nothing_is_lost(flow, whole, tmp_path):
    out = tmp_path / "run"
    with room_for(whole[2] // 2, out), pytest.raises(DiskError):
        run(flow, out)
    kept = {p: p.read_bytes() for p in (out / "checkpoints").rglob("*") if p.is_file()}
    for _ in range(2):
        with room_for(0, out), pytest.raises(DiskError) as raised:
            run(flow, out, resume=True)
    assert {p: p.read_bytes() for p in (out / "checkpoints").rglob("*") if p.is_file()} == kept
    check_it_goes_on(flow, out, whole, raised.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="a disk is mounted by root")
@pytest.mark.parametrize("pages", [1, 6, 20])
def test_a_disk_that_is_really_full(flow, whole, tmp_path, pages):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={pages * 4096}", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        pytest.skip("no disk can be mounted here")
    try:
        with pytest.raises(DiskError, match="No space left on device") as raised:
            run(flow, disk / "run")
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        check_it_goes_on(flow, disk / "run", whole, raised.value)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


SCRIPT = """
import sys
sys.path.insert(0, {beside!r})
import small_flow, kept_flow
from damage_flow import *
"""


def test_the_command_line_says_how_to_go_on(flow, whole, tmp_path):
    """A limit of the size of files, as a shell's ``ulimit -f`` sets it."""
    script, out = tmp_path / "driver.py", tmp_path / "run"
    script.write_text(SCRIPT.format(beside=str(Path(__file__).parents[1])))
    command = [sys.executable, "-m", "flowrl", "run", str(script), "--out", str(out), "--quiet"]
    limited = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (12000, 12000)),
    )
    assert limited.returncode == 1
    what, fix, how = limited.stderr.splitlines()
    assert what.startswith(f"DiskError: {out}") and "could not be written: File too large" in what
    assert fix == "  fix  Make room, then go on with --resume."
    assert how == "nothing was recorded, so there is nothing to go on from", "its run.json is larger"
    assert shutil.disk_usage(tmp_path).free > 0
