"""FieldError: the text of ask reads 'anwser', which no op before it adds.
  at   tests/wrong/164_question_without_column.py:25   asked = judge.ask(batch, "Is {response} the same as {anwser}?")
  have answer, prompt, response
  fix  Did you mean 'answer'?

grpo: 1 error, 0 lints
"""

# A name in a question's text is no column.
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
judge = flow.worker(fl.Actor, model="Qwen/Qwen3-4B", lr=None)
reward = flow.worker(fl.FunctionReward, lambda response: float(response == "yes"), tokenizer=judge)


@flow.program
def grpo(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch, n=8)
        asked = judge.ask(batch, "Is {response} the same as {anwser}?")
        batch = rl.collect(batch, reward.score(judge.generate(asked)), rewards="mean")
        flow.log(step, actor.update(rl.group_advantages(batch), loss=rl.ppo_clip()))
