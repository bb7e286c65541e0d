"""Mistakes that no check can know: the run ends with one error of flowrl, at the user's line, with a fix, no traceback."""

import runpy
from pathlib import Path

import pytest

import flowrl as fl
from flowrl import rl
from flowrl.errors import FlowError

TASK = runpy.run_path(str(Path(__file__).parents[2] / "algorithms" / "tasks" / "arithmetic.py"))
PROMPTS = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=2)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


def returns_nothing(response: str, answer: str) -> float:
    if response == "never":
        return 1.0


def returns_text(response: str) -> float:
    return "good"


@rl.loss(reads="advantages, response_mask")
def means(x):
    return -(x["advantages"] * x.predicted).mean()


@rl.loss(reads="advantages, response_mask", per="row")
def by_token(x):
    return -x["advantages"] * x.predicted


@rl.loss(reads="advantages, response_mask")
def gathers(x):
    name = "rew" + "ards"
    return x[name] * x.predicted


@rl.loss(reads="advantages, response_mask")
def forgets_the_policy(x):
    return -x["advantages"]


@fl.op(reads="rewards", adds="scaled: f32[]", cost="local")
def gathers_a_column(batch):
    name = "ans" + "wer"
    return {"scaled": [len(text) for text in batch[name].to_list()]}


@fl.op(reads="rewards", adds="scaled: f32[]", cost="local")
def returns_the_batch(batch):
    return batch.with_columns({"scaled": batch.rewards * 2})


@fl.op(reads="rewards", adds="scaled: f32[]", cost="local")
def returns_another_name(batch):
    return {"scale": batch.rewards * 2}


def unseen(**arguments):
    """Arguments of an update on a path that no trace takes, as in it the step is no number yet."""
    return lambda step: arguments if type(step) is int else {}


def run(folder, *, reward=exact, loss=None, op=None, how=lambda step: {}):
    flow = fl.Flow("f")
    actor = flow.worker(fl.Actor, TASK["MODEL"], max_tokens=3, name="actor")
    judge = flow.worker(fl.FunctionReward, reward, name="reward")

    @flow.program
    def f(steps: int = 1):
        for step, batch in flow.steps(PROMPTS, steps):
            batch = judge.score(actor.generate(batch, n=2))
            if op is not None:
                batch = op(batch)
            batch = rl.group_advantages(batch)
            metrics = actor.update(batch, loss=loss or rl.ppo_clip(), **how(step))
            flow.log(step, metrics, **({} if op is None else {"scaled": batch.scaled.mean()}))

    assert flow.check().errors == ()
    flow.run(out=folder, quiet=True, save_models=False)


@pytest.mark.parametrize(
    ("program", "what", "line", "fix"),
    [
        ({"reward": returns_nothing}, "it returned None, which is no number", "judge.score(", "Mend the function"),
        ({"reward": returns_text}, "it returned 'good', which is no number", "judge.score(", "Mend the function"),
        ({"loss": means()}, "loss means gave shape [], not one number per response token", "def means(x):", "before"),
        ({"loss": by_token()}, "loss by_token gave shape", "def by_token(x):", "before"),
        ({"loss": gathers()}, "the loss reads x['rewards'], which its reads=", "actor.update(", "Add rewards to"),
        ({"loss": forgets_the_policy()}, "does not depend on x.predicted", "def forgets_the_policy", "Compute it from"),
        (
            {"op": gathers_a_column},
            "user.gathers_a_column reads 'answer', which its",
            "batch[name]",
            'reads="rewards, a',
        ),
        ({"op": returns_the_batch}, "returned Batch, not a dict", "def returns_the_batch", "Return {'scaled': ...}"),
        ({"op": returns_another_name}, "adds 'scaled', but returned 'scale'", "op(batch)", "Make adds="),
        (
            {"how": lambda step: {"epochs": step}},
            "epochs=0 is not a whole number",
            "actor.update(",
            "Give epochs= 1 or",
        ),
        ({"how": unseen(epoch=1)}, "got an unexpected keyword argument 'epoch'", "actor.update(", "Write epochs= for"),
        ({"how": unseen(into=7, mu=1)}, "unexpected keyword argument 'mu'", "actor.update(", "Leave out mu=."),
    ],
)
def test_it_ends_with_what_the_line_and_a_fix(tmp_path, program, what, line, fix):
    with pytest.raises(FlowError) as error:
        run(tmp_path, **program)
    assert what in error.value.what
    assert error.value.at.file == __file__ and line in error.value.at.text
    assert fix in error.value.fix
