"""Whatever lies damaged in the folder of a run: it is said in a line, and the run ends as if nothing had been."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from damages import ASKED_AGAIN, DAMAGES, LINES_LOST, ONE_NUMBER, STOPS
from flows import metrics, module_of

from flowrl.analysis.run_pages import look_at
from flowrl.errors import ResumeError, RunError

NOBODY = 65534


@pytest.fixture(scope="module")
def prepared():
    """The module of the flow, a folder of a run that was killed in its eighth step, and what the undisturbed one gave."""
    beside = Path(tempfile.mkdtemp(prefix="flowrl-damage-"))
    beside.chmod(0o755)
    for name in ("small_flow", "kept_flow"):
        module_of(name)
    module = module_of("damage_flow")
    whole = module.flow.run(out=beside / "whole", quiet=True, checkpoint_every=2)
    update = sys.modules["small_flow"].Counter.__dict__["update"]
    real, count = update.fn, []

    def fails(self, batch, *, scale=1.0):
        count.append(1)
        if len(count) == 8:
            raise OSError("the plug was pulled")
        return real(self, batch, scale=scale)

    fails.__annotations__ = real.__annotations__
    object.__setattr__(update, "fn", fails)
    with pytest.raises(RunError):
        module.flow.run(out=beside / "run", quiet=True, checkpoint_every=2)
    object.__setattr__(update, "fn", real)
    assert [p.name for p in sorted((beside / "run" / "checkpoints").iterdir())] == ["000001", "000002"]
    files = [p for p in (beside / "run" / "checkpoints").rglob("*") if p.is_file()]
    assert len({p.stat().st_ino for p in files}) == len(files), "what damages one checkpoint leaves the other whole"
    yield module, beside, whole.weights_digest
    shutil.rmtree(beside)


@contextmanager
def as_a_user(folder):
    """Without the rights of root, for whom every file is open."""
    if os.geteuid():
        yield
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def contents(folder):
    """All that lies in a folder."""
    return {
        str(p.relative_to(folder)): os.readlink(p) if p.is_symlink() else p.is_dir() or p.read_bytes()
        for p in folder.rglob("*")
        if p.name != "user_code.jsonl"  # notes of what user code was doing, made anew by each start
    }


def said_of(run, text):
    """A line as the table has it: without the names of folders and numbers of bytes, which differ by run."""
    return re.sub(
        r"\d+ bytes( of(?: the)? )\d+", r"N bytes\1N", re.sub(r"last \d+", "last N", text.replace(str(run), "RUN"))
    )


@pytest.mark.parametrize("damage", DAMAGES, ids=range(1, len(DAMAGES) + 1))
def test_what_is_damaged_is_said_and_the_run_goes_on_or_changes_nothing(prepared, damage, capsys):
    module, beside, digest = prepared
    run = beside / "resumed"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(beside / "run", run)
    damage.do(run)
    before = contents(run)
    already = len((run / "events.jsonl").read_text().splitlines())
    module.CALLS.clear()
    try:
        with as_a_user(run):
            outcome = module.flow.run(out=run, resume=True, checkpoint_every=2)
    except ResumeError as error:
        assert damage.comes_to == STOPS
        assert (said_of(run, error.report()),) == damage.said
        assert contents(run) == before
        return
    assert damage.comes_to != STOPS
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    told = [said_of(run, e["text"]) for e in events[already:] if e["kind"] == "damaged"]
    assert told == list(damage.said)
    shown = said_of(run, capsys.readouterr().err).replace("\n", " ")
    assert all(text in re.sub(" +", " ", shown) for text in damage.said)
    assert outcome.weights_digest == digest
    undisturbed = metrics(beside / "whole")
    if damage.comes_to == LINES_LOST:
        assert metrics(run) == [m for m in undisturbed if m in metrics(run)] and len(metrics(run)) < len(undisturbed)
    elif damage.comes_to == ONE_NUMBER:
        assert sum(a != b for a, b in zip(metrics(run), undisturbed, strict=True)) == 1
    else:
        assert metrics(run) == undisturbed
    assert sorted(module.CALLS) == ([(24,), (25,), (26,), (27,)] if damage.comes_to == ASKED_AGAIN else [])
    left = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert len(left) == 2 and not [n for n in left if n.startswith(".") or n.endswith(".damaged")], left
    look_at(run)
