"""Paths that no run takes: what flowrl finds on them is a remark, and stays an error on all others."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flowrl as fl
from flowrl import rl
from flowrl.errors import At
from flowrl.graph.stand_ins.values import PYTHON
from flowrl.graph.tracing import impossible_paths
from flowrl.graph.tracing.follow_branches import Decision, Path
from flowrl.graph.tracing.impossible_paths import contradiction
from flowrl.graph.tracing.trace_program import trace

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)
flow = fl.Flow("tests")
actor = flow.worker(fl.Actor, model="a/model")
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.RewardModel, model="a/judge")


def scored(batch):
    return rl.group_advantages(reward.score(actor.generate(batch, n=4)))


def train_where(has, wants):
    """A program that adds what its loss reads where ``has`` holds of a step and a mean, and reads it where ``wants``."""

    def program():
        for step, batch in flow.steps(prompts, 90):
            batch = scored(batch)
            mean = float(batch.rewards.mean())
            if has(step, mean):
                batch = ref.logprobs(batch)
            loss = rl.ppo_clip(kl=1e-3) if wants(step, mean) else rl.ppo_clip()
            flow.log(step, actor.update(batch, loss=loss))

    return program


def found(program):
    traced = trace(program, {}, name="program")
    return [e.what for e in traced.errors], [x.what for x in traced.lints if x.kind == "path"], traced


#: Where a field is there, where it is read, and where it is read without.
IMPLIED = {
    "a later step": (lambda s, x: s >= 10, lambda s, x: s >= 20, "not (step >= 10) and step >= 20"),
    "not the first": (lambda s, x: s > 0, lambda s, x: s >= 1, "not (step > 0) and step >= 1"),
    "a multiple": (lambda s, x: s % 10 == 0, lambda s, x: s % 50 == 0, "not (step % 10 == 0) and step % 50 == 0"),
    "hundreds": (lambda s, x: s >= 250, lambda s, x: s // 100 == 3, "not (step >= 250) and step // 100 == 3"),
    "a smaller value": (lambda s, x: x < 0.5, lambda s, x: x < 0.2, "not (rewards.mean() < 0.5) and rewards.mean() < 0.2"),
}  # fmt: skip


@pytest.mark.parametrize("case", IMPLIED)
def test_conditions_that_hold_together_for_no_number_are_no_error(case):
    has, wants, where = IMPLIED[case]
    errors, remarks, _ = found(train_where(has, wants))
    said = where.replace(" and ", " in the first step and ") + " in the first step"
    reads = "actor.update with loss ppo_clip reads 'ref_logprobs', which no op before it adds."
    assert errors == [] and remarks == [f"no run comes here where {said}: {reads}"]


@pytest.mark.parametrize(
    ("has", "wants"),
    [
        (lambda s, x: s >= 20, lambda s, x: s >= 10),
        (lambda s, x: s % 7 == 3, lambda s, x: s % 11 == 5),
        (lambda s, x: s < 1000, lambda s, x: s * 0.001 > 1),
        (lambda s, x: s < 900, lambda s, x: s // 100 % 10 == 9),
        (lambda s, x: False, lambda s, x: s // 20 >= 20),
        (lambda s, x: False, lambda s, x: s / 10 > 10),
        (lambda s, x: False, lambda s, x: s // 10 == 10),
        (lambda s, x: False, lambda s, x: 1 - 1 / (s + 1) > 0.99),
        (lambda s, x: False, lambda s, x: s / (s + 100) > 0.9),
        (lambda s, x: False, lambda s, x: s * 101 % 1000 >= 999),
        (lambda s, x: x < 0.2, lambda s, x: x < 0.5),
        (lambda s, x: x < 0.5, lambda s, x: x <= 0.5),
        (lambda s, x: x < 0.5, lambda s, x: s >= 10),
        (lambda s, x: x * x < 0.5, lambda s, x: x < 0.5),
    ],
)
def test_conditions_that_hold_for_some_number_stay_errors(has, wants):
    errors, _, _ = found(train_where(has, wants))
    assert [what.partition(" which")[0] for what in errors] == ["actor.update with loss ppo_clip reads 'ref_logprobs',"]


def test_the_first_iteration_is_step_0_for_what_it_finds_itself():
    def program():
        before = None
        for step, batch in flow.steps(prompts, 90):
            batch = scored(batch)
            rows = batch.concat(before) if step > 0 else batch
            before = batch
            flow.log(step, mean=rows.rewards.mean())

    errors, (remark,), _ = found(program)
    what = "concat takes batches, and was given None."
    assert errors == [] and remark == f"no run comes here where step > 0 in the first step: {what}"


def test_the_second_one_follows_any_step():
    def cleared():
        before = None
        for step, batch in flow.steps(prompts, 90):
            batch = scored(batch)
            rows = batch.concat(before) if step > 0 else batch
            before = None if step == 5 else batch
            flow.log(step, mean=rows.rewards.mean())

    def begins_late():
        before = None
        for step, batch in flow.steps(prompts, 90):
            if step < 10:
                continue
            if before is not None:
                before.nowhere.mean()
            before = batch

    assert found(cleared)[0] == ["concat takes batches, and was given None."]
    assert found(begins_late)[0] == ["the batch has no field 'nowhere' here."]


def test_the_first_step_of_a_loop_is_step_0_there_and_any_step_of_it_for_the_next_loop():
    def kept_by_two():
        a = b = None
        for step, batch in flow.steps(prompts, 90):
            a = batch if step == 5 else a
            b = batch if step == 6 else b
        for step, batch in flow.steps(prompts, 90):
            loss = rl.ppo_clip(kl=1e-3) if a is not None and b is not None else rl.ppo_clip()
            a = None
            flow.log(step, actor.update(scored(batch), loss=loss))

    def begins_in_each():
        for _ in range(2):
            before = None
            for step, batch in flow.steps(prompts, 90):
                batch = scored(batch)
                rows = batch.concat(before) if step > 0 else batch
                before = batch
                flow.log(step, mean=rows.rewards.mean())

    reads = "actor.update with loss ppo_clip reads 'ref_logprobs', which no op before it adds."
    assert found(kept_by_two)[0] == [reads] and found(begins_in_each)[0] == []


def test_rows_that_are_counted_twice_are_as_many():
    def counts(first, second):
        def program():
            for step, batch in flow.steps(prompts, 90):
                batch = scored(batch)
                kept = batch.filter(batch.group_std("rewards") > 0)
                good = rl.group_advantages(kept.drop("advantages")) if first(len(kept)) else None
                if second(len(kept)):
                    flow.log(step, actor.update(good, loss=rl.ppo_clip()))

        return program

    assert found(counts(lambda n: n > 0, lambda n: n != 0))[0] == []
    assert found(counts(lambda n: n > 1, lambda n: n != 0))[0] == ["actor.update takes a batch, and was given None."]


def test_a_value_may_be_no_number_and_a_whole_one_is_none():
    def guards(value):
        def program():
            for step, batch in flow.steps(prompts, 90):
                batch = scored(batch)
                x = value(step, batch)
                if x <= 10:
                    loss = rl.ppo_clip()
                elif x > 10:
                    loss = rl.sft()
                else:
                    loss = rl.ppo_clip(kl=1e-3)
                flow.log(step, actor.update(batch, loss=loss))

        return program

    mean = lambda batch: float(batch.rewards.mean())  # noqa: E731
    assert len(found(guards(lambda step, batch: mean(batch)))[0]) == 1
    assert len(found(guards(lambda step, batch: mean(batch) - step))[0]) == 1
    assert found(guards(lambda step, batch: len(batch)))[0] == []
    assert found(guards(lambda step, batch: len(batch) // 2 - step))[0] == []
    assert found(guards(lambda step, batch: int(batch.rewards.sum())))[0] == []


def test_nothing_is_left_out_where_not_all_paths_are_followed_or_steps_are_too_many(monkeypatch):
    has, wants, _ = IMPLIED["a multiple"]
    assert len(trace(train_where(has, wants), {}, name="program", cap=4).errors) == 1
    monkeypatch.setattr(impossible_paths, "MOST_STEPS", 40)
    assert len(found(train_where(has, wants))[0]) == 1


_NUMBERS = st.sampled_from((0, 1, 2, 3, -5, 7, 10, 20, 50, 100, 0.1, 0.5, 1.001))
_WITH_NUMBER = ("add", "sub", "mul", "truediv", "floordiv", "mod")


def _computed_on(inner):
    return st.one_of(
        st.builds("{}({}, {})".format, st.sampled_from(_WITH_NUMBER), inner, _NUMBERS),
        st.builds("{}({}, {})".format, st.sampled_from(_WITH_NUMBER), _NUMBERS, inner),
        st.builds("{}({}, {})".format, st.sampled_from(("add", "mul", "truediv")), inner, inner),
        st.builds("neg({})".format, inner),
    )


_OF_A_STEP = st.recursive(st.just("step1.1"), _computed_on, max_leaves=4)
_CONDITIONS = st.builds(
    "{}({}, {})".format, st.sampled_from(("lt", "le", "gt", "ge", "eq", "ne")), _OF_A_STEP, _NUMBERS
)


@given(st.lists(st.tuples(_CONDITIONS, st.booleans()), min_size=1, max_size=2))
@settings(max_examples=150, deadline=None)
def test_what_is_said_to_hold_for_no_step_holds_for_none_of_many(conditions):
    at = At("driver.py", 1)
    taken = [Decision(key, outcome, at, 1, key=key) for key, outcome in conditions]
    never = contradiction(Path(taken=taken, free=[True] * len(taken)), {})
    if not never:
        return
    names = dict(PYTHON)
    codes = [(compile(d.key.replace("step1.1", "step"), "", "eval"), d.outcome) for d in never]
    for step in range(20_000):
        try:
            holds = all(bool(eval(code, names, {"step": step})) == outcome for code, outcome in codes)
        except ArithmeticError:
            continue
        assert not holds, f"step {step}"
