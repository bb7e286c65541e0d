"""Episodes of several steps that are played beside each other, and go on under weights that are published meanwhile: what
tests of their replays and their records run. ``GATE`` holds episodes back until weights have come, where a test sets it."""

from __future__ import annotations

import time

import pytest
from flows import module_of

import flowrl as fl
from flowrl import rl
from flowrl.backends.continuous import ContinuousBatch
from flowrl.runtime.local.executor import LocalExecutor

WAIT = 100.0  # seconds that an episode waits for a publish, at most
PROMPTS, GROUP, TURNS = 2, 2, 3
MODEL = module_of("stale_flow").MODEL


GATE: dict[str, int] = {}  # where it says the staleness: the version that is ready to be published


def wait(step: int, turn: int) -> None:
    """Wait behind the first turn of step k until the version after the oldest that it may have is ready, and behind the
    second one until version k is, where a test says when that is."""
    if "staleness" not in GATE:
        return
    wanted = {0: min(step, max(0, step - GATE["staleness"]) + 1), 1: step}.get(turn, 0)
    end = time.monotonic() + WAIT
    while GATE["ready"] < wanted:
        if time.monotonic() > end:
            raise TimeoutError(f"version {wanted} was not trained while step {step} is played")
        time.sleep(2e-3)


def publishes_within_turns(monkeypatch: pytest.MonkeyPatch, staleness: int) -> None:
    """Have publishes come while rows of episodes run, in the middle of a turn; rows end with their last token."""
    install = LocalExecutor.install

    def installed(executor, name, version, *weights, **how):
        stream = executor.open_server(name).stream
        GATE["ready"], end = version, time.monotonic() + 0.5
        while not stream.engine.running() and time.monotonic() < end:
            time.sleep(1e-3)
        return install(executor, name, version, *weights, **how)

    monkeypatch.setattr(LocalExecutor, "install", installed)
    monkeypatch.setattr(ContinuousBatch, "end_of", lambda batch, row: "length" if len(row.ids) >= row.limit else None)
    monkeypatch.setitem(GATE, "staleness", staleness)
    monkeypatch.setitem(GATE, "ready", 0)


class Counts(fl.Env):
    """An episode has one to three turns, by its seed."""

    turns = TURNS

    def reset(self, row, seed):
        return (int(row["number"]) // PROMPTS, 0, TURNS - seed % 2), "1"

    def step(self, state, action):
        step, turn, turns = state
        wait(step, turn)
        return (step, turn + 1, turns), str(turn), float(len(action) % 3), turn + 1 == turns


flow = fl.Flow("beside")
actor = flow.worker(fl.Actor, MODEL, lr=1e-2, max_tokens=8, name="actor")
game = flow.worker(Counts, name="game")


@flow.program
def beside(steps: int = 5, look: bool = False, mix: bool = False):
    rows = fl.data.rows([{"prompt": "2", "number": i} for i in range(40)], batch=PROMPTS, shuffle=False)
    for step, batch in flow.steps(rows, steps):
        played = rl.group_advantages(game.rollout(batch, policy=actor, n=GROUP))
        if mix:
            flow.log(step, plain=actor.generate(batch, n=GROUP).versions.row_mean().min())
        flow.log(step, actor.update(played, loss=rl.ppo_clip()), reward=played.rewards.mean())
        if look:
            held = game.rollout(
                flow.take(fl.data.rows([{"prompt": "3", "number": 0}], batch=1)), policy=actor, greedy=True
            )
            flow.log(step, held=held.rewards.mean())
