"""UsageError: tests/wrong/46_two_flows.py has 2 flows; a script has one.
  fix  Write flow = fl.Flow("name") once, at module level.
"""

# A script has two flows.
import flowrl as fl
from flowrl import rl

examples = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, response="answer")

flow = fl.Flow("sft")
again = fl.Flow("again")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")


@flow.program
def sft(steps: int = 10):
    for step, batch in flow.steps(examples, steps):
        flow.log(step, actor.update(batch, loss=rl.sft()))
