"""More prompt groups are asked for than a step trains: it takes those that end first, and the others go on."""

from __future__ import annotations

import json
import threading
import zlib
from pathlib import Path

import torch
from flows import module_of

from flowrl.backends.continuous import ContinuousBatch
from flowrl.cli import load_script
from flowrl.placement.plan.plan import Pipeline, Place, Plan
from flowrl.runtime.driver.pool_threads import Pools
from flowrl.runtime.local.shared_engine import SharedEngine
from flowrl.schedule.events import Publish, Start

BOUND = 120.0  # seconds that a test waits for another thread at most
LONG, SHORT = 12, 2  # tokens


def plan(**pipeline) -> Plan:
    pools = {"train": "cpu", "rollout": "cpu", "cpu": "cpu"}
    place = {"actor": {"train": Place("train"), "generate": Place("rollout")}, "reward": Place("cpu")}
    return Plan(pools, place, pipeline=Pipeline(**pipeline))


def lines(out: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()]


class Gate:
    """The first prompt's rows are long. They wait, in their middle, for the update of the step that went without them.

    ``weights`` are those of each version, and ``inside`` the rows that ran as one was published.
    """

    def __init__(self, monkeypatch) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.inside: dict[int, int] = {}
        joined, published = threading.Event(), threading.Event()
        put, step, publish = Pools.put, SharedEngine.step, SharedEngine.publish
        starts: list[int] = []
        steps = [0]

        def noted(pools, pool, job):
            put(pools, pool, job)
            if isinstance(job.command, Publish):
                published.set()
            elif pool == "rollout" and isinstance(job.command, Start):
                starts.append(job.command.id)
                if len(starts) == 2:
                    joined.set()

        def gated(shared):
            self.weights.setdefault(0, self.copied(shared))
            steps[0] += 1
            if steps[0] == 2:
                assert joined.wait(BOUND), "the next step has not come"
            running = {call for call, _ in shared.engine.running()}
            if running == {1} and steps[0] >= 5 and not published.is_set():
                assert published.wait(BOUND), "the first step waits for its long rows"
                return
            step(shared)

        def kept(shared, install, version, *, keep_cache):
            self.inside[version] = len(shared.engine.running())
            moved = publish(shared, install, version, keep_cache=keep_cache)
            self.weights[version] = self.copied(shared)
            return moved

        monkeypatch.setattr(Pools, "put", noted)
        monkeypatch.setattr(SharedEngine, "step", gated)
        monkeypatch.setattr(SharedEngine, "publish", kept)
        monkeypatch.setattr(ContinuousBatch, "end_of", self.end_of)

    @staticmethod
    def copied(shared) -> dict[str, torch.Tensor]:
        return {name: weights.clone() for name, weights in shared.engine.plain_weights().items()}

    @staticmethod
    def end_of(batch, row):
        return "length" if len(row.ids) >= (LONG if row.call == 1 else SHORT) else None


def test_what_has_not_ended_is_carried_over_with_its_tokens_versions_and_log_probabilities(tmp_path, monkeypatch):
    """Two steps' prompts are asked for, and the first step trains the half that ends first. The rows of a slow prompt
    are live meanwhile, are interrupted by its publish, and are trained on in the next step: nothing is drawn anew."""
    from flowrl.backends import open_engine
    from flowrl.workers.model_options import Build

    module = module_of("overlap_flow")
    module.Witness.rows.clear()
    gate, out = Gate(monkeypatch), tmp_path / "run"
    made = plan(staleness=1, order="window", window=1.0, publish="interrupt")
    module.flow.run(out=out, plan=made, quiet=True, save_models=False, parameters={"overlap": {"steps": 4}})

    trained = {step: {key[0] for key in batch.keys} for step, batch in module.Witness.rows}
    assert all(len(uids) == module.PROMPTS for uids in trained.values())
    assert 0 not in trained[0] and 0 in trained[1], "the slow prompt comes a step later"
    assert gate.inside[1] == module.GROUP, "its rows ran as the first step was published"

    batch = next(batch for step, batch in module.Witness.rows if step == 1)
    slow = batch.take([place for place, key in enumerate(batch.keys) if key[0] == 0])
    for versions in slow["versions"].to_list():
        assert len(versions) == LONG and set(versions) == {0, 1} and versions == sorted(versions)
    engine = open_engine("hf", Build(module.MODEL, device="cpu"))
    for version in (0, 1):
        engine.take_weights(gate.weights[version])
        apart = engine.logprobs(slow).values - slow["rollout_logprobs"].values
        assert float(apart[slow["versions"].values == version].abs().max()) < 1e-4, "of the weights that drew them"

    first, last = lines(out, "ledger")[0], json.loads((out / "run.json").read_text())["ledger"]["overlap"]
    for told in (first["rows"], last["rows"]):
        assert told["admitted"] == told["trained"] + told["live"] and not told["dropped"]
    assert first["rows"]["trained"] == module.PROMPTS * module.GROUP and first["rows"]["live"] >= module.GROUP
    assert last["rows"]["live"] == 0 and last["rows"]["trained"] == 4 * module.PROMPTS * module.GROUP


def informative_by_prompt(prompt: str, response: str) -> float:
    """A reward on which the rows of a prompt agree whose first digit is even, and those of another do not."""
    return 0.0 if prompt[0] in "02468" else zlib.crc32(response.encode()) % 1000 / 1000


def test_a_refill_loop_runs_ahead_of_the_update(tmp_path, monkeypatch):
    """DAPO draws until enough groups differ. One step ahead, with publishes that interrupt, it trains every informative
    group once, drops the others by its own filter alone, and no row is older than the plan allows."""
    module = module_of("overlap_flow")
    monkeypatch.setattr(module.arithmetic, "exact_match", informative_by_prompt)
    monkeypatch.setattr(module.arithmetic, "MODEL", module.MODEL)
    flow = load_script(str(Path(__file__).parents[3] / "algorithms" / "dapo.py"))
    asked = {"steps": 5, "groups": 4, "group_size": 4, "rounds": 4}
    flow.run(
        "dapo",
        out=tmp_path / "run",
        plan=plan(staleness=1, publish="interrupt"),
        quiet=True,
        save_models=False,
        parameters={"dapo": asked},
    )
    traffic = lines(tmp_path / "run", "traffic")
    assert len(traffic) == 5 and all(line["calls"]["actor.update"] == 1 for line in traffic)
    assert {int(lag) for line in traffic for lag in line["lags"]} <= {0, 1}
    told = json.loads((tmp_path / "run" / "run.json").read_text())["ledger"]["dapo"]["rows"]
    assert told["trained"] > 0 and told["trained"] % asked["group_size"] == 0 and told["live"] == 0
    assert told["admitted"] == told["trained"] + sum(told["dropped"].values())
    assert any(sum(line["calls"][node] for node in line["calls"] if node.startswith("actor.generate")) > 1
               for line in traffic), "a step has asked again"  # fmt: skip
