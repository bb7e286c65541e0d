"""ProgramError: actor.generate was called outside of a program.
  at   tests/wrong/14_op_outside_program.py:13   first = actor.generate(prompts)
  fix  Call it inside a function under @flow.program, and run that with flow.main() or flow.run().
"""

# An op at module level: no program is running, and nothing is loaded yet.
import flowrl as fl

prompts = fl.data.rows([{"prompt": "1+2="}], batch=1)

flow = fl.Flow("sample")
actor = flow.worker(fl.Actor, model="Qwen/Qwen3-0.6B")
first = actor.generate(prompts)


@flow.program
def sample(steps: int = 10):
    for step, batch in flow.steps(prompts, steps):
        batch = actor.generate(batch)
        flow.log(step, length=batch.response_ids.lengths_column().mean())
