"""WorkerError: Actor: got an unexpected keyword argument 'maxtokens'.
  at   tests/wrong/17_worker_argument_typo.py:13   actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", maxtokens=8)
  have betas, dtype, eps, freeze, grad_clip, gradient_checkpointing, lora, lr, max_tokens, min_lr, min_p, model, of, repetition_penalty, schedule, seed, stop, temperature, top_k, top_p, total, warmup, weight_decay
  fix  Write max_tokens= for maxtokens=.
"""

# An argument of a worker is misspelt.
import flowrl as fl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("sample")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B", maxtokens=8)


@flow.program
def sample(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch)
        flow.log(step, length=batch.response_ids.lengths_column().mean())
