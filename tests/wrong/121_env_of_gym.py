"""WorkerError: Guess.step(self, action) cannot be called with state and action.
  at   tests/wrong/121_env_of_gym.py:18   def step(self, action):
  fix  Write def step(self, state, action), which returns (state, observation, reward, done): an environment is a pure function, and its state is handed on.
"""

# An environment as Gymnasium has it: state in the object, seed and options in reset
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "guess:", "answer": "3"}], batch=1)


class Guess(fl.Env):
    def reset(self, seed=None, options=None):
        self.tries = 0
        return "guess:", {}

    def step(self, action):
        self.tries += 1
        right = action == "3"
        return "no, again:", float(right), right, self.tries == 3, {}


flow = fl.Flow("game")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-4)
env = flow.worker(Guess)


@flow.program
def game(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = env.rollout(batch, policy=actor, n=2, turns=3)
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
