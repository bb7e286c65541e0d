"""Arithmetic in words: what is written means what was computed."""

import random

import pytest

import flowrl as fl
from flowrl.graph.compile_paths import compile_graph
from flowrl.graph.stand_ins.arithmetic_as_written import SYMBOLS, method, written
from flowrl.graph.stand_ins.values import PYTHON
from flowrl.graph.tracing.trace_program import trace


@pytest.mark.parametrize(
    ("name", "parts", "text"),
    [
        ("mul", ("a + b", "2"), "(a + b) * 2"),
        ("add", ("a * b", "2"), "a * b + 2"),
        ("add", ("a", "b + c"), "a + (b + c)"),
        ("add", ("a + b", "c"), "a + b + c"),
        ("sub", ("a", "b - c"), "a - (b - c)"),
        ("mul", ("a", "b / c"), "a * (b / c)"),
        ("truediv", ("a", "b * c"), "a / (b * c)"),
        ("pow", ("a ** b", "2"), "(a ** b) ** 2"),
        ("pow", ("2", "-x"), "2 ** -x"),
        ("pow", ("-1", "x"), "(-1) ** x"),
        ("gt", ("a > b", "c"), "(a > b) > c"),
        ("and", ("a > 0", "b > 0"), "(a > 0) & (b > 0)"),
        ("neg", ("a + b",), "-(a + b)"),
        ("neg", ("a ** b",), "-a ** b"),
        ("invert", ("a > 0",), "~(a > 0)"),
        ("abs", ("a - b",), "abs(a - b)"),
        ("add", ("no such thing", "x"), "no such thing + x"),
    ],
)
def test_parentheses_stand_where_they_are_needed(name, parts, text):
    assert written(name, parts) == text


def test_methods_hold_their_operand():
    assert method("a - b", "mean") == "(a - b).mean()"
    assert method("rewards", "mean") == "rewards.mean()"


def _random(rng, depth):
    """An expression on a, b and c as text, and its value."""
    if depth == 0 or rng.random() < 0.2:
        name, value = rng.choice([("a", 3), ("b", 5), ("c", 7), ("2", 2)])
        return name, value
    name = rng.choice(["add", "sub", "mul", "floordiv", "mod", "neg", "abs", "lt", "ge", "eq", "and", "or", "pow"])
    left, x = _random(rng, depth - 1)
    if name in ("neg", "abs"):
        return written(name, (left,)), PYTHON[name](x)
    right, y = _random(rng, depth - 1)
    if (name in ("floordiv", "mod") and y == 0) or (name == "pow" and not (0 <= y <= 3 and abs(x) < 1000)):
        name = "add"
    return written(name, (left, right)), PYTHON[name](x, y)


def test_what_is_written_is_what_was_computed():
    rng = random.Random(0)
    for _ in range(2000):
        text, value = _random(rng, 4)
        assert eval(text, {"a": 3, "b": 5, "c": 7, "abs": abs}) == value, text


def test_every_operator_has_a_symbol():
    assert set(PYTHON) - set(SYMBOLS) == {"neg", "abs", "invert"}


flow = fl.Flow("tests")
prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)
actor = flow.worker(fl.Actor, model="a/model")


def test_conditions_that_differ_in_their_parentheses_alone_are_two():
    def program(steps=10):
        for step, _ in flow.steps(prompts, steps):
            if (step + 1) * 2 > 5:
                actor.save("a")
            if step + 1 * 2 > 5:
                actor.save("b")

    graph = compile_graph(trace(program, {}, name="program"))
    assert {n.id: n.branch for n in graph.nodes} == {"actor.save": "(step + 1) * 2 > 5", "actor.save#2": "step + 2 > 5"}
    assert graph.paths == 16
