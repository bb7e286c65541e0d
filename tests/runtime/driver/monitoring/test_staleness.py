"""One unchanged driver under every plan: equal where the rules say equal, within the bound where they allow more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from flows import module_of

from flowrl.batch import CallInfo
from flowrl.errors import CheckError, FlowError
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

ONE = {"main": "cpu"}
TWO = {"models": "cpu", "cpu": "cpu"}
THREE = {"train": "cpu", "rollout": "cpu", "cpu": "cpu"}
SPLIT = {"actor": {"train": Place("train"), "generate": Place("rollout")}, "reward": Place("cpu")}


def plan(kind: str, **pipeline) -> Plan:
    steps = Pipeline(**pipeline)
    if kind == "one":
        return Plan(ONE, pipeline=steps)
    if kind == "colocated":
        return Plan(TWO, {"reward": Place("cpu")}, pipeline=steps)
    return Plan(THREE, SPLIT, pipeline=steps)


@pytest.fixture
def module():
    return module_of("stale_flow")


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def published(out: Path) -> dict[int, int]:
    """Bytes of the weights that were published, by step, of the publishes that the timeline has."""
    timeline = [json.loads(line) for line in (out / "timeline.jsonl").read_text().splitlines()]
    traffic = [json.loads(line) for line in (out / "traffic.jsonl").read_text().splitlines()]
    times = [line for line in timeline if line["node"] == "actor.publish"]
    assert all(line["end"] > line["start"] for line in times)
    steps = [line["step"] for line in times]
    assert len(steps) == len(set(steps)), "no publish is there twice"
    return {k: sum(t["weights"].get("actor.publish", 0) for t in traffic if t["step"] == k) for k in sorted(steps)}


def run(module, out, plan, program="stale", runtime="local", **how):
    return module.flow.run(program, out=out, plan=plan, runtime=runtime, quiet=True, save_models=False, **how)


@pytest.mark.parametrize("program", ["stale", "every_other", "evaluated", "refills"])
def test_at_s0_every_plan_gives_what_eager_gives(module, tmp_path, program):
    eager = run(module, tmp_path / "eager", plan("one"), program, "eager")
    for kind in ("one", "colocated", "split"):
        assert run(module, tmp_path / kind, plan(kind), program).weights_digest == eager.weights_digest, kind
    for kind in ("one", "colocated", "split"):
        mine, theirs = lines(tmp_path / kind), lines(tmp_path / "eager")
        drop = ("seconds", "tokens_per_second")
        assert [{k: v for k, v in a.items() if k.split("/")[-1] not in drop} for a in mine] == [
            {k: v for k, v in a.items() if k.split("/")[-1] not in drop} for a in theirs
        ]


def test_eager_says_what_of_a_plan_it_has_no_use_for(module, tmp_path):
    def warnings(out: Path) -> list[str]:
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
        return [event["text"] for event in events if event["kind"] == "warning"]

    run(module, tmp_path / "ahead", plan("split", staleness=1, chunks=2), runtime="eager", steps=2)
    run(module, tmp_path / "in turn", plan("split"), runtime="eager", steps=2)
    assert warnings(tmp_path / "ahead") == [
        "--runtime eager does one call after another and one step after another, without staleness: 1 and chunks: 2 "
        "of the plan. Results may differ from those of --runtime local."
    ]
    assert warnings(tmp_path / "in turn") == []


def one_step_off(module, steps: int) -> str:
    """A plain loop without any scheduler: step k generates with the weights after the update of step k-2."""
    from flowrl.backends import open_engine
    from flowrl.rl import group_advantages, ppo_clip
    from flowrl.workers.base import Opening
    from tasks import arithmetic

    def opened(cls, serving=False, peer=None, **kwargs):
        worker = cls(**kwargs)
        worker.open(
            Opening(
                lambda b: open_engine("hf", b),
                lambda h: peer,
                lambda said: actor.tokenizer,
                print,
                device="cpu",
                serving=serving,
            )
        )
        return worker

    fl = module.fl
    actor = opened(fl.Actor, model=module.MODEL, lr=3e-3, max_tokens=5)
    server = opened(fl.Actor, serving=True, model=module.MODEL, lr=3e-3, max_tokens=5)
    ref = opened(fl.Reference, peer=actor, of=module.actor)
    reward = opened(fl.FunctionReward, fn=module.digits)
    for worker in (actor, ref, reward):
        worker.program_starts()
    server.install(actor.stage(), 0)
    source = arithmetic.prompts(module.PROMPTS)
    cursor, waiting, uid = source.cursor(), None, 0

    def call(worker, name, step, *args, **kwargs):
        op = type(worker).__dict__[name]
        info = CallInfo(0, "stale", step, f"{type(worker).__name__}.{name}", 0)
        return op.apply(worker, args, kwargs, CallInfo(0, "stale", step, NAMES[worker] + "." + name, 0) or info)

    NAMES = {actor: "actor", server: "actor", ref: "ref", reward: "reward"}
    for step in range(steps):
        rows = cursor.draw(None)
        batch = source.to_batch(rows, uid, actor.tokenizer)
        uid += len(rows)
        batch = call(server, "generate", step, batch, n=module.GROUP)
        if waiting is not None:
            server.install(waiting, step)
        batch = call(reward, "score", step, batch)
        batch = call(ref, "logprobs", step, batch)
        batch = group_advantages(batch)
        call(actor, "update", step, batch, loss=ppo_clip(kl=1e-3))
        waiting = actor.stage()
    return actor.digest()


@pytest.mark.parametrize("kind", ["split", "colocated"])
def test_at_s1_local_is_a_plain_loop_that_is_one_step_off(module, tmp_path, kind):
    run(module, tmp_path / "run", plan(kind, staleness=1), parameters={"stale": {"steps": 6}})
    digests = json.loads((tmp_path / "run" / "run.json").read_text())["weights_digests"]
    assert digests["actor"] == one_step_off(module, 6)
    assert [line["oldest"] for line in lines(tmp_path / "run")] == [0, 0, 1, 2, 3, 4]


@pytest.mark.parametrize("program", ["every_other", "evaluated", "refills"])
def test_at_s1_what_is_computed_does_not_depend_on_where(module, tmp_path, program):
    digests = {
        run(module, tmp_path / f"{kind}{i}", plan(kind, staleness=1), program).weights_digest
        for i in range(2)
        for kind in ("split", "colocated", "one")
    }
    assert len(digests) == 1


def test_at_s1_a_function_that_calls_itself_samples_as_a_loop_does(module, tmp_path):
    found = {}
    for by_itself in (True, False):
        out = tmp_path / str(by_itself)
        done = run(
            module, out, plan("split", staleness=1), "six_rounds", parameters={"six_rounds": {"by_itself": by_itself}}
        )
        found[by_itself] = done.weights_digest, [(line["oldest"], line["newest"]) for line in lines(out)]
    assert found[True] == found[False] and found[True][1] == [(0, 0), (0, 0), (1, 1)]


def test_an_evaluation_sees_every_update_before_it_at_any_staleness(module, tmp_path):
    for staleness in (0, 1, 4):
        run(module, tmp_path / str(staleness), plan("split", staleness=staleness), "evaluated")
        assert [line["at"] for line in lines(tmp_path / str(staleness)) if "at" in line] == [2, 5]


@pytest.mark.parametrize("staleness", [2, 4])
def test_more_staleness_stays_within_its_bound(module, tmp_path, staleness):
    run(module, tmp_path / "run", plan("split", staleness=staleness), parameters={"stale": {"steps": 12}})
    assert all(step - line["oldest"] <= staleness for step, line in enumerate(lines(tmp_path / "run")))
    assert [line["step"] for line in lines(tmp_path / "run")] == list(range(12)), "nothing is dropped"


@pytest.mark.parametrize("pieces", [2, 3, 7])
def test_pieces_sample_the_same_tokens(module, tmp_path, pieces):
    whole = run(module, tmp_path / "whole", plan("split"), parameters={"stale": {"steps": 1}})
    cut = run(module, tmp_path / "cut", plan("split", chunks=pieces), parameters={"stale": {"steps": 1}})
    assert whole.status == cut.status == "done"
    tokens = {out: _trajectories(tmp_path / out) for out in ("whole", "cut")}
    assert [t["response_ids"] for t in tokens["whole"]] == [t["response_ids"] for t in tokens["cut"]]
    for mine, theirs in zip(tokens["whole"], tokens["cut"], strict=True):
        assert mine["rewards"] == theirs["rewards"]
        assert mine["rollout_logprobs"] == pytest.approx(theirs["rollout_logprobs"], abs=1e-4)
    timeline = [json.loads(line) for line in (tmp_path / "cut" / "timeline.jsonl").read_text().splitlines()]
    count = min(pieces, module.PROMPTS)
    assert [t["node"] for t in timeline].count("actor.generate") == count
    assert [t["node"] for t in timeline].count("reward.score") == count
    assert [t["node"] for t in timeline].count("actor.update") == 1


def _trajectories(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_stopped_run_goes_on_as_if_nothing_had_happened(module, tmp_path, staleness):
    """Also where the last publish was waiting for the step that the stop kept from beginning."""
    made = plan("split", staleness=staleness)
    how = {"parameters": {"stale": {"steps": 9}}, "checkpoint_every": 3}
    whole = run(module, tmp_path / "whole", made, **how)

    _stopped_at(module, tmp_path / "again", made, 6, {"checkpoint_every": 3})
    outcome = run(module, tmp_path / "again", made, resume=True, **how)
    undisturbed, resumed = lines(tmp_path / "whole"), lines(tmp_path / "again")
    assert [(a["step"], a["loss"], a["oldest"]) for a in undisturbed] == [
        (a["step"], a["loss"], a["oldest"]) for a in resumed
    ]
    assert outcome.weights_digest == whole.weights_digest
    for out in ("whole", "again"):  # also those that were waiting when a step was recorded for a checkpoint
        sizes = published(tmp_path / out)
        assert list(sizes) == list(range(9)) and len(set(sizes.values())) == 1 and sizes[0] > 0


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_is_done_goes_on_as_if_it_had_not_ended(module, tmp_path, staleness):
    """Also where its last publish, which waits for another step, was made at its end."""
    made = plan("split", staleness=staleness)
    whole = run(module, tmp_path / "whole", made, parameters={"stale": {"steps": 7}})
    run(module, tmp_path / "run", made, parameters={"stale": {"steps": 4}})
    outcome = run(module, tmp_path / "run", made, parameters={"stale": {"steps": 7}}, resume=True)
    undisturbed, longer = lines(tmp_path / "whole"), lines(tmp_path / "run")
    assert [(a["step"], a["loss"], a["oldest"]) for a in undisturbed] == [
        (a["step"], a["loss"], a["oldest"]) for a in longer
    ]
    assert outcome.weights_digest == whole.weights_digest
    assert published(tmp_path / "run") == published(tmp_path / "whole") and len(published(tmp_path / "run")) == 7


@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1), (1, 4), (4, 1), (4, 0)])
def test_a_run_goes_on_under_another_plan(module, tmp_path, before, after):
    how: dict[str, Any] = {"checkpoint_every": 3}
    stopped = _stopped_at(module, tmp_path / "cut", plan("split", staleness=before), 5, how)
    kind = "split" if after else "one"
    outcome = run(module, stopped, plan(kind, staleness=after), parameters={"stale": {"steps": 9}}, resume=True, **how)
    assert outcome.status == "done" and [line["step"] for line in lines(stopped)] == list(range(9))
    lag = max(before, after)
    assert all(step - line["oldest"] <= lag for step, line in enumerate(lines(stopped)))


def _stopped_at(module, out: Path, made: Plan, update: int, how: dict) -> Path:
    """The folder of a run that died in that update."""
    op, count = module.fl.Actor.__dict__["update"], 0
    real = op.fn

    def dies(self, batch, *, loss, allow_stale=False):
        nonlocal count
        count += 1
        if count == update:
            raise RuntimeError("stopped on purpose")
        return real(self, batch, loss=loss)

    dies.__annotations__ = real.__annotations__
    object.__setattr__(op, "fn", dies)
    try:
        with pytest.raises(Exception, match="stopped on purpose"):
            run(module, out, made, parameters={"stale": {"steps": 9}}, **how)
    finally:
        object.__setattr__(op, "fn", real)
    return out


def test_a_reference_does_not_wait_for_rewards_that_it_does_not_read(module, tmp_path):
    """The driver scores before it asks the reference; on two pools the two run side by side all the same."""
    import time

    module.reward.kwargs["fn"] = module.reward.arguments["fn"] = lambda prompt, response: time.sleep(0.02) or 1.0
    module.reward.args = ()
    run(module, tmp_path / "run", plan("split"), parameters={"stale": {"steps": 2}})
    timeline = [json.loads(line) for line in (tmp_path / "run" / "timeline.jsonl").read_text().splitlines()]
    for step in (0, 1):
        mine = {t["node"]: t for t in timeline if t["step"] == step}
        assert mine["ref.logprobs"]["start"] < mine["reward.score"]["end"]


def test_what_one_process_cannot_do_is_said_before_anything_is_loaded(module, tmp_path):
    cluster = Cluster.of("h100-80:1x8")
    wide = Plan(
        {"all": Pool("all", devices=tuple(range(8)))}, {"actor": Place("all", Mesh.of("fsdp=8"), "hf")}, cluster=cluster
    )
    with pytest.raises(CheckError, match="(?s)actor has a mesh of 8 devices.*actor: hf holds whole models"):
        run(module, tmp_path / "a", wide)
    assert not (tmp_path / "a").exists()


def test_a_loss_that_does_not_correct_is_refused_where_rows_can_be_stale(module, tmp_path):
    run(module, tmp_path / "s0", plan("split"), "uncorrected")
    with pytest.raises(FlowError) as refused:
        run(module, tmp_path / "s1", plan("split", staleness=1), "uncorrected")
    said = getattr(refused.value, "errors", (refused.value,))[0]
    assert (
        said.at is not None
        and "ppo_clip" in said.what
        and "older than the weights" in said.what
        and said.at.file.endswith("stale_flow.py")
    )
    run(
        module,
        tmp_path / "allowed",
        plan("split", staleness=1),
        "uncorrected",
        parameters={"uncorrected": {"allow": True}},
    )


def test_rows_that_were_kept_are_stale_without_any_plan(module, tmp_path):
    with pytest.raises(FlowError, match=r"older than the weights|CheckError|errors? found"):
        run(module, tmp_path / "kept", plan("one"), "kept")
