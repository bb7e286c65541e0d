"""FieldError: actor.update with loss sft reads 'finnished', which no op before it adds.
  at   tests/wrong/65_masked_by_no_field.py:23   flow.log(step, actor.update(batch, loss=rl.where("finnished", rl.sft())))
  have finish_reason, finished, prompt, prompt_ids, response_ids, response_mask, rollout_logprobs, sampling_logprobs, temperature, tokens, versions
  fix  Did you mean 'finished'?

grpo: 1 error, 0 lints
"""

# A loss leaves out rows by a field that nothing adds.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, n=8)
        flow.log(step, actor.update(batch, loss=rl.where("finnished", rl.sft())))
