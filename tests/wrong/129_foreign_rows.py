"""ProgramError: student.update: loss ppo_clip is one of the policy that sampled the rows, and these were sampled by teacher.
  at   tests/wrong/129_foreign_rows.py:29   flow.log(step, student.update(batch, loss=rl.ppo_clip()))
  fix  Sample them with student, or write foreign=True if they are meant. Losses that ask not who sampled, such as rl.sft(), need no word.

train: 1 error, 0 lints
"""

# The student is trained on what the teacher sampled, as if it had sampled it
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)

flow = fl.Flow("student")
teacher = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-6)
student = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-6)
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def train(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(teacher.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, student.update(batch, loss=rl.ppo_clip()))
