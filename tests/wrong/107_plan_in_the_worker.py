"""WorkerError: Actor: got an unexpected keyword argument 'tensor_parallel_size'.
  at   tests/wrong/107_plan_in_the_worker.py:18   actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-6, tensor_parallel_size=4)
  have betas, dtype, eps, freeze, grad_clip, gradient_checkpointing, lora, lr, max_tokens, min_lr, min_p, model, of, repetition_penalty, schedule, seed, stop, temperature, top_k, top_p, total, warmup, weight_decay
  fix  Where a worker runs is said by a plan, --plan FILE: leave it out.
"""

# Where a worker runs is said by the plan
import flowrl as fl
from flowrl import rl

prompts = fl.data.rows([{"prompt": "1+2=", "answer": "3"}], batch=1)


def exact(response: str, answer: str) -> float:
    return float(response == answer)

flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", lr=1e-6, tensor_parallel_size=4)
reward = flow.worker(fl.FunctionReward, exact)


@flow.program
def grpo(steps: int = 3):
    for step, batch in flow.steps(prompts, steps):
        batch = reward.score(actor.generate(batch, n=2))
        batch = rl.group_advantages(batch)
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()))
