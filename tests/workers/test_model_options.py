"""What settings of a model and of sampling come to."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

import flowrl as fl

#: Another value of each setting, and whether tokens are drawn from the policy itself then, at the temperature.
OTHER = {
    "max_tokens": (64, True),
    "temperature": (0.7, True),
    "top_p": (0.9, False),
    "top_k": (5, False),
    "greedy": (True, False),
    "stop": ((3,), True),
    "min_p": (0.1, False),
    "repetition_penalty": (1.1, False),
    "support": (True, True),
}


def test_tokens_are_drawn_from_the_policy_itself_unless_a_setting_leaves_some_out_or_changes_their_logits():
    plain = fl.testing.Sampling()
    assert plain.is_policy
    assert {field.name for field in fields(plain)} == {*OTHER}, "say of a new setting what it does"


@pytest.mark.parametrize("name", OTHER)
def test_each_setting_says_whether_tokens_are_drawn_from_the_policy_itself(name):
    value, is_policy = OTHER[name]
    assert replace(fl.testing.Sampling(), **{name: value}).is_policy is is_policy
