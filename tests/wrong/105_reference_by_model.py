"""ModelError: model=<Actor 'actor'> is no model.
  at   tests/wrong/105_reference_by_model.py:18   ref = flow.worker(fl.Reference, model=actor)
  fix  Write of=actor, to a worker that takes of=.
"""

# A reference to the actor, where a model is asked for
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
ref = flow.worker(fl.Reference, model=actor)
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = ref.logprobs(reward.score(actor.generate(batch, n=2)))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip(kl=0.01)))
