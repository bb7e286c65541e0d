"""DataError: A data source has no option 'enable_thinking'.
  at   tests/wrong/179_chat_template_kwargs_as_an_option.py:11   prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, chat=True, enable_thinking=False)
  have batch, chat, chat_template_kwargs, columns, length, max_prompt_tokens, messages, on_bad, overlong, pack, prompt, rejected, repeat, response, seed, shuffle, system, text, tokenizer, tools
  fix  Write chat_template_kwargs={'enable_thinking': False}.
"""

# An argument of the chat template is no option of the data.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1, chat=True, enable_thinking=False)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
reward = flow.worker(fl.FunctionReward, lambda response, answer: float(response == answer))


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = rl.group_advantages(reward.score(actor.generate(batch, n=8)))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
