"""Which replica of an engine has which rows: prompts stay whole, and the longest are known from earlier steps."""

from __future__ import annotations

import json
import random

import pytest
import torch
from direct import Direct, run_direct
from flows import metrics, module_of

import flowrl as fl
from flowrl.batch import Column
from flowrl.placement.backends import BACKENDS
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.workers.model_options import Sampling


@pytest.fixture
def replicas(monkeypatch):
    """The flow of replicas without a model, and a plan with two of them."""
    module = module_of("replicas_flow")
    monkeypatch.setitem(BACKENDS, "replica", module.ROW)
    module.ENGINES.clear()
    return module, Plan({"b": Pool("b", processes=2)}, {"actor": {"generate": Place("b", backend="replica")}})


class Told(list):
    """``die``: step and rank of a call that generates, in which that rank dies."""

    die = None


@pytest.fixture
def shares(monkeypatch):
    """Which rows each rank was told to generate: (step, rank, keys), in the order of the calls."""
    told, real = Told(), Direct.send

    def send(self, rank, method, *args):
        if method == "run" and args[0].title.endswith(".generate"):
            step = args[0].info.step
            told.append((step, rank, next(iter(args[0].arguments.values())).keys))
            if (step, rank) == told.die:
                told.die = None
                self.dead.add(rank)
        return real(self, rank, method, *args)

    monkeypatch.setattr(Direct, "send", send)
    return told


def test_replicas_end_together_once_the_lengths_are_known(replicas, tmp_path):
    module, plan = replicas
    run_direct(module.flow, plan, tmp_path, "sampled", parameters={"sampled": {"steps": 3}})
    took = [[sum(module.LENGTHS[d] for d in asked) for asked in engine.asked] for engine in module.ENGINES]
    first, *later = zip(*took, strict=True)
    assert max(first) > 1.2 * min(first), "eight prompts of one length are all the same to it"
    assert all(max(step) <= 1.05 * min(step) for step in later)
    for engine in module.ENGINES:
        for asked in engine.asked[1:]:
            lengths = [module.LENGTHS[d] for d in asked]
            assert lengths == sorted(lengths, reverse=True), "the longest begin first"


def test_rows_of_a_prompt_stay_with_one_replica(replicas, shares, tmp_path):
    module, plan = replicas
    run_direct(module.flow, plan, tmp_path, "sampled")
    by_step = {}
    for step, rank, keys in shares:
        by_step.setdefault(step, {})[rank] = [key[0] for key in keys]
    assert all(not set(ranks[0]) & set(ranks[1]) and len(ranks) == 2 for ranks in by_step.values())
    assert all(len({*ranks[0], *ranks[1]}) == 8 for ranks in by_step.values())


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_resumed_run_gives_rows_to_the_same_replicas(shares, tmp_path, staleness):
    module = module_of("replicas_flow")
    plan = Plan(
        {"a": "cpu", "b": Pool("b", processes=2)},
        {"learner": {"train": Place("a"), "generate": Place("b")}},
        pipeline=Pipeline(staleness=staleness),
    )
    whole, _ = run_direct(module.trained, plan, tmp_path / "whole", "learn", checkpoint_every=2)
    wanted = sorted(shares)
    assert len({tuple(sorted(key[0] % 8 for key in keys)) for _, rank, keys in wanted if rank == 1}) > 1
    shares.clear()
    run_direct(
        module.trained, plan, tmp_path / "parts", "learn", checkpoint_every=2, parameters={"learn": {"steps": 3}}
    )
    shares.clear()
    found, _ = run_direct(module.trained, plan, tmp_path / "parts", "learn", checkpoint_every=2, resume=True)
    assert sorted(shares) == [one for one in wanted if one[0] >= 3]
    assert found.weights_digest == whole.weights_digest


@pytest.mark.parametrize("count", [5, 9])
def test_a_run_that_goes_back_gives_rows_to_the_same_replicas(shares, tmp_path, count):
    module = module_of("replicas_flow")
    plan = Plan({"a": "cpu", "b": Pool("b", processes=2)}, {"learner": {"train": Place("a"), "generate": Place("b")}})
    whole, _ = run_direct(module.trained, plan, tmp_path / "whole", "learn", checkpoint_every=3)
    wanted = set(shares)
    shares.clear()
    kill = ("run", count, 0)
    found, _ = run_direct(module.trained, plan, tmp_path / "back", "learn", checkpoint_every=3, kill=kill)
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "back" / "events.jsonl").read_text().splitlines()]
    assert "recovered" in kinds and set(shares) == wanted and len(shares) > len(wanted)
    assert found.weights_digest == whole.weights_digest
    assert metrics(tmp_path / "back")[-1]["length"] == metrics(tmp_path / "whole")[-1]["length"]


def test_tokens_of_hf_do_not_depend_on_who_has_which_rows():
    """Their log-probabilities agree to the last bits, which the shape of a batch decides."""
    actor = fl.open(fl.Actor(module_of("stale_flow").MODEL, max_tokens=20))
    chance, n = random.Random(0), 3
    prompts = [[chance.randrange(3, 12) for _ in range(chance.randrange(2, 12))] for _ in range(12)]
    seeds = torch.arange(len(prompts) * n) + 1000

    def sample(places):
        column = Column.of([prompts[p] for p in places], dim="prompt", dtype="i32")
        mine = torch.cat([seeds[p * n : (p + 1) * n] for p in places])
        made = actor.engine.generate(column, n, mine, Sampling(max_tokens=20))
        ids, logprobs = made.ids.to_list(), made.rollout_logprobs.to_list()
        return {(p, i): (ids[j * n + i], logprobs[j * n + i]) for j, p in enumerate(places) for i in range(n)}

    whole = sample(range(12))
    for _ in range(8):
        order = chance.sample(range(12), 12)
        cuts = sorted(chance.sample(range(1, 12), 2))
        parts = [order[: cuts[0]], order[cuts[0] : cuts[1]], order[cuts[1] :]]
        found = {key: row for part in parts for key, row in sample(part).items()}
        assert {key: ids for key, (ids, _) in found.items()} == {key: ids for key, (ids, _) in whole.items()}
        for key, (_, logprobs) in found.items():
            assert logprobs == pytest.approx(whole[key][1], abs=2e-6)


TWO = Plan({"a": "cpu", "b": Pool("b", processes=2)}, {"learner": {"train": Place("a"), "generate": Place("b")}})


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The digest of the weights of a run that nobody disturbs, and what was said of its steps."""
    out = tmp_path_factory.mktemp("calm")
    found, _ = run_direct(module_of("replicas_flow").trained, TWO, out, "learn")
    return found.weights_digest, numbers(out), json.loads((out / "run.json").read_text())["ledger"]


def numbers(out):
    return [{k: v for k, v in line.items() if k.split("/")[-1] != "tokens_per_second"} for line in metrics(out)]


@pytest.mark.parametrize(("step", "lost"), [(0, 1), (0, 2), (1, 1), (2, 2), (5, 1), (5, 2)])
def test_a_replica_that_dies_costs_its_own_rows(shares, calm, tmp_path, step, lost):
    """Another one makes them, from the same call; what that one had made stays. No checkpoint is gone back to."""
    flow, shares.die = module_of("replicas_flow").trained, (step, lost)
    found, place = run_direct(flow, TWO, tmp_path, "learn", checkpoint_every=100)
    assert (found.weights_digest, numbers(tmp_path)) == calm[:2]
    assert json.loads((tmp_path / "run.json").read_text())["ledger"] == calm[2]
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [k for k in kinds if k in ("lost", "renewed", "recovered")] == ["lost", "renewed"]
    assert place.ranks.restarted == [lost]
    asked = [(rank, keys) for at, rank, keys in shares if at == step]
    mine = next(keys for rank, keys in asked if rank == lost)
    assert len(asked) == 3 and asked[-1] == (3 - lost, mine), "the lost rank's rows alone are asked for again"
    assert all(len([1 for at, *_ in shares if at == other]) == 2 for other in range(6) if other != step)
