"""Rows kept of each prompt, and responses under other prompts, against slow loops over lists."""

import math

import pytest
import torch

import flowrl as fl
from flowrl.batch import Batch, Column
from flowrl.errors import FlowError, ProgramError
from flowrl.graph.tracing.trace_program import trace
from flowrl.rl.pairs import best_of, mismatched, pairs
from flowrl.rl.preference import dpo, kto
from flowrl.rl.supervised import sft

torch.set_num_threads(1)


def draw_rows(seed, *, prompts=6, ties=True):
    """Rows of prompts in any order, with few different rewards."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 6, (prompts,), generator=draw).tolist()
    keys = [(7 * p, i) for p in range(prompts) for i in range(sizes[p])]
    keys = [keys[i] for i in torch.randperm(len(keys), generator=draw).tolist()]
    rewards = torch.randint(0, 3, (len(keys),), generator=draw).float()
    if not ties:
        rewards = torch.randn(len(keys), generator=draw)
    return Batch.of(keys, rewards=Column.of(rewards), note=[str(k) for k in keys])


def by_prompt(batch):
    """Rows as (key, reward), by prompt and key."""
    found = {}
    for row in sorted(zip(batch.keys, batch.rewards.values.tolist(), strict=True)):
        found.setdefault(row[0][0], []).append(row)
    return found.values()


@pytest.mark.parametrize("seed", range(8))
def test_pairs_are_the_best_and_the_worst_row_of_each_prompt(seed):
    batch = draw_rows(seed, ties=seed % 2 == 0)
    wanted = {}
    for rows in by_prompt(batch):
        rewards = [reward for _, reward in rows]
        if max(rewards) > min(rewards):
            wanted[rows[rewards.index(max(rewards))][0]] = True
            wanted[rows[rewards.index(min(rewards))][0]] = False
    found = pairs(batch)
    assert dict(zip(found.keys, found.preferred.values.tolist(), strict=True)) == wanted
    assert found.preferred.type == "bool[]"
    assert list(found.keys) == [k for k in batch.keys if k in wanted]  # rows stay in their order
    assert found.note.values == [str(k) for k in found.keys]  # other fields go along
    turned = pairs(batch.take(list(range(len(batch)))[::-1]))
    assert turned.sort().preferred.equal(found.sort().preferred)


def test_pairs_may_be_made_by_another_field():
    batch = Batch.of([(0, 0), (0, 1)], rewards=[1.0, 0.0], grade=[0.0, 2.0])
    assert pairs(batch, of="grade").preferred.values.tolist() == [False, True]


def test_rows_that_cannot_be_learned_from_are_in_no_pair():
    keys = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    mask = Column.of([[True], [], [False, True], [True], [False]], dim="response", dtype="bool")
    batch = Batch.of(keys, rewards=[1.0, 9.0, 0.0, 1.0, 0.0], response_mask=mask)
    assert pairs(batch).keys == ((0, 0), (0, 2))
    assert len(pairs(batch.drop("response_mask"))) == 4
    odd = Batch.of(keys, rewards=[1.0, math.nan, 0.0, math.nan, 0.0])
    assert pairs(odd).keys == ((0, 0), (0, 2))
    assert pairs(odd).preferred.values.tolist() == [True, False]


@pytest.mark.parametrize("op", [pairs, best_of])
def test_of_no_rows_there_are_none(op):
    none = Batch.of([(0, 0), (1, 0)], rewards=[1.0, 2.0]).filter([False, False])
    assert len(op(none)) == 0
    assert len(pairs(Batch.of([(0, 0), (1, 0)], rewards=[1.0, 2.0]))) == 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_best_rows_of_each_prompt_are_kept(seed, k):
    batch = draw_rows(seed, ties=seed % 2 == 0)
    wanted = set()
    for rows in by_prompt(batch):
        wanted |= {key for key, _ in sorted(rows, key=lambda row: (-row[1], row[0]))[:k]}
    found = best_of(batch, k=k)
    assert list(found.keys) == [key for key in batch.keys if key in wanted]
    assert found.fields == batch.fields


def test_what_is_not_a_number_is_never_the_best():
    batch = Batch.of([(0, 0), (0, 1), (1, 0)], rewards=[math.nan, -math.inf, math.nan])
    assert best_of(batch, k=2).keys == ((0, 1),)


@pytest.mark.parametrize("k", [0, -1, 1.5])
def test_a_number_of_rows_is_1_or_more(k):
    with pytest.raises(ProgramError, match=r"rl\.best_of: k=.* is not a whole number") as error:
        best_of(Batch.of([(0, 0)], rewards=[1.0]), k=k)
    assert error.value.fix


def texts(seed, *, prompts=4):
    """Rows with prompts and responses of any length, in any order; some tokens are observations."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 4, (prompts,), generator=draw).tolist()
    keys = [(3 * p, i) for p in range(prompts) for i in range(sizes[p])]
    keys = [keys[i] for i in torch.randperm(len(keys), generator=draw).tolist()]
    asked = {3 * p: [100 + p] * int(torch.randint(1, 5, (1,), generator=draw)) for p in range(prompts)}
    said = [
        torch.randint(0, 99, (int(torch.randint(0, 6, (1,), generator=draw)),), generator=draw).tolist() for _ in keys
    ]
    return Batch.of(
        keys,
        prompt_ids=Column.of([asked[key[0]] for key in keys], dim="prompt", dtype="i32"),
        response_ids=Column.of(said, dim="response", dtype="i32"),
        tokens=Column.of([asked[key[0]] + row for key, row in zip(keys, said, strict=True)], dim="token", dtype="i32"),
        response_mask=Column.of([[t % 3 > 0 for t in row] for row in said], dim="response", dtype="bool"),
        rewards=torch.zeros(len(keys)),
    )


@pytest.mark.parametrize("seed", range(5))
def test_mismatched_rows_have_the_prompt_of_the_next_prompt(seed):
    batch = texts(seed)
    asked = dict(zip([key[0] for key in batch.keys], batch.prompt_ids.to_list(), strict=True))
    uids = sorted(asked)
    found = mismatched(batch)
    assert found.keys == batch.keys
    assert found.fields == ("tokens", "response_mask")
    assert found.tokens.type == "i32[*token]"
    for key, response, tokens in zip(batch.keys, batch.response_ids.to_list(), found.tokens.to_list(), strict=True):
        after = uids[(uids.index(key[0]) + 1) % len(uids)]
        assert tokens == asked[after] + response
    assert found.response_mask.equal(batch.response_mask)
    turned = mismatched(batch.take(list(range(len(batch)))[::-1])).sort()
    assert turned.tokens.equal(found.sort().tokens)


def test_a_prompt_is_what_stands_before_the_response_though_the_data_has_another():
    """As in rows of agents, which write their prompts themselves: each row has its own, and the first one counts."""
    batch = Batch.of(
        [(0, 0), (0, 1), (1, 0)],
        prompt_ids=Column.of([[9], [9], [9]], dim="prompt", dtype="i32"),
        tokens=Column.of([[1, 2, 5], [3, 6, 6], [4]], dim="token", dtype="i32"),
        response_ids=Column.of([[5], [6, 6], []], dim="response", dtype="i32"),
        response_mask=Column.of([[True], [True, True], []], dim="response", dtype="bool"),
    )
    assert mismatched(batch).tokens.to_list() == [[4, 5], [4, 6, 6], [1, 2]]


def test_one_prompt_has_no_other():
    batch = texts(0)
    with pytest.raises(ProgramError, match=r"rl\.mismatched: all rows are of one prompt"):
        mismatched(batch.filter([key[0] == 0 for key in batch.keys]))
    assert len(mismatched(batch.filter([False] * len(batch)))) == 0


flow = fl.Flow("tests")
actor = flow.worker(fl.Actor, model="a/model")
ref = flow.worker(fl.Reference, of=actor)
judge = flow.worker(fl.RewardModel, model="a/judge")
prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def errors(program):
    return [error.what for error in trace(program, {}, name=program.__name__).errors]


def test_a_program_makes_pairs_and_learns_from_them():
    def program():
        for step, batch in flow.steps(prompts, 10):
            batch = judge.score(actor.generate(batch, n=4))
            best = best_of(batch, k=2)
            batch = ref.logprobs(pairs(batch))
            other = ref.logprobs(actor.logprobs(mismatched(batch)))
            point = (other.old_logprobs - other.ref_logprobs).row_sum().mean()
            flow.log(step, actor.update(batch, loss=dpo(beta=0.2)))
            flow.log(step, again=actor.update(batch, loss=kto(reference_point=point)).loss)
            flow.log(step, best=actor.update(best, loss=sft()).loss)

    assert errors(program) == []


def test_a_program_without_pairs_is_told():
    def program():
        for step, batch in flow.steps(prompts, 10):
            batch = ref.logprobs(judge.score(actor.generate(batch, n=4)))
            flow.log(step, actor.update(batch, loss=dpo()))

    (what,) = errors(program)
    assert "reads 'preferred'" in what


def test_pairs_need_rewards():
    with pytest.raises(FlowError, match=r"rl\.pairs reads 'rewards'"):
        pairs(Batch.of([(0, 0)], grades=[1.0]))


def test_which_of_them_may_be_run_prompt_by_prompt():
    assert pairs.in_pieces({}, {}) and best_of.in_pieces({}, {})
    assert not mismatched.in_pieces({}, {})
