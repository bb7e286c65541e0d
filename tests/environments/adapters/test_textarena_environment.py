"""Games of textarena: what a policy plays in them is worth what textarena itself says of the same answers."""

from __future__ import annotations

import sys

import pytest
from real_package import expect_trained, packages, said_by

from flowrl.environments import TextArenaEnvironment
from flowrl.errors import WorkerError

nightly = [pytest.mark.nightly, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return said_by("textarena_play.py", packages("textarena", tmp_path_factory.mktemp("site")))


class TestPlayed:
    pytestmark = nightly

    @pytest.mark.parametrize("game", ["guess", "cards", "first", "second"])
    def test_rewards_and_ends_are_those_of_the_game_for_the_same_answers(self, found, game):
        rows = found[game]["rows"]
        assert len(rows) == 20 and found[game]["delivered"] == 1
        for row in rows:
            assert row["theirs"]["left"] == 0, "nothing is sampled after the end"
            assert row["reward"] == pytest.approx(row["theirs"]["reward"])
            if row["theirs"]["ended"]:
                assert (row["outcome"], row["reason"]) == ("finished", row["theirs"]["ended"])
            else:
                assert row["outcome"].startswith("truncated") and row["reward"] == 0
        assert {row["theirs"]["ended"] for row in rows} - {""}
        assert len({row["task"]["prompt"] for row in rows}) > 1 or game in ("guess", "first")

    def test_the_program_of_the_page_trains(self, found):
        expect_trained(found["page"])

    def test_what_cannot_be_played_is_refused_with_what_helps(self, found):
        name, option, players = found["refused"]
        assert "no game 'GuessTheNumbr-v0'" in name and "Did you mean 'GuessTheNumber-v0" in name
        assert "'hands'" in option
        assert "2 players" in players and "Define opponent" in players


def test_the_package_that_is_missing_and_a_seat_that_is_not_there_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(WorkerError, match="needs the package textarena") as refused:
        TextArenaEnvironment("GuessTheNumber-v0").rows()
    assert refused.value.fix == "pip install 'flowrl-lm[textarena]'."
    with pytest.raises(WorkerError, match="seat=2 is none of 2 players"):
        TextArenaEnvironment("TicTacToe-v0", players=2, seat=2)
