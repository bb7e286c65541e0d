"""ProgramError: sft: aggregate='token_mean' is none of token-mean, token-sum, seq-mean-token-mean, seq-mean-token-sum, seq-mean-token-sum-norm, prompt-mean.
  at   tests/wrong/21_bad_aggregate.py:21   flow.log(step, actor.update(batch, loss=rl.sft(aggregate="token_mean")))
  fix  Write aggregate='token-mean'.

sft: 1 error, 0 lints
"""

# An aggregate that there is not.
import flowrl as fl
from flowrl import rl

examples = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")

flow = fl.Flow("sft")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")


@flow.program
def sft(steps: int = 10):
    for step, batch in flow.steps(examples, steps):
        flow.log(step, actor.update(batch, loss=rl.sft(aggregate="token_mean")))
