"""Calls of an agent as a tree, however many there are."""

from __future__ import annotations

from flowrl.environments.gateway.call_tree import Call, CallTree
from flowrl.workers.policy_calls import Answer


def test_a_conversation_may_have_thousands_of_calls():
    tree, last = CallTree(None), None
    for number in range(3000):
        answer = Answer(0, [number], [0.0], [0.0], [0], 1.0, stopped=True)
        said = [{"role": "assistant", "content": str(number)}]
        last = tree.add(last, [-1], answer, said, [])
    assert isinstance(last, Call) and tree.main is last and tree.forks == 0
    assert [call.answer.ids[0] for call in last.chain] == [*range(3000)] and last.ids[-2:] == [-1, 2999]
