"""ProgramError: game.rollout: missing a required argument: 'policy'.
  at   tests/wrong/42_no_policy.py:32   batch = rl.group_advantages(game.rollout(batch, n=8))
  have backoff, batch, branches, greedy, max_failed, messages, min_p, n, on_error, policy, repetition_penalty, retries, seconds, spare, stop, support, temperature, tokens, top_k, top_p, turn_tokens, turns
  fix  Give policy=.

play: 1 error, 0 lints
"""

# An environment without a policy that plays it.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "?", "secret": 7}], batch=1)


class Guess(fl.Env):
    def reset(self, row, seed):
        return row["secret"], ""

    def step(self, state, action):
        return state, "", float(action == str(state)), True


flow = fl.Flow("play")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
game = flow.worker(Guess)


@flow.program
def play(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = rl.group_advantages(game.rollout(batch, n=8))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
