"""Episodes that straddle a publish, one step apart: the first turn of step k is taken under version k - 1, and the others
once version k is installed."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from typing import Any

import torch
from flows import module_of

import flowrl as fl
from flowrl import rl
from flowrl.placement.plan.plan import Pipeline, Place, Plan, Pool

WAIT = 100.0  # seconds that anything waits for another thread, at most
PROMPTS, GROUP, TURNS = 2, 2, 3
MODEL = module_of("stale_flow").MODEL


class Gate:
    """Holds episodes back until what they wait for has come. ``weights`` are those of each version."""

    def __init__(self, steps: int) -> None:
        self.steps, self.weights, self.kept = steps, dict[int, dict[str, torch.Tensor]](), dict[int, fl.Batch]()
        self._published = defaultdict[int, threading.Event](threading.Event)
        self._begun = defaultdict[int, threading.Event](threading.Event)
        self._first, self._lock = Counter[int](), threading.Lock()

    def turn(self, step: int, turn: int) -> None:
        """Wait where a turn is over: in step k after the first one for version k, and after the last one for the next
        step's episodes to have had theirs."""
        if turn == 0:
            with self._lock:
                self._first[step] += 1
                if self._first[step] == PROMPTS * GROUP:
                    self._begun[step].set()
        if turn == 0 and step:
            assert self._published[step].wait(WAIT), f"version {step} was not published while step {step} is played"
        elif turn == TURNS - 1 and step + 1 < self.steps:
            assert self._begun[step + 1].wait(WAIT), f"step {step + 1} is not played beside step {step}"

    def before(self, version: int, engine: Any) -> None:
        """Keep the weights that an engine has before it is given those of a version."""
        self.weights.setdefault(version - 1, copied(engine))

    def after(self, version: int, engine: Any) -> None:
        """Keep the weights that an engine has now, and let those go on that wait for them."""
        self.weights[version] = copied(engine)
        self._published[version].set()


def copied(engine: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in engine.plain_weights().items()}


GATE: list[Gate] = []  # of the run, the last one


class Waits(fl.Env):
    turns = TURNS

    def reset(self, row, seed):
        return (int(row["number"]) // PROMPTS, 0), "1"

    def step(self, state, action):
        step, turn = state
        GATE[-1].turn(step, turn)
        return (step, turn + 1), "1", float(len(action)), turn + 1 == TURNS


class Keep(fl.Worker):
    """Shows the test the rows of each step."""

    @fl.op(
        reads="tokens, response_mask, versions, rollout_logprobs, turn_ids, temperature, response_ids",
        adds="kept: f32[]",
    )
    def keep(self, batch):
        GATE[-1].kept[batch.keys[0][0] // PROMPTS] = batch
        return {"kept": fl.Column.of([0.0] * len(batch), dtype="f32")}


def make_flow() -> fl.Flow:
    flow = fl.Flow("straddle")
    actor = flow.worker(fl.Actor, MODEL, lr=3e-2, max_tokens=4, name="actor")
    game = flow.worker(Waits, name="game")
    keep = flow.worker(Keep, name="keep")

    @flow.program
    def straddle(steps: int = 4):
        rows = fl.data.rows([{"prompt": "2", "number": i} for i in range(40)], batch=PROMPTS, shuffle=False)
        for step, batch in flow.steps(rows, steps):
            batch = keep.keep(game.rollout(batch, policy=actor, n=GROUP))
            batch = rl.group_advantages(batch)
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()), reward=batch.rewards.mean())

    return flow


def plan(engine: str = "hf", publish: str = "interrupt", staleness: int = 1, games: int = 1, model: int = 1) -> Plan:
    pools = {
        "train": "cpu",
        "model": Pool("model", processes=model),
        "games": Pool("games", processes=games),
        "keep": "cpu",
    }
    place = {"actor": {"train": Place("train", backend=engine), "generate": Place("model", backend=engine)}}
    rest = {"game": Place("games"), "keep": Place("keep")}
    return Plan(pools, {**place, **rest}, pipeline=Pipeline(staleness=staleness, publish=publish))


def hold(gate: Gate, engine: str) -> None:
    """Hold the tokens of all steps to their versions, and log-probabilities to those of a fresh pass under these."""
    assert sorted(gate.kept) == list(range(gate.steps))
    for step, rows in gate.kept.items():
        columns = (rows[name].to_list() for name in ("versions", "turn_ids"))
        for versions, turns in zip(*columns, strict=True):
            found = {(turn, version) for version, turn in zip(versions, turns, strict=True) if turn >= 0}
            later = {(turn, step) for turn in range(1, TURNS)}
            assert found == {(0, max(step - 1, 0))} | later, f"step {step}"
        for version in sorted({max(step - 1, 0), step}):
            mine = rows.response_mask.values & (rows.versions.values == version)
            fresh = fresh_logprobs(rows, gate.weights[version], engine)
            torch.testing.assert_close(rows.rollout_logprobs.values[mine], fresh[mine], atol=1e-4, rtol=0)
            other = fresh_logprobs(rows, gate.weights[gate.steps], engine)
            assert (other - fresh)[mine].abs().max() > 1e-3, "other weights are seen in the log-probabilities"


def fresh_logprobs(rows: fl.Batch, weights: dict[str, torch.Tensor], engine: str) -> torch.Tensor:
    """The log-probability of each token of the responses under some weights, by a pass of its own."""
    if engine == "hf":
        actor = fl.open(fl.Actor(MODEL, lr=1e-2), name="actor")
        actor.engine.take_weights(weights)
        return actor.logprobs(rows).old_logprobs.values
    table = weights["table"].log_softmax(-1)
    found = []
    for tokens, response in zip(rows.tokens.to_list(), rows.response_ids.to_list(), strict=True):
        before = tokens[len(tokens) - len(response) - 1 : -1]
        found += [float(table[last, token]) for last, token in zip(before, response, strict=True)]
    return torch.tensor(found, dtype=torch.float32)
