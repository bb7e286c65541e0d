"""ProgramError: rl.collect: rewards='median' is none of mean, sum, min, max.
  at   tests/wrong/165_collected_how.py:25   batch = rl.collect(batch, said, rewards="median")
  fix  Write rewards="mean".

grpo: 1 error, 0 lints
"""

# A word that is no way to make one number of several.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
judge = flow.worker(fl.Actor, model="Qwen/Qwen3-4B", lr=None)
reward = flow.worker(fl.FunctionReward, lambda response: float(response == "yes"), tokenizer=judge)


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, n=8)
        said = reward.score(judge.generate(judge.ask(batch, "Is {response} right?")))
        batch = rl.collect(batch, said, rewards="median")
        flow.log(step, actor.update(rl.group_advantages(batch), loss=rl.ppo_clip()))
