"""What comes to a rank when its publish is over, moves and what has rows stand still: they do not do so for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from policy_ranks import PolicyRank

from flowrl.errors import RunError
from flowrl.runtime.distributed.protocol import Failed, Serving
from flowrl.runtime.distributed.rank_process.rank import Rank
from flowrl.runtime.distributed.rank_process.rank_streams import RankStreams
from flowrl.runtime.distributed.rank_process.rank_weights import Weights
from flowrl.runtime.distributed.rank_process.serve_policies import Policies
from flowrl.runtime.distributed.ray.rank_actor import lane_of
from flowrl.workers.user_code.rows_in_progress import Notes

KEY = ("actor", True)
AT = Serving("actor", (0,), 0, follows=True)


class Serves(Rank):
    """A rank that has the copy of the actor that generates, and is about to get weights for it."""

    def __init__(self) -> None:
        Weights.__init__(self, "127.0.0.1", Path())
        Policies.__init__(self)
        made = PolicyRank(serving=True)
        self.number, self.workers, self.specs, self.streams = 0, made.workers, made.specs, RankStreams(Notes())
        assert not isinstance(self.poll(AT, "game", [], 0), Failed)
        self.routes["actor-actor.generate.1"] = cast("Any", ((), 0, None))

    def take(self) -> Any:
        return self.move("actor-actor.generate.1", ("actor", False), None, KEY)


def give_up(rank: Serves) -> None:
    """What a rank is told of a publish that has failed on another one."""
    rank.disconnect("actor-actor.generate.1")
    rank.give_up_rows(KEY)


def go_back(rank: Serves) -> None:
    """What is done where the run goes back to a checkpoint."""
    rank.forget_weights()
    rank.stream_of(KEY).let_go()


@pytest.mark.parametrize(("over", "fails"), [(give_up, True), (go_back, False)], ids=["given up", "gone back"])
@pytest.mark.parametrize("late", [True, False], ids=["before them", "as they begin"])
def test_rows_do_not_stand_still_for_moves_of_a_publish_that_is_over(monkeypatch, over, fails, late):
    """They did so for ever: what has rows go on had come before these, which wait for others in their lane."""
    rank = Serves()
    if late:
        over(rank)
    else:
        hold = Rank.hold_rows
        monkeypatch.setattr(Rank, "hold_rows", lambda rank, *said: (over(rank), hold(rank, *said)))
    with pytest.raises((KeyError, RunError), match="actor-actor.generate.1"):
        rank.take()
    stream = rank.stream_of(KEY)
    assert not stream.is_held and stream.is_given_up is fails


@pytest.mark.parametrize("gone_back", [False, True], ids=["given up", "gone back"])
def test_rows_that_are_held_once_their_publish_is_given_up_are_left_in_turn(gone_back):
    """They stood still for ever: what has them fail overtakes what holds them, which waits for others in its lane."""
    assert lane_of("leave_rows", ()) == lane_of("hold_rows", ()) == "move" != lane_of("give_up_rows", ())
    rank = Serves()
    rank.give_up_rows(KEY)
    if gone_back:
        go_back(rank)
    rank.hold_rows(KEY)
    stream = rank.stream_of(KEY)
    assert stream.is_held
    rank.leave_rows(KEY)
    assert not stream.is_held and stream.is_given_up is not gone_back
