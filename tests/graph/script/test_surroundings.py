"""What a trace does to the Python state around a program is undone; what cannot be undone is said, with the line."""

from __future__ import annotations

import itertools
import random
import sys
import time
import types
from collections import Counter, OrderedDict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import flowrl as fl
from flowrl.graph.script.surroundings import Surroundings

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


class Curriculum:
    highest = 1
    __slots__ = ("__dict__", "level")

    def __init__(self):
        self.level, self.past = 1, []

    def up(self):
        self.level += 1
        self.past.append(self.level)
        Curriculum.highest = self.level


LEVEL = 1
BATCHES: list = []
CURRICULUM = Curriculum()
COUNTS, RECENT, SEEN = Counter(a=2), deque([1, 2], maxlen=2), {"a"}
ORDER = OrderedDict(first=1, second=2)

TABLE, ARRAY = torch.zeros(3), np.zeros(3)
CONFIG = SimpleNamespace(rate=1.0, inner={"deep": [1]})
RNG, DICE = random.Random(0), np.random.default_rng(0)


def state():
    return (
        LEVEL, list(BATCHES), CURRICULUM.level, list(CURRICULUM.past), Curriculum.highest, dict(COUNTS), [*ORDER.items(), *reversed(ORDER)], list(RECENT),
        set(SEEN), TABLE.tolist(), ARRAY.tolist(), CONFIG.rate, str(CONFIG.inner), RNG.getstate(), random.getstate(),
        str(DICE.bit_generator.state), torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(),
    )  # fmt: skip


def raise_level():
    global LEVEL
    LEVEL += 1


def changed(flow, actor):
    """A program that changes all of it."""
    closed = {"over": [1]}

    def changes(steps: int = 10, mutable: list = []):  # noqa: B006
        for step, batch in flow.steps(prompts, steps):
            batch = actor.generate(batch)
            raise_level()
            mutable.append(batch)
            BATCHES.append(batch)
            assert len(BATCHES) <= 3 and len(mutable) <= 3, "each path begins with the lists as they were"
            CURRICULUM.up()
            CURRICULUM.new = batch
            COUNTS["a"] += 1
            ORDER.move_to_end("first")
            ORDER["third"] = 3
            RECENT.append(3)
            SEEN.add("b")
            TABLE.add_(1)
            ARRAY[1] += 1
            CONFIG.rate *= 0.5
            CONFIG.inner["deep"].append(2)
            closed["over"].append(batch)
            RNG.random(), random.random(), DICE.random(), torch.rand(1), np.random.rand()
            flow.log(step, n=batch.count(), level=CURRICULUM.level)
            if batch.count() > 3:
                flow.log(step, more=1.0)

    return changes, closed


def flow_and_actor(name="changes"):
    flow = fl.Flow(name)
    return flow, flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", name="actor")


def test_a_trace_leaves_everything_as_it_was():
    flow, actor = flow_and_actor()
    program, closed = changed(flow, actor)
    flow.program(program)
    before = state()
    report = flow.check()
    assert not report.errors
    assert len(flow.trace().trails) > 1
    assert state() == before
    assert closed == {"over": [1]} and program.__defaults__ == (10, [])
    assert not hasattr(CURRICULUM, "new")


def test_module_level_lists_of_batches_are_of_one_path():
    flow, actor = flow_and_actor("joins")

    def joins(steps: int = 10):
        for step, batch in flow.steps(prompts, steps):
            batch = actor.generate(batch)
            BATCHES.append(batch)
            held = BATCHES[0] if len(BATCHES) == 1 else BATCHES[0].concat(*BATCHES[1:])
            flow.log(step, n=held.count(), mean=held.response_ids.lengths_column().mean())
            if held.count() > 8:
                BATCHES.clear()

    flow.program(joins)
    assert flow.check().errors == () and BATCHES == []


NUMBERS = itertools.count()
ROWS = iter([1, 2, 3, 4, 5, 6])
PAIRS = zip([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], strict=True)


def squares():
    for i in range(100):
        yield i * i


SQUARES = squares()


@pytest.mark.parametrize("name", ["NUMBERS", "ROWS", "PAIRS", "SQUARES"])
def test_what_a_program_takes_from_an_iterator_cannot_be_put_back_and_is_refused(name):
    flow, actor = flow_and_actor("takes")
    source = f"""
def takes(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        number = next({name})
        flow.log(step, n=actor.generate(batch).count())
"""
    scope = {"flow": flow, "actor": actor, "prompts": prompts, name: globals()[name], "__name__": __name__}
    exec(compile(source, __file__, "exec"), scope)
    flow.program(scope["takes"])
    (error,) = flow.check().errors
    assert error.what == (
        f"'{name}' is outside of the program, and the program takes from it or changes it: check, which runs the "
        "program too, has done so already."
    )
    assert error.at.line == 4 and error.fix == "Make it inside of the program, which begins with it anew."


NAMES = map(str.upper, "abcdefgh")
UNLIKE = filter(None, [1, 2, 3])


def fresh_name():
    return next(NAMES)


def test_what_a_function_of_the_program_takes_from_an_iterator_is_refused_at_its_line():
    flow, actor = flow_and_actor("helped")

    def helped(steps: int = 10):
        name = fresh_name()
        for step, batch in flow.steps(prompts, steps):
            flow.log(step, n=actor.generate(batch).count(), name=name)

    flow.program(helped)
    (error,) = flow.check().errors
    assert error.what.startswith("'NAMES' is outside of the program, and the program takes from it")
    assert error.at.text == "return next(NAMES)"


def test_a_variable_of_the_program_is_no_iterator_of_the_module_that_is_called_like_it():
    flow, actor = flow_and_actor("hides")

    def hides(steps: int = 10):
        for step, batch in flow.steps(prompts, steps):
            UNLIKE = actor.generate(batch)
            flow.log(step, n=(lambda: UNLIKE.count())())

    flow.program(hides)
    assert flow.check().errors == () and list(UNLIKE) == [1, 2, 3]


TASKS = """
values = zip("ab", "cd")
TABLE = dict(values)
def score(row): return TABLE.get(row)
def draw(): return next(values, None)
class Deck:
    def draw(self): return next(values, None)
"""
OTHER = "items = {'a': 1}\ndef read(): return items['a']\n"
USES_OF_ITERATORS = {
    "a method called so": ("ROW.items()", None),
    "a function of its module": ("deck_tasks.score('a')", None),
    "another's variable called so": ("read()", None),
    "its own variable": ("next(items, None)", "items"),
    "of its module": ("next(deck_tasks.values, None)", "deck_tasks.values"),
    "a function that takes": ("deck_tasks.draw()", "deck_tasks.values"),
    "a method that takes": ("deck_tasks.Deck().draw()", "deck_tasks.values"),
    "by another name": ("next(pairs, None)", "pairs"),
}


@pytest.mark.parametrize("case", USES_OF_ITERATORS)
def test_an_iterator_is_known_by_what_it_is_and_not_by_its_name_alone(case, tmp_path, monkeypatch):
    (tmp_path / "deck_tasks.py").write_text(TASKS)
    (tmp_path / "deck_other.py").write_text(OTHER)
    monkeypatch.syspath_prepend(tmp_path)
    use, taken = USES_OF_ITERATORS[case]
    flow, actor = flow_and_actor("knows")
    source = f"""
import deck_tasks
from deck_other import read
{"from deck_tasks import values as pairs" if "pairs" in use else ""}
items = zip("ab", "cd")
TABLE, ROW = dict(items), dict(a=1)

def helper():
    return {use}

def knows(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        helper()
        flow.log(step, n=actor.generate(batch).count())
"""
    scope = {"flow": flow, "actor": actor, "prompts": prompts, "__name__": __name__}
    exec(compile(source, __file__, "exec"), scope)
    flow.program(scope["knows"])
    errors = flow.check().errors
    assert [error.what.partition(" is outside")[0] for error in errors] == ([f"'{taken}'"] if taken else [])


def test_iterators_that_a_program_leaves_alone_are_no_error():
    flow, actor = flow_and_actor("leaves")

    def leaves(steps: int = 10):
        for step, batch in flow.steps(prompts, steps):
            flow.log(step, n=actor.generate(batch).count())

    flow.program(leaves)
    assert flow.check().errors == ()


def test_modules_of_the_users_are_looked_after_and_those_of_libraries_are_not(tmp_path, monkeypatch):
    (tmp_path / "own_state.py").write_text("level = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import own_state

    def program():
        own_state.level += 1
        sys.flowrl_was_here = True

    around = Surroundings(program)
    program()
    around.restore()
    assert own_state.level == 1 and sys.flowrl_was_here
    del sys.flowrl_was_here


def test_large_states_are_watched_at_little_cost_and_what_is_left_out_is_said():
    rows = [{"prompt": str(i)} for i in range(50_000)]
    many = [[i] for i in range(300_000)]

    def program():
        rows[5]["prompt"] = "changed"

    start = time.process_time()
    around = Surroundings(program)
    program()
    around.restore()
    assert time.process_time() - start < 3.0
    assert rows[5] == {"prompt": "5"} and around.whole
    assert not Surroundings(lambda: many).whole


def test_a_name_that_was_taken_away_comes_back_in_its_place():
    held = {"a": 1, "b": 2}

    def program():
        del held["a"]
        held["c"] = 3

    around = Surroundings(program)
    program()
    around.restore()
    assert list(held.items()) == [("a", 1), ("b", 2)]


def test_large_tensors_are_not_copied_and_their_change_is_said(monkeypatch):
    monkeypatch.setattr("flowrl.graph.script.surroundings.LARGE", 8)
    table, array = torch.zeros(100), np.zeros(100)

    def program():
        table.add_(1)

    around = Surroundings(program)
    assert around.leaks() == []
    program()
    (error,) = around.leaks()
    assert error.what.startswith("'table' is outside of the program") and error.at.text == "table.add_(1)"
    array[0] = 1.0
    assert Surroundings(lambda: array).leaks() == []


def test_objects_that_answer_with_work_are_not_asked():
    class Proxy:
        @property
        def __class__(self):
            raise AssertionError("it was asked")

    held = [Proxy(), types.SimpleNamespace(x=Proxy())]
    Surroundings(lambda: held).restore()


def test_what_is_python_itself_in_every_module_is_no_part_of_it():
    """A module has all of Python's functions under ``__builtins__``: nobody's variables."""
    own = types.ModuleType("own")
    own.__file__ = __file__
    own.table = [1]
    exec("", own.__dict__)  # as a script has them
    assert "__builtins__" in vars(own)
    around = Surroundings(raise_level, names={"own": own})
    assert "own.table" in [name for name, _ in around.seen]
    assert not [name for name, _ in around.seen if "__builtins__" in name]
