"""ProgramError: ppo_clip: kl=True is not a number of at least 0.
  at   tests/wrong/99_kl_without_a_number.py:29   flow.log(step, actor.update(batch, loss=rl.ppo_clip(kl=True)))
  fix  Give kl= the weight of the KL, such as 0.001.

grpo: 1 error, 0 lints
"""

# A coefficient that is switched on where it should be given
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-6)
ref = flow.worker(fl.Reference, of=actor)
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = ref.logprobs(reward.score(actor.generate(batch, n=2)))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip(kl=True)))
