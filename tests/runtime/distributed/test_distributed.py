"""Programs on ranks: the numbers of one process, whoever has which rows, and whatever is lost on the way."""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from direct import place_for, run_direct
from flows import events, metrics, module_of

import flowrl as fl
from flowrl.errors import RankLost, RunError
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.work import Role, Workload
from flowrl.placement.cost.worker_memory import reading, training
from flowrl.placement.model.model_shape import ModelShape
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.runtime.storage.recorder import Recorder
from flowrl.schedule.events import Memory

ONE = Plan({"a": "cpu"})
SPLIT = Plan({"a": "cpu", "b": "cpu", "c": "cpu"}, {"world": Place("b"), "fails": Place("c")})
MANY = Plan({"a": "cpu", "b": Pool("b", processes=3)}, {"world": Place("b")})


@pytest.mark.parametrize("plan", [ONE, SPLIT, MANY], ids=["one", "split", "many"])
def test_ranks_give_the_numbers_of_one_process(small, tmp_path, plan):
    wanted = small.flow.run("train", out=tmp_path / "local", quiet=True)
    found, place = run_direct(small.flow, plan, tmp_path / "ranks")
    assert found.last == wanted.last or metrics(tmp_path / "ranks") == metrics(tmp_path / "local")
    assert metrics(tmp_path / "ranks") == metrics(tmp_path / "local")
    assert place.client.traffic.payload == 0


def test_what_moved_is_counted_as_in_one_process(tmp_path):
    plan = Plan(
        {"train": "cpu", "rollout": "cpu", "cpu": Pool("cpu", processes=2)},
        {"actor": {"train": Place("train"), "generate": Place("rollout")}, "reward": Place("cpu")},
        pipeline=Pipeline(staleness=1),
    )
    flow = module_of("stale_flow").flow
    flow.run("stale", out=tmp_path / "local", plan=plan, quiet=True, parameters={"stale": {"steps": 3}})
    run_direct(flow, plan, tmp_path / "ranks", "stale", parameters={"stale": {"steps": 3}})
    local, ranks = (
        [json.loads(line) for line in (tmp_path / out / "traffic.jsonl").read_text().splitlines()]
        for out in ("local", "ranks")
    )
    assert ranks == local and [line["step"] for line in local] == [0, 1, 2, 2]
    assert local[2]["lags"] == {"1": 4} and local[0]["weights"]["actor.publish"] > 0
    assert local[2]["weights"] == {} and local[3]["weights"] == local[0]["weights"], "the last publish has its own line"


@pytest.mark.parametrize("program", ["ends", "two_loops"])
def test_other_programs_too(small, tmp_path, program):
    small.flow.run(program, out=tmp_path / "local", quiet=True)
    run_direct(small.flow, SPLIT, tmp_path / "ranks", program)
    assert metrics(tmp_path / "ranks") == metrics(tmp_path / "local")


def test_only_read_fields_travel_between_ranks(small, tmp_path):
    _, place = run_direct(small.flow, SPLIT, tmp_path / "ranks", parameters={"train": {"steps": 1}})
    # judge reads y of 4 rows, the baseline's mean runs beside r; update reads y: 4 bytes each
    assert 0 < place.client.traffic.between <= 4 * 4 * 4


def test_a_failure_has_the_line_of_the_program_and_both_tracebacks(small, tmp_path):
    with pytest.raises(
        RunError, match=r"fails.fail failed on rank 2 of pool 'c': ValueError: broken on purpose 0"
    ) as e:
        run_direct(small.flow, SPLIT, tmp_path / "ranks", "breaks")
    assert e.value.at.file.endswith("small_flow.py") and "fails.fail(batch)" in e.value.at.text
    assert any(
        n.startswith("fails.fail on rank 2 of pool 'c':") and "broken on purpose" in n for n in e.value.__notes__
    )
    assert any("1 more calls" in n for n in e.value.__notes__)


@pytest.mark.parametrize("count", [0, 3, 7, 12, 25])
def test_a_lost_rank_changes_nothing(small, tmp_path, count):
    small.flow.run("train", out=tmp_path / "local", quiet=True)
    wanted = [tuple(k) for k in small.CALLS]
    small.CALLS.clear()
    found, place = run_direct(small.flow, SPLIT, tmp_path / "ranks", kill=("run", count), checkpoint_every=3)
    assert found.status == "done"
    assert metrics(tmp_path / "ranks") == metrics(tmp_path / "local")
    assert len(set(place.ranks.restarted)) == 1
    events = [json.loads(line) for line in (tmp_path / "ranks" / "events.jsonl").read_text().splitlines()]
    lost = next(e["text"] for e in events if e["kind"] == "lost")
    assert re.search(r"rank \d died during [\w.]+ of step \d \(.+ -> .+\)", lost), "it names the edge"
    twice = len(small.CALLS) - len(wanted)
    assert twice == 0, "what touched the world is never run again"
    kept = sorted((tmp_path / "ranks" / "checkpoints").glob("[0-9]*"))[-1]
    state = json.loads((kept / "counter.json").read_text())
    assert state["total"] == metrics(tmp_path / "ranks")[-1]["total"], "the last checkpoint has the last state"


@pytest.mark.parametrize("count", range(8, 28, 3))
def test_every_checkpoint_after_a_loss_has_the_state_of_its_step(small, tmp_path, count):
    """Files of a worker that has not changed are linked: what counts its changes must not begin anew."""
    small.flow.run("train", out=tmp_path / "local", quiet=True)
    totals = [m["total"] for m in metrics(tmp_path / "local")]
    from flowrl.runtime.storage.checkpoints import checkpoint_folder as checkpoint

    seen, real = {}, checkpoint.write

    def write(begun, commit):
        target = real(begun, commit)
        if begun.manifest["program"]:
            seen[begun.manifest["program"]["steps"]] = json.loads((target / "counter.json").read_text())["total"]
        return target

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint, "write", write)
        run_direct(small.flow, SPLIT, tmp_path / "ranks", kill=("run", count), checkpoint_every=1)
    assert seen == {step: totals[step - 1] for step in seen}
    told = [e for e in events(tmp_path / "ranks", "checkpoint") if e["text"].startswith("one was not finished")]
    lacking = set(range(1, 11)) - set(seen)
    assert len(lacking) <= len(told) <= 1 and 10 in seen, "one that a rank died in is told of, and taken after its step"


def kinds(out: Path) -> list[str]:
    lines = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    return [line["kind"] for line in lines if line["kind"] in ("lost", "renewed", "recovered")]


APART = Plan(
    {"a": "cpu", "b": Pool("b", processes=2), "c": "cpu"},
    {"actor": {"train": Place("a"), "generate": Place("b")}, "ref": Place("b"), "reward": Place("c")},
)


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """A run with ranks that train, generate and give rewards apart, which nobody disturbs."""
    out = tmp_path_factory.mktemp("calm")
    found, _ = run_direct(module_of("stale_flow").flow, APART, out, "stale", parameters={"stale": {"steps": 3}})
    return found.weights_digest, [numbers(m) for m in metrics(out)]


@pytest.mark.parametrize(
    ("method", "count", "lost"),
    [
        *(("run", n, rank) for n, rank in ((0, 1), (1, 2), (2, 1), (4, 2), (6, 1), (0, 3), (1, 3), (4, 3))),
        *(("run", n, 0) for n in (1, 2)),
        *(("sums", n, rank) for n, rank in ((0, 1), (1, 2), (2, 1), (3, 2), (5, 0))),
        *(("weights_written", n, rank) for n, rank in ((0, 1), (1, 2), (2, 1), (3, 2))),
    ],
)
def test_only_what_is_lost_is_done_again(tmp_path, calm, method, count, lost):
    """Without a checkpoint to go back to: ranks that train lose the run's work, all others nothing but their own."""
    flow = module_of("stale_flow").flow
    found, place = run_direct(
        flow,
        APART,
        tmp_path,
        "stale",
        parameters={"stale": {"steps": 3}},
        kill=(method, count, lost),
        checkpoint_every=100,
    )
    assert (found.weights_digest, [numbers(m) for m in metrics(tmp_path)]) == calm
    assert set(place.ranks.restarted) == {lost}
    found = kinds(tmp_path)
    assert found[:2] == ["lost", "recovered" if lost == 0 else "renewed"]
    assert len(found) == 2 or count, "later, rows may be needed whose weights go on to the next version just then"
    assert place.client.traffic.payload == 0


def test_a_worker_as_the_checkpoint_has_it_comes_from_there(tmp_path, calm):
    """The rank that trains, lost before it has changed what the checkpoint has: nothing is gone back to."""
    flow = module_of("stale_flow").flow
    run_direct(flow, APART, tmp_path / "until", "stale", parameters={"stale": {"steps": 2}}, checkpoint_every=1)
    _, place = run_direct(
        flow, APART, tmp_path / "run", "stale", parameters={"stale": {"steps": 3}}, kill=("sums", 0), checkpoint_every=1
    )
    assert place.ranks.restarted == [0] and kinds(tmp_path / "run") == ["lost", "renewed"]
    assert [numbers(m) for m in metrics(tmp_path / "run")] == calm[1]


def test_rows_that_come_out_differently_send_the_run_back(small, tmp_path):
    """A worker that does not give the same rows twice: others may have used those that it gave first."""
    flow = module_of("ranks_flow").flow
    plan = Plan({"a": "cpu", "b": "cpu"}, {"moody": Place("a"), "pair": Place("b")})
    found, place = run_direct(flow, plan, tmp_path, "moods", kill=("run", 1, 0), checkpoint_every=100)
    assert found.status == "done" and place.ranks.restarted == [0], "who is there again is not started once more"
    assert kinds(tmp_path) == ["lost", "renewed", "lost", "recovered"]
    events = [json.loads(line)["text"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert any("moody.feel gave other rows when rank 0 made them again" in text for text in events)
    assert kinds(tmp_path) == ["lost", "renewed", "lost", "recovered"]


def test_an_update_whose_rows_were_lost_is_done_once(small, tmp_path):
    """Its rank lives, and had not begun: rows are made again, and the state moves once."""
    flow = module_of("ranks_flow").flow
    plan = Plan({"a": "cpu", "b": "cpu"}, {"state": Place("a"), "pair": Place("b")})
    run_direct(flow, plan, tmp_path / "calm", "fed", checkpoint_every=100)
    for count in range(4):
        out = tmp_path / str(count)
        run_direct(flow, plan, out, "fed", kill=("pull", count, 1), checkpoint_every=100)
        assert kinds(out) == ["lost", "renewed"]
        assert metrics(out) == metrics(tmp_path / "calm")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_ranks_that_had_answered_do_not_ask_the_world_again(small, tmp_path, rank):
    """One of three ranks is lost in the midst of a call: the other two answer from their journals."""
    module = module_of("ranks_flow")
    plan = Plan({"b": Pool("b", processes=3)}, {"asked": Place("b")})
    run_direct(module.flow, plan, tmp_path, "judged", kill=("run", 0, rank), checkpoint_every=100)
    assert kinds(tmp_path) == ["lost", "renewed"]
    assert len(module.ASKED) == len(set(module.ASKED)) == 12


ALONE = Plan(
    {"a": "cpu", "b": "cpu", "c": "cpu"},
    {"actor": {"train": Place("a"), "generate": Place("b")}, "ref": Place("b"), "reward": Place("c")},
)


def opened(out, plan):
    """The workers of the stale flow on ranks, as a run has them before its first step."""
    place = place_for(module_of("stale_flow").flow, plan, out, "stale", parameters={"stale": {"steps": 3}})
    for name in ("actor", "reward", "ref"):
        place.open(name)
    place.open_server("actor")
    place.start_program(["actor", "reward", "ref"], resumed=False)
    return place


def test_weights_are_installed_though_their_ranks_are_started_again_meanwhile(tmp_path):
    place = opened(tmp_path, APART)
    real, results, threads = place.ranks.restart, [], []

    def restart(ranks, within):
        def install():
            place.servers["actor"].install(place.workers["actor"].in_use(), 1)
            results.append(place.servers["actor"].version)

        threads.append(threading.Thread(target=install, daemon=True))
        threads[0].start()
        time.sleep(0.5)  # it has found its way to the ranks, and waits
        return real(ranks, within)

    place.ranks.restart = restart
    place.ranks.dead.add(1)
    place.client.retry(lambda: place.client.call_all([1, 2], "sums", ("actor", True), None, None))
    threads[0].join(30)
    assert results == [1]
    assert place.servers["actor"].digest() == place.workers["actor"].digest()
    place.close()


def test_going_back_starts_what_a_renewal_has_left_half_open(tmp_path):
    from flowrl.runtime.storage.checkpoints import checkpoint_folder as checkpoint

    place = opened(tmp_path, ALONE)
    record = {"stage": 0, "program": None, "finished": [], "marks": {}, "seed": 0}
    folder = checkpoint.write(place.capture(tmp_path / "checkpoints", record, {}))
    place.ranks.dead.add(1)
    place.ranks.kill = ("meeting_point", 0, 0)  # the rank that trains dies while the other gets its weights
    with pytest.raises(RankLost) as e:
        place.client.retry(lambda: place.client.call_all([1], "sync"))
    assert e.value.inconsistent
    place.recover(RankLost("rank 0 died during actor.update.", ranks=[0], inconsistent=True))
    for name in ("actor", "reward", "ref", "actor.generate"):
        worker = place.open_server("actor") if name.endswith("generate") else place.open(name)
        checkpoint.load_worker(folder, name, worker)
    assert place.servers["actor"].digest() == place.workers["actor"].digest()
    place.close()


def test_losses_without_end_end_the_run(small, tmp_path, monkeypatch):
    from direct import Direct

    real = Direct.restart

    def again(self, ranks, within):
        late = real(self, ranks, within)
        self.kill = ("run", 0)
        return late

    monkeypatch.setattr(Direct, "restart", again)
    with pytest.raises(RankLost, match="died during"):
        run_direct(small.flow, SPLIT, tmp_path / "ranks", kill=("run", 0))


def test_workers_that_do_not_fit_together_take_turns(tmp_path):
    """Bytes freed and taken are those of weights and moments, and the numbers are those of a run with room for all."""
    module = module_of("stale_flow")
    steps = {"stale": {"steps": 3}}
    roomy, _ = run_direct(module.flow, ONE, tmp_path / "roomy", "stale", parameters=steps)
    shape = replace(ModelShape.from_config(module.SMALL), dtype_bytes=4)
    actor, ref = Role("actor", shape, trains=True), Role("ref", shape)
    load = Workload(12, 6, 5)
    sizes = {"actor.train": training(actor, Mesh(), load).staying, "ref.train": reading(ref, Mesh(), load).staying}
    tight, _ = run_direct(module.flow, ONE, tmp_path / "tight", "stale", parameters=steps, checkpoint_every=2,
                              memory={"a": Memory(sizes["actor.train"], sizes)})  # fmt: skip
    assert tight.weights_digest == roomy.weights_digest
    said = json.loads((tmp_path / "tight" / "run.json").read_text())["swaps"]
    model = sum(s.tensor.nbytes for s in fl.open(fl.Actor(module.MODEL)).engine.shards())
    freed = {s["resident"]: s["bytes"]["0"] for s in said if s["what"] == "offload"}
    assert freed == {"actor.train": 3 * model, "ref.train": model}, "weights and two moments; weights alone"
    told = [s for s in said if "forecast" in s]
    assert told and all(s["bytes"]["0"] == pytest.approx(s["forecast"], rel=0.15) for s in told)
    assert [s["resident"] for s in said[-4:]].count("actor.train") == 2


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_rank_that_dies_while_another_is_started_again(small, tmp_path, monkeypatch, after, first):
    """Whatever was begun of the first recovery, the second one leaves nothing that is half open."""
    from direct import Direct

    real, seen = Direct.restart, []

    def restart(self, ranks, within):
        late = real(self, ranks, within)
        seen.append(list(ranks))
        if len(seen) == 1:
            if after < 2:
                self.kill = ("forget" if after else "open", 0)
            else:
                self.dead.add(2)
                raise RankLost("rank 2 of pool 'c' died during starting ranks.", ranks=[2])
        return late

    monkeypatch.setattr(Direct, "restart", restart)
    small.flow.run("train", out=tmp_path / "local", quiet=True)
    run_direct(small.flow, SPLIT, tmp_path / "ranks", kill=("run", 5, first), checkpoint_every=3)
    assert metrics(tmp_path / "ranks") == metrics(tmp_path / "local")
    assert len(seen) >= 2 or (after == 1 and kinds(tmp_path / "ranks") == ["lost", "renewed"])


@pytest.mark.parametrize("how", [{"staleness": 1}, {"chunks": 2}, {"staleness": 1, "chunks": 3}], ids=str)
def test_steps_overlap_on_ranks_as_in_one_process(tmp_path, how):
    """At S=1 the versions of all reads are settled, so pools of one process and ranks have the same numbers."""
    module = module_of("stale_flow")
    actor = {"train": Place("a"), "generate": Place("b")}
    plan = Plan({"a": "cpu", "b": "cpu", "c": "cpu"}, {"actor": actor, "reward": Place("c")}, None, Pipeline(**how))
    steps = {"stale": {"steps": 5}}
    module.flow.run("stale", out=tmp_path / "local", quiet=True, plan=plan, parameters=steps)
    run_direct(module.flow, plan, tmp_path / "ranks", "stale", parameters=steps)
    assert [numbers(m) for m in metrics(tmp_path / "ranks")] == [numbers(m) for m in metrics(tmp_path / "local")]


def numbers(line: dict) -> dict:
    return {k: v for k, v in line.items() if k.split("/")[-1] != "tokens_per_second"}


def test_a_run_that_goes_back_finds_the_python_state_of_its_start(tmp_path):
    """The list at module level, too, is as it was when the program began."""
    module_of("small_flow")
    module_of("level_flow").flow.run(out=tmp_path / "calm", quiet=True)
    assert [line["level"] for line in metrics(tmp_path / "calm")] == [2, 3, 4, 5, 6, 7]
    module = module_of("level_flow")
    run_direct(module.flow, ONE, tmp_path / "run", kill=("run", 9), checkpoint_every=2)
    assert "recovered" in kinds(tmp_path / "run")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "calm") and module.LEVELS == [1, 2, 3, 4, 5, 6, 7]


TWO = Plan({"a": Pool("a", processes=2)})


@pytest.mark.parametrize("program", ["stateful", "choose", "two_batches", "window", "apart", "ordered", "columns"])
@pytest.mark.parametrize("plan", [ONE, TWO], ids=["one", "two"])
def test_rows_that_take_other_ways_arrive_as_in_one_process(small, tmp_path, program, plan):
    flow = module_of("ranks_flow").flow
    flow.run(program, out=tmp_path / "local", quiet=True)
    run_direct(flow, plan, tmp_path / "ranks", program)
    assert metrics(tmp_path / "ranks") == metrics(tmp_path / "local")


def test_values_that_go_on_survive_a_loss(small, tmp_path):
    flow = module_of("ranks_flow").flow
    flow.run("columns", out=tmp_path / "local", quiet=True)
    for count in (6, 13, 20):
        out = tmp_path / f"ranks{count}"
        _, place = run_direct(flow, TWO, out, "columns", kill=("run", count), checkpoint_every=2)
        assert place.ranks.restarted and metrics(out) == metrics(tmp_path / "local")


def test_objects_that_nobody_holds_are_freed(small, tmp_path, monkeypatch):
    from direct import Direct

    held = []
    real = Direct.stop
    monkeypatch.setattr(Direct, "stop", lambda self: (held.append(len(self.ranks[0].objects)), real(self)))
    for steps in (10, 40):
        out = tmp_path / str(steps)
        run_direct(module_of("ranks_flow").flow, ONE, out, "window", parameters={"window": {"steps": steps}})
    assert held[0] == held[1] <= 3


def test_a_program_without_workers(small, tmp_path):
    flow = fl.Flow("bare")

    @flow.program
    def bare(steps: int = 2):
        for step, batch in flow.steps(small.Numbers(), steps):
            flow.log(step, x=batch.x.mean())

    flow.run("bare", out=tmp_path / "local", quiet=True)
    run_direct(flow, ONE, tmp_path / "ranks")
    assert metrics(tmp_path / "ranks") == metrics(tmp_path / "local")


def test_a_run_that_broke_off_on_ranks_asks_the_world_nothing_again_in_one_process(small, tmp_path, monkeypatch):
    from direct import Direct

    class Crash(BaseException):
        pass

    real = Direct.send

    def send(self, rank, method, *args):
        if method == "run" and args[0].title == "counter.update" and args[0].info.step == 4:
            raise Crash
        return real(self, rank, method, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Direct, "send", send)
        with pytest.raises(Crash):
            run_direct(small.flow, SPLIT, tmp_path / "ranks", checkpoint_every=3)
    small.flow.run("train", out=tmp_path / "ranks", quiet=True, resume=True, checkpoint_every=3)
    asked = [tuple(key) for key in small.CALLS]
    assert len(asked) == len(set(asked)) > 0


TWO = Plan({"b": Pool("b", processes=2)}, {"asked": Place("b")})
THREE = Plan({"b": Pool("b", processes=3)}, {"asked": Place("b")})
IN_CHUNKS = Plan({"a": "cpu", "b": "cpu"}, {"asked": Place("b")}, pipeline=Pipeline(chunks=2))


@pytest.mark.parametrize(("before", "after"), [(THREE, TWO), (TWO, THREE), (THREE, IN_CHUNKS), (IN_CHUNKS, THREE)])
def test_on_another_plan_the_world_is_asked_nothing_again(tmp_path, monkeypatch, before, after):
    """The run breaks off when its last step is to be recorded: all four were judged, and none is in a checkpoint."""
    module, out = module_of("ranks_flow"), tmp_path / "run"
    module.flow.run("judged", out=tmp_path / "whole", quiet=True, parameters={"judged": {"steps": 4}})
    module.ASKED.clear()

    def go(plan, **how):
        if plan is IN_CHUNKS:
            how["parameters"] = {"judged": {"steps": 4}}
            return module.flow.run("judged", out=out, plan=plan, quiet=True, **how)
        return run_direct(module.flow, plan, out, "judged", parameters={"judged": {"steps": 4}}, **how)

    with monkeypatch.context() as patched:
        real = Recorder.commit

        def commit(self, program, step, tokenizer):
            if step.number == 3:
                raise OSError("the disk is full")
            return real(self, program, step, tokenizer)

        patched.setattr(Recorder, "commit", commit)
        with pytest.raises(OSError, match="full"):
            go(before)
    asked = [tuple(key) for key in module.ASKED]
    assert len(asked) == len(set(asked)) == 24
    go(after, resume=True)
    assert len(module.ASKED) == 24, "nothing was asked again"
    assert [json.loads(e)["kind"] for e in (out / "events.jsonl").read_text().splitlines()] == [
        "failed", "resumed", "changed",
    ]  # fmt: skip
    assert metrics(out) == metrics(tmp_path / "whole")


def test_what_one_program_has_trained_the_next_one_samples(tmp_path):
    """Also where the copy that generates was opened before, and the second program trains nothing."""
    module = module_of("stale_flow")
    flow = fl.Flow("warm")
    actor = flow.worker(fl.Actor, module.MODEL, lr=3e-2, max_tokens=5, name="actor")
    other = flow.worker(fl.Actor, module.MODEL, max_tokens=5, name="other")
    reward = flow.worker(fl.FunctionReward, module.digits, name="reward")

    @flow.program
    def warm(steps: int = 4):
        for step, batch in flow.steps(module.arithmetic.prompts(4), steps):
            flow.log(step, actor.update(other.generate(batch, n=3), loss=module.rl.sft()))

    @flow.program
    def evaluate(steps: int = 2):
        for step, batch in flow.steps(module.arithmetic.prompts(4), steps):
            batch = reward.score(actor.generate(batch, n=1, greedy=True))
            flow.log(step, reward=batch.rewards.mean(), version=batch.versions.row_mean().min())

    apart = Plan({"a": "cpu", "b": "cpu"}, {"actor": {"train": Place("a"), "generate": Place("b")}})
    flow.run("warm", "evaluate", out=tmp_path / "local", quiet=True, plan=apart)
    run_direct(flow, apart, tmp_path / "ranks", "warm", "evaluate")
    assert [numbers(m) for m in metrics(tmp_path / "ranks")] == [numbers(m) for m in metrics(tmp_path / "local")]
    assert metrics(tmp_path / "ranks")[-1]["version"] == 1.0
