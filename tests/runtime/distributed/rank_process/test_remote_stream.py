"""Episodes whose policy is on other ranks: rows leave its batch one by one, of all processes that play."""

from __future__ import annotations

import math
import random
import threading
import time
from typing import Any

import pytest
import torch
from letters import model_of
from policy_ranks import WAIT, Gated, Gone, Near, PolicyRank, beside, handle, rows, walk

import flowrl as fl
from flowrl.errors import FlowError, RewardError, RunError, WrongAnswer
from flowrl.runtime.distributed.protocol import Offers, Polled, Serving
from flowrl.runtime.distributed.rank_process.remote_stream import RemoteStream
from flowrl.testing import SampledRow
from flowrl.workers.decode_slots import DecodeSlots, counted, counted_in
from flowrl.workers.model_options import Sampling
from flowrl.workers.streaming import SampleRequest

WHAT = ("response_ids", "response_mask", "rewards", "turns", "finish_reason", "versions", "sampled_tokens")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def same(found, expected, names=WHAT):
    for name in names:
        assert found[name].to_list() == expected[name].to_list(), name
    torch.testing.assert_close(found.rollout_logprobs.values, expected.rollout_logprobs.values, atol=1e-4, rtol=0)


def local(engine=None, **how):
    """The same rollout in one process."""
    actor = fl.open(fl.Actor(model_of(), max_tokens=3), name="actor", engine=engine or Gated())
    return walk().rollout(rows(), policy=actor, **how)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_episodes_are_those_of_one_process(ranks):
    peers = Near({rank: PolicyRank() for rank in range(ranks)})
    same(walk().rollout(rows(), policy=handle(peers), n=2), local(n=2))
    assert "respond" not in dict(peers.calls).values()
    assert all(rank.engine.steps and rank.engine.running() == [] for rank in peers.ranks.values())


@pytest.mark.parametrize(
    "how", [{"tokens": 5}, {"tokens": 4, "turn_tokens": 2}, {"greedy": True}, {"temperature": 0.5}]
)
def test_what_a_call_says_of_sampling_holds_there_too(how):
    peers = Near({4: PolicyRank()})
    found, expected = walk().rollout(rows(), policy=handle(peers), n=2, **how), local(n=2, **how)
    same(found, expected, [*WHAT, "temperature"])


class Whole(fl.Actor):
    """Is asked in whole calls."""

    def respond(self, prompts, seeds, starts, said):
        return super().respond(prompts, seeds, starts, said)


@pytest.mark.parametrize("cls", [fl.Actor, Whole])
def test_what_could_be_drawn_is_recorded_there_too(cls):
    how = {"n": 2, "support": True, "top_k": 3, "temperature": 0.8}
    found = walk().rollout(rows(), policy=handle(Near({rank: PolicyRank(cls=cls) for rank in (0, 1)})), **how)
    same(found, local(**how), [*WHAT, "support_ids", "support_sizes"])
    mask = found.response_mask.values
    assert set(found.support_sizes.values[mask].tolist()) == {3} and not found.support_sizes.values[~mask].any()


def test_a_model_gives_the_tokens_of_one_process():
    ranks = {}
    for rank in (0, 1):
        ranks[rank] = PolicyRank()
        ranks[rank].workers["actor", False] = fl.open(fl.Actor(model_of(**SIZES), max_tokens=3), name="actor")
    actor = fl.open(fl.Actor(model_of(**SIZES), max_tokens=3), name="actor")
    found = walk().rollout(rows(), policy=handle(Near(ranks)), n=3)
    same(found, walk().rollout(rows(), policy=actor, n=3))


def test_an_engine_without_single_rows_is_asked_in_whole_calls():
    peers = Near({0: PolicyRank(cls=Whole)})
    same(walk().rollout(rows(), policy=handle(peers), n=2), local(n=2))
    methods = [method for _, method in peers.calls]
    assert methods.count("respond") == 3 and "poll" not in methods


# -- several processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4])
def test_processes_meet_in_one_batch(count):
    """Each alone takes forty steps of the engine; so do all of them beside each other."""
    peers = Near({0: PolicyRank(Gated(calls=count))})
    how: dict[str, Any] = {"n": 2, "turns": 1, "turn_tokens": 40}
    parts = [rows(3, first=3 * i) for i in range(count)]
    found = beside(*(lambda part=part: walk().rollout(part, policy=handle(peers), **how) for part in parts))
    assert peers.ranks[0].engine.steps == 40, f"and not {40 * count}"
    for part, made in zip(parts, found, strict=True):
        alone = fl.open(fl.Actor(model_of(), max_tokens=3), name="actor", engine=Gated())
        same(made, walk().rollout(part, policy=alone, **how))


def test_a_long_answer_holds_up_nobody():
    """The others of its own process, and those of the other one, end before it does, by the steps of the engine."""
    ended, longest = {}, rows().expand(1).row_seeds().tolist()[2]
    peers = Near({0: PolicyRank(Gated(calls=2, lengths=lambda seed: 3000 if seed == longest else 2))})

    def at(number, turn):
        if turn == 2:
            ended[number] = peers.ranks[0].engine.steps

    both = [rows(), rows(first=6)]
    jobs = [lambda part=part: walk(at).rollout(part, policy=handle(peers), turn_tokens=3000) for part in both]
    with_long, without = beside(*jobs)
    assert with_long.response_mask.row_sum().to_list()[2] == 9000 == ended.pop(2)
    assert len(ended) == 11 and all(steps < 3000 for steps in ended.values())
    assert set(without.outcome.to_list()) == {"finished"}


def test_a_rank_that_is_slow_holds_up_no_other():
    """Those whose policy is on the other rank play to their ends."""
    peers, others = Near({0: PolicyRank(), 1: PolicyRank()}), threading.Event()
    slow = peers.ranks[1].engine
    slow.wanted, ended = 10**9, []  # makes no step

    def at(number, turn):
        ended.append((number, turn))
        if sum(turn == 2 for _, turn in ended) == 3:
            others.set()

    def release():
        assert others.wait(WAIT), "one rank waits for the other"
        slow.opened.set()
        return True

    found, released = beside(lambda: walk(at).rollout(rows(), policy=handle(peers)), release)
    assert released and set(found.outcome.to_list()) == {"finished"}


def test_one_process_finds_the_same_batch_each_time():
    """Whatever its messages take: so sums are rounded the same way, and a call that is made again has the same bits."""
    found = []
    for seed in range(3):
        chance = random.Random(seed)

        class Late(Near):
            def _answer(self, rank, method, args, chance=chance):
                time.sleep(chance.random() * 0.003)
                answer = super()._answer(rank, method, args)
                time.sleep(chance.random() * 0.003)
                return answer

        peers = Late({rank: PolicyRank(Gated(stop=(1,))) for rank in (0, 1)})
        walk().rollout(rows(), policy=handle(peers), n=3)
        found.append([rank.engine.beside for rank in peers.ranks.values()])
    assert found[0] == found[1] == found[2]


def test_rows_of_a_prompt_begin_on_one_rank_and_stay_there():
    class Notes(Gated):
        def submit(self, request):
            self.seen = [
                *getattr(self, "seen", []),
                *zip(request.seeds.tolist(), [p[0] for p in request.prompts.to_list()], strict=True),
            ]
            return super().submit(request)

    engines = [Notes(), Notes()]
    walk().rollout(rows(4), policy=handle(Near(dict(enumerate(map(PolicyRank, engines))))), n=3)
    seen = [set(engine.seen) for engine in engines]
    assert [len(engine.seen) for engine in engines] == [18, 18]
    assert not {seed for seed, _ in seen[0]} & {seed for seed, _ in seen[1]}
    assert not {prompt for _, prompt in seen[0]} & {prompt for _, prompt in seen[1]}


def test_rows_that_come_one_by_one_are_spread_over_ranks():
    """Of an environment that takes its time to begin: a rank that is at more gets no new ones."""
    peers = Near({rank: PolicyRank(Gated(calls=10**9)) for rank in (0, 1)})
    stream = RemoteStream(Serving("actor", (0, 1), 0), peers, Offers(None, True, True))
    for seed in range(8):
        column = fl.Column.of([[1 + seed] * 4], dim="prompt", dtype="i32")
        stream.submit(SampleRequest(column, 1, torch.tensor([seed]), Sampling(max_tokens=5)))
    assert [engine.open for engine in stream._engines] == [4, 4]


# -- decode slots ---------------------------------------------------------------------------------------------------


def test_decode_slots_are_counted_on_ranks():
    """As in one process: six sessions of three turns with one token each, one of which is over after its first."""

    class Ends:
        def step(self, state, action):
            number, turn = state
            return (number, turn + 1), "b", 1.0, turn == 2 or number == 2

    slots = DecodeSlots()
    with counted_in(slots):
        walk(step=Ends.step).rollout(rows(), policy=handle(Near({0: PolicyRank()})), turn_tokens=1)
    assert slots == DecodeSlots(used=16, there=18)


def test_slots_of_processes_that_share_an_engine_are_those_of_its_steps():
    peers, counts = Near({3: PolicyRank(Gated(calls=2))}), []

    def play(part):
        with counted() as found:
            walk().rollout(part, policy=handle(peers), turns=1, turn_tokens=40)
        counts.extend(found)

    beside(lambda: play(rows(3)), lambda: play(rows(3, first=3)))
    slots = DecodeSlots()
    slots.add(counts)
    assert [(each.policy, each.rank, each.sessions) for each in counts] == [("actor", 3, 3)] * 2
    assert slots == DecodeSlots(used=240, there=240), "forty steps of six sessions, not twice as many"


# -- what goes wrong ------------------------------------------------------------------------------------------------


def test_a_policy_whose_process_is_gone_ends_the_call():
    peers = Near({0: PolicyRank(Gated(calls=2)), 1: PolicyRank()})

    def at(number, turn):
        peers.gone.add(0)

    with pytest.raises(Gone, match="rank 0"):
        beside(
            lambda: walk(at).rollout(rows(), policy=handle(peers), n=2),
            lambda: peers.ranks[0].engine.opened.set(),
        )
    assert peers.ranks[1].engine.running() == [], "rows on the rank that is left are ended"


def test_a_failure_of_user_code_leaves_the_engines_clean():
    def at(number, turn):
        if (number, turn) == (3, 1):
            raise ZeroDivisionError("no")

    peers = Near({0: PolicyRank(), 1: PolicyRank()})
    with pytest.raises(RewardError, match=r"game.step failed for row 3, sample 0: ZeroDivisionError: no"):
        walk(at).rollout(rows(), policy=handle(peers), n=2)
    assert [rank.engine.running() for rank in peers.ranks.values()] == [[], []]
    same(walk().rollout(rows(), policy=handle(peers), n=2), local(n=2))


def test_time_that_is_up_ends_rows_with_one_message_for_each_rank():
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    clock, peers = Clock(), Near({0: PolicyRank(), 1: PolicyRank()})

    def at(number, turn):
        if turn == 1:
            clock.now = 100.0

    env = walk(at)
    env._now = clock
    found = env.rollout(rows(), policy=handle(peers), n=4, seconds=50, tokens=9)
    assert set(found.outcome.to_list()) == {"truncated_wall"}
    assert [rank.engine.running() for rank in peers.ranks.values()] == [[], []]
    assert sorted(peers.calls).count((0, "abort_rows")) <= 1 >= sorted(peers.calls).count((1, "abort_rows"))
    tokens = [len(ids) for ids in found.response_ids.to_list()]
    assert all(made <= whole for made, whole in zip(tokens, local(n=4).response_mask.row_sum().to_list(), strict=True))


def test_an_engine_that_fails_ends_the_call_with_its_reason():
    engine = Gated()
    engine.table[4] = math.nan
    with pytest.raises(FlowError, match="not finite"):
        walk().rollout(rows(), policy=handle(Near({0: PolicyRank(engine)})))

    class Breaks(Gated):
        def step(self):
            raise RunError("the process of the engine is gone")

    peers = Near({0: PolicyRank(Breaks())})
    with pytest.raises(RunError, match="the process of the engine is gone"):
        walk().rollout(rows(), policy=handle(peers))


def test_a_prompt_that_cannot_be_answered_is_named():
    engine = Gated(vocab=4)
    with pytest.raises(FlowError, match="has the token"):
        walk().rollout(rows(), policy=handle(Near({0: PolicyRank(engine)})))
    assert engine.running() == []


def test_weights_of_another_version_are_refused():
    peers = Near({5: PolicyRank(serving=True)})
    with pytest.raises(
        WrongAnswer, match="actor on rank 5: the weights here are version 0, and the call is for version 3"
    ):
        walk().rollout(rows(), policy=handle(peers, version=3))


def row(call=1, number=0, ids=(5, 6), plain=(-0.5, -0.5), own=(-0.5, -0.5), versions=((0, 2),)):
    return SampledRow(call, number, ids, plain, own, versions, "stop")


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([Polled((row(number=7),), 1, 1, 0, 1)], "row 7 of call 1 was not asked for, or was answered before"),
        ([Polled((row(call=9),), 1, 1, 0, 1)], "row 0 of call 9 was not asked for"),
        ([Polled((row(), row()), 1, 1, 0, 1)], "row 0 of call 1 was not asked for, or was answered before"),
        ([Polled((row(plain=(-0.5,)),), 1, 1, 0, 1)], "'rollout_logprobs' of row 0 has 1 numbers for 2 tokens"),
        ([Polled((row(own=(-0.5, math.inf)),), 1, 1, 0, 1)], "'sampling_logprobs' of row 0, token 1, is inf"),
        ([Polled((row(versions=((0, 1),)),), 1, 1, 0, 1)], "'versions' of row 0 are"),
        ([Polled((row(versions=((2, 1), (3, 1))),), 1, 1, 0, 1)], "of versions .2, 3., and the weights are 2"),
        ([Polled((row(versions=((2, 1), (1, 1))),), 1, 1, 0, 1)], "of versions .2, 1., and the weights are 2"),
        ([Polled((row(),), 0, 1, 0, 1)], "has lost 1 rows"),
    ],
)
def test_an_answer_that_cannot_be_right_names_the_rank(answers, said):
    class Wrong:
        def call(self, rank, method, *args):
            return lambda: answers.pop(0)

        def ready(self, begun, seconds):
            return list(range(len(begun)))

    stream = RemoteStream(Serving("actor", (7,), 2), Wrong(), Offers(None, True))
    prompts = fl.Column.of([[1], [2]], dim="prompt", dtype="i32")
    call = stream.submit(SampleRequest(prompts, 1, torch.arange(2), Sampling(max_tokens=5)))
    with pytest.raises(WrongAnswer, match=f"actor on rank 7:? .*{said}"):
        stream.rows_of([call])


def test_rows_are_aborted_wherever_they_are():
    """Those that a rank was not told of yet, those that run, and those that have ended."""
    peers = Near({0: PolicyRank(Gated(lengths=lambda seed: 2 if seed == 1 else 500))})
    stream = RemoteStream(Serving("actor", (0,), 0), peers, Offers(None, True))
    prompts = fl.Column.of([[1], [2], [3]], dim="prompt", dtype="i32")

    def submit(*seeds):
        return stream.submit(SampleRequest(prompts, 1, torch.tensor(seeds), Sampling(max_tokens=600)))

    call = submit(1, 2, 3)
    found = []
    while not found:
        found = stream.rows_of([call])
    assert [(row.row, len(row.ids), row.reason) for row in found] == [(0, 2, "stop")]
    late = submit(4, 5, 6)
    ended = stream.abort_rows({call: [0, 1], late: None})
    assert sorted((row.call, row.row) for row in ended) == [(1, 1), (2, 0), (2, 1), (2, 2)]
    assert late.is_over and not call.is_over and len(peers.ranks[0].engine.running()) == 1
    assert [row.row for row in stream.leave([call])] == [2] and call.is_over
    assert peers.ranks[0].engine.running() == [] and stream.abort_rows({call: None}) == []
