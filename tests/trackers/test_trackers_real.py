"""The real packages keep what a run tells them, on this machine alone, and go on with it after a resume."""

from __future__ import annotations

import json
import socket
import time

import pytest

import flowrl as fl
from flowrl.trackers.open_tracker import find_tracker
from flowrl.trackers.tracker import TrackedRun

HOSTILE = "1+|2\n<script>alert(1)</script>"


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    """Connections to other hosts fail, and variables of this machine say nothing."""
    real = socket.socket.connect

    def connect(self, address):
        assert self.family == socket.AF_UNIX or address[0] in ("127.0.0.1", "::1", "localhost"), address
        return real(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
    for name in ("WANDB_MODE", "WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def graph():
    return fl.load_script("algorithms/grpo.py").graph().to_json()


def track(name, out, graph):
    """Three steps, and the third again after a resume, with another number."""
    for resumed, steps in ((False, (0, 1, 2)), (True, (2, 3))):
        configuration = {"seed": 3, "workers": {"actor: lr": "0.001"}}
        plan = {"pools": {"gpu": {"device": "cpu"}}}
        tracker = find_tracker(name)(
            TrackedRun("run", "grpo", "0c5e", out, resumed, configuration, plan, {"grpo": graph})
        )
        for step in steps:
            tracker.log("grpo", step, {"reward": step + 10.0 * resumed, "actor/loss": 0.5})
        tracker.event("alarm", f"step {steps[-1]}, entropy fell\nwhat to try: <b>{HOSTILE}", "alarm")
        tracker.event("not kept" if resumed else "lost", f"rank {steps[0]}", "warning" if resumed else "alarm")
        tracker.event("recovered", "at step 2", "note")
        tracker.samples("grpo", steps[-1], [{"key": [3, k], "response": HOSTILE, "rewards": 0.5} for k in range(2)])
        tracker.close("done")


def test_tensorboard_shows_curves_samples_configuration_plan_and_graph(tmp_path, graph):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    track("tensorboard", tmp_path, graph)
    about = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert b'"actor: lr": "0.001"' in about.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0]
    assert b"device: cpu" in about.Tensors("plan/text_summary")[0].tensor_proto.string_val[0]
    assert about.Images("graph/grpo")[0].encoded_image_string[:4] == b"\x89PNG"
    assert {tag for tag in about.Tags()["tensors"] if "/" in tag and tag[:4] in ("alar", "warn", "note")} == {
        "alarm/alarm/text_summary",
        "alarm/lost/text_summary",
        "warning/not_kept/text_summary",
        "note/recovered/text_summary",
    }
    alarms = about.Tensors("alarm/alarm/text_summary")
    assert [each.step for each in alarms] == [2, 3]
    told = alarms[0].tensor_proto.string_val[0].decode()
    assert told.splitlines()[:2] == ["    step 2, entropy fell", "    what to try: <b>1+|2"], "as code, not as markup"
    curves = EventAccumulator(str(tmp_path / "tensorboard" / "grpo")).Reload()
    assert [(e.step, e.value) for e in curves.Scalars("reward")] == [(0, 0.0), (1, 1.0), (2, 12.0), (3, 13.0)]
    [*_, text] = curves.Tensors("samples/text_summary")
    shown = text.tensor_proto.string_val[0].decode().splitlines()
    assert text.step == 3 and shown[0] == "| key | response | rewards |" and len(shown) == 4
    assert shown[2] == "| 3.0 | 1+&#124;2 ⏎ &lt;script&gt;alert(1)&lt;/script&gt; | 0.5 |"


def test_mlflow_goes_on_with_the_same_run(tmp_path, graph):
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    from mlflow.tracking import MlflowClient

    track("mlflow", tmp_path, graph)
    client = MlflowClient((tmp_path / "mlruns").as_uri())
    [run] = client.search_runs([client.get_experiment_by_name("grpo").experiment_id])
    assert run.data.params == {"seed": "3", "workers/actor: lr": "0.001"} and run.info.status == "FINISHED"
    assert [m.step for m in client.get_metric_history(run.info.run_id, "grpo/reward")] == [0, 1, 2, 2, 3]
    files = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert files == {"configuration.json", "plan.yaml", "graph.grpo.png", "samples", "events.txt"}
    assert run.data.tags["flowrl.alarm"].startswith("step 3, entropy fell\nwhat to try")
    assert run.data.tags["flowrl.lost"] == "rank 0" and run.data.tags["flowrl.not kept"] == "rank 2"
    told = next(tmp_path.rglob("events.txt")).read_text()
    assert [told.count(kind) for kind in ("alarm, alarm: ", "alarm, lost: rank 0", "note, recovered: ")] == [2, 1, 2]
    table = json.loads(next(tmp_path.rglob("samples/grpo-3.json")).read_text())
    assert table["columns"] == ["key", "response", "rewards"] and table["data"][1] == ["3.1", HOSTILE, 0.5]


def test_trackio_goes_on_with_the_same_run(tmp_path, graph, monkeypatch):
    pytest.importorskip("trackio", reason="trackio is not installed")
    from trackio import sqlite_storage, utils

    for module in (sqlite_storage, utils):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    track("trackio", tmp_path, graph)
    logs = sqlite_storage.SQLiteStorage.get_logs("grpo", "run-0c5e")
    assert [entry["grpo/reward"] for entry in logs if "grpo/reward" in entry] == [0.0, 1.0, 2.0, 12.0, 13.0]
    assert any("graph/grpo" in entry for entry in logs), "the picture of the graph"
    samples = [entry["grpo/samples"] for entry in logs if "grpo/samples" in entry]
    assert len(samples) == 2 and HOSTILE in json.dumps(samples, ensure_ascii=False).replace("\\n", "\n")
    alerts = sqlite_storage.SQLiteStorage.get_alerts("grpo", "run-0c5e")
    assert {(each["title"], each["level"]) for each in alerts} == {
        ("alarm", "error"),
        ("lost", "error"),
        ("not kept", "warn"),
        ("recovered", "info"),
    }
    assert sorted(each["text"] for each in alerts if each["title"] == "alarm")[0].startswith("step 2, entropy fell")
    kept = json.dumps(sqlite_storage.SQLiteStorage.get_run_config("grpo", "run-0c5e"))
    assert "workers/actor: lr" in kept and "device: cpu" in kept, "the configuration, and the plan"


def test_wandb_writes_offline_runs_of_one_id(tmp_path, graph):
    pytest.importorskip("wandb", reason="wandb is not installed")
    track("wandb", tmp_path, graph)
    written = list(tmp_path.rglob("run-0c5e.wandb"))
    assert written and all("offline-run" in str(file) for file in written)
    assert any(b"actor/loss" in file.read_bytes() for file in written)
    assert any(b"actor: lr" in file.read_bytes() and b"pools" in file.read_bytes() for file in written)
    for said in (b"alarm: step 2, entropy fell", b"alarm: step 3, entropy fell", b"not kept: rank 2"):
        until = time.monotonic() + 60
        while not any(said in file.read_bytes() for file in written):  # its own process writes them
            assert time.monotonic() < until, said
            time.sleep(0.05)
    assert [file for file in tmp_path.rglob("*.png") if "graph" in str(file)], "the picture of the graph"
    assert [json.loads(t.read_text())["columns"] for t in tmp_path.rglob("samples_*.table.json")]
