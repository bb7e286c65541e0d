"""Arguments go to parameters as Python puts them there, and come back as a call writes them."""

import inspect
import itertools
import operator
from functools import partial

import pytest

from flowrl.graph.ops.function_parameters import Parameters


def plain(batch, n, *, greedy=False):
    return batch, n, greedy


def lenient(batch=None, n=1):
    return batch, n


def method(self, batch, *, loss, epochs=1):
    return batch, loss, epochs


def variadic(batch, *others, **more):
    return batch, others, more


def positional_only(batch, /, n=2):
    return batch, n


def nothing():
    return ()


FUNCTIONS = [plain, lenient, method, variadic, positional_only, nothing, operator.add, len]
ARGS = [(), ("rows",), ("rows", 3), ("rows", 3, True)]
KWARGS = [
    dict(zip(names, range(len(names)), strict=True))
    for size in range(3)
    for names in itertools.combinations(("batch", "n", "greedy", "loss", "epochs", "other"), size)
]


def by_inspect(fn, args, kwargs):
    signature = inspect.signature(fn)
    first = (None,) if next(iter(signature.parameters), "") == "self" else ()
    bound = signature.bind(*first, *args, **kwargs)
    bound.apply_defaults()
    return {name: value for name, value in bound.arguments.items() if not first or name != "self"}


def outcome(act):
    try:
        return act()
    except TypeError as error:
        return str(error)


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)
def test_arguments_are_bound_as_inspect_binds_them(fn):
    parameters = Parameters(fn)
    for args, kwargs in itertools.product(ARGS, KWARGS):
        said = outcome(partial(parameters.bind, args, kwargs))
        wanted = outcome(partial(by_inspect, fn, args, kwargs))
        assert said == wanted
        assert not isinstance(said, dict) or list(said) == list(wanted), "in the order of the parameters"


@pytest.mark.parametrize("fn", [plain, lenient, variadic, positional_only, nothing], ids=lambda fn: fn.__name__)
def test_what_was_bound_is_passed_as_it_was_given(fn):
    parameters = Parameters(fn)
    for args, kwargs in itertools.product(ARGS, KWARGS):
        bound = outcome(partial(parameters.bind, args, kwargs))
        if isinstance(bound, dict):
            passed, named = parameters.passed(bound)
            assert fn(*passed, **named) == fn(*args, **kwargs)


def test_a_method_is_passed_everything_but_itself():
    parameters = Parameters(method)
    assert parameters.is_method and parameters.first == "batch"
    args, kwargs = parameters.passed(parameters.bind(("rows",), {"loss": "ppo"}))
    assert method("worker", *args, **kwargs) == ("rows", "ppo", 1)


def test_values_are_not_compared():
    class Odd:
        def __eq__(self, other):
            raise AssertionError("a value of a program is compared by a call")

    assert list(Parameters(plain).bind((Odd(),), {"n": Odd()})) == ["batch", "n", "greedy"]


def test_defaults_are_not_shared_between_calls():
    parameters = Parameters(lenient)
    parameters.bind((), {})["n"] = 7
    assert parameters.bind((), {}) == {"batch": None, "n": 1}
