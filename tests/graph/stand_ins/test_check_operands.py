"""Operands that no field or number takes are found in the trace, with the line and what to write; others stay."""

import pytest

import flowrl as fl
from flowrl import rl


def exact(response: str) -> float:
    return 1.0


def errors_of(compute):
    flow = fl.Flow("f")
    actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", name="actor")
    reward = flow.worker(fl.FunctionReward, exact, name="reward")
    rows = fl.data.rows([{"prompt": "a", "answer": "b"}], batch=1)

    @flow.program
    def f(steps: int = 1):
        for step, batch in flow.steps(rows, steps):
            batch = reward.score(actor.generate(batch, n=2))
            metrics = actor.update(batch, loss=rl.sft())
            compute(batch, metrics)
            flow.log(step, metrics)

    return flow.check().errors


@pytest.mark.parametrize(
    ("compute", "said"),
    [
        (lambda b, m: b.rewards + "x", "rewards + 'x': a field f32[] cannot be combined with str 'x'"),
        (lambda b, m: "x" + b.rewards, "'x' + rewards: a field f32[]"),
        (lambda b, m: b.tokens * None, "tokens * None: a field i32[*token] cannot be combined with None"),
        (lambda b, m: b.rewards - [1], "rewards - [1]: a field f32[] cannot be combined with list [1]"),
        (lambda b, m: b.rewards + 1j, "cannot be combined with complex 1j"),
        (lambda b, m: b.rewards == None, "rewards == None: a field f32[]"),  # noqa: E711
        (lambda b, m: b.rewards + b, "rewards + batch: a batch is no operand"),
        (lambda b, m: m + b.rewards.mean(), "metrics + rewards.mean(): metrics are no operand"),
        (lambda b, m: b.rewards * m, "rewards * metrics: metrics are no operand"),
        (lambda b, m: ~b.rewards, "~rewards: ~, & and | are for bool[], and one side is f32[]"),
        (lambda b, m: b.rewards & b.finished, "rewards & finished: ~, & and | are for bool[], and one side is f32[]"),
        (lambda b, m: b.finished | 0.5, "finished | 0.5: ~, & and | are for bool[], and one side is 0.5"),
        (lambda b, m: b.rewards.lengths_column(), "f32[] has one value for each row, and no lengths"),
        (lambda b, m: m.loss + "x", "actor.update.loss + 'x': a number cannot be combined with str 'x'"),
        (lambda b, m: m.loss < None, "actor.update.loss < None: a number cannot be combined with None"),
        (lambda b, m: b.rewards.mean() * {}, "a number cannot be combined with dict {}"),
        (lambda b, m: b.group_mean(b.rewards), "group_mean takes names of fields, and was given a field"),
        (lambda b, m: b.group_mean("tokens"), "group_mean takes one number per row, and 'tokens' is i32[*token]"),
        (lambda b, m: b.concat(5), "concat takes batches, and was given int 5"),
        (lambda b, m: b.select(5), "select takes names of fields, and was given int 5"),
        (lambda b, m: b.rename(rewards=5), "rename takes names of fields, and was given int 5"),
        (lambda b, m: b.with_columns([b.rewards]), "with_columns takes a dict of fields by name, and was given a list"),
    ],
)
def test_it_is_told_in_the_trace_with_line_and_fix(compute, said):
    first = errors_of(compute)[0]
    assert said in first.what, first.what
    assert first.at.file == __file__ and "lambda b, m" in first.at.text and first.fix
    first.report().encode()


@pytest.mark.parametrize(
    "compute",
    [
        lambda b, m: b.rewards + 1 - True,
        lambda b, m: b.answer + "x",
        lambda b, m: (b.answer == "x") & b.finished,
        lambda b, m: b.answer == None,  # noqa: E711
        lambda b, m: ~b.finished | (b.rewards > 0.5),
        lambda b, m: b.tokens & 1,
        lambda b, m: -b.finished + abs(b.finished),
        lambda b, m: m.loss == None,  # noqa: E711
        lambda b, m: b.rewards * m.loss + b.rewards.mean(),
        lambda b, m: b.tokens.lengths_column() % 2,
        lambda b, m: b.rewards.row_sum(),
    ],
)
def test_what_runs_is_not_refused(compute):
    assert errors_of(compute) == ()
