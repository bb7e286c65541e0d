"""Numbers that plain Python is given: what hangs on them is followed, or a remark with the line says that it is not."""

import copy
import importlib.util
import json
import math
import operator
import pickle
import random
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import flowrl as fl
from flowrl import rl
from flowrl.errors import ProgramError
from flowrl.graph.check_program import check
from flowrl.graph.compile_paths import compile_graph
from flowrl.graph.stand_ins.scalars import ScalarValue
from flowrl.graph.tracing import trace_program as tracing
from flowrl.graph.tracing.numbers_to_python import FURTHER
from flowrl.graph.tracing.trace_program import trace

_found = importlib.util.spec_from_file_location("exits_elsewhere", Path(__file__).parent / "exits_elsewhere.py")
elsewhere = importlib.util.module_from_spec(_found)
sys.modules["exits_elsewhere"] = elsewhere
_found.loader.exec_module(elsewhere)

rows = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)
easy = fl.data.rows([{"prompt": "1+1=", "answer": "2"}], batch=1)
flow = fl.Flow("exits")
actor = flow.worker(fl.Actor, model="a/model")
reward = flow.worker(fl.RewardModel, model="a/judge")
LEVELS = [1, 2, 3]
WORDS = {"l0": 1, "l1": 2, "l2": 3}
BY_NUMBER = {0: 1, 1: 2, 2: 3}
controller = elsewhere.Controller()


def program_of(use):
    """A program in which ``use`` is handed the step, a batch and a number that is not there yet."""

    def program():
        for step, batch in flow.steps(rows, 10):
            batch = rl.group_advantages(reward.score(actor.generate(batch, n=2)))
            use(step, batch, batch.rewards.mean())
            flow.log(step, loss=actor.update(batch, loss=rl.ppo_clip()).loss)

    return program


def found(program):
    """The graph of a program and its numbered remarks, where it has no errors."""
    traced = trace(program, {}, name="program")
    graph = compile_graph(traced)
    report = check(traced)
    assert [e.report() for e in report.errors] == []
    return graph, [lint for lint in report.lints if lint.kind == "number"], traced


def score(batch):
    return reward.score(batch.drop("rewards"))


def sample(batch, n):
    return actor.generate(batch.select("prompt_ids"), n=n)


#: Ways out of the trace on which a call hangs: what is done, the remark's reason, the condition on the edge.
FOLLOWED = {
    "an index of a list": (lambda _, b, x: sample(b, LEVELS[int(x)]), "an index", "int(rewards.mean()) == 1"),
    "a slice": (lambda _, b, x: sample(b, len(LEVELS[: int(x)]) + 1), "an index", "int(rewards.mean()) == 1"),
    "a range": (lambda _, b, x: [score(b) for _ in range(int(x))], "an index", "int(rewards.mean()) == 1"),
    "operator.index": (lambda _, b, x: sample(b, 1 + operator.index(int(x))), "an index", "int(rewards.mean()) == 1"),
    "a key of a dict": (lambda _, b, x: sample(b, BY_NUMBER[int(x)]), "a key", "int(rewards.mean()) == 1"),
    "a member of a set": (lambda _, b, x: score(b) if int(x) in {1, 7} else 0, "a key", "int(rewards.mean()) == 1"),
    "get of a dict": (lambda _, b, x: sample(b, BY_NUMBER.get(round(x), 9)), "a key", "round(rewards.mean()) == 1"),
    "an f-string": (lambda _, b, x: sample(b, WORDS[f"l{int(x)}"]), "part of a text", "int(rewards.mean()) == 1"),
    "str": (lambda _, b, x: sample(b, WORDS["l" + str(int(x))]), "part of a text", "int(rewards.mean()) == 1"),
    "percent": (
        lambda _, b, x: sample(b, WORDS["l%d" % x]),  # noqa: UP031
        "a plain number",
        "int(rewards.mean()) == 1",
    ),
    "repr": (lambda _, b, x: sample(b, WORDS[f"l{int(x)!r}"]), "part of a text", "int(rewards.mean()) == 1"),
    "an array": (lambda _, b, x: score(b) if np.mean([x, 1.0]) > 0.7 else 0, "a plain number", "rewards.mean() == 1"),
    "a field of numpy": (
        lambda _, b, x: score(b) if (np.array([1.0, 2.0]) * x).sum() > 1 else 0,
        "a plain number",
        "rewards.mean() == 1",
    ),
    "statistics": (
        lambda _, b, x: score(b) if statistics.mean([float(x), 1.0]) > 0.7 else 0,
        "a plain number",
        "rewards.mean() == 1",
    ),
    "json": (
        lambda _, b, x: sample(b, json.loads(json.dumps({"n": int(x)}))["n"] + 1),
        "a plain number",
        "int(rewards.mean()) == 1",
    ),
    "a tensor": (
        lambda _, b, x: score(b) if torch.tensor([float(x)]).item() > 0.7 else 0,
        "a plain number",
        "rewards.mean() == 1",
    ),
    "pickle": (
        lambda _, b, x: sample(b, pickle.loads(pickle.dumps(int(x))) + 1),  # noqa: TID251  made a line before
        "a plain number",
        "int(rewards.mean()) == 1",
    ),
    "a method of float": (
        lambda _, b, x: score(b) if (float(x) / 2).as_integer_ratio()[0] else 0,
        "a plain number",
        "rewards.mean() / 2 == 1",
    ),
}


@pytest.mark.parametrize("way", FOLLOWED)
def test_what_hangs_on_a_number_that_left_has_an_edge_from_it_and_a_remark(way):
    use, reason, condition = FOLLOWED[way]
    graph, remarks, _ = found(program_of(use))
    changed = [(e.src, e.fields) for e in graph.edges if e.kind == "control" and e.dst != "actor.update"]
    assert changed == [("batch.mean", (condition,))]
    assert len(remarks) == 1 and reason in remarks[0].what and "1 and of 0" in remarks[0].what
    assert (
        (remarks[0].at.file == __file__ and "lambda" in remarks[0].at.text)
        or "statistics" in remarks[0].at.text
        or (remarks[0].at.text.startswith(("lambda", '"')))
    )


#: Ways out after which the trace cannot know what is done with the number.
NOT_FOLLOWED = {
    "a mean that is only logged": (lambda s, _, x: flow.log(s, mean_of=np.mean([float(x)])), "a plain number"),
    "a key that no dict has": (lambda s, b, _: score(b) if s in {31, 40} else 0, "a key"),
    "an index where both are the same": (lambda _, b, x: sample(b, ([2] * 11 + [3])[int(x)]), "an index"),
    "the only one": (lambda _, b, x: sample(b, [3][int(x)]), "an index"),
}


@pytest.mark.parametrize("way", NOT_FOLLOWED)
def test_a_number_that_left_without_a_trace_is_said_to_have(way):
    use, reason = NOT_FOLLOWED[way]
    graph, remarks, traced = found(program_of(use))
    assert len(traced.trails) == 1 and graph.edges_of("control") == ()
    (remark,) = remarks
    assert reason in remark.what and "not in the graph" in remark.what
    assert remark.at.file == __file__ and remark.at.line > 0
    if reason == "a key":
        assert "x in (10, 20)" in remark.what


#: What only a third number shows: what is done, and that number.
LATER = {
    "a list that is longer": (lambda _, b, x: sample(b, [2, 2, 2, 2, 5][int(x)]), 4),
    "a key that a set has": (lambda s, b, _: score(b) if s in {10, 20} else 0, 10),
    "a turn of a loop": (lambda _, b, x: [score(b) for i in range(int(x)) if i == 2], 3),
}


@pytest.mark.parametrize("way", LATER)
def test_what_only_another_number_leads_to_is_in_the_graph_too(way):
    use, number = LATER[way]
    graph, remarks, traced = found(program_of(use))
    assert len(traced.trails) > 1
    assert [f"1 and of {number}" in remark.what for remark in remarks] == [True]
    assert len({(n.id, *n.settings.items()) for n in graph.nodes}) > 4 or "reward.score#2" in {
        n.id for n in graph.nodes
    }


def test_a_mistake_that_only_another_number_leads_to_is_remarked_with_its_line():
    bare = fl.data.rows([{"prompt": "1+2="}], batch=1)
    levels = [rows, easy, easy, bare]

    def program():
        for step, batch in flow.steps(rows, 10):
            mean = reward.score(actor.generate(batch)).rewards.mean()
            taken = flow.take(levels[int(mean)])
            flow.log(step, mean=taken.select("answer", "prompt_ids").count())

    traced = trace(program, {}, name="program")
    assert traced.errors == []
    (_, remark) = [lint for lint in traced.lints if lint.kind == "number"]
    assert remark.what == "where 'int(rewards.mean())' is 3: the batch has no field 'answer' here."
    assert "taken.select" in remark.at.text


#: What stays a symbol: the conditions after it are followed both ways, and nothing is remarked.
SYMBOLIC = {
    "int": lambda x: int(x),
    "round": lambda x: round(x, 2),
    "floor": lambda x: math.floor(x),
    "ceil": lambda x: math.ceil(float(x)),
    "trunc": lambda x: math.trunc(x),
    "divmod": lambda x: divmod(x, 2)[0],
    "of a divmod": lambda x: divmod(7, x)[1],
    "plus": lambda x: +x,
    "shift": lambda x: int(x) << 1,
    "shifted": lambda x: 1 << int(x),
    "xor": lambda x: int(x) ^ 3,
    "min": lambda x: min(x, 3),
    "sum": lambda x: sum([x, float(x)]),
    "math": lambda x: math.exp(x),
    "numpy's functions": lambda x: np.sqrt(x),
    "a number of numpy": lambda x: np.float64(2) * x + x * np.float32(1),
    "a copy": lambda x: copy.deepcopy([float(x)])[0],
    "another function": lambda x: (lambda y: float(y))(x),
}


@pytest.mark.parametrize("way", SYMBOLIC)
def test_what_can_stay_a_symbol_does(way):
    seen = []

    def use(step, batch, x):
        made = SYMBOLIC[way](x)
        seen.append(isinstance(made, ScalarValue) or way == "min")
        if made > 0.5:
            score(batch)

    graph, remarks, _ = found(program_of(use))
    assert remarks == []
    (edge,) = [e for e in graph.edges_of("control") if e.dst == "reward.score#2"]
    assert "rewards.mean()" in edge.fields[0]


def test_texts_that_are_only_shown_are_nothing_to_remark():
    def use(step, batch, x):
        print(f"{float(x):.3f} {step:04d} {x} {x!r}" + str(step))

    graph, remarks, traced = found(program_of(use))
    assert remarks == [] and len(traced.trails) == 1 and graph.edges_of("control") == ()


def test_what_is_put_somewhere_is_nothing_to_remark():
    history, places = {}, [0.0] * 9

    def use(step, batch, x):
        history[step] = float(x)
        places[step % 9] = float(x)

    assert found(program_of(use))[1] == []


def test_a_history_by_step_is_carried():
    history = {}

    def use(step, batch, x):
        history[step] = float(x)
        if step > 0 and history[step - 1] > 0.5:
            score(batch)

    graph, _, _ = found(program_of(use))
    (edge,) = [e for e in graph.edges if e.dst == "reward.score#2" and e.kind in ("carried", "control")]
    assert (edge.src, edge.kind) == ("batch.mean", "carried")


def test_functions_and_methods_of_other_modules_see_symbols():
    graph, remarks, _ = found(program_of(lambda _, b, x: sample(b, elsewhere.level(x))))
    assert [(e.src, e.fields) for e in graph.edges_of("control")] == [("batch.mean", ("rewards.mean() < 0.01",))]
    assert remarks == [] and "float" not in vars(elsewhere)

    def use(step, batch, x):
        actor.generate(batch.select("prompt_ids"), temperature=controller.update(x))

    graph, remarks, _ = found(program_of(use))
    assert {e.fields for e in graph.edges if e.kind in ("control", "carried")} == {("rewards.mean() > 0.1",)}
    assert remarks == [] and controller.coef == 1.0


def test_questions_of_type_are_answered_as_in_a_run():
    def use(step, batch, x):
        assert isinstance(float(x), float) and isinstance(step, int) and isinstance(int(x) + 1, int)
        assert isinstance(step / 2, float) and not isinstance(float(x), int)

    assert found(program_of(use))[1] == []


def test_the_source_may_hang_on_a_number():
    def program():
        for step, batch in flow.steps(rows, 10):
            mean = reward.score(actor.generate(batch)).rewards.mean()
            other = reward.score(actor.generate(flow.take([rows, easy][int(mean > 0.5)])))
            flow.log(step, mean=other.rewards.mean())

    graph, remarks, _ = found(program)
    assert {e.dst for e in graph.edges_of("control")} >= {"data.easy"}
    assert len(remarks) == 1


def test_how_many_rows_are_taken_hangs_on_what_computes_it():
    graph, remarks, _ = found(program_of(lambda s, b, x: flow.log(s, n=flow.take(easy, int(x)).count())))
    assert [(e.src, e.dst, e.fields) for e in graph.edges_of("control")] == [
        ("batch.mean", "data.easy", ("int(rewards.mean())",))
    ]
    assert remarks == []


def test_a_batch_as_a_condition_is_its_number_of_rows():
    def use(step, batch, x):
        if batch.filter(batch.rewards > 0):
            score(batch)

    graph, _, traced = found(program_of(use))
    assert graph.node("reward.score#2").branch == "len(batch)" and len(traced.trails) == 4


def test_a_number_that_only_the_trace_would_give_an_op_is_no_error():
    def use(step, batch, x):
        sample(batch, int(np.median([float(x), 0.0])))  # 0 or 1 rows, in the trace

    found(program_of(use))


def test_a_mistake_in_what_a_number_leads_to_is_an_error():
    traced = trace(program_of(lambda _, b, x: sample(b, [0, 2][int(x)])), {}, name="program")
    assert ["n: 0" in e.what or "n=0" in e.what or "0" in e.what for e in traced.errors] == [True]


def test_a_mistake_before_or_after_is_still_one():
    def use(step, batch, x):
        np.mean([float(x)])
        actor.logprobs(batch.nowhere)

    traced = trace(program_of(use), {}, name="program")
    assert any("nowhere" in e.what for e in traced.errors)


def test_python_failing_on_every_number_is_an_error_with_its_line():
    traced = trace(program_of(lambda _, b, x: [][int(x)]), {}, name="program")
    (error,) = traced.errors
    assert isinstance(error, ProgramError) and "IndexError" in error.what and error.at.file == __file__


@pytest.mark.parametrize(
    "seed",
    [
        random.seed,
        lambda step: random.Random(step).random(),
        lambda step: np.random.default_rng(step).random(),
        lambda step: np.random.default_rng([step, 7]).random(),
        eval("lambda step: np.random.default_rng(step).random()"),  # as it is typed in, in no file
    ],
)
def test_a_step_may_seed_a_generator(seed):
    _, remarks, traced = found(program_of(lambda step, b, x: seed(step)))
    assert traced.trails and [lint.what.partition(" here")[0] for lint in remarks] == [
        "'step' is a plain number to other code"
    ]


def test_mistakes_beside_a_seed_are_found():
    def use(step, batch, x):
        if step > 9:
            batch.nowhere.mean()
        random.seed(step)

    assert ["nowhere" in e.what for e in trace(program_of(use), {}, name="program").errors] == [True]

    def rare(step, batch, x):
        if step == 7:
            random.Random([step])
        if step > 9:
            batch.nowhere.mean()

    assert ["nowhere" in e.what for e in trace(program_of(rare), {}, name="program").errors] == [True]


@pytest.mark.parametrize("parts", [math.modf, math.frexp, np.modf, np.frexp])
def test_functions_that_give_two_numbers_are_given_a_plain_one(parts):
    def use(step, batch, x):
        part, whole = parts(float(x))
        sample(batch, 1 + int(part + whole))

    assert [lint.what.partition(" here")[0] for lint in found(program_of(use))[1]] == [
        "'rewards.mean()' is a plain number to other code"
    ]


def runs_of(use, monkeypatch):
    """How often the trace runs a program."""
    runs = []
    plainly = tracing._run
    monkeypatch.setattr(tracing, "_run", lambda *args: (runs.append(1), plainly(*args))[1])
    found(program_of(use))
    return len(runs)


def test_a_program_is_run_again_only_where_a_number_left(monkeypatch):
    assert runs_of(lambda s, b, x: None, monkeypatch) == 2  # one path, and a third step to see what grows
    assert runs_of(lambda s, b, x: f"{float(x):.3f} {s}", monkeypatch) == 3
    assert runs_of(lambda s, b, x: np.mean([float(x), float(s)]), monkeypatch) == 3 + len(FURTHER)


def test_a_program_that_is_never_the_same_is_not_followed_in_circles():
    count = iter(range(10_000))

    class Clock:
        def __call__(self):
            return 1 + next(count)

    clock = Clock()

    def use(step, batch, x):
        sample(batch, clock())
        np.mean([float(x)])

    traced = trace(program_of(use), {}, name="program")
    assert len(traced.trails) == 1
