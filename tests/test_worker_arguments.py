"""Other arguments of workers than their driver gives, and what words cannot say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import flowrl as fl
from flowrl.errors import FlowError, ModelError, UsageError, WorkerError
from flowrl.worker_arguments import shown_arguments


@dataclass(frozen=True)
class Opponent:
    """A record of a user."""

    depth: int = 2
    moves: tuple[str, ...] = ()

    def __post_init__(self):
        if self.depth < 0:
            raise ValueError("depth is below 0")


@dataclass(frozen=True)
class Match:
    """A record that has another one, and several."""

    rounds: int = 1
    rate: float | None = None
    opponent: Opponent = Opponent()
    guests: list[Opponent] = field(default_factory=list[Opponent])
    rule: Callable[[str], float] | None = None


class Board(fl.Worker):
    """Takes an argument of each kind."""

    def __init__(
        self,
        size: int = 3,
        *,
        opponent: Opponent | None = None,
        match: Match | None = None,
        guests: tuple[Opponent, ...] = (),
        names: tuple[str, ...] = (),
        rows: list[int] | None = None,
        score: Callable[[str], float] | None = None,
        folder: Path | None = None,
        data: Any = None,
        **options: Any,
    ):
        if size > 9:
            raise ValueError("size is above 9")
        self.size = size

    @classmethod
    def check_declaration(cls, arguments):
        if arguments["size"] == 0:
            raise WorkerError("a board has fields.")

    @fl.op(reads="rewards", adds="seen: f32[]")
    def look(self, batch):
        return {"seen": batch.rewards}


def exact(prompt: str, response: str) -> float:
    return 1.0


def other(prompt: str, response: str) -> float:
    return 0.0


@pytest.fixture
def flow():
    flow = fl.Flow("example")
    actor = flow.worker(fl.Actor, "a/model", lr=1e-6, lora=fl.Lora(r=8), name="actor")
    flow.worker(fl.Reference, of=actor, name="ref")
    flow.worker(fl.Actor, of=actor, lora=fl.Lora(r=4), name="second")
    flow.worker(fl.FunctionReward, exact, name="reward")
    flow.worker(Board, 5, data=Opponent, name="board", colour="red", rule=exact)
    return flow


def of(flow, name):
    return next(handle for handle in flow.handles if handle.name == name)


@pytest.mark.parametrize(
    ("worker", "given", "kept"),
    [
        ("actor", {"lr": 2e-6}, {"lr": 2e-6}),
        ("actor", {"schedule": "linear", "total": 100}, {"schedule": "linear", "total": 100}),  # neither stands alone
        ("actor", {"betas": [0.9, 0.95]}, {"betas": (0.9, 0.95)}),
        ("actor", {"lora": {"r": 16}}, {"lora": fl.Lora(r=16)}),
        ("actor", {"lora": {"targets": ["q_proj"]}}, {"lora": fl.Lora(targets=("q_proj",))}),
        ("actor", {"lora": fl.Lora(r=2)}, {"lora": fl.Lora(r=2)}),
        ("actor", {"grad_clip": None}, {"grad_clip": None}),
        ("reward", {"on_error": 0.5, "tokenizer": "a/b"}, {"on_error": 0.5, "tokenizer": "a/b"}),
        ("reward", {"fn": other}, {"fn": other}),  # Python says what no word says
        ("board", {"size": 9}, {"size": 9}),  # given by place
        ("board", {"opponent": {"depth": 4, "moves": ["a1"]}}, {"opponent": Opponent(4, ("a1",))}),
        (
            "board",
            {"match": {"opponent": {"depth": 4, "moves": ["a1"]}}},
            {"match": Match(opponent=Opponent(4, ("a1",)))},
        ),
        ("board", {"match": {"rate": 1, "guests": []}}, {"match": Match(rate=1)}),
        ("board", {"match": {"rate": None}}, {"match": Match()}),
        ("board", {"guests": [Opponent(4)]}, {"guests": [Opponent(4)]}),
        ("board", {"names": ["a"], "rows": [1, 2]}, {"names": ("a",), "rows": [1, 2]}),
        ("board", {"folder": "there"}, {"folder": "there"}),
        ("board", {"colour": "blue", "depth": 3}, {"options": {"colour": "blue", "depth": 3, "rule": exact}}),
    ],
)
def test_a_worker_has_the_arguments_that_it_is_given_and_else_its_own(flow, worker, given, kept):
    before = dict(of(flow, worker).arguments)
    flow.use_arguments(worker, **given)
    handle = of(flow, worker)
    assert handle.arguments == {**before, **kept}
    assert handle.cls(*handle.args, **handle.kwargs), "as the runtimes make it"


@pytest.mark.parametrize(
    ("worker", "given", "what", "fix"),
    [
        ("actr", {"lr": 1.0}, "flow 'example' has no worker 'actr'.", "Did you mean 'actor'?"),
        ("actor", {"lrr": 1.0}, "worker 'actor' (Actor) has no argument 'lrr'.", "Did you mean actor.lr?"),
        ("actor", {"learning_rate": 1.0}, "has no argument 'learning_rate'.", "Did you mean actor.lr?"),
        ("actor", {"lr": "fast"}, "Actor: lr='fast' is not a number of at least 0, or None.", None),
        ("actor", {"lr": "2e-6x"}, "Actor: lr='2e-6x' is not a number", None),
        ("actor", {"top_p": 1.5}, "top_p=1.5 is not a number above 0 and at most 1.", None),
        ("actor", {"schedule": "linear"}, "schedule='linear' needs to know where it ends.", "Give total="),
        ("actor", {"model": "b/model"}, "a model has an option of its own.", "Write --model actor=NAME"),
        ("actor", {"of": "second"}, "that is the handle of an actor with adapters, which is written in Python.", "Change"),
        ("actor", {"lora": 16}, "that is Lora, and was given int 16.", "Write --arg actor.lora={r: VALUE}."),
        ("actor", {"lora": {"rank": 16}}, "Lora has no 'rank'.", None),
        ("actor", {"lora": {"r:16": None}}, "Lora has no 'r:16'.", "Write r: 16, with a space."),
        ("actor", {"lora": {"r": 0}}, "Lora: r=0 is not a whole number of at least 1.", None),
        ("ref", {"of": "second"}, "that is the worker 'actor'", "Change it in the driver, at "),
        ("reward", {"fn": "other"}, "that is the function exact, which is written in Python.", "test_worker_arguments.py:"),
        ("board", {"size": "big"}, "Board: size='big' is not a whole number.", None),
        ("board", {"size": 0}, "a board has fields.", None),
        ("board", {"size": 10}, "cannot be made with these arguments: ValueError: size is above 9.", "what --arg board.size"),
        ("board", {"opponent": {"depth": -1}}, "Opponent cannot be made so: ValueError: depth is below 0.", None),
        ("board", {"opponent": {"depth": "abc"}}, "Opponent: depth='abc' is not a whole number.", "Give depth= a whole"),
        ("board", {"match": {"rate": "2e-6x"}}, "Match: rate='2e-6x' is not a number, or None.", None),
        ("board", {"match": {"opponent": {"depth": -1}}}, "Opponent cannot be made so: ValueError: depth is below 0.", None),
        ("board", {"match": {"opponent": {"dept": 1}}}, "Opponent has no 'dept'.", "Did you mean 'depth'?"),
        ("board", {"match": {"opponent": 3}}, "that is Opponent, and was given int 3.", "board.match={opponent: {depth: VALUE}}."),
        ("board", {"match": {"guests": [{"depth": 1}]}}, "'guests' of Match is a list of Opponent, which is written in Python.", "Change it in the driver, at "),
        ("board", {"match": {"rule": "exact"}}, "'rule' of Match is a function, which is written in Python.", None),
        ("board", {"guests": [{"depth": 1}]}, "that is a tuple of Opponent, which is written in Python.", "Change it in the driver, at "),
        ("board", {"score": "exact"}, "that is a function", None),
        ("board", {"data": "file"}, "that is the class Opponent", None),
        ("board", {"rule": "exact"}, "that is the function exact", None),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_and_nothing_is_changed(flow, worker, given, what, fix):
    before = [(h.args, h.kwargs, h.arguments) for h in flow.handles]
    with pytest.raises(FlowError) as raised:
        flow.use_arguments(worker, **given)
    assert what in raised.value.what
    assert fix is None or fix in str(raised.value.fix)
    assert worker == "actr" or getattr(raised.value.at, "file", None) == __file__
    assert [(h.args, h.kwargs, h.arguments) for h in flow.handles] == before


def test_workers_that_are_made_of_it_are_looked_at_too(flow):
    with pytest.raises(ModelError, match="'actor' has no adapters"):
        flow.use_arguments("actor", lora=None)
    assert of(flow, "actor").arguments["lora"] == fl.Lora(r=8)


def test_what_was_traced_before_is_traced_again():
    flow = fl.Flow("example")
    board = flow.worker(Board, name="board")

    @flow.program
    def example():
        for step, batch in flow.steps(fl.data.rows([{"prompt": "a", "rewards": 1.0}], batch=1), 1):
            flow.log(step, seen=board.look(batch).seen.mean())

    assert "size" not in flow.graph().workers[0].settings
    flow.use_arguments("board", size=4)
    assert flow.graph().workers[0].settings["size"] == "4"


def test_arguments_that_words_can_change_are_shown(flow):
    shown = {handle.name: shown_arguments(handle) for handle in flow.handles}
    assert list(shown["ref"]) == ["dtype"] and "fn" not in shown["reward"] and shown["actor"]["lr"] == "1e-06"
    assert "model" not in shown["actor"] and "of" not in shown["actor"] and shown["actor"]["lora"].startswith("Lora(")
    assert list(shown["board"]) == ["size", "opponent", "match", "names", "rows", "folder"]


def test_the_default_of_an_argument_fits_whatever_its_rule_says(flow):
    flow.use_arguments("reward", timeout=None)
    with pytest.raises(UsageError, match="no argument 'worker'"):
        flow.use_arguments("reward", worker=1)
