"""WorkerError: a worker (Actor) is declared inside a program, which is run several times.
  at   tests/wrong/104_worker_in_the_program.py:24   actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
  fix  Move the line to the module, above the program.

grpo: 1 error, 0 lints
"""

# A worker that is declared where it is used
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)

flow = fl.Flow("grpo")
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def grpo(steps: int = 3):
    actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
