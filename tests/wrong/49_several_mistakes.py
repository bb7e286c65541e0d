"""ProgramError: actor.generate: got an unexpected keyword argument 'num'.
  at   tests/wrong/49_several_mistakes.py:38   batch = actor.generate(batch, num=2)
  have batch, greedy, max_tokens, min_p, n, repetition_penalty, stop, support, temperature, top_k, top_p
  fix  Leave out num=.

FieldError: rl.gae reads 'rewards', which no op before it adds.
  at   tests/wrong/49_several_mistakes.py:39   batch = rl.gae(critic.values(batch))
  have finish_reason, finished, prompt, prompt_ids, response_ids, response_mask, rollout_logprobs, sampling_logprobs, temperature, tokens, values, versions
  fix  Add reward = flow.worker(fl.FunctionReward, fn) and batch = reward.score(batch) before this line.

FieldError: actor.update with loss ppo_clip reads 'ref_logprobs', which no op before it adds.
  at   tests/wrong/49_several_mistakes.py:40   flow.log(step, critic.update(batch), actor.update(batch, loss=rl.ppo_clip(kl=0.1)))
  have advantages, finish_reason, finished, prompt, prompt_ids, response_ids, response_mask, returns, rollout_logprobs, sampling_logprobs, temperature, tokens, values, versions
  fix  Add batch = ref.logprobs(batch) before this line.

WorkerError: worker 'ref' (Reference) is never used by a program of this flow.
  at   tests/wrong/49_several_mistakes.py:32   ref = flow.worker(fl.Reference, of=actor)
  fix  Call one of its ops, or take the worker out.

ppo: 4 errors, 0 lints
"""

# All mistakes of a program are found in one go.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("ppo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
critic = flow.worker(fl.Critic, model="Qwen/Qwen3-0.6B")
ref = flow.worker(fl.Reference, of=actor)


@flow.program
def ppo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, num=2)
        batch = rl.gae(critic.values(batch))
        flow.log(step, critic.update(batch), actor.update(batch, loss=rl.ppo_clip(kl=0.1)))
