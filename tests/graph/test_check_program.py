"""What check reports beyond the trace: workers, several programs, remarks, and its two forms."""

import json

import pytest

import flowrl as fl
from flowrl import rl
from flowrl.errors import UsageError

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)
examples = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")


def flow_of(*names):
    """A flow with some of these workers, by name."""
    flow = fl.Flow("main")
    made = {}
    if "actor" in names:
        made["actor"] = flow.worker(fl.Actor, model="a/model", name="actor")
    if "ref" in names:
        made["ref"] = flow.worker(fl.Reference, of=made["actor"], name="ref")
    if "reward" in names:
        made["reward"] = flow.worker(fl.RewardModel, model="a/model", name="reward")
    return flow, *made.values()


def test_a_right_program_is_fine():
    flow, actor, reward = flow_of("actor", "reward")

    @flow.program
    def main(steps: int = 10):
        for step, batch in flow.steps(prompts, steps):
            batch = rl.group_advantages(reward.score(actor.generate(batch, n=2)))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))

    report = flow.check()
    assert (report.errors, report.lints, report.text()) == ((), (), "main: fine")
    assert report.to_json() == {"program": "main", "errors": [], "lints": []}


def test_a_worker_that_other_parameters_lead_to_is_remarked_and_not_refused():
    flow, actor, reward = flow_of("actor", "reward")
    other = flow.worker(fl.RewardModel, model="a/judge", name="other")
    held = {"critic": [other]}

    def judged(batch, scored):
        return reward.score(batch) if scored else batch

    @flow.program
    def main(steps: int = 10, scored: bool = False):
        for step, batch in flow.steps(examples, steps):
            batch = judged(batch, scored)
            if scored:
                [held["critic"][0] for _ in range(2)]
            flow.log(step, actor.update(batch, loss=rl.sft()))

    report = flow.check()
    assert report.errors == ()
    assert [lint.what for lint in report.lints] == [
        f"worker '{name}' (RewardModel) is called on no path that was followed, with these parameters; it is not "
        "opened, and a call of it ends the run."
        for name in ("reward", "other")
    ]
    assert [lint.at for lint in report.lints] == [reward.at, other.at]


def test_a_worker_is_used_if_any_program_of_the_flow_uses_it():
    flow, actor, reward = flow_of("actor", "reward")

    @flow.program
    def main(steps: int = 10):
        for step, batch in flow.steps(examples, steps):
            flow.log(step, actor.update(batch, loss=rl.sft()))

    [error] = flow.check().errors
    assert error.what == "worker 'reward' (RewardModel) is never used by a program of this flow."

    @flow.program
    def evaluate(steps: int = 1):
        for step, batch in flow.steps(prompts, steps):
            flow.log(step, reward=reward.score(actor.generate(batch)).rewards.mean())

    assert flow.check().errors == () == flow.check("evaluate").errors
    assert flow.workers_of(flow.trace("main")) == ("actor",)
    assert flow.workers_of(flow.trace("evaluate")) == ("actor", "reward")


def test_a_worker_that_another_copies_is_used():
    flow, _, ref, reward = flow_of("actor", "ref", "reward")

    @flow.program
    def main(steps: int = 10):
        for step, batch in flow.steps(examples, steps):
            batch = reward.score(ref.logprobs(batch))
            flow.log(step, ref=batch.ref_logprobs.mean(), reward=batch.rewards.mean())

    assert flow.check().errors == ()
    assert flow.workers_of(flow.trace()) == ("actor", "ref", "reward")
    assert [w.name for w in flow.graph().workers] == ["ref", "reward"]


def test_nothing_is_said_of_unused_workers_where_a_program_did_not_come_to_its_end():
    flow, actor, reward = flow_of("actor", "reward")

    @flow.program
    def main(steps: int = 10):
        for step, batch in flow.steps(prompts, steps):
            batch = actor.genrate(batch)
            flow.log(step, reward=reward.score(batch).rewards.mean())

    assert [e.what.split(";")[0] for e in flow.check().errors] == ["actor.genrate is not there"]


def test_work_for_nothing_is_a_remark():
    flow, actor, ref, reward = flow_of("actor", "ref", "reward")

    @flow.program
    def main(steps: int = 10):
        for step, batch in flow.steps(prompts, steps):
            batch = ref.logprobs(reward.score(actor.generate(batch, n=2)))
            batch = rl.group_advantages(batch)
            flow.log(step, actor.update(batch, loss=rl.ppo_clip()))

    report = flow.check()
    assert report.errors == ()
    [lint] = report.lints
    assert lint.report().splitlines()[0] == "lint unread: ref.logprobs adds ref_logprobs, which nothing reads."
    assert report.text().endswith("main: 0 errors, 1 lint")


def test_what_is_only_logged_is_read():
    flow, actor, reward = flow_of("actor", "reward")

    @flow.program
    def main(steps: int = 10):
        for step, batch in flow.steps(prompts, steps):
            flow.log(step, reward=reward.score(actor.generate(batch)).rewards.mean())

    assert flow.check().lints == ()


def test_what_goes_through_a_filter_is_read():
    flow, actor, ref, reward = flow_of("actor", "ref", "reward")

    @flow.program
    def main(steps: int = 10):
        for step, batch in flow.steps(prompts, steps):
            batch = ref.logprobs(reward.score(actor.generate(batch, n=2)))
            batch = rl.group_advantages(batch.filter(batch.group_std("rewards") > 0))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip(kl=0.1)))

    assert flow.check().lints == ()


def test_workers_have_names_of_their_own():
    flow, actor = flow_of("actor")
    judges = [flow.worker(fl.RewardModel, model=f"judge-{i}") for i in range(2)]
    odd = [flow.worker(fl.RewardModel, model="x", name=name) for name in ("rl", "manifest")]

    @flow.program
    def main(steps: int = 10):
        for step, batch in flow.steps(prompts, steps):
            batch = actor.generate(batch)
            for i, judge in enumerate([*judges, *odd]):
                batch = judge.score(batch, into={"rewards": f"score_{i}"})
            flow.log(step, **{f"score_{i}": batch[f"score_{i}"].mean() for i in range(4)})

    assert [e.what for e in flow.check().errors] == [
        "several workers of this line are called 'rewardmodel'.",
        "a worker is called 'rl', which is the name of a library.",
        "a worker is called 'manifest', which is the name of a file in every checkpoint.",
    ]


def says_yes(response: str) -> float:
    return float(response == "yes")


def test_a_text_that_names_a_worker_is_no_tokenizer(tmp_path, monkeypatch):
    def errors(said: str, model: str = "a/judge"):
        flow, actor = flow_of("actor")
        judge = flow.worker(fl.Actor, model=model, lr=None, name="judge")
        verdict = flow.worker(fl.FunctionReward, says_yes, tokenizer=said, name="verdict")
        mine = fl.data.rows([{"prompt": "1+2="}], batch=1, tokenizer=said)

        @flow.program
        def main(steps: int = 10):
            for step, batch in flow.steps(mine, steps):
                asked = judge.ask(actor.generate(batch), "{prompt} {response}?", tokenizer=said)
                flow.log(step, grade=verdict.score(judge.generate(asked)).rewards.mean())

        return [error for error in flow.check().errors if "tokenizer='judge'" in error.what]

    found = errors("judge")
    assert [error.what for error in found] == [
        f"{who} has tokenizer='judge', the name of a worker: as a text it would be loaded from the hub."
        for who in ("verdict", "mine", "judge.ask")
    ]
    for error in found:
        assert error.fix == "Give the worker itself, tokenizer=judge, below the line that declares it."
        assert error.at is not None and error.at.file.endswith("test_check_program.py")
    assert errors("judge", model="judge") == errors("a/judge") == [], "a model may be called so too"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "judge").mkdir()
    assert errors("judge") == [], "and a folder"


def test_parameters_change_what_is_checked():
    flow, actor, reward = flow_of("actor", "reward")

    @flow.program
    def main(kl: float = 0.0):
        for step, batch in flow.steps(prompts, 3):
            batch = rl.group_advantages(reward.score(actor.generate(batch, n=2)))
            flow.log(step, actor.update(batch, loss=rl.ppo_clip(kl=kl)))

    assert flow.check().errors == ()
    assert "reads 'ref_logprobs'" in flow.check(kl=0.1).errors[0].what
    with pytest.raises(UsageError, match="program 'main' has no parameter 'lk'"):
        flow.check(lk=0.1)


def test_a_program_that_needs_parameters_does_not_stop_the_check_of_another():
    flow, actor, reward = flow_of("actor", "reward")

    @flow.program
    def main():
        for step, batch in flow.steps(examples, 3):
            flow.log(step, actor.update(batch, loss=rl.sft()))

    @flow.program
    def score(path: str):
        for step, batch in flow.steps(fl.data.jsonl(path, batch=1)):
            flow.log(step, reward=reward.score(actor.generate(batch)).rewards.mean())

    assert flow.check().errors == ()
    with pytest.raises(UsageError, match="program 'score' needs a value for 'path'"):
        flow.check("score")


def test_the_record_names_file_line_and_fix():
    flow, actor = flow_of("actor")

    @flow.program
    def main():
        for step, batch in flow.steps(prompts):
            flow.log(step, actor.update(batch, loss=rl.sft()))

    record = json.loads(json.dumps(flow.check().to_json()))
    first = record["errors"][0]
    assert list(first) == ["error", "what", "file", "line", "text", "have", "fix"]
    assert first["error"] == "FieldError" and first["file"] == __file__
    assert first["text"] == "flow.log(step, actor.update(batch, loss=rl.sft()))"
    assert first["have"] == "answer, prompt, prompt_ids" and first["fix"].startswith(
        "Give the source response=, the column to learn from"
    )


def test_a_loss_is_one_that_the_worker_can_train():
    flow, actor, reward = flow_of("actor", "reward")
    critic = flow.worker(fl.Critic, model="a/model", name="critic")

    @flow.program
    def main():
        for step, batch in flow.steps(prompts):
            batch = rl.gae(critic.values(reward.score(actor.generate(batch))))
            actor.update(batch, loss=rl.value_clip())
            actor.update(batch, loss=None)
            flow.log(step, critic.update(batch, loss=rl.sft()))

    assert [e.what for e in flow.check().errors] == [
        "loss value_clip is one of values; this update trains logprobs.",
        "actor.update: loss= takes a loss, and was given None.",
        "loss sft is one of logprobs; this update trains values.",
    ]


def test_a_model_of_another_name_may_have_another_tokenizer():
    """A lint where files here do not tell, once for each pair, and none where an error says more."""

    def lints(reward="a/judge", policy="a/model", op="score", wrong=0.0):
        flow = fl.Flow("main")
        actor = flow.worker(fl.Actor, model=policy, name="actor")
        judge = flow.worker(fl.RewardModel, model=reward, name="judge")

        @flow.program
        def main(steps: int = 10):
            for step, batch in flow.steps(prompts, steps):
                batch = actor.generate(batch, n=2)
                again = getattr(judge, op)(batch, into={"rewards": "again"})
                batch = rl.group_advantages(getattr(judge, op)(batch))
                flow.log(step, actor.update(batch, loss=rl.ppo_clip(kl=wrong)), again=again.again.mean())

        return [lint.report() for lint in flow.check().lints]

    [said] = lints()
    assert said.startswith("lint tokenizer: judge.score reads 'tokens' that a/model made, and has the model a/judge. ")
    assert "If they differ, write judge.score_text(batch)." in said and "test_check_program.py" in said
    assert lints("a/model") == lints(op="score_text") == lints(wrong=0.1) == lints("llama-7b") == []
    built = fl.Model(config={"model_type": "qwen2"}, tokenizer=prompts_tokenizer)
    assert lints(built) == lints(policy=built) == [], "what a function builds is compared when models open"


def prompts_tokenizer():
    raise AssertionError("check builds no tokenizer")
