"""Tic-tac-toe: its rules and players against all games there are, its tasks, and a short training."""

from __future__ import annotations

import json
import random
import runpy
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import flowrl as fl
from flowrl import rl
from flowrl.batch import CallInfo

NO_MARKS = str.maketrans("", "", "ABCDEFGHIabcdefghi")


@pytest.fixture(scope="module")
def game(drivers_path):
    from tasks import tictactoe

    return tictactoe


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_all_games_there_are(game):
    """255,168 games: the numbers of wins and draws are known, and minimax over all of them agrees with ``value``."""
    ends: Counter[str] = Counter()

    def outcome(board, mark):
        """What X comes to when both play as well as can be, from walking through every game."""
        if game.is_over(board):
            ends[game.winner(board) or "draw"] += 1
            return {"x": 1, "o": -1, "": 0}[game.winner(board)]
        other = "o" if mark == "x" else "x"
        found = [outcome(game.play(board, field, mark), other) for field in game.free(board)]
        best = max(found) if mark == "x" else min(found)
        assert game.value(board, mark) == (best if mark == "x" else -best)
        wanted = [f for f, result in zip(game.free(board), found, strict=True) if result == best]
        assert game.best_moves(board, mark) == "".join(wanted)
        return best

    assert outcome(game.BOARD, "x") == 0
    assert ends == Counter({"x": 131_184, "o": 77_904, "draw": 46_080}) and ends.total() == 255_168


@pytest.mark.parametrize("side", ["first", "second"])
def test_the_optimal_player_never_loses_whatever_it_chooses_among_its_best_moves(game, side):
    results: set[str] = set()

    def walk(board, mark):
        if game.is_over(board):
            results.add(game.winner(board))
            return
        other = "o" if mark == "x" else "x"
        for field in game.best_moves(board, mark) if mark == "o" else game.free(board):
            walk(game.play(board, field, mark), other)

    walk(game.BOARD, "o" if side == "first" else "x")
    assert results == {"o", ""}


def test_what_the_policy_is_shown_says_of_each_field_which_it_is_and_whose(game):
    chance = random.Random(0)
    for _ in range(200):
        board = "".join(chance.choice([field, "x", "o"]) for field in game.BOARD)
        shown = game.show(board)
        assert game.read(shown) == board and len(set(shown)) == 9
        assert sorted(shown.upper().translate(str.maketrans(game.SHOWN["x"], game.BOARD))) == list(game.BOARD)


def test_an_opponent_is_its_seed_and_draws_all_its_moves_alike(game):
    board = "x23456789"
    for opponent, moves in (("random", "23456789"), ("optimal", "5")):
        drawn = [game.reply(opponent, board, seed) for seed in range(4000)]
        assert drawn == [game.reply(opponent, board, seed) for seed in range(4000)]
        counts = Counter(drawn)
        assert set(counts) == set(moves)
        for count in counts.values():
            assert abs(count - 4000 / len(moves)) < 6 * (4000 / len(moves)) ** 0.5
    corners = Counter(game.reply("optimal", "1234x6789", seed) for seed in range(400))
    assert set(corners) == set("1379") and min(corners.values()) > 60, "ties are broken by the seed"


def said(game, env, task, *fields):
    """The state of a game after these moves of the policy, and what the environment said to each."""
    state, _ = env.reset(task, seed=0)
    told = []
    for field in fields:
        state, observation, _, over = env.step(state, field)
        told.append((str(observation), bool(over)))
    return state, told


def test_a_move_is_answered_with_the_board(game):
    env, task = game.TicTacToe(), {"prompt": game.BOARD, "opponent": "optimal", "seed": 1}
    state, told = said(game, env, task, "<move>1</move>")
    assert told == [("A234e6789", False)], "only the middle draws against a corner"
    assert state.result == "" and state.messages[-1] == {"role": "user", "content": "A234e6789"}


@pytest.mark.parametrize(
    ("prompt", "move", "result", "reward"),
    [
        ("xx3oo6789", "<move>3</move>", "won", 1.0),
        ("xoxoxo7o9", "<move>9</move>", "won", 1.0),
        ("xoxxoo7x9", "<move>9</move>", "drawn", 0.5),
        ("x2345o7oo", "<move>2</move>", "lost", -1.0),
        ("xx3oo6789", "<move>1</move>", "invalid", -1.5),
        ("xx3oo6789", "<move>0</move>", "malformed", -1.5),
        ("xx3oo6789", "3", "malformed", -1.5),
        ("xx3oo6789", "<move>3</move>3", "malformed", -1.5),
        ("xx3oo6789", "", "malformed", -1.5),
    ],
)
def test_how_games_end(game, prompt, move, result, reward):
    env = game.TicTacToe()
    state, told = said(game, env, {"prompt": game.show(prompt), "opponent": "optimal", "seed": 3}, move)
    assert state.result == result and told[-1][1]
    found, scores = env.grade(state)
    assert found == reward
    assert {name for name, value in scores.items() if value} == {result}


def test_games_of_a_task_meet_the_same_opponent_whatever_their_own_seeds(game):
    env, task = game.TicTacToe(), game.task("random", "first", 5)
    boards = set()
    for seed in range(20):
        state, _ = env.reset(task, seed=seed)
        boards.add(str(env.step(state, "<move>5</move>")[1]))
    assert len(boards) == 1
    others = [said(game, env, game.task("random", "first", seed), "<move>5</move>")[1][0][0] for seed in range(20)]
    assert len(set(others)) > 4


def test_every_step_has_the_same_share_of_each_opponent_side_and_of_positions(game):
    source = game.games(48)
    cursor = source.cursor()
    for _ in range(3):
        drawn = cursor.draw()
        wanted = {"random first": 4, "random second": 4, "optimal first": 4, "optimal second": 12, "position": 24}
        assert Counter(name for name, _ in drawn) == wanted
        assert len({task["seed"] for _, task in drawn}) == 48
        for name, task in drawn:
            marks = Counter(game.read(task["prompt"]))
            assert marks["o"] - marks["x"] == int(task["side"] == "second")
            assert name == "position" or (name == f"{task['opponent']} {task['side']}" and marks["x"] == 0)


def test_positions_go_from_the_end_of_a_game_to_its_begin(game):
    def behind(cursor):
        """How many moves lie behind the positions of a step."""
        drawn = [game.read(task["prompt"]) for name, task in cursor.draw() if name == "position"]
        return [sum(board.count(mark) for mark in game.MARKS) for board in drawn]

    cursor = game.games(48, backwards=10).cursor()
    found = [behind(cursor) for _ in range(14)]
    assert set(found[0]) <= {6, 7} and 7 in found[0]
    assert [min(each) for each in found] == sorted((min(each) for each in found), reverse=True)
    assert {1, 2, 3, 4, 5, 6, 7} == set().union(*found[10:])
    assert set(behind(game.games(480).cursor())) == {1, 2, 3, 4, 5, 6, 7}, "without it they are of all lengths at once"


def test_a_position_has_moves_that_lose_and_moves_that_do_not(game):
    for seed in range(200):
        board = game.read(game.position(seed)["prompt"])
        after = [game.play(board, field, "x") for field in game.free(board)]
        assert {game.value(one, "o") == 1 for one in after} == {True, False}
        assert game.position(seed) == game.position(seed)
        assert (
            sum(board.count(mark) for board in [game.read(game.position(seed, earliest=5)["prompt"])] for mark in "xo")
            >= 5
        )


def test_examples_are_200_games_of_best_moves_turned_and_mirrored(game):
    source = game.examples(1600)
    rows = source.cursor().draw()
    assert len(rows) == 1600 and len({json.dumps(row["messages"]) for row in rows}) > 1000
    lengths = Counter(len(row["messages"][0]["content"].translate(NO_MARKS)) for row in rows)
    assert lengths[9] == lengths[8] == 400, "half from the begin, of each side"
    for row in rows:
        boards = [m["content"] for m in row["messages"] if m["role"] == "user"]
        moves = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        for board, move in zip(boards, moves, strict=True):
            field = move.removeprefix("<move>").removesuffix("</move>")
            assert field in game.best_moves(game.read(board), "x") and move == f"<move>{field}</move>"
    batch = source.to_batch(rows, 0, game.build_tokenizer())
    assert batch.response_mask.values.sum() == 4 * sum(len(row["messages"]) // 2 for row in rows)


def test_the_forms_of_a_board_are_its_turns_and_its_mirror_images(game):
    forms = {game.turned("x2o4o6x89", form) for form in game.FORMS}
    assert len(set(game.FORMS)) == 8 and len(forms) == 8
    for form in game.FORMS:
        assert {frozenset(form[int(field) - 1] for field in line) for line in game.LINES} == set(
            map(frozenset, game.LINES)
        )
    assert game.turned("xo3456789", "741852963") == "123o56x89"


def test_the_benchmark_reads_games_before_and_after_the_training(tmp_path):
    measured = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "tictactoe.py"))
    lost = {"random": 0.3, "optimal": 0.8}
    before = [{"program": "evaluate", f"{who}_lost": share, f"{who}_wrong": 0.1} for who, share in lost.items()]
    steps = [{"program": "tictactoe", "table/lost": 0.5, "actor/rows": 8.0}] * 40
    after = [{"program": "evaluate-2", f"{who}_lost": 0.02, f"{who}_wrong": 0.0} for who in lost]
    lines = [{"program": "warmup", "loss": 1.0}, *before, *steps, *after]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = measured["read"](tmp_path)
    assert found["before"]["optimal_lost"] == 0.8 and found["after"]["random_lost"] == 0.02
    assert found["games"] == 320 and found["curve"] == [0.5, 0.5] and measured["reached"](found)
    assert not measured["reached"]({"after": {**found["after"], "optimal_lost": 0.021}})
    assert not measured["reached"]({"after": {**found["after"], "random_wrong": 0.01}})


def told(mask: list[int]) -> list[tuple[int, int]]:
    """Where the environment's words lie in a response: from the end of each move to the begin of the next one."""
    edges = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    return [(begin, end) for begin, end in pairwise(edges) if not mask[begin]]


def test_a_short_training_learns_the_format_and_plays(game, one_thread):
    small = {**game.MODEL.config, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    torch.manual_seed(0)
    actor = fl.open(fl.Actor(fl.Model(config=small, tokenizer=game.build_tokenizer), lr=3e-3, max_tokens=4))
    table = fl.open(game.TicTacToe())

    def played(step, n):
        source = game.games(16)
        batch = source.to_batch(source.cursor().draw(), 0, actor.tokenizer)
        return table.rollout(batch.with_call(CallInfo(step=step, op="play")), policy=actor, n=n, turn_tokens=3)

    assert float(table.outcomes(played(0, 4)).malformed) > 0.9
    source = game.examples(20)
    cursor = source.cursor()
    for _ in range(40):
        actor.update(source.to_batch(cursor.draw(), 0, actor.tokenizer), loss=rl.sft())
    for step in range(2):
        batch = rl.gigpo(played(step, 16), gamma=1.0, scale="none")
        assert float(table.outcomes(batch).malformed) < 0.5  # 0.1 to 0.13 for seeds, threads and vector units tried
        metrics = actor.update(batch, loss=rl.ppo_clip(entropy=0.05), lr=3e-4)
        assert metrics.grad_norm > 0 and metrics.gap_max < 1e-3
    assert set(batch.outcome.to_list()) == {"finished"}
    rows = list(zip(batch.response_ids.to_list(), batch.response_mask.to_list(), strict=True))
    answered = 0
    for first in range(0, len(rows), 16):  # games of a group that have gone alike so far have the same answer
        answers: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        for ids, mask in rows[first : first + 16]:
            for begin, end in told(mask):
                answers.setdefault(tuple(ids[:begin]), set()).add(tuple(ids[begin:end]))
                answered += 1
        assert all(len(boards) == 1 for boards in answers.values())
    assert answered > 0
