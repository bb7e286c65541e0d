"""A program on the virtual clock: which way it goes where it asks for a value."""

from __future__ import annotations

import pytest

import flowrl as fl
from flowrl import rl
from flowrl.placement.plan.plan import Plan, Pool

prompts = fl.data.rows([{"prompt": f"{i}+1="} for i in range(4)], batch=4)


def simulated(body):
    """The numbers of calls, and what was assumed, of one step that gives ``body`` 4 prompts with 2 answers each."""
    flow = fl.Flow("flown")
    actor = flow.worker(fl.Actor, "qwen3-0.6b", lr=1e-5, name="actor")
    reward = flow.worker(fl.FunctionReward, lambda response: 1.0, name="reward")

    @flow.program
    def flown():
        for step, batch in flow.steps(prompts, 1):
            batch = reward.score(actor.generate(batch, n=2))
            more = lambda: reward.score(actor.generate(flow.more(4), n=2))  # noqa: E731
            body(batch, lambda rows: actor.update(rows, loss=rl.sft()), more)
            flow.log(step, reward=batch.rewards.mean())

    simulation = flow.study(Plan({"main": Pool("main", device="cpu")}, {})).simulate(1)
    updates = [bar for bar in simulation.bars if bar.node == "actor.update"]
    return len(updates), [text.partition("   ")[0] for text in simulation.assumed]


def right(batch):
    return batch.filter(batch.rewards > 0)


@pytest.mark.parametrize(
    ("condition", "text", "goes"),
    [
        (lambda batch: len(right(batch)) > 0, "len(batch) > 0", True),
        (lambda batch: right(batch).count() * 2 >= 16, "len(batch) * 2 >= 16", True),
        (lambda batch: right(batch), "len(batch)", True),
        (lambda batch: 1 / (len(batch) - 8) > 0, "1 / (len(batch) - 8) > 0", False),
        (lambda batch: len(batch) < 8, "len(batch) < 8", False),
        (lambda batch: batch.rewards.mean() > 0, "rewards.mean() > 0", False),
        (lambda batch: batch.rewards.sum() / len(batch) > 0, "rewards.sum() / len(batch) > 0", False),
    ],
)
def test_a_condition_on_numbers_of_rows_is_computed_and_another_is_false(condition, text, goes):
    updates, assumed = simulated(lambda batch, update, _: update(batch) if condition(batch) else None)
    assert (updates, assumed) == (int(goes), [text if goes else f"not ({text})"])


def test_a_loop_until_there_are_enough_rows_ends_with_as_many():
    def refill(batch, update, more):
        while len(batch) < 20:
            batch = batch.concat(more())
        update(batch)

    assert simulated(refill) == (1, ["len(batch) < 20", "not (len(batch) < 20)"])


def test_a_loop_that_no_filter_ends_ends():
    def never(batch, update, _):
        while len(batch) > 4:
            batch = right(batch)
        update(batch)

    assert simulated(never) == (1, ["len(batch) > 4", "not (len(batch) > 4)"])


def test_conditions_on_one_line_are_all_false():
    def evaluate(batch, update, _):
        m = update(batch)
        if float(m.loss) > 5 or float(m.grad_norm) > 2 or float(m.loss) < 0.1 or any(m.loss > n for n in (6, 7, 8)):
            update(batch)

    text = ["loss > 5", "grad_norm > 2", "loss < 0.1", *(f"loss > {n}" for n in (6, 7, 8))]
    assert simulated(evaluate) == (1, [f"not (actor.update.{condition})" for condition in text])


def test_what_ends_a_loop_is_assumed_as_it_was_taken():
    def until(batch, update, more):
        while not batch.rewards.mean() > 0.5:
            batch = batch.concat(more())
        update(batch)

    assert simulated(until) == (1, ["not (rewards.mean() > 0.5)", "rewards.mean() > 0.5"])


def test_a_number_of_rows_that_no_loop_changes_stays_as_it_is():
    def often(batch, update, _):
        if all(len(batch) == 8 for _ in range(40)):
            update(batch)

    assert simulated(often) == (1, ["len(batch) == 8"])
