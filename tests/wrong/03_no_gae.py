"""FieldError: critic.update with loss value_clip reads 'returns', which no op before it adds.
  at   tests/wrong/03_no_gae.py:26   critic_metrics = critic.update(batch)
  have finish_reason, finished, prompt, prompt_ids, response_ids, response_mask, rewards, rollout_logprobs, sampling_logprobs, temperature, tokens, values, versions
  fix  Add batch = rl.gae(batch) before this line.

ppo: 1 error, 0 lints
"""

# A critic is trained, and nothing has computed what it regresses to.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("ppo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
critic = flow.worker(fl.Critic, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.RewardModel, model="runs/judge")


@flow.program
def ppo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch)
        batch = reward.score(batch) | critic.values(batch)
        critic_metrics = critic.update(batch)
        batch = rl.gae(batch)
        flow.log(step, critic_metrics, actor.update(batch, loss=rl.ppo_clip()))
