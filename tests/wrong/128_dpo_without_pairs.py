"""FieldError: actor.update with loss dpo reads 'preferred', which no op before it adds.
  at   tests/wrong/128_dpo_without_pairs.py:29   flow.log(step, actor.update(batch, loss=rl.dpo()))
  have answer, prompt, prompt_ids, ref_logprobs, response_ids, response_mask, tokens, worse
  fix  Give the source rejected=, the column of the worse response, beside response=.

dpo: 1 error, 0 lints
"""

# Preferences are learned from a source that has none
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)

flow = fl.Flow("dpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-6)
ref = flow.worker(fl.Reference, of=actor)
examples = fl.data.rows([{"prompt": "1+2=", "answer": "3", "worse": "4"}], batch=1, response="answer")


@flow.program
def dpo(steps: int = 3):
    for step, batch in flow.steps(examples, steps):
        batch = ref.logprobs(batch)
        flow.log(step, actor.update(batch, loss=rl.dpo()))
