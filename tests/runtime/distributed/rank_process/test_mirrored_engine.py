"""Episodes whose policy is split over ranks: the first one has each call made on all of them, in one order."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from letters import model_of
from policy_ranks import WAIT, EnvRank, Gated, Near, PolicyRank, beside, rows, walk

import flowrl as fl
from flowrl.errors import DataError, EngineLost, FlowError, RunError
from flowrl.runtime.distributed.protocol import Asked, Failed, Offers, Serving
from flowrl.runtime.distributed.rank_process import mirrored_engine
from flowrl.runtime.distributed.rank_process.mirrored_engine import MirroredEngine, TeamCalls
from flowrl.runtime.distributed.rank_process.peers import Policy
from flowrl.runtime.distributed.rank_process.rank_streams import RankStreams
from flowrl.runtime.distributed.rank_process.remote_stream import RemoteStream
from flowrl.workers.decode_slots import DecodeSlots, counted_in
from flowrl.workers.model_options import Sampling
from flowrl.workers.streaming import SampleRequest
from flowrl.workers.user_code.rows_in_progress import Notes

KEY = ("actor", False)
WHAT = ("response_ids", "response_mask", "rewards", "turns", "finish_reason", "versions", "rollout_logprobs")


class Told(Gated):
    """An engine that notes what it is asked."""

    def __init__(self, calls=1, **how):
        super().__init__(calls, **how)
        self.asked = []

    def submit(self, request):
        self.asked.append(("submit", request.seeds.tolist(), request.prompts.to_list()))
        return super().submit(request)

    def step(self):
        self.asked.append(("step", sorted((row.seed, len(row.ids)) for row in self._rows.values())))
        return super().step()

    def abort(self, call, rows=None):
        ended = super().abort(call, rows)
        self.asked.append(("abort", sorted((row.row, row.ids) for row in ended)))
        return ended


class TeamRank(PolicyRank):
    """A rank that has a part of the policy, as far as others can tell."""

    def __init__(self, number, engine=None, cls=fl.Actor):
        super().__init__(engine or Told(), cls)
        self.number = number


def team(*engines, cls=fl.Actor, size=2):
    """Ranks 0, 1, ...: the first of each ``size`` has the others beside it. Returns peers, and how they are asked."""
    peers = Near({number: TeamRank(number, engine, cls) for number, engine in enumerate(engines)})
    for rank in peers.ranks.values():
        rank.peers = peers
    firsts = tuple(range(0, len(engines), size))
    return peers, Serving("actor", firsts, 0, beside={r: tuple(range(r + 1, r + size)) for r in firsts})


def handle(peers, at):
    return Policy(cast("Any", EnvRank(peers)), at)


def same(found, expected, names=WHAT):
    for name in names:
        assert found[name].to_list() == expected[name].to_list(), name


def whole(count=1, **how):
    """The same rollout with as many engines that are not split."""
    peers = Near({number: TeamRank(number) for number in range(count)})
    return walk().rollout(rows(), policy=handle(peers, Serving("actor", tuple(range(count)), 0)), **how)


def asked_alike(peers, size=2):
    """What the engines of each team were asked; it is the same."""
    found = [rank.engine.asked for _, rank in sorted(peers.ranks.items())]
    for first in range(0, len(found), size):
        assert all(each == found[first] for each in found[first : first + size])
    assert all(rank.engine.running() == [] for rank in peers.ranks.values())
    return found


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (3, 3), (4, 2)])
def test_ranks_of_a_team_are_asked_alike_and_give_what_a_whole_engine_gives(ranks, size):
    peers, at = team(*(Told() for _ in range(ranks)), size=size)
    same(walk().rollout(rows(), policy=handle(peers, at), n=2), whole(ranks // size, n=2))
    found = asked_alike(peers, size)
    assert all({what for what, *_ in each} == {"submit", "step"} for each in found)
    for first in range(0, ranks, size):
        sent = [rank for rank, method in peers.calls if method == "mirror" and first < rank < first + size]
        assert len(sent) == (size - 1) * len(found[first]), "one message for each call and rank"
    assert {rank for rank, method in peers.calls if method != "mirror"} == set(range(0, ranks, size))


def test_a_model_gives_the_bits_of_one_that_is_whole():
    def ranks(count):
        made = {number: TeamRank(number) for number in range(count)}
        for rank in made.values():
            sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
            rank.workers["actor", False] = fl.open(fl.Actor(model_of(**sizes), max_tokens=3), name="actor")
        peers = Near(made)
        for rank in made.values():
            rank.peers = peers
        return peers

    split = handle(ranks(2), Serving("actor", (0,), 0, beside={0: (1,)}))
    alone = handle(ranks(1), Serving("actor", (0,), 0))
    same(walk().rollout(rows(), policy=split, n=3), walk().rollout(rows(), policy=alone, n=3))


@pytest.mark.parametrize("how", [{"tokens": 5}, {"tokens": 4, "turn_tokens": 2}, {"greedy": True}, {"support": True}])
def test_limits_and_ways_of_sampling_hold_there_too(how):
    peers, at = team(Told(), Told())
    same(walk().rollout(rows(), policy=handle(peers, at), n=2, **how), whole(n=2, **how))
    asked_alike(peers)


@pytest.mark.parametrize("ranks", [2, 4])
def test_environments_that_play_at_once_share_the_batch(ranks):
    engines = [Told(calls=2 if ranks == 2 else 1) for _ in range(ranks)]
    peers, at = team(*engines)
    parts = [rows(3), rows(3, first=3)]
    jobs = [lambda part=part: walk().rollout(part, policy=handle(peers, at), turns=1, turn_tokens=40) for part in parts]
    found = beside(*jobs)
    asked_alike(peers)
    if ranks == 2:
        assert peers.ranks[0].engine.steps == 40, "and not 80"
    for part, made in zip(parts, found, strict=True):
        alone = handle(Near({0: TeamRank(0)}), Serving("actor", (0,), 0))
        same(made, walk().rollout(part, policy=alone, turns=1, turn_tokens=40))


def test_decode_slots_are_those_of_one_engine():
    peers, at = team(Told(), Told())
    slots = DecodeSlots()
    with counted_in(slots):
        walk().rollout(rows(), policy=handle(peers, at), turn_tokens=1)
    assert slots == DecodeSlots(used=18, there=18)


def test_time_that_is_up_ends_rows_on_all_ranks():
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    clock = Clock()
    peers, at = team(*(Told(lengths=lambda seed: 1 + 400 * (seed % 2)) for _ in range(2)))

    def later(number, turn):
        clock.now = 100.0

    env = walk(later)
    env._now = clock
    found = env.rollout(rows(), policy=handle(peers, at), n=4, seconds=50, turn_tokens=500)
    assert set(found.outcome.to_list()) == {"truncated_wall"}
    aborted = [each for each in asked_alike(peers)[1] if each[0] == "abort"]
    assert aborted and all(each[1] for each in aborted), "and nothing is sent where no row is left"


def test_who_listens_is_told_by_the_first_rank():
    peers, at = team(*(Told(lengths=lambda seed: 10**6) for _ in range(2)))
    stream = RemoteStream(at, peers, Offers(None, True))
    prompts = fl.Column.of([[1]], dim="prompt", dtype="i32")
    call = stream.submit(SampleRequest(prompts, 1, torch.tensor([1]), Sampling(max_tokens=10**6)))
    shown, heard, ends = 0, [], time.monotonic() + WAIT
    while not heard and time.monotonic() < ends:
        assert stream.rows_of([call]) == []
        heard = stream.tokens_since({call: {0: shown}})
    assert heard[0].ids and heard[0].reason == "aborted"
    (row,) = stream.leave([call])
    assert row.ids[: len(heard[0].ids)] == heard[0].ids
    asked_alike(peers)


class Own(fl.Actor):
    """Is asked in whole calls."""

    def respond(self, prompts, seeds, starts, said):
        return super().respond(prompts, seeds, starts, said)


def test_whole_calls_are_made_on_all_ranks_too():
    peers, at = team(Told(), Told(), cls=Own)
    same(walk().rollout(rows(), policy=handle(peers, at), n=2), whole(n=2))
    asked_alike(peers)
    assert [(rank, method) for rank, method in peers.calls if method in ("respond", "mirror")] == [
        (0, "respond"), (1, "mirror")] * 3  # fmt: skip


def test_whole_calls_that_differ_are_named():
    other = Told()
    other.table = other.table.roll(1, 0)
    peers, at = team(Told(), other, cls=Own)
    with pytest.raises(RunError, match="The ranks that split 'actor' have drawn other tokens for the same rows"):
        walk().rollout(rows(), policy=handle(peers, at), turn_tokens=20)


# -- what nobody waits for any more -----------------------------------------------------------------------------------


def test_rows_of_an_environment_that_died_end_on_all_ranks_as_the_first_one_ends_them():
    """The others do nothing by themselves."""
    peers, at = team(*(Told(lengths=lambda seed: 10**6) for _ in range(2)))
    stream = RemoteStream(at, peers, Offers(None, True))
    prompts = fl.Column.of([[1], [2]], dim="prompt", dtype="i32")
    call = stream.submit(SampleRequest(prompts, 1, torch.arange(2), Sampling(max_tokens=10**6)))
    stream.rows_of([call])
    while not peers.ranks[1].engine.running():
        time.sleep(0.001)
    before = len(peers.calls)
    peers.ranks[1].end_rows(("actor", False))
    assert len(peers.ranks[1].engine.running()) == 2
    peers.ranks[0].end_rows(("actor", False))
    asked_alike(peers)
    assert {each for each in peers.calls[before:] if each[1] != "poll"} == {(1, "mirror")}
    asked = len(peers.calls)
    peers.ranks[0].renew_rows()
    assert not [each for each in peers.calls[asked:] if each[1] == "mirror"], "nothing is left"


def following():
    """A team of two that is asked over publishes, and what asks its first rank for a row."""
    peers, at = team(Told(), Told())
    for rank in peers.ranks.values():
        rank.streams = RankStreams(Notes())
    at = replace(at, follows=True)
    request = SampleRequest(fl.Column.of([[3]], dim="prompt", dtype="i32"), 1, torch.arange(1), Sampling(max_tokens=3))

    def poll(name, *asked, seconds=0.0) -> Any:
        return peers.ranks[0].poll(at, name, [Asked(number, request) for number in asked], seconds)

    return peers, poll


def go_back(rank):
    """What a rank forgets as the run goes back to a checkpoint."""
    stream = rank.stream_of(KEY)
    stream.let_go()
    rank.streams.forget()
    rank.renew_rows()
    stream.follows = False


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_after_a_publish_was_given_up_the_team_goes_on_whichever_goes_back_first(order):
    """The other rank refused to end the rows of the first one: after that no call of the team was made any more."""
    peers, poll = following()
    first, other = peers.ranks.values()
    assert poll("before", 1).open == 1
    first.hold_rows(KEY, (1,))
    other.hold_rows(KEY)
    for rank in (first, other):
        rank.give_up_rows(KEY)
    assert isinstance(poll("before", seconds=WAIT), Failed)
    for place in order:
        go_back(peers.ranks[place])
    assert not other.engine.running()
    found = poll("after", 1, seconds=WAIT)
    while not found.rows:
        found = poll("after", seconds=WAIT)
    assert found.open == 0


def test_a_step_that_is_made_as_the_other_rank_knows_first_of_a_publish_that_is_given_up_is_made():
    peers, poll = following()
    first, other = peers.ranks.values()
    poll("before", 1)
    other.give_up_rows(KEY)
    assert poll("before", seconds=WAIT).rows
    first.give_up_rows(KEY)
    assert isinstance(poll("before", 2, seconds=WAIT), Failed)


def test_rows_that_are_opened_after_a_publish_was_given_up_wait_for_no_weights():
    peers, poll = following()
    first = peers.ranks[0]
    first.give_up_rows(KEY)
    found = poll("after", 1)
    assert isinstance(found, Failed) and "a publish has failed" in found.text


# -- what goes wrong --------------------------------------------------------------------------------------------------


def failing(error, after=4):
    class Breaks(Told):
        def step(self):
            if len(self.asked) > after:
                raise error
            return super().step()

    return Breaks()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("kind", [RunError, EngineLost, ZeroDivisionError])
def test_an_engine_that_fails_on_one_rank_ends_the_call_and_is_named(monkeypatch, place, kind):
    monkeypatch.setattr(mirrored_engine, "GRACE", 0.2)
    engines = [Told(), Told()]
    engines[place] = failing(kind("no more of it"))
    peers, at = team(*engines)
    with pytest.raises(FlowError, match="no more of it") as failed:
        walk().rollout(rows(), policy=handle(peers, at), n=2, turn_tokens=20)
    if kind is EngineLost:
        assert isinstance(failed.value, EngineLost) and failed.value.rank == place
    elif place:
        assert "actor on rank 1: " in failed.value.what
    with pytest.raises(FlowError) as again:  # it is of no more use, and says why
        walk().rollout(rows(), policy=handle(peers, at))
    assert isinstance(again.value, EngineLost) == (kind is EngineLost)


def test_an_engine_that_waits_for_a_lost_one_holds_up_nobody(monkeypatch):
    """As the process of vLLM does in the midst of a step: the other rank has said that it is lost."""
    monkeypatch.setattr(mirrored_engine, "GRACE", 0.1)
    monkeypatch.setattr(mirrored_engine, "LOOK", 0.05)
    released = threading.Event()

    class Hangs(Told):
        def step(self):
            assert len(self.asked) <= 4 or released.wait(WAIT)
            return super().step()

    peers, at = team(Hangs(), failing(EngineLost("it is gone, with exit status -9.")))
    began = time.monotonic()
    try:
        with pytest.raises(EngineLost, match="exit status -9") as failed:
            walk().rollout(rows(), policy=handle(peers, at), turn_tokens=20)
        assert failed.value.rank == 1 and time.monotonic() - began < WAIT / 2
    finally:
        released.set()


def test_whose_process_is_lost_tells_more_than_who_has_lost_its_connection(monkeypatch):
    monkeypatch.setattr(mirrored_engine, "GRACE", 2.0)
    for place in (0, 1):
        engines = [failing(RunError("vLLM: connection closed by peer")), failing(EngineLost("it is gone."))]
        peers, at = team(*(engines if place else engines[::-1]))
        with pytest.raises(EngineLost, match="it is gone") as failed:
            walk().rollout(rows(), policy=handle(peers, at), turn_tokens=20)
        assert failed.value.rank == place


def test_a_rank_whose_process_is_gone_ends_the_call(monkeypatch):
    monkeypatch.setattr(mirrored_engine, "GRACE", 0.2)
    peers, at = team(Told(), Told())

    def end(number, turn):
        peers.gone.add(1)

    with pytest.raises(RunError, match="actor on rank 1, which has the engine too, is gone: Gone: rank 1"):
        walk(end).rollout(rows(), policy=handle(peers, at), n=2)


def test_a_prompt_that_no_rank_can_answer_is_named_and_others_go_on():
    peers, at = team(Told(vocab=4), Told(vocab=4))
    with pytest.raises(FlowError, match="has the token"):
        walk().rollout(rows(), policy=handle(peers, at))
    asked_alike(peers)
    prompts = fl.Column.of([[1]], dim="prompt", dtype="i32")
    stream = RemoteStream(at, peers, Offers(None, True))
    call = stream.submit(SampleRequest(prompts, 1, torch.tensor([1]), Sampling(max_tokens=3)))
    found = []
    while not found:
        found = stream.rows_of([call])
    assert len(found[0].ids) == 3


def test_where_all_ranks_fail_each_is_told_of():
    peers, at = team(failing(RunError("connection closed by peer")), failing(RunError("no more memory")))
    with pytest.raises(RunError, match="connection closed by peer") as failed:
        walk().rollout(rows(), policy=handle(peers, at), turn_tokens=20)
    assert failed.value.__notes__ == ["actor on rank 1: no more memory"]


def test_a_call_that_began_on_one_rank_alone_ends_the_engine():
    class Refuses(Told):
        def submit(self, request):
            raise DataError("not this one")

    peers, at = team(Told(), Refuses())
    with pytest.raises(DataError, match="actor on rank 1: not this one"):
        walk().rollout(rows(), policy=handle(peers, at))
    with pytest.raises(RunError, match="The engine of this call has failed"):
        walk().rollout(rows(), policy=handle(peers, at))


def test_tokens_that_differ_end_the_call():
    other = Told()
    other.table = other.table.roll(1, 0)
    peers, at = team(Told(), other)
    with pytest.raises(RunError, match="The ranks that split 'actor' have drawn other tokens for the same rows"):
        walk().rollout(rows(), policy=handle(peers, at), turn_tokens=20)
    with pytest.raises(RunError, match="have drawn other tokens|has failed"):
        walk().rollout(rows(), policy=handle(peers, at))


def test_calls_of_several_policies_have_one_order():
    """Ranks that split two engines would else be in the midst of another one each."""
    at_once, most = [], []

    class Notes(Told):
        def step(self):
            at_once.append(self)
            most.append(len(at_once))
            time.sleep(0.001)
            at_once.remove(self)
            return super().step()

    peers, _ = team(Notes(), Told())
    turn = threading.Lock()
    engines = [MirroredEngine(Notes(), TeamCalls(name, ("actor", False), (1,), peers, turn)) for name in "ab"]
    prompts = fl.Column.of([[1]], dim="prompt", dtype="i32")
    both = threading.Barrier(2)

    def go(engine):
        engine.submit(SampleRequest(prompts, 1, torch.tensor([1]), Sampling(max_tokens=5)))
        both.wait()
        with pytest.raises(RunError):  # both are beside one engine there
            while engine.running():
                engine.step()
        return True

    assert beside(*(lambda engine=engine: go(engine) for engine in engines)) == [True, True]
    assert set(most) == {1}


def test_what_is_no_call_of_a_rollout_is_not_there():
    engine = MirroredEngine(Told(), TeamCalls("actor", ("actor", False), (), Near({}), threading.Lock()))
    assert engine.most_rows is None and engine.running() == [] and engine.step() == []
    for name in ("pause", "resume", "generate", "prefix_tokens"):
        assert not hasattr(engine, name)
    assert isinstance(TeamRank(0).mirror(("nobody", False), "step"), Failed)
