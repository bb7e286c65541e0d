"""WorkerError: Critic: missing a required argument: 'model'.
  at   tests/wrong/18_worker_without_model.py:14   critic = flow.worker(fl.Critic, lr=1e-5)
  have betas, dtype, eps, freeze, grad_clip, gradient_checkpointing, lora, lr, min_lr, model, schedule, seed, total, warmup, weight_decay
  fix  Give model=.
"""

# A worker without an argument that it needs.
import flowrl as fl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("sample")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
critic = flow.worker(fl.Critic, lr=1e-5)


@flow.program
def sample(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = critic.values(actor.generate(batch))
        flow.log(step, value=batch.values.mean())
