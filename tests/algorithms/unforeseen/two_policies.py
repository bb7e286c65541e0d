"""Two policies of one flow: each is trained on its own rows, and on those that the other one sampled hotter."""

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

MODEL = fl.Model(
    config={**(arithmetic.MODEL.config or {}), "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2},
    tokenizer=arithmetic.build_tokenizer,
)

flow = fl.Flow("two_policies")
left = flow.worker(fl.Actor, MODEL, lr=1e-3, max_tokens=4, temperature=0.6, min_p=0.02, seed=1)
right = flow.worker(fl.Actor, MODEL, lr=1e-3, max_tokens=4, temperature=1.4, repetition_penalty=1.2, seed=2)
reward = flow.worker(fl.FunctionReward, arithmetic.says_one)


@flow.program
def two_policies(steps: int = 2, meant: bool = True) -> None:
    for step, prompts in flow.steps(arithmetic.prompts(4), steps):
        rows = [rl.group_advantages(reward.score(actor.generate(prompts, n=4))) for actor in (left, right)]
        for name, actor, mine, theirs in (("left", left, *rows), ("right", right, *rows[::-1])):
            own = actor.update(mine, loss=rl.where("finished", rl.ppo_clip(entropy=0.01)))
            other = actor.update(theirs, loss=rl.ppo_clip(), foreign=meant, lr=1e-4)
            flow.log(step, **{f"{name}_ratio": own.ratio, f"{name}_other": other.ratio, name: mine.temperature.mean()})


if __name__ == "__main__":
    flow.main()
