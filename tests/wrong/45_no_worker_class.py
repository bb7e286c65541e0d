"""WorkerError: flow.worker takes a worker class, and was given the function exact.
  at   tests/wrong/45_no_worker_class.py:18   reward = flow.worker(exact)
  fix  Wrap a reward function: flow.worker(fl.FunctionReward, exact).
"""

# A function is declared as a worker.
import flowrl as fl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("sample")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(exact)


@flow.program
def sample(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch))
        flow.log(step, reward=batch.rewards.mean())
