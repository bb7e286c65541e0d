"""The abstract run of a program: symbols, every outcome of its conditions, and what is found on the way."""

import math
import numbers
import sys
import types

import numpy as np
import pytest
import torch

import flowrl as fl
from flowrl import rl
from flowrl.graph.tracing.trace_program import PATH_CAP, trace

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)
flow = fl.Flow("tests")
actor = flow.worker(fl.Actor, model="a/model")
reward = flow.worker(fl.RewardModel, model="a/judge")
seen = []
counter = 0


def traced(program, **parameters):
    return trace(program, parameters, name=program.__name__)


def clean(program, **parameters):
    """The trace of a program without errors."""
    found = traced(program, **parameters)
    assert [e.report() for e in found.errors] == []
    return found


def labels(found):
    """The outcomes of each path."""
    return sorted([d.label + ("" if d.iteration == 2 else " *") for d in t.path.taken] for t in found.trails)


def whats(found):
    return [e.what for e in found.errors]


# -- Python in a program --------------------------------------------------------------------------------------------


def test_python_works_on_numbers_that_are_not_there():
    def program():
        kept = {}
        for step, batch in flow.steps(prompts, 10):
            batch = reward.score(actor.generate(batch, n=2))
            mean = batch.rewards.mean()
            kept["float"], kept["int"] = float(mean), int(mean)
            kept["round"], kept["len"] = round(mean, 2), len(batch)
            kept["text"] = f"{mean:.3f} {step:04d} {mean}" + str(mean)
            kept["sum"] = sum([mean, 1.0, float(mean)])
            kept["abs"], kept["neg"] = abs(mean), -mean
            kept["power"] = 2 ** float(mean) - (step // 3) % 2
            kept["log"], kept["range"] = math.log(mean + 1), list(range(int(mean)))
            print("nothing of this is seen", mean)
            flow.log(step, mean=mean)

        assert all(
            isinstance(kept[n], fl.graph.stand_ins.scalars.ScalarValue) for n in ("float", "int", "len", "sum", "power")
        )
        assert isinstance(kept["text"], str) and isinstance(kept["log"], fl.graph.stand_ins.scalars.ScalarValue)
        assert len(kept["range"]) == 1

    clean(program)


def test_a_trace_prints_nothing(capsys):
    def program():
        for step, batch in flow.steps(prompts, 10):
            print("step", step, batch)
            flow.log(step, n=len(batch))

    clean(program)
    assert capsys.readouterr().out == ""


def test_types_are_still_types():
    def program():
        assert isinstance(1.5, float) and isinstance(2, int) and not isinstance(2, float)
        assert float("1.5") == 1.5 and int("12", 8) == 10 and len([1, 2]) == 2
        assert float.fromhex("0x1p-1") == 0.5 and int.from_bytes(b"\x02", "little") == 2
        assert int("ff", base=16) == 255 and {int: "whole", str: "text"}[int] == "whole"
        assert int in (int, str) and int == int and float != int  # noqa: E721  as some write it
        assert issubclass(bool, int) and issubclass(int, int) and not issubclass(float, int)
        assert issubclass(int, numbers.Integral) and not issubclass(str, int)
        match 3:
            case float():
                raise AssertionError("it is an int")
            case int(n):
                assert n == 3
        assert np.zeros(3, dtype=float).dtype == np.exp(np.arange(3).astype(float)).dtype == np.dtype("float64")
        for step, batch in flow.steps(prompts, 10):
            flow.log(step, n=batch.count())

    clean(program)


def test_a_number_may_grow_out_of_itself():
    def program():
        for step, batch in flow.steps(prompts, 10):
            x = float(reward.score(actor.generate(batch)).rewards.mean()) + 2
            for _ in range(40):
                x = x - (x * x - 2) / (2 * x)
                x = math.sqrt(x * x) + math.hypot(x, x)
            flow.log(step, x=x, larger=x > 1)

    assert len(clean(program).trails) == 1


def test_min_and_max_follow_both_outcomes():
    def program():
        for step, batch in flow.steps(prompts, 10):
            flow.log(step, low=max(float(reward.score(actor.generate(batch)).rewards.mean()), 0.5))

    assert len(clean(program).trails) == 4


def test_the_globals_of_the_module_stay_as_they_were():
    def program():
        global counter, fresh
        seen.append("a list is shared")  # what is changed in place is changed
        counter += 1
        fresh = 3
        for step, batch in flow.steps(prompts, 10):
            flow.log(step, n=batch.count())

    before = dict(globals())
    clean(program)
    assert counter == 0 and "fresh" not in globals()
    assert dict(globals()) == before
    assert float is __builtins__["float"] if isinstance(__builtins__, dict) else float is __builtins__.float


def helper(number):
    return float(number)


def test_functions_of_the_script_see_symbols_too():
    def program():
        for step, batch in flow.steps(prompts, 10):
            if helper(reward.score(actor.generate(batch)).rewards.mean()) > 0.5:
                flow.log(step, n=batch.count())

    assert len(clean(program).trails) == 4
    assert isinstance(helper, types.FunctionType) and helper(1) == 1.0


def test_parameters_arrive():
    def program(n: int = 2, *, name: str = "x"):
        assert (n, name) == (3, "y")
        for step, batch in flow.steps(prompts, n):
            flow.log(step, n=actor.generate(batch, n=n).count())

    clean(program, n=3, name="y")


# -- conditions -----------------------------------------------------------------------------------------------------


def test_a_condition_on_the_step_takes_both_outcomes_in_both_iterations():
    def program():
        for step, batch in flow.steps(prompts, 10):
            if step % 50 == 0:
                flow.log(step, n=batch.count())

    a, b = "step % 50 == 0", "not (step % 50 == 0)"
    assert labels(clean(program)) == sorted([[f"{x} *", y] for x in (a, b) for y in (a, b)])


def test_a_condition_asked_again_keeps_its_outcome():
    def program():
        for step, batch in flow.steps(prompts, 10):
            if step > 5:
                flow.log(step, n=batch.count())
            if step > 5:
                flow.log(step, m=batch.count())

    found = clean(program)
    assert len(found.trails) == 4
    assert all(len(t.calls) in (0, 2, 4) for t in found.trails)


def test_comparisons_of_fields_make_fields_and_ask_nothing():
    def program():
        for step, batch in flow.steps(prompts, 10):
            batch = reward.score(actor.generate(batch, n=2))
            good = (batch.rewards > 0.5) & (batch.rewards <= 1.0) | ~(batch.rewards != 0.25)
            flow.log(step, share=batch.filter(good).count() / batch.count())

    assert len(clean(program).trails) == 1


def test_a_value_of_metrics_in_a_condition():
    def program():
        for step, batch in flow.steps(prompts, 10):
            batch = rl.group_advantages(reward.score(actor.generate(batch, n=2)))
            metrics = actor.update(batch, loss=rl.ppo_clip())
            if not metrics.approx_kl < 0.1 or step == 3:
                break

    found = clean(program)
    assert any("actor.update.approx_kl < 0.1" in d.label for t in found.trails for d in t.path.taken)
    assert [(x.kind, x.what) for x in found.lints] == [
        ("serial", "this line waits for actor.update: steps cannot overlap past it.")
    ]


def test_a_loop_on_a_value_ends():
    def program():
        for step, batch in flow.steps(prompts, 10):
            batch = actor.generate(batch)
            while batch.count() < 100:
                batch = batch.concat(actor.generate(flow.more(2)))
            while True:
                if float(batch.response_ids.lengths_column().mean()) > 3:
                    break
                batch = batch.concat(actor.generate(flow.more(2)))
            flow.log(step, n=batch.count())

    found = clean(program)
    assert all(len(t.calls) < 80 for t in found.trails)


class Short:
    """Metrics whose KL has a short name."""

    def __init__(self, metrics):
        self.loss, self.kl = metrics.loss, metrics.approx_kl


def outcomes(found):
    """The outcomes of each path in short, with a ! behind one that ends a loop."""
    return sorted("".join("FT"[d.outcome] + "!" * d.forced for d in trail.path.taken) for trail in found.trails)


def over(metrics):
    """A condition in a function, which is another one wherever it is called."""
    return bool(metrics.kl > 1)


ASKED = 500  # numbers that a condition is held against


@pytest.mark.parametrize(
    ("condition", "paths"),
    [
        (lambda a, b, c: a.kl > 1 and float(b.kl) > 1 and c.loss < 3, ["F", "TF", "TTF", "TTT"]),
        (lambda a, b, c: a.kl > 1 or float(b.kl) > 1 or c.loss < 3, ["FFF", "FFT", "FT", "T"]),
        (lambda a, b, c: 0.1 < float(a.kl) < 0.5 and b.loss > 1, ["F", "TF", "TTF", "TTT"]),
        (lambda a, b, c: over(a) and over(b) and over(c), ["F", "TF", "TTF", "TTT"]),
        (lambda a, b, c: any(x.kl > 1 for x in (a, b, c)), ["FFF", "FT", "T"]),
        (lambda a, b, c: all(x.kl > 1 for x in (a, b, c)), ["F", "TF", "TTT"]),
        (lambda a, b, c: float(a.kl) in tuple(range(ASKED)), ["F" * ASKED, "FT", "T"]),
        (lambda a, b, c: [float(a.kl) > 1 for _ in range(5)][4], ["F", "T"]),
    ],
)
def test_conditions_on_one_line_are_asked_one_by_one(condition, paths):
    def program():
        batch = rl.group_advantages(reward.score(actor.generate(flow.take(prompts), n=2)))
        a, b, c = [Short(actor.update(batch, loss=rl.ppo_clip())) for _ in range(3)]
        if condition(a, b, c):
            batch.rewrds.mean()

    found = traced(program)
    assert outcomes(found) == paths
    assert whats(found) == ["the batch has no field 'rewrds' here."]


def test_names_in_one_condition_are_asked_one_by_one():
    def program():
        batch = reward.score(actor.generate(flow.take(prompts)))
        a, b, c = batch.rewards.mean() > 1, batch.rewards.min() > 1, batch.rewards.max() > 1
        if a or b or c:
            flow.log(0, n=batch.count())

    assert outcomes(clean(program)) == ["FFF", "FFT", "FT", "T"]


def test_what_is_known_of_a_step_is_not_overruled():
    def late(step):
        return bool(step > 10)

    def program():
        for step, batch in flow.steps(prompts, 10):
            answers = [late(step) for _ in range(5) if len(actor.generate(batch)) is not None]
            assert len(set(answers)) == 1

    assert len(clean(program).trails) == 4


def more():
    return actor.generate(flow.take(prompts)).select("prompt_ids", "response_ids")


def refill(batch, kl):
    while batch.count() < 9:
        batch = batch.concat(more())


def refill_from_the_data(batch, kl):
    batch = batch.select("prompt_ids")
    while len(batch) < 9:
        batch = batch.concat(flow.take(prompts).select("prompt_ids"))


def narrow(batch, kl):
    while len(batch) > 9:
        batch = batch.filter(batch.prompt_ids.row_sum() > 3)


def measure(batch, kl):
    while True:
        if float(more().response_ids.lengths_column().mean()) > 1:
            break


def count_up_to(batch, kl):
    for n in range(9):
        if n > kl:
            break
        more()


def refill_on_two(batch, kl):
    while len(batch) < 9 and batch.prompt_ids.row_sum().mean() > 3:
        batch = batch.concat(more())


def refill_by_itself(batch, kl):
    return batch if len(batch) >= 9 else refill_by_itself(batch.concat(more()), kl)


def nothing_changes(batch, kl):
    while kl > 1:
        more()


def plain_python(batch, kl):
    n = 0
    while n < kl:
        n += 1


@pytest.mark.parametrize(
    ("loop", "paths"),
    [
        (refill, ["F", "TF", "TTF!"]),
        (refill_from_the_data, ["F", "TF", "TTF!"]),
        (narrow, ["F", "TF", "TTF!"]),
        (measure, ["FFT!", "FT", "T"]),
        (count_up_to, ["FFT!", "FT", "T"]),
        (refill_on_two, ["F", "TF", "TTF", "TTTF", "TTTTF!"]),
        (refill_by_itself, ["FFFT!", "FFT", "FT", "T"]),
        (nothing_changes, ["F", "TF!"]),
        (plain_python, ["F", "TF", "T" * 1000 + "F!"]),
    ],
)
def test_a_loop_on_a_value_goes_round_twice_and_ends(loop, paths):
    def program():
        answers = rl.group_advantages(reward.score(actor.generate(flow.take(prompts), n=2)))
        kl = float(actor.update(answers, loss=rl.ppo_clip()).approx_kl)
        loop(answers.select("prompt_ids", "response_ids"), kl)

    assert outcomes(clean(program)) == paths


def fails_on_a_value(batch, number):
    for _ in range(4):
        metrics = actor.update(batch, loss=rl.ppo_clip())
        if float(metrics.approx_kl) > 0.1:
            raise RuntimeError("diverged")


def holds_a_value(batch, number):
    for _ in range(4):
        assert float(actor.update(batch, loss=rl.ppo_clip()).approx_kl) < 0.1


def both_of_them(batch, number):
    fails_on_a_value(batch, number)
    holds_a_value(batch, number)


def asks_what_is_known(batch, number):
    base = reward.score(actor.generate(flow.take(prompts))) if number > 1 else None
    for _ in range(40):
        more()
        if number > 1:
            base.rewards.mean()


@pytest.mark.parametrize(
    ("loop", "paths"),
    [
        (fails_on_a_value, ["FFFF"]),
        (holds_a_value, ["TTTT"]),
        (both_of_them, ["FFFFTTTT"]),
        (asks_what_is_known, ["F", "T"]),
    ],
)
def test_a_loop_that_ends_by_itself_is_not_left(loop, paths):
    def program():
        answers = rl.group_advantages(reward.score(actor.generate(flow.take(prompts), n=2)))
        loop(answers, float(answers.rewards.mean()))

    found = clean(program)
    assert outcomes(found) == paths and not any("AttributeError" in lint.what for lint in found.lints)


def test_the_number_of_paths_has_a_cap_that_is_reported():
    def program():
        for step, batch in flow.steps(prompts, 10):
            n = sum(1 for i in range(8) if step > i)
            flow.log(step, n=n, rows=batch.count())

    found = clean(program)
    assert found.capped and len(found.trails) == PATH_CAP
    [lint] = found.lints
    assert lint.kind == "paths" and f"only {PATH_CAP} of the program's paths were followed" in lint.what
    assert lint.at.text == "def program():"


def test_a_smaller_cap():
    def program():
        for step, batch in flow.steps(prompts, 10):
            if step > 1:
                flow.log(step, n=batch.count())

    assert len(trace(program, {}, name="program", cap=3).trails) == 3
    assert not trace(program, {}, name="program", cap=4).capped


# -- mistakes -------------------------------------------------------------------------------------------------------


def test_a_mistake_on_a_rare_path_is_found():
    def program():
        for step, batch in flow.steps(prompts, 10):
            batch = actor.generate(batch)
            if step % 50 == 0:
                batch.rewards.mean()
            if step % 100 == 99:
                actor.genrate(batch)

    assert whats(traced(program)) == [
        "the batch has no field 'rewards' here.",
        "actor.genrate is not there; the ops of Actor are ask, entropies, follow, generate, logprobs, save, update.",
    ]


def test_a_mistake_after_a_condition_is_found():
    def program():
        for step, batch in flow.steps(prompts, 10):
            if step > 5:
                flow.log(step, n=batch.count())
            actor.genrate(batch)

    assert len(whats(traced(program))) == 1


def test_python_failing_on_a_path_that_may_not_exist_is_a_remark():
    def program():
        for step, batch in flow.steps(prompts, 10):
            if step == 0:
                first = batch.count()
            flow.log(step, first=first)

    found = clean(program)
    assert {x.kind for x in found.lints} == {"path"}
    assert "where not (step == 0): UnboundLocalError" in found.lints[0].what
    assert not found.whole and found.trails


def test_leaving_python_on_a_rare_path_is_a_remark():
    def program():
        for step, batch in flow.steps(prompts, 10):
            if reward.score(actor.generate(batch)).rewards.mean() < 0:
                sys.exit(f"diverged in step {step}")

    assert "rewards.mean() < 0: SystemExit: diverged in step" in clean(program).lints[-1].what


def test_a_failure_of_one_line_is_remarked_on_once():
    def program():
        for step, batch in flow.steps(prompts, 10):
            if step == 0:
                first = batch.count()
            if step % 2 == 0:
                flow.log(step, n=batch.count())
            flow.log(step, first=first)

    assert [lint.kind for lint in clean(program).lints] == ["path"]


@pytest.mark.parametrize(
    ("act", "cause", "fix"),
    [
        (lambda: rl.stf(), "AttributeError: module 'flowrl.rl' has no attribute 'stf'.", "Did you mean 'sft'?"),
        (lambda: promts, "NameError: name 'promts' is not defined.", "Did you mean 'prompts'?"),  # noqa: F821
        (
            lambda: flow.take(prompts, rows=4),
            "TypeError: Flow.take() got an unexpected keyword argument 'rows'.",
            "Mend",
        ),
    ],
)
def test_a_name_that_is_not_there_is_an_error_on_a_rare_path_too(act, cause, fix):
    def program():
        for step, batch in flow.steps(prompts, 10):
            flow.log(step, n=batch.count())
            if step % 50 == 49:
                act()

    [error] = traced(program).errors
    assert error.what == f"the program failed while it was traced: {cause}"
    assert error.fix.startswith(fix)


def test_the_waits_of_a_line_are_one_remark():
    def program():
        for step, batch in flow.steps(prompts, 10):
            batch = reward.score(actor.generate(batch, n=2))
            while batch.rewards.mean() < 0.1 and batch.count() < 8:
                batch = batch.concat(reward.score(actor.generate(flow.more(1), n=2)))
            flow.log(step, n=batch.count())

    [lint] = clean(program).lints
    assert lint.what == "this line waits for actor.generate, reward.score: steps cannot overlap past it."


def test_numpys_numbers_are_numbers_beside_a_field():
    def program():
        for step, batch in flow.steps(prompts, 10):
            rewards = reward.score(actor.generate(batch)).rewards
            twice = np.float64(2) * rewards - np.float32(1)
            flow.log(step, mean=twice.mean(), above=(np.float64(1) < rewards).mean())

    clean(program)


def test_python_failing_on_every_path_is_an_error_with_the_line():
    def program():
        for step, batch in flow.steps(prompts, 10):
            if step > 3:
                flow.log(step, n=batch.count())
            {}["missing"]

    [error] = traced(program).errors
    assert error.what == "the program failed while it was traced: KeyError: 'missing'."
    assert error.at.text.startswith('{}["missing"]')


def test_an_error_inside_a_library_names_the_line_of_the_script():
    def program():
        import json

        json.loads("{")

    [error] = traced(program).errors
    assert error.at.file == __file__ and error.at.text == 'json.loads("{")'


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (lambda batch: list(batch), "a program does not go through the rows of a batch."),
        (lambda batch: "rewards" in batch, "whether a batch has 'rewards' cannot be asked in a program."),
        (lambda batch: setattr(batch, "x", 1), "a batch never changes: 'x' cannot be assigned."),
        (lambda batch: batch.__setitem__("x", 1), "a batch never changes: 'x' cannot be assigned."),
        (lambda batch: batch.prompt_ids.median(), "a field has no 'median'."),
        (lambda batch: batch.count().item(), "a number has no 'item'."),
        (lambda batch: actor.engine, "actor.engine is no op: it can be called on its rank only;"),
        (lambda batch: batch | 3, "a | b joins two batches; the right one is int."),
        (lambda batch: batch.filter([True]), "filter takes a bool field of the batch."),
        (lambda batch: batch.with_columns({"x": 1.0}), "with_columns: 'x' takes a field, and was given float 1.0."),
        (lambda batch: batch.with_columns({"prompt": batch.prompt_ids}), "with_columns adds 'prompt', which the batch"),
        (lambda batch: batch.rename(prompt="prompt_ids"), "rename adds 'prompt_ids', which the batch already has."),
        (lambda batch: batch.select("promt"), "the batch has no field 'promt' here."),
        (lambda batch: float(batch.prompt_ids), "'prompt_ids' has a value for each row, and float() takes one."),
        (lambda batch: flow.take(3), "flow.take(source, count) takes a source of data, and was given int 3."),
        (
            lambda batch: actor.generate(batch, into="mine"),
            "actor.generate: into= takes a dict of names, and was given str 'mine'.",
        ),
        (lambda batch: actor.generate(), "actor.generate: missing a required argument: 'batch'."),
        (lambda batch: batch + batch, "batches are not added."),
        (lambda batch: np.exp(batch.prompt_ids), "NumPy takes no field: its values are not there in a program."),
        (lambda batch: np.std([batch.prompt_ids]), "NumPy takes no field: its values are not there in a program."),
        (lambda batch: torch.exp(batch.prompt_ids), "torch.exp takes no field: its values are not there in a program."),
        (lambda batch: torch.stack([batch.prompt_ids]), "torch.stack takes no field: its values are not there"),
        (lambda batch: batch.prompt_ids + flow.more(1).prompt_ids, "+ takes the same rows on both sides;"),
    ],
)
def test_what_a_value_cannot_do_is_said_in_the_words_of_the_language(act, what):
    def program():
        for _step, batch in flow.steps(prompts, 10):
            act(batch)

    found = traced(program)
    assert len(found.errors) == 1, whats(found)
    assert found.errors[0].what.startswith(what)
    assert found.errors[0].at.file == __file__


def test_a_field_takes_the_place_of_another_as_the_fix_says():
    def twice():
        for _step, batch in flow.steps(prompts, 10):
            batch.with_columns({"prompt": batch.prompt_ids})
            batch.rename(prompt_ids="prompt")

    def dropped():
        for _step, batch in flow.steps(prompts, 10):
            batch.drop("prompt").with_columns({"prompt": batch.prompt_ids})
            batch.drop("prompt").rename(prompt_ids="prompt")

    either = "if it takes the place of that one, or give it another name."
    assert [error.fix for error in traced(twice).errors] == [
        f"Write batch.drop('prompt').with_columns(...) {either}",
        f"Write batch.drop('prompt').rename(...) {either}",
    ]
    assert not traced(dropped).errors


def test_hasattr_and_getattr_work_on_handles_and_values():
    def program():
        for step, batch in flow.steps(prompts, 10):
            assert not hasattr(actor, "with_parameters") and hasattr(actor, "generate")
            assert getattr(batch.count(), "item", None) is None
            flow.log(step, n=batch.count())

    clean(program)


def test_one_mistake_is_told_once():
    def program():
        for step, batch in flow.steps(prompts, 10):
            if step > 2:
                flow.log(step, n=batch.count())
            flow.log(step, reward=batch.rewards.mean())

    assert len(whats(traced(program))) == 1


def test_a_batch_of_the_step_before_has_other_rows():
    def program():
        old = None
        for step, batch in flow.steps(prompts, 10):
            if old is not None:
                batch = batch | old.rename(prompt="before").select("before")
            old = batch.select("prompt")
            flow.log(step, n=batch.count())

    [error] = traced(program).errors
    assert error.what.startswith("a | b takes the same rows on both sides; the left has the rows drawn at line")


def test_the_same_n_gives_the_same_rows():
    def program(n=4):
        for step, batch in flow.steps(prompts, 10):
            one = actor.generate(batch, n=n).select("rollout_logprobs").rename(rollout_logprobs="first")
            flow.log(step, x=(one | actor.generate(batch, n=4)).first.mean())

    clean(program)


def test_the_same_number_of_a_step_gives_the_same_rows():
    def program(further=0):
        for step, batch in flow.steps(prompts, 10):
            n = 2 + step // 100
            one = actor.generate(batch, n=n).select("rollout_logprobs").rename(rollout_logprobs="first")
            flow.log(step, x=(one | actor.generate(batch, n=n + further if further else n)).first.mean())

    clean(program)
    assert len(whats(traced(program, further=1))) == 1


def test_one_mask_keeps_the_same_rows():
    def program(other=0):
        for step, batch in flow.steps(prompts, 10):
            batch = reward.score(actor.generate(batch, n=4))
            twice = batch.with_columns({"twice": 2 * batch.rewards})
            mask = batch.rewards > 0
            kept = batch.filter(mask) | twice.filter(batch.rewards > other if other else mask)
            ended = batch.filter(batch.finished) | twice.filter(twice.finished)
            flow.log(step, kept=kept.twice.mean(), ended=ended.twice.mean())

    clean(program)
    assert len(whats(traced(program, other=1))) == 1


def test_joining_a_batch_with_a_part_of_itself_changes_nothing():
    def program():
        for step, batch in flow.steps(prompts, 10):
            batch = reward.score(actor.generate(batch))
            flow.log(step, x=(batch | batch.select("rewards", "prompt")).rewards.mean())

    clean(program)


# -- fields that the body of an op reads ------------------------------------------------------------------------------


@fl.op(reads={"batch": "rewards", "other": "prompt"}, adds="weight: f32[]", cost="local")
def weigh(batch, other):
    return {"weight": [len(a) + len(b) for a, b in zip(batch["answer"], other.answer, strict=True)]}


@fl.op(reads=lambda shape: "rewards, answer" if shape.call["long"] else "rewards", adds="weight: f32[]", cost="local")
def weigh_some(batch, *, long=False):
    return {"weight": [len(text) for text in batch.answer] if long else batch.rewards}


@fl.op(reads=None, adds="weight: f32[]", cost="local")
def weigh_all(batch):
    return {"weight": [len(text) for text in batch.answer]}


def test_an_op_whose_body_reads_what_it_does_not_declare():
    def program():
        for step, batch in flow.steps(prompts, 10):
            scored = reward.score(actor.generate(batch))
            flow.log(step, weight=weigh(scored, scored).weight.mean())

    errors = traced(program).errors
    assert [e.what for e in errors] == ["user.weigh reads 'answer', which its reads= does not name."] * 2
    assert [e.have for e in errors] == ["rewards", "prompt"]
    assert errors[0].fix == 'Write reads={"batch": "rewards, answer", "other": "prompt"}.'
    assert errors[1].fix == 'Write reads={"batch": "rewards", "other": "prompt, answer"}.'
    assert {(e.at.file, e.at.line) for e in errors} == {(__file__, weigh.fn.__code__.co_firstlineno + 2)}


def test_an_op_that_is_handed_all_fields_or_says_by_call_what_it_reads_is_left_alone():
    def program():
        for step, batch in flow.steps(prompts, 10):
            scored = reward.score(actor.generate(batch))
            flow.log(step, some=weigh_some(scored).weight.mean(), all=weigh_all(scored).weight.mean())

    clean(program)


# -- a number per row where one per token is read ---------------------------------------------------------------------


@fl.op(reads="rewards", adds="advantages: f32[]", cost="local")
def by_row(batch):
    return {"advantages": batch.rewards}


@fl.op(reads="margin: f32[*response]", adds="most: f32[]", cost="local")
def most(batch):
    return {"most": batch.margin}


@pytest.mark.parametrize(
    ("spread", "fix"),
    [
        (
            lambda batch: batch.with_columns({"advantages": batch.rewards}),
            'Write batch = rl.advantages(batch, center="none", scale="none"), or '
            'batch.with_columns({"advantages": batch.response_mask * batch.rewards}): each token gets the number',
        ),
        (
            lambda batch: batch.with_columns({"advantages": batch.rewards - 0.5}),
            'Write batch.with_columns({"advantages": batch.response_mask * (...)}): each token gets the number',
        ),
        (by_row, "Make user.by_row give f32[*response]: batch.response_mask * ... is the number of its row"),
        (
            lambda batch: batch.with_columns({"advantages": batch.finished}),
            "Make actor.generate give f32[*response], or read another field.",
        ),
        (lambda batch: batch.with_columns({"advantages": batch.response_mask * (batch.rewards - 0.5)}), None),
        (lambda batch: rl.advantages(batch, center="none", scale="none"), None),
    ],
)
def test_a_number_per_row_where_one_per_token_is_read_says_how_it_is_spread(spread, fix):
    def program():
        for step, batch in flow.steps(prompts, 10):
            batch = spread(reward.score(actor.generate(batch)))
            flow.log(step, actor.update(batch, loss=rl.reinforce()))

    fixes = [e.fix for e in traced(program).errors]
    assert fixes == [] if fix is None else len(fixes) == 1 and fixes[0].startswith(fix)


def test_a_field_of_another_name_is_spread_alike_and_one_of_the_data_cannot_be():
    def program():
        for step, batch in flow.steps(fl.data.rows([{"prompt": "1+2=", "margin": 1.0}], batch=1), 10):
            scored = reward.score(actor.generate(batch))
            other = scored.drop("margin").with_columns({"margin": scored.rewards})
            flow.log(step, data=most(scored).most.mean(), other=most(other).most.mean())

    errors = traced(program).errors
    assert [e.fix.partition(":")[0] for e in errors if "margin" in e.what][-1] == 'Write batch.with_columns({"margin"'
    assert "batch.response_mask * batch.rewards" in errors[-1].fix
    assert all("response_mask" not in e.fix for e in errors[:-1])
