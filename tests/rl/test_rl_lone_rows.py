"""Ops that compare the rows of a prompt, where each prompt has one: refused by check, or said at the first real call."""

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

import flowrl as fl
from flowrl import rl
from flowrl.batch import Batch, Column

ALL_0 = "every advantage would be 0"
COMPARING = {
    "rl.advantages": (rl.advantages, ALL_0),
    "rl.group_advantages": (rl.group_advantages, ALL_0),
    "rl.gdpo": (partial(rl.gdpo, rewards=("rewards", "rewards")), ALL_0),
    "rl.optimal_token_baseline": (rl.optimal_token_baseline, ALL_0),
    "rl.length_penalty": (rl.length_penalty, "every penalty would be 0"),
    "rl.pairs": (rl.pairs, "no prompt would be left"),
}
#: What says something of a prompt with one row.
ALONE = {
    "batch": partial(rl.advantages, center="batch", scale="batch"),
    "returns": partial(rl.advantages, of="returns", center="none", scale="none", whiten=True),
    "best_of": rl.best_of,
    "whitened": partial(rl.whitened_rewards, of="rewards", into={"rewards": "others"}),
}


def score(prompt: str, response: str) -> float:
    return float(len(response))


def errors(make, *, n=1, samples=1, filtered=False, last=None):
    """What check says of a program that samples ``n`` rows, then ``samples`` of each of these, and calls ``make``."""
    flow = fl.Flow("lone")
    actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", name="actor")
    reward = flow.worker(fl.FunctionReward, score)
    source = fl.data.rows([{"prompt": "1+2="}], batch=4)

    @flow.program
    def lone(steps: int = 2):
        for step, batch in flow.steps(source, steps):
            batch = actor.generate(batch, n=n)
            if samples > 1:
                batch = actor.generate(batch.select("prompt_ids"), n=samples)
            if last:
                batch = actor.generate(batch.select("prompt_ids"), **last)
            batch = reward.score(batch)
            if filtered:
                batch = batch.filter(batch.rewards > 0)
            batch = make(batch)
            flow.log(step, rows=batch.count() if hasattr(batch, "count") else 1)

    return [error for error in flow.check().errors if "prompt" in error.what]


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("title", COMPARING)
def test_check_refuses_one_row_per_prompt_at_its_line(title, filtered):
    make, outcome = COMPARING[title]
    (error,) = errors(make, filtered=filtered)
    assert error.what == f"{title} compares the rows of a prompt, and each has one here: {outcome}."
    assert error.at.file == __file__ and error.at.text.strip() == "batch = make(batch)"
    line = next(
        i
        for i, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "batch = actor.generate(batch, n=n)" in text
    )
    assert error.fix.startswith(f"Write n=8 in actor.generate (line {line})")


@pytest.mark.parametrize("title", COMPARING)
def test_several_greedy_rows_are_one(title):
    make, outcome = COMPARING[title]
    (error,) = errors(make, last={"n": 8, "greedy": True})
    assert error.what == f"{title} compares the rows of a prompt, and each has one here: {outcome}."
    assert "and leave out greedy=True: its rows are equal" in error.fix
    assert errors(make, samples=4, last={"greedy": True}) == []  # the prompts may be others by then
    assert errors(make, last={"n": 8, "greedy": False}) == []


@pytest.mark.parametrize("title", COMPARING)
def test_it_is_fine_with_two(title):
    make, _ = COMPARING[title]
    assert errors(make, n=2) == [] == errors(make, samples=2)


@pytest.mark.parametrize("name", ALONE)
def test_what_compares_over_the_batch_or_not_at_all_is_fine(name):
    assert errors(ALONE[name]) == []


def test_the_fix_of_advantages_names_what_needs_no_second_row():
    (error,) = errors(rl.advantages)
    assert error.fix.endswith(', or compare over the batch: center="batch", scale="batch".')


@pytest.mark.parametrize("n", [1, 3, 4])
def test_the_best_of_k_needs_more_than_k_rows(n):
    (error,) = errors(partial(rl.pass_at_k, k=4), n=n)
    assert error.what == f"rl.pass_at_k: k=4, and each prompt has {n} rows at most: {ALL_0}."
    assert error.fix.startswith("Write n=8 in actor.generate (line ") and error.fix.endswith("), or a smaller k.")
    assert errors(partial(rl.pass_at_k, k=4), n=5) == []


def test_pairs_of_the_data_are_two_rows_each():
    flow = fl.Flow("given")
    judge = flow.worker(fl.RewardModel, model="Qwen/Qwen3-0.6B")
    rows = [{"prompt": "1+2=", "chosen": "3", "rejected": "4"}]
    source = fl.data.rows(rows, batch=4, response="chosen", rejected="rejected")

    @flow.program
    def given(steps: int = 2):
        for step, batch in flow.steps(source, steps):
            batch = rl.group_advantages(judge.score(batch))
            flow.log(step, value=batch.advantages.mean())

    assert flow.check().errors == ()


def test_rows_of_an_unknown_number_are_no_rows_of_a_known_one():
    """A number that the program computes says nothing of how many rows there are, and so nothing is refused."""
    flow = fl.Flow("unknown")
    actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", name="actor")
    reward = flow.worker(fl.FunctionReward, score)
    source = fl.data.rows([{"prompt": "1+2="}], batch=4)

    @flow.program
    def unknown(steps: int = 2):
        for step, batch in flow.steps(source, steps):
            made = reward.score(actor.generate(batch, n=step + 1))
            made = rl.group_advantages(made)
            joined = made | actor.generate(batch, n=1).select("tokens").rename(tokens="others")
            flow.log(step, value=joined.advantages.mean())

    (error,) = flow.check().errors
    assert error.what.startswith(
        "a | b takes the same rows on both sides; the left has some for each of the rows drawn"
    )


def rows(keys):
    mask = Column.packed(torch.ones(len(keys), dtype=torch.bool), [1] * len(keys), "response")
    return Batch.of(
        keys,
        rewards=[1.0 * i for i in range(len(keys))],
        response_mask=mask,
        rollout_logprobs=mask.with_values(-mask.values.float()),
    )


@pytest.mark.parametrize("title", [name for name in COMPARING if name != "rl.group_advantages"])
def test_a_real_call_with_lone_rows_alone_says_so(title):
    make, outcome = COMPARING[title]
    with pytest.warns(UserWarning) as found:
        make(rows([(0, 0), (1, 0), (2, 0)]))
    assert str(found[0].message) == (
        f"{title} compares the rows of a prompt, and each of these 3 prompts has one: {outcome}. "
        "Sample at least 2 rows of each."
    )


def test_a_real_call_without_more_than_k_rows_of_any_prompt_says_so():
    with pytest.warns(UserWarning) as found:
        rl.pass_at_k(rows([(0, 0), (0, 1), (1, 0)]), k=2)
    assert str(found[0].message) == (
        "rl.pass_at_k compares the rows of a prompt, and each of these 2 prompts has 2 at most: "
        "every advantage would be 0. Sample at least 3 rows of each."
    )


@pytest.mark.parametrize("keys", [[(0, 0)], [(0, 0), (0, 1), (1, 0)]])
def test_a_real_call_with_a_group_or_a_single_row_says_nothing(keys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make, _ in COMPARING.values():
            make(rows(keys))
