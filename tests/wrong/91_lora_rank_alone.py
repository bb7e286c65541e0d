"""WorkerError: Actor: lora=16 is not a record fl.Lora(r=...), or None.
  at   tests/wrong/91_lora_rank_alone.py:17   actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-6, lora=16)
  fix  Write lora=fl.Lora(r=16), or another rank.
"""

# The rank of the adapters, without the record that holds it
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-6, lora=16)
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
