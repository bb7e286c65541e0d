"""RowsError: rl.collect takes rows that were made of those of the batch, which are 8 for each of the rows drawn at line 25; it was given 2 for each of the rows drawn at line 27.
  at   tests/wrong/163_collected_from_other_rows.py:29   batch = rl.collect(batch, said, rewards="mean")
  fix  Give it what was made of this batch, by judge.ask(batch, ...) and judge.generate(...), say.

grpo: 1 error, 0 lints
"""

# Verdicts about other rows than those that are rewarded.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)
heldout = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
judge = flow.worker(fl.Actor, model="Qwen/Qwen3-4B", lr=None)
reward = flow.worker(fl.FunctionReward, lambda response: float(response == "yes"), tokenizer=judge)


@flow.program
def grpo(steps: int = 10):
    """The wrong rows are asked about."""

    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, n=8)
        other = flow.take(heldout)
        said = reward.score(judge.generate(judge.ask(other, "Is {prompt} hard?"), n=2))
        batch = rl.collect(batch, said, rewards="mean")
        flow.log(step, actor.update(rl.group_advantages(batch), loss=rl.ppo_clip()))
