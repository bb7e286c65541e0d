"""Values of arguments: what a rule accepts, and that the trace, constructors, losses and real calls hold to it."""

import math

import numpy
import pytest
import torch

import flowrl as fl
from flowrl import rl
from flowrl.batch import Batch
from flowrl.errors import ModelError, ProgramError, WorkerError
from flowrl.graph.ops.allowed import flag, instance, number, numbers, one_of, text, whole
from flowrl.graph.ops.function_spec import Spec
from flowrl.workers.model_options import Optim, Sampling

SHARE = number(above=0, most=1)
RATE = whole(least=1, fixes={-1: "Leave it out."})


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        (SHARE, [1, 0.5, numpy.float32(0.5), torch.tensor(0.5)], [0, 1.5, "0.5", None, True, math.nan, [0.5]]),
        (number(least=0), [0, 1e300], [-1e-9, math.inf, math.nan]),
        (number(least=0, finite=False), [math.inf], [-math.inf, math.nan]),
        (number(below=1), [-5, 0.99], [1, math.inf]),
        (RATE, [1, numpy.int64(3), 10**30], [0, 1.0, -1, "3", True, None]),
        (RATE | None, [None, 2], [0]),
        (flag(), [True, False, numpy.True_], [0, 1, "yes", None]),
        (text(), ["", "x"], [1, None, b"x"]),
        (one_of("a", "b"), ["a"], ["c", 1, None]),
        (numbers(2, least=0, below=1), [(0.9, 0.99), [0, 0]], [0.9, (0.9,), (0.9, 1.0), ("a", "b")]),
        (instance("Lora", form="fl.Lora(...)"), [fl.Lora(r=2)], [16, {"r": 16}, None]),
    ],
)
def test_a_rule_accepts_what_it_says(rule, right, wrong):
    assert [v for v in right if not rule.accepts(v)] == []
    assert [v for v in wrong if rule.accepts(v)] == []


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (number(), "a number"),
        (SHARE, "a number above 0 and at most 1"),
        (RATE | None, "a whole number of at least 1, or None"),
        (numbers(2, least=0, below=1), "2 numbers, each of at least 0 and below 1"),
        (flag(), "True or False"),
    ],
)
def test_a_rule_reads_as_a_sentence(rule, said):
    assert str(rule) == said


@pytest.mark.parametrize(
    ("rule", "value", "fix"),
    [
        (RATE, -1, "Leave it out."),
        (RATE, 1000.0, "Write x=1000."),
        (RATE, "3", "Write x=3."),
        (RATE, True, "Give x= a whole number of at least 1."),
        (SHARE, "0.5", "Write x=0.5."),
        (SHARE, 95, "Give x= a number above 0 and at most 1."),
        (one_of("linear", "cosine"), "cosin", 'Write x="cosine".'),
    ],
)
def test_the_fix_is_the_value_that_was_meant(rule, value, fix):
    assert rule.mend("x", value) == fix


@fl.op(reads="rewards", adds="powered: f32[]", cost="local")
@fl.takes(power=number(above=0))
def powered(batch, *, power: float = 2.0, times: int = 1, kind: str | None = None):
    """An op of a user: ``power`` has a rule, ``times`` and ``kind`` have their annotations."""
    return {"powered": batch.rewards**power * times}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"power": 0}, "user.powered: power=0 is not a number above 0."),
        ({"times": 1.5}, "user.powered: times=1.5 is not a whole number."),
        ({"kind": 3}, "user.powered: kind=3 is not text, or None."),
    ],
)
def test_an_op_of_a_user_holds_to_its_rules_and_annotations(wrong, said):
    rows = Batch.of(2, rewards=[1.0, 2.0])
    assert powered(rows, power=3, kind=None).powered.to_list() == [1.0, 8.0]
    with pytest.raises(ProgramError) as error:
        powered(rows, **wrong)
    assert error.value.what == said


SOURCE = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def test_the_trace_finds_all_values_of_a_call_and_leaves_those_that_the_program_computes():
    flow = fl.Flow("f")
    actor = flow.worker(fl.Actor, model="a", name="actor")

    @flow.program
    def f(steps: int = 3):
        for step, batch in flow.steps(SOURCE, steps):
            batch = actor.generate(batch, n=0, temperature=0.0, top_p=1.5)
            n = step + 1
            batch = actor.generate(batch.select("prompt_ids"), n=n, temperature=batch.tokens.mean())
            flow.log(step, tokens=batch.tokens.mean())

    assert [e.what for e in flow.check("f").errors] == [
        "actor.generate: n=0 is not a whole number of at least 1.",
        "actor.generate: temperature=0.0 is not a number above 0.",
        "actor.generate: top_p=1.5 is not a number above 0 and at most 1.",
    ]
    assert all(e.at.text.startswith("batch = actor.generate(batch, n=0") and e.fix for e in flow.check("f").errors)


@pytest.mark.parametrize(
    "make",
    [
        lambda flow: flow.worker(fl.Actor, model="a", lr="1e-6"),
        lambda flow: flow.worker(fl.Actor, model="a", warmup=0.1),
        lambda flow: flow.worker(fl.Actor, model="a", betas=0.9),
        lambda flow: flow.worker(fl.Actor, model="a", lora=16),
        lambda flow: flow.worker(fl.Actor, model="a", gradient_checkpointing="yes"),
        lambda flow: flow.worker(fl.Actor, model="a", dtype="bfloat16"),
        lambda flow: flow.worker(fl.Critic, model="a", lr=-1.0),
        lambda flow: flow.worker(fl.FunctionReward, len, timeout="30s"),
    ],
)
def test_constructors_refuse_at_the_line_of_the_worker(make):
    with pytest.raises(WorkerError) as error:
        make(fl.Flow("f"))
    assert error.value.at.file == __file__ and error.value.fix


def test_a_worker_of_a_user_holds_to_its_annotations():
    class Novelty(fl.Worker):
        def __init__(self, weight: float = 0.1, names: tuple[str, ...] = ()):
            self.weight = weight

    flow = fl.Flow("f")
    flow.worker(Novelty, weight=1, name="novelty")
    with pytest.raises(WorkerError, match=r"Novelty: weight='0.1' is not a number\.") as error:
        flow.worker(Novelty, weight="0.1")
    assert error.value.fix == "Write weight=0.1."


@pytest.mark.parametrize("make", [lambda: Sampling(top_p=0), lambda: Optim(lr=math.nan), lambda: fl.Lora(r=0)])
def test_records_hold_to_the_rules_of_their_workers(make):
    with pytest.raises(ModelError) as error:
        make()
    assert error.value.at is not None and error.value.at.file == __file__, "not the code that a record is made by"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: rl.ppo_clip(clip=-0.2), "rl.gates.ppo: clip=-0.2 is not a number of at least 0."),
        (lambda: rl.value_clip(clip=0), "rl.value_clip: clip=0 is not a number above 0, or None."),
    ],
)
def test_losses_refuse_at_the_line_that_makes_them(make, said):
    with pytest.raises(ProgramError) as error:
        make()
    assert error.value.what == said and error.value.fix


def test_a_loss_of_a_user_holds_to_its_annotations_also_once_a_computed_parameter_is_known():
    @rl.loss(reads="advantages, response_mask")
    def scaled(x, *, scale: float = 1.0):
        return -scale * x["advantages"] * x.predicted

    @fl.op(reads="rewards", updates="weights")
    def train(batch, *, loss: Spec):
        return fl.Metrics(loss=0.0)

    rows = Batch.of(2, rewards=[1.0, 2.0], advantages=[1.0, 2.0], response_mask=[True, True])
    assert train(rows, loss=scaled(scale=2)) == {"loss": 0.0}
    for loss in (scaled(scale="2"), scaled(scale=1.0).with_parameters({"scale": "2"})):
        with pytest.raises(ProgramError, match=r"scaled: scale='2' is not a number\."):
            train(rows, loss=loss)
    with pytest.raises(ProgramError, match=r"ppo_clip: kl=True is not a number of at least 0\."):
        train(
            rows.with_columns({"ref_logprobs": rows.rewards, "rollout_logprobs": rows.rewards}),
            loss=rl.ppo_clip(kl=True),
        )


def test_takes_refuses_a_parameter_that_is_not_there_and_what_is_no_function():
    with pytest.raises(ProgramError, match="has no parameter 'pover'") as error:

        @fl.takes(pover=number())
        def powered_again(batch, *, power=2.0):
            return {}

    assert error.value.fix == "Did you mean 'power'?"
    with pytest.raises(ProgramError, match="takes declares arguments of a function"):
        fl.takes(power=number())(powered)
