"""The common work of ``peers/work.py`` as a flowrl program; what ``grpo_step.py`` times."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import work

import flowrl as fl
from flowrl import rl


def rows():
    return [{"prompt": work.prompt(p), "a": p[0], "b": p[1]} for p in work.rl_prompts(1000)]


def matches(response: str, a: int, b: int) -> float:
    return work.reward((a, b), response if work.LONG else f"{response};")


flow = fl.Flow("grpo")
actor = flow.worker(fl.Actor, model=work.CKPT, lr=work.LR, grad_clip=work.CLIP, max_tokens=work.MAX_NEW)
reward = flow.worker(fl.FunctionReward, matches)


@flow.program
def grpo(steps: int = 60):
    for step, batch in flow.steps(fl.data.rows(rows, batch=work.N_PROMPT, shuffle=False), steps):
        batch = actor.generate(batch, n=work.N_GEN)
        batch = reward.score(batch)
        batch = rl.group_advantages(batch)
        metrics = actor.update(batch, loss=rl.ppo_clip(clip=work.EPS))
        flow.log(step, metrics, reward=batch.rewards.mean())


if __name__ == "__main__":
    flow.main()
