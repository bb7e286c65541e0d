"""A game of three turns, each of which is worth the length of what was said: what tests of episodes on ranks play."""

from __future__ import annotations

import flowrl as fl


class Count(fl.Env):
    turns = 3

    def reset(self, row, seed):
        return 0, "1"

    def step(self, state, action):
        return state + 1, "1", float(len(action)), state == 2
