"""A call is known by the lines that lead to it: training and evaluation may share a function of the program."""

from __future__ import annotations

from flows import module_of

from flowrl.graph.compile_paths import ids_by_site
from flowrl.graph.may_see_older_weights import main_samplers, relaxed_calls


def test_of_a_function_that_trains_and_evaluates_only_the_first_may_see_older_weights():
    flow = module_of("overlap_flow").flow
    traced = flow.trace(look=True)
    names = ids_by_site(traced)
    assert {names[site] for site in relaxed_calls(traced)} == {"actor.generate"}
    assert {names[site] for site in main_samplers(traced)} == {"actor.generate"}
    weights = {e.dst for e in flow.graph(look=True).edges if e.kind == "weights"}
    assert weights == {"actor.generate", "actor.generate#2"}
