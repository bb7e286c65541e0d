"""FieldError: the batch has no field 'rewards' here.
  at   tests/wrong/48_rare_path.py:29   flow.log(step, heldout=test.rewards.mean())
  have finish_reason, finished, prompt, prompt_ids, response_ids, response_mask, rollout_logprobs, sampling_logprobs, temperature, tokens, versions
  fix  Add batch = reward.score(batch) before this line.

grpo: 1 error, 0 lints
"""

# The mistake lies on a path that step 49 is the first to take.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)
heldout = fl.data.rows([{"prompt": "2+2="}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="runs/judge")


@flow.program
def grpo(steps: int = 100):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=8))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
        if step % 50 == 49:
            test = actor.generate(flow.take(heldout), greedy=True)
            flow.log(step, heldout=test.rewards.mean())
