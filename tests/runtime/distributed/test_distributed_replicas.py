"""Which replica of an engine has which rows: prompts stay whole, and the longest are known from earlier steps."""

from __future__ import annotations

import gc
import json
import random
import re
import time
from dataclasses import replace

import pytest
import torch
from direct import Direct, run_direct
from flows import metrics, module_of

import flowrl as fl
from flowrl.batch import Column
from flowrl.errors import RankLost, WrongAnswer
from flowrl.placement.backends import BACKENDS
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool
from flowrl.runtime.distributed.calls.pending_calls import CallOnRanks
from flowrl.runtime.distributed.executor import DistributedExecutor
from flowrl.runtime.distributed.protocol import Serving
from flowrl.runtime.distributed.rank_process.peers import Policy
from flowrl.runtime.distributed.rank_process.rank import Rank
from flowrl.workers.model_options import Sampled, Sampling
from flowrl.workers.streaming import SampleRequest
from flowrl.workers.tokens.sampling import SamplingArguments

HANGS = object()  # the answer of a rank that gives none


@pytest.fixture
def replicas(monkeypatch):
    """The flow of replicas without a model, and a plan with two of them."""
    module = module_of("replicas_flow")
    monkeypatch.setitem(BACKENDS, "replica", module.ROW)
    module.ENGINES.clear()
    module.FAULTS.clear()
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


def test_a_run_that_goes_back_gives_rows_to_the_same_replicas(shares, tmp_path):
    module = module_of("replicas_flow")
    plan = Plan({"a": "cpu", "b": Pool("b", processes=2)}, {"learner": {"train": Place("a"), "generate": Place("b")}})
    whole, _ = run_direct(module.trained, plan, tmp_path / "whole", "learn", checkpoint_every=3)
    wanted = set(shares)
    shares.clear()
    kill = ("run", 9, 0)
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


@pytest.mark.parametrize(("step", "lost"), [(0, 1), (2, 2), (5, 1), (5, 2)])
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


#: What a replica answers, and what is said of it. Its rows begin with row 1.0, which has 4 tokens.
WRONG = {
    "too few rows": (lambda m, made: m.with_row(made, list(range(len(made.ids) - 1))), "7 rows were sampled, and 8"),
    "a row twice": (lambda m, made: m.with_row(made, [0, *range(len(made.ids))]), "9 rows were sampled, and 8"),
    "no row": (lambda m, made: m.with_row(made, []), "there is none for row"),
    "not a number": (lambda m, made: m.with_number(made, 5, float("nan")), r"'rollout_logprobs' of row \d+\.[01], token [15], is nan"),
    "infinite": (lambda m, made: m.with_number(made, 0, float("inf")), r"'rollout_logprobs' of row \d+\.0, token 0, is inf"),
    "fewer numbers than tokens": (
        lambda m, made: m.replace(made, rollout_logprobs=m.with_row(made, [1, *range(1, len(made.ids))]).rollout_logprobs.take([0] * len(made.ids))),
        "numbers for",
    ),
    "a version to come": (lambda m, made: m.with_versions(made, [0, 0, 3]), r"token 2 of row \d+\.0 is of version 3, and the weights are version 0"),
    "an older version after": (lambda m, made: m.with_versions(made, [0, -1]), r"token 1 of row \d+\.0 is of an older version"),
}  # fmt: skip


@pytest.mark.parametrize(("number", "kind"), [(at % 2, kind) for at, kind in enumerate(WRONG)])
def test_a_replica_that_answers_wrongly_is_named(replicas, tmp_path, number, kind):
    """As its call ends, with the row: nobody has used what it gave."""
    module, plan = replicas
    fault, said = WRONG[kind]
    module.FAULTS[number] = lambda made: fault(module, made)
    with pytest.raises(WrongAnswer, match=rf"actor\.generate on rank {number} of pool 'b': .*{said}") as e:
        run_direct(module.flow, plan, tmp_path, "sampled")
    assert "actor.generate(batch, n=2)" in e.value.at.text
    assert not metrics(tmp_path)


def test_a_replica_that_has_not_the_weights_of_the_call_is_named(monkeypatch, tmp_path):
    """A publish that one rank answers, and has not taken."""
    real = Rank.weights_written

    def written(self, key, version, keep_cache=False):
        worker = self.workers[key]
        before = worker.version
        answer = real(self, key, version, keep_cache)
        if self.number == 2 and version == 2:
            worker.version = before
        return answer

    monkeypatch.setattr(Rank, "weights_written", written)
    said = r"learner.generate on rank 2 of pool 'b': the weights here are version 1, and the call is for version 2"
    with pytest.raises(WrongAnswer, match=said):
        run_direct(module_of("replicas_flow").trained, TWO, tmp_path, "learn")
    assert [line["step"] for line in metrics(tmp_path)] == [0, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda keys: keys[:-1], r"there are 2 of row \d+, and 3 of others"),
        (lambda keys: (*keys, keys[0]), r"row \d+\.0 is there twice"),
        (lambda keys: keys[3:], r"row \d+ is not there"),
        (lambda keys: ((99, 0), *keys[1:]), r"row 99\.0 was not asked for"),
    ],
    ids=["lacks a row", "a row twice", "lacks a prompt", "another prompt"],
)
def test_a_rank_that_answers_other_rows_than_it_was_asked_for_is_named(monkeypatch, tmp_path, change, said):
    real = Direct.send

    def send(self, rank, method, *args):
        answer = real(self, rank, method, *args)
        if method == "run" and rank == 2 and args[0].title == "learner.generate" and args[0].info.step == 1:
            answer.keys = change(answer.keys)
        return answer

    monkeypatch.setattr(Direct, "send", send)
    with pytest.raises(WrongAnswer, match=rf"learner\.generate on rank 2 of pool 'b': {said}"):
        run_direct(module_of("replicas_flow").trained, TWO, tmp_path, "learn")


def test_a_rank_that_hangs_is_named_with_its_rows_and_another_one_makes_them(shares, calm, monkeypatch, tmp_path):
    """It lives and does not answer: as it is found by the deadline it is as one that has died."""
    real = Direct.wait

    def wait(self, begun, what, deadline=None, on_death=None):
        if late := {rank for rank, answer in begun.items() if answer is HANGS}:
            answers = {rank: answer for rank, answer in begun.items() if rank not in late}
            said = f"rank {min(late)} of pool 'b' has not answered {what} in time."
            raise RankLost(said, ranks=late, answers=answers)
        return real(self, begun, what, deadline, on_death)

    real_send, left = Direct.send, [2]

    def send(self, rank, method, *args):
        if method == "run" and rank in left and args[0].title == "learner.generate" and args[0].info.step == 3:
            left.remove(rank)
            return HANGS
        return real_send(self, rank, method, *args)

    monkeypatch.setattr(Direct, "wait", wait)
    monkeypatch.setattr(Direct, "send", send)
    found, place = run_direct(module_of("replicas_flow").trained, TWO, tmp_path, "learn")
    assert (found.weights_digest, numbers(tmp_path)) == calm[:2]
    assert place.ranks.restarted == [2]
    told = [json.loads(line)["text"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert any(
        re.match(r"rank 2 of pool 'b' has not answered learner\.generate of step 3 \(.*\) in time\. Rank 2 was at the rows "
                 r"(2[4-9]|3[01])[-\d ]*\. Rank 1 does what rank 2 was at\.", text) for text in told
    )  # fmt: skip


def test_a_row_that_leaves_an_engine_twice_is_named():
    class Twice(fl.testing.FakeEngine):
        """Hands out its first row as the second one too."""

        def step(self):
            return [replace(row, row=0) if row.row == 1 else row for row in super().step()]

    prompts = Column.of([[3], [5]], dim="prompt", dtype="i32")
    call = Twice(vocab=8, stop=()).stream.submit(SampleRequest(prompts, 1, torch.arange(2), Sampling(max_tokens=3)))
    call._left = {0}  # the stream would wait for the row that never comes, and say so
    with pytest.raises(WrongAnswer, match="Of call 1 row 0 has left twice"):
        call.sampled()


@pytest.mark.parametrize(("copies", "way"), [(1, ["lost", "renewed", "lost", "recovered"]), (2, ["lost", "renewed"])])
def test_rows_that_wait_for_their_update_have_a_copy(shares, monkeypatch, tmp_path, copies, way):
    """At staleness 1 a replica dies that has rows of older weights: with a copy of them nothing is gone back to."""
    plan = replace(TWO, pipeline=Pipeline(staleness=1, copies=copies))
    whole, _ = run_direct(module_of("replicas_flow").trained, plan, tmp_path / "whole", "learn")
    shares.clear()
    shares.die, real = (3, 1), CallOnRanks.__init__

    def begin(self, client, call, group, arguments):
        if call.title == "reward.score" and call.step == 2:  # its rows are not looked at before that rank is lost
            until = time.monotonic() + 60
            while shares.die is not None and time.monotonic() < until:
                time.sleep(0.01)
        real(self, client, call, group, arguments)

    monkeypatch.setattr(CallOnRanks, "__init__", begin)
    found, place = run_direct(module_of("replicas_flow").trained, plan, tmp_path / "run", "learn", checkpoint_every=100)
    assert found.weights_digest == whole.weights_digest and place.ranks.restarted == [1]
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [k for k in kinds if k in ("lost", "renewed", "recovered")] == way


@pytest.mark.parametrize(("staleness", "kill"), [(0, ("sums", 4, 1)), (4, ("weights_written", 1, 1))])
def test_a_replica_that_dies_in_a_publish_brings_back_what_the_program_holds(calm, tmp_path, staleness, kill):
    """Its rows come from their copies, and what was made of them is made again, also of a step that is committed."""
    plan = replace(TWO, pipeline=Pipeline(staleness=staleness, copies=2))
    found, place = run_direct(
        module_of("replicas_flow").trained, plan, tmp_path, "learn", kill=kill, checkpoint_every=2
    )
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [k for k in kinds if k in ("lost", "renewed", "recovered")] == ["lost", "renewed"]
    assert place.ranks.restarted == [1]
    assert staleness or (found.weights_digest, numbers(tmp_path)) == calm[:2]


def test_copies_are_freed_with_the_rows(monkeypatch, tmp_path):
    """What ranks hold does not grow with the steps: one copy that stayed in each step would be six more."""
    held, real = [], DistributedExecutor.close

    def close(place):
        gc.collect()
        for number, rank in place.ranks.ranks.items():
            rank.free(place.client.take_dropped(number))  # ranks are told with their next call, which does not come
        held.append(sum(len(rank.objects) for rank in place.ranks.ranks.values()))
        real(place)

    monkeypatch.setattr(DistributedExecutor, "close", close)
    flow, plan = module_of("replicas_flow").trained, replace(TWO, pipeline=Pipeline(copies=2))
    for steps in (3, 9):
        run_direct(flow, plan, tmp_path / str(steps), "learn", parameters={"learn": {"steps": steps}})
    assert len(held) == 2 and held[1] < held[0] + 4


def test_a_row_that_goes_on_is_asked_for_where_its_tokens_are(monkeypatch):
    """Of an environment: rows of a prompt begin on one replica, and stay where they began while that has no more to do."""
    asked = []

    class Here:
        """The rank of an environment, whose replicas answer with two tokens each."""

        peers = None

        def ask_all(self, calls, peers):
            asked.append({rank: seeds.tolist() for rank, _, _, _, seeds, _, _ in calls})
            return [answer(len(call[3])) for call in calls]

    def answer(rows):
        ids = Column.of([[5, 6]] * rows, "response", "i32")
        sure = Column.of([[-0.5, -0.5]] * rows, "response", "f32")
        return Sampled(ids, sure, sure, torch.ones(rows, dtype=torch.bool), 1.0)

    policy = Policy(Here(), Serving("actor", (3, 7), version=2))
    rows = [[1, 2], [1, 2], [4, 9], [4, 9]]

    def respond(prompts, seeds, start):
        column = Column.of(prompts, dim="prompt", dtype="i32")
        return policy.respond(column, torch.tensor(seeds), torch.full((len(seeds),), start), SamplingArguments())

    respond(rows, [10, 11, 12, 13], 0)
    assert sorted(asked[0].values()) == [[10, 11], [12, 13]], "both rows of a prompt"
    respond([[*row, 5, 6, 8] for row in reversed(rows)], [13, 12, 11, 10], 2)
    assert {rank: sorted(seeds) for rank, seeds in asked[1].items()} == asked[0]
    respond([[*row, 5, 6, 8, 5, 6] for row in rows[:2]], [10, 11], 4)
    assert sorted(asked[2].values()) == [[10], [11]], "the other replica has nothing to do"
    wrong = replace(answer(1), rollout_logprobs=Column.of([[-0.5, float("nan")]], "response", "f32"))
    monkeypatch.setattr(Here, "ask_all", lambda self, calls, peers: [answer(1), wrong])
    said = "actor on rank 7, asked for 1 rows: 'rollout_logprobs' of row [01], token 1, is nan"
    with pytest.raises(WrongAnswer, match=said):
        respond(rows[::2], [20, 21], 0)
