"""WorkerError: A reward is one function, not float 1.0.
  at   tests/wrong/44_reward_is_no_function.py:18   reward = flow.worker(fl.FunctionReward, exact())
  fix  Give fn(prompt, response, **columns) -> float.
"""

# A reward function is called where it should be named.
import flowrl as fl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str = "", answer: str = "") -> float:
    return float(response == answer)


flow = fl.Flow("sample")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.FunctionReward, exact())


@flow.program
def sample(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch))
        flow.log(step, reward=batch.rewards.mean())
