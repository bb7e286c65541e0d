"""WorkerError: several workers of this line are called 'rewardmodel'.
  at   tests/wrong/43_same_name.py:15   judges = [flow.worker(fl.RewardModel, model=f"runs/judge-{i}") for i in range(2)]
  fix  Give each its own name: flow.worker(..., name=f"rewardmodel_{i}").

sample: 1 error, 0 lints
"""

# Two workers have the same name.
import flowrl as fl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("sample")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
judges = [flow.worker(fl.RewardModel, model=f"runs/judge-{i}") for i in range(2)]


@flow.program
def sample(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch)
        for i, judge in enumerate(judges):
            batch = judge.score(batch, into={"rewards": f"score_{i}"})
        flow.log(step, first=batch.score_0.mean(), second=batch.score_1.mean())
