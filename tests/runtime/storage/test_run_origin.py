"""What a run says of where it comes from, and what it keeps of its rows."""

from __future__ import annotations

import json
import platform
import subprocess
from functools import partial

from flows import module_of

from flowrl.runtime.storage.run_origin import device, origin
from flowrl.runtime.values.values_in_records import spelled


def git(folder, *words):
    subprocess.run(["git", "-C", str(folder), *words], check=True, capture_output=True)


def test_the_commit_is_that_of_the_scripts_repository(tmp_path):
    script = tmp_path / "driver.py"
    script.write_text("1\n")
    assert origin(str(script))["commit"] is None and origin(str(script))["dirty"] is None
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "driver.py")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    clean = origin(str(script))
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    script.write_text("2\n")
    assert origin(str(script)) == {**clean, "dirty": True}
    assert clean["host"] == platform.node() and clean["device"] == device()


def test_where_git_does_not_say_in_time_a_script_is_not_called_unchanged(tmp_path, monkeypatch):
    real = subprocess.run

    def slow(command, **how):
        if "status" in command:
            raise subprocess.TimeoutExpired(command, how["timeout"])
        return real(command, **how)

    script = tmp_path / "driver.py"
    script.write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "driver.py")
    git(tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")
    monkeypatch.setattr(subprocess, "run", slow)
    said = origin(str(script))
    assert len(said["commit"]) == 40 and said["dirty"] is None


def test_a_record_has_no_addresses(small, tmp_path):
    class Thing:
        pass

    values = [Thing(), partial(sorted, Thing(), reverse=True), {"fn": len}, (lambda x: x), object()]
    assert "0x" not in json.dumps([spelled(v) for v in values])
    assert spelled(values[1]).startswith("sorted(<") and spelled(values[2]) == {"fn": "len"}
    small.flow.run(out=tmp_path / "run", quiet=True)
    record = (tmp_path / "run" / "run.json").read_text()
    assert "0x" not in record and set(json.loads(record)) >= {"commit", "dirty", "host", "device"}


def rows(out):
    lines = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    return {step: [tuple(line["key"]) for line in lines if line["step"] == step] for step in {n["step"] for n in lines}}


def test_trajectories_are_whole_groups_of_the_steps_that_are_asked_for(tmp_path):
    module = module_of("stale_flow")
    how = {"quiet": True, "parameters": {"stale": {"steps": 3}}}
    module.flow.run("stale", out=tmp_path / "usual", **how)
    usual = rows(tmp_path / "usual")
    assert list(usual) == [0] and len(usual[0]) == 2 * module.GROUP
    assert len({key[0] for key in usual[0]}) == 2
    module.flow.run("stale", out=tmp_path / "run", trajectories=1, trajectories_every=2, **how)
    found = rows(tmp_path / "run")
    assert list(found) == [0, 2]
    assert all(len(keys) == module.GROUP and len({k[0] for k in keys}) == 1 for keys in found.values())
    module.flow.run("stale", out=tmp_path / "none", trajectories=0, **how)
    assert rows(tmp_path / "none") == {}
