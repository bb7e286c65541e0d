"""ProgramError: flow.steps was called within a step.
  at   tests/wrong/103_steps_within_steps.py:33   for _, tests in flow.steps(heldout):
  fix  Draw the rows with flow.take(source), or make a program of its own of it and name both with --program.

grpo: 1 error, 0 lints
"""

# An evaluation that opens steps of its own within a step
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)

heldout = fl.data.rows([{"prompt": "3+4=", "answer": "7"}], batch=1, repeat=False)


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
        if step % 2 == 1:
            for _, tests in flow.steps(heldout):
                tests = reward.score(actor.generate(tests, greedy=True))
                flow.log(step, greedy=tests.rewards.mean())
