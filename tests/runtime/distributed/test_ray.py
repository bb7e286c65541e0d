"""Runs on Ray: a process for each rank, with the numbers of one process, whatever the layout and whoever dies."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest
from flows import module_of

pytest.importorskip("ray", reason="the extra [ray] is not installed")

from flowrl.errors import RankLost, RunError
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

STEPS = {"stale": {"steps": 5}}


@pytest.fixture(scope="module")
def cluster():
    """One Ray for all tests of this file: starting it takes seconds."""
    import ray

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def flow():
    module = module_of("stale_flow")
    return module.flow


@pytest.fixture(scope="module")
def alone(flow, tmp_path_factory):
    """The run of one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    flow.run("stale", out=out, quiet=True, parameters=STEPS)
    return metrics(out)


def metrics(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def plan(mesh: str, backend: str, *, generate: int = 0, **pipeline) -> Plan:
    """The actor on a mesh of CPU ranks, which also generate unless there are ``generate`` others; rewards apart.

    The reference is split as the actor is where that is so by tp alone, and whole on the same ranks otherwise.
    """
    train = Mesh.of(mesh)
    size = train.size + generate
    pools = {"train": Pool("train", devices=tuple(range(train.size))), "cpu": Pool("cpu", processes=1)}
    place: dict = {"actor": Place("train", train, backend), "reward": Place("cpu"), "ref": Place("train")}
    if train["tp"] == train.size > 1:
        place["ref"] = Place("train", train, backend)
    if generate:
        pools["rollout"] = Pool("rollout", devices=tuple(range(train.size, size)))
        place["actor"] = {"train": place["actor"], "generate": Place("rollout")}
    return Plan(pools, place, cluster=Cluster.of(f"cpu:1x{size}"), pipeline=Pipeline(**pipeline))


def same_curve(found: list[dict], wanted: list[dict]) -> None:
    """The same tokens, hence the same rewards; losses to 1e-4."""
    assert [m["reward"] for m in found] == [m["reward"] for m in wanted]
    assert [m["tokens"] for m in found] == [m["tokens"] for m in wanted]
    for a, b in zip(found, wanted, strict=True):
        assert abs(a["loss"] - b["loss"]) < 1e-4
        assert abs(a["grad_norm"] - b["grad_norm"]) < 1e-3 * max(1.0, b["grad_norm"])


def record(out: Path) -> dict:
    return json.loads((out / "run.json").read_text())


LAYOUTS = [
    pytest.param("fsdp=2", "fsdp2", 0, id="fsdp2"),
    pytest.param("fsdp=2", "fsdp2", 2, id="fsdp2-apart", marks=pytest.mark.nightly),
    pytest.param("tp=2", "fsdp2", 2, id="tp2-apart"),
    pytest.param("fsdp=2,tp=2", "fsdp2", 0, id="fsdp2-tp2", marks=pytest.mark.nightly),
    pytest.param("pp=2,fsdp=2", "fsdp2", 0, id="fsdp2-pp2", marks=pytest.mark.nightly),
    pytest.param("pp=2,tp=2", "megatron", 0, id="megatron-tp2-pp2"),
    pytest.param("dp=2", "fsdp2", 0, id="dp2", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("mesh", "backend", "generate"), LAYOUTS)
def test_every_layout_has_the_curve_of_one_process(cluster, flow, alone, tmp_path, mesh, backend, generate):
    if backend == "megatron":
        pytest.importorskip("megatron.core", reason="the extra [megatron] is not installed")
    flow.run("stale", out=tmp_path, quiet=True, runtime="ray", plan=plan(mesh, backend, generate=generate),
             parameters=STEPS, overwrite=True)  # fmt: skip
    same_curve(metrics(tmp_path), alone)
    said = record(tmp_path)
    assert said["traffic"]["payload"] == 0, "the driver held columns"
    assert said["traffic"]["between"] > 0
    assert said["publishes"], "weights were published"


def killed(out: Path, sig: int, *, rank: int, after: int) -> threading.Thread:
    """Send a signal to a rank once so many steps are recorded."""

    def work():
        while not (out / "metrics.jsonl").exists() or len(metrics_so_far(out)) < after:
            time.sleep(0.02)
        os.kill(json.loads((out / "ranks.json").read_text())[str(rank)]["pid"], sig)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def events(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("mesh", "backend", "publish"),
    [("fsdp=2", "fsdp2", "interrupt"), pytest.param("dp=1", "hf", "continue", marks=pytest.mark.nightly)],
)
def test_rows_leave_one_by_one_while_others_train(cluster, flow, tmp_path, mesh, backend, publish):
    """Publishes come into running rows of two ranks: within the bound, every row accounted for, nothing disagrees."""
    here = plan(mesh, backend, generate=2, staleness=1, publish=publish)
    found = flow.run("stale", out=tmp_path / "run", quiet=True, runtime="ray", plan=here, parameters=STEPS)
    assert found.status == "done" and [m["step"] for m in metrics(tmp_path / "run")] == list(range(5))
    said = record(tmp_path / "run")
    rows = said["ledger"]["stale"]["rows"]
    assert rows["admitted"] == rows["trained"] == 5 * 4 * 3 and rows["live"] == 0
    assert len(said["publishes"]) >= 5 and said["traffic"]["payload"] == 0
    lags = [json.loads(line).get("lags", {}) for line in (tmp_path / "run" / "traffic.jsonl").read_text().splitlines()]
    assert {int(lag) for line in lags for lag in line} <= {0, 1}
    assert not [e for e in events(tmp_path / "run") if "disagree" in e.get("text", "")]


def metrics_so_far(out: Path) -> list[str]:
    return (out / "metrics.jsonl").read_text().splitlines()


@pytest.mark.parametrize(
    ("pool", "rank", "after"),
    [
        pytest.param("train", 1, 1, marks=pytest.mark.nightly),  # test_recovery_kills.py kills one in an update
        pytest.param("rollout", 4, 2, marks=pytest.mark.nightly),
        pytest.param("rollout", 3, 1, marks=pytest.mark.nightly),
        pytest.param("cpu", 2, 3, marks=pytest.mark.nightly),
    ],
)
def test_a_killed_rank_changes_no_weight(cluster, flow, tmp_path, pool, rank, after):
    """A rank that trains sends the run back to its last checkpoint; of others only their own part is done again."""
    here = plan("fsdp=2", "fsdp2", generate=2)
    how = {"quiet": True, "runtime": "ray", "plan": here, "parameters": STEPS, "checkpoint_every": 4}
    wanted = flow.run("stale", out=tmp_path / "calm", **how)
    thread = killed(tmp_path / "killed", signal.SIGKILL, rank=rank, after=after)
    found = flow.run("stale", out=tmp_path / "killed", **how)
    thread.join(10)
    assert found.weights_digest == wanted.weights_digest
    assert [m["reward"] for m in metrics(tmp_path / "killed")] == [m["reward"] for m in metrics(tmp_path / "calm")]
    said = record(tmp_path / "killed")
    assert said["restarts"] == 1
    lost = next(e for e in events(tmp_path / "killed") if e["kind"] == "lost")["text"]
    assert f"rank {rank} of pool '{pool}' died" in lost
    kinds = [e["kind"] for e in events(tmp_path / "killed")]
    assert ("recovered" if pool == "train" else "renewed") in kinds
    assert pool == "train" or "recovered" not in kinds


def test_a_rank_that_hangs_is_found_by_the_deadline(cluster, flow, alone, tmp_path):
    thread = killed(tmp_path / "run", signal.SIGSTOP, rank=1, after=1)
    here = plan("fsdp=2", "fsdp2", deadline=15)
    flow.run("stale", out=tmp_path / "run", quiet=True, runtime="ray", plan=here, parameters=STEPS)
    thread.join(10)
    same_curve(metrics(tmp_path / "run"), alone)
    lost = next(e for e in events(tmp_path / "run") if e["kind"] == "lost")["text"]
    said = re.search(r"rank 1 of pool 'train' has not answered (.+) in time", lost)
    assert said, lost
    if re.match(r"(actor|ref)\.", said[1]):  # whichever call met the hung rank: one of an op names its edge
        assert re.fullmatch(r"(actor|ref)\.\w+ of step \d \(.+ -> .+, version \d\)", said[1])


LONG = {"staleness": 2, "publish": "interrupt"}
RECORDED = {"quiet": True, "runtime": "ray", "trajectories": 12, "trajectories_every": 1}


@pytest.fixture(scope="module")
def calm_long_rows(cluster, tmp_path_factory) -> Path:
    """A run of long rows that nobody disturbs."""
    out = tmp_path_factory.mktemp("calm") / "run"
    module_of("long_rows_flow").flow.run(out=out, plan=plan("dp=1", "hf", generate=2, **LONG), **RECORDED)
    return out


@pytest.mark.parametrize(
    ("sent", "deadline", "said"),
    [
        pytest.param(signal.SIGKILL, 0.0, r"rank \d of pool 'rollout' died during ", id="killed"),
        pytest.param(
            signal.SIGSTOP,
            30.0,
            r"rank \d of pool 'rollout' has not answered .+ in time",
            id="stopped",
            marks=pytest.mark.nightly,  # a minute; test_a_rank_that_hangs_is_found_by_the_deadline has whole calls
        ),
    ],
)
def test_long_rows_of_a_lost_rank_go_on_from_what_it_had_told(
    cluster, calm_long_rows, tmp_path, monkeypatch, sent, deadline, said
):
    """A process is killed, or hangs until the deadline, in the middle of long rows: all of them are those of the
    undisturbed run, and none is lost."""
    from flowrl.runtime.distributed.calls.streamed_calls import EngineOnRanks

    module = module_of("long_rows_flow")
    monkeypatch.setattr(module, "PACE", 0.05)
    advance, hit = EngineOnRanks.advance, []

    def hits(engine, what):
        heard = {rank: sum(part.heard.unfinished) for _, rank, part in engine._unanswered()}
        rank = max(heard, key=lambda rank: heard[rank], default=None)
        if not hit and rank is not None and heard[rank] >= 20:
            hit.append(rank)
            os.kill(json.loads((tmp_path / "run" / "ranks.json").read_text())[str(rank)]["pid"], sent)
        advance(engine, what)

    monkeypatch.setattr(EngineOnRanks, "advance", hits)
    here = plan("dp=1", "hf", generate=2, deadline=deadline, **LONG)
    found = module.flow.run(out=tmp_path / "run", plan=here, **RECORDED)
    assert found.status == "done" and len(hit) == 1
    rows = {
        name: {(r["step"], *r["key"]): r["response_ids"] for r in trajectories(out)}
        for name, out in (("calm", calm_long_rows), ("run", tmp_path / "run"))
    }
    assert rows["run"] == rows["calm"] and len(rows["run"]) == module.STEPS * module.PROMPTS * module.GROUP
    account = record(tmp_path / "run")["ledger"]["long_rows"]["rows"]
    assert account == record(calm_long_rows)["ledger"]["long_rows"]["rows"] and account["live"] == 0
    kinds = [e["kind"] for e in events(tmp_path / "run")]
    assert "renewed" in kinds and "recovered" not in kinds
    (lost,) = [e["text"] for e in events(tmp_path / "run") if e["kind"] == "lost"]
    assert re.match(said, lost), lost
    told = [e["text"] for e in events(tmp_path / "run") if e["kind"] == "kept"]
    counts = [
        re.fullmatch(rf"(\d+) rows? goe?s? on from (\d+) kept tokens: .* on rank {hit[0]}", text) for text in told
    ]
    assert sum(int(count[2]) for count in counts if count) >= 20


def trajectories(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]


def test_ranks_that_the_cluster_has_no_room_for_are_named(cluster, monkeypatch):
    from flowrl.runtime.distributed.ray import cluster_room

    monkeypatch.setattr(cluster_room, "SECONDS_TO_PLACE", 0.1)
    pool = cluster_room.PoolOfRanks("train", tuple(range(99)))
    with pytest.raises(RunError, match="the cluster has no room for pool 'train': 99 ranks of 1 CPU"):
        cluster_room.ClusterRoom([pool], "auto").reserve(pool)
    pool = cluster_room.PoolOfRanks("rollout", tuple(range(99)), team=33, near=True)
    room = cluster_room.ClusterRoom([pool], "auto")
    with pytest.raises(RunError, match="'rollout': 99 ranks of 1 CPU.*, each 33 on one node"):
        room.reserve(pool)
    assert room._teams == {}  # what was asked for is given back


def test_a_rank_that_does_not_see_the_folder_of_the_run_is_named(cluster, tmp_path, monkeypatch):
    """As where --out is on a disk that another machine does not have: ranks would wait for each other there."""
    from flowrl.runtime.distributed import open_groups

    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(open_groups, "leave_sign", lambda folder: str(tmp_path / "elsewhere" / "sign"))
    here = Plan({"a": Pool("a", processes=1)})
    with pytest.raises(RunError, match=r"rank 0 of pool 'a', on [\d.]+, does not see the folder of the run") as e:
        module_of("small_flow").flow.run("breaks", out=tmp_path / "run", quiet=True, runtime="ray", plan=here)
    assert e.value.fix == "Give --out a folder that all machines of the cluster share."


def test_user_code_that_fails_on_a_rank_is_told_with_the_users_line(cluster, tmp_path):
    module = module_of("small_flow")
    here = Plan({"a": Pool("a", processes=1)})
    with pytest.raises(RunError, match="broken on purpose 0") as e:
        module.flow.run("breaks", out=tmp_path, quiet=True, runtime="ray", plan=here)
    assert not isinstance(e.value, RankLost)
    assert "fails.fail(batch)" in e.value.at.text
    assert any("small_flow.py" in n and "rank 0 of pool 'a'" in n for n in e.value.__notes__)


def stop_after(monkeypatch, step: int) -> None:
    """Ctrl-C once that step is recorded."""
    from flowrl.runtime.storage.recorder import Recorder

    real = Recorder.commit

    def commit(self, program, done, tokenizer):
        line = real(self, program, done, tokenizer)
        if done.number == step:
            os.kill(os.getpid(), signal.SIGINT)
        return line

    monkeypatch.setattr(Recorder, "commit", commit)


HOPS = [
    pytest.param([None, plan("fsdp=2", "fsdp2")], id="one-process-to-fsdp2"),
    pytest.param([plan("pp=2", "fsdp2"), plan("fsdp=2", "fsdp2")], id="stages-to-fsdp2", marks=pytest.mark.nightly),
    pytest.param(
        [plan("fsdp=2", "fsdp2"), plan("tp=2", "fsdp2"), plan("pp=2,tp=2", "megatron"), None],
        id="fsdp2-tp2-megatron-one-process",
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.parametrize("plans", HOPS)
def test_a_run_goes_on_under_another_plan(cluster, flow, alone, tmp_path, monkeypatch, plans):
    for number, here in enumerate(plans):
        with monkeypatch.context() as patched:
            if number < len(plans) - 1:
                stop_after(patched, number)
            flow.run("stale", out=tmp_path / "run", quiet=True, resume=number > 0, parameters=STEPS,
                     **({"runtime": "ray", "plan": here} if here else {}))  # fmt: skip
    same_curve(metrics(tmp_path / "run"), alone)


def test_an_environment_on_the_ranks_of_its_policy(cluster, tmp_path):
    """Each rank plays some episodes and generates for those of the other: neither waits for itself."""
    import flowrl as fl

    module = module_of("stale_flow")

    class Count(fl.Env):
        turns = 2

        def reset(self, row, seed):
            return 0, ""

        def step(self, state, action):
            return state + 1, "1", float(len(action)), state >= 1

    flow = fl.Flow("play")
    actor = flow.worker(fl.Actor, module.MODEL, max_tokens=4, name="actor")
    env = flow.worker(Count, name="env")

    @flow.program
    def play(steps: int = 2):
        for step, batch in flow.steps(module.arithmetic.prompts(4), steps):
            flow.log(step, reward=env.rollout(batch, policy=actor, n=2).rewards.mean())

    both = Plan({"a": Pool("a", processes=2)}, pipeline=Pipeline(deadline=60))
    flow.run("play", out=tmp_path / "ranks", quiet=True, runtime="ray", plan=both)
    flow.run("play", out=tmp_path / "local", quiet=True)
    assert [m["reward"] for m in metrics(tmp_path / "ranks")] == [m["reward"] for m in metrics(tmp_path / "local")]


def test_the_modules_that_go_to_ranks_by_value_are_the_users(flow):
    """Those that are installed, and flowrl wherever it lies, are imported there; shipped scripts are the users' too."""
    from flowrl.graph.script.site import is_shipped
    from flowrl.runtime.distributed.ray.own_modules import own_modules

    names = {module.__name__ for module in own_modules() if not is_shipped(str(module.__file__))}
    assert "stale_flow" in names
    assert not [n for n in names if n.partition(".")[0] in ("flowrl", "torch", "ray", "numpy", "json")]
