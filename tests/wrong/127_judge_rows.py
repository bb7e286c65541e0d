"""RowsError: a | b takes the same rows on both sides; the left has 2 for each of the rows drawn at line 26, the right has 1 for each of 2 for each of the rows drawn at line 26.
  at   tests/wrong/127_judge_rows.py:30   batch = batch | verdicts.select("rewards")
  fix  The one was made of rows of the other: bring its fields back with rl.collect(<left>, <right>, rewards="mean").

judged: 1 error, 0 lints
"""

# A second actor judges, and its verdicts are joined to the rows that it judged
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)

flow = fl.Flow("judged")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
judge = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def judged(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, n=2)
        questions = batch.select("prompt", "prompt_ids", "answer")
        verdicts = reward.score(judge.generate(questions))
        batch = batch | verdicts.select("rewards")
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
