"""DataError: A data source: chat_template_kwargs has 'tokenize', which is no argument of the template.
  at   tests/wrong/180_chat_template_kwargs_reserved.py:10   prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, chat=True, chat_template_kwargs={"tokenize": False})
  fix  Leave it out: flowrl makes the tokens itself, of the text of the template.
"""

# What flowrl gives the chat template itself is no argument of it.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, chat=True, chat_template_kwargs={"tokenize": False})

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.FunctionReward, lambda response, answer: float(response == answer))


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = rl.group_advantages(reward.score(actor.generate(batch, n=8)))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
