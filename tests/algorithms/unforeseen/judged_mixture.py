"""A mixture of sources, three votes of a frozen judge beside a rule, and an evaluation in every second step."""

from functools import partial

import flowrl as fl
from flowrl import rl
from tasks import arithmetic


def small(more: str = "") -> fl.Model:
    """A Qwen2 of two layers, whose tokenizer has some further characters."""
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    tokens = {"vocab_size": 16 + len(more), "eos_token_id": len(more) + 1 + arithmetic.CHARS.index(";")}
    config = {**(arithmetic.MODEL.config or {}), **shape, **tokens}
    return fl.Model(config=config, tokenizer=partial(arithmetic.build_tokenizer, more))


easy = arithmetic.prompts(1, one_digit=1.0)
hard = arithmetic.prompts(1, one_digit=0.0, seed=5)
mixed = fl.data.mix({"easy": easy, "hard": hard}, weights={"easy": 3, "hard": 1}, batch=6)
heldout = arithmetic.heldout(4, repeat=True)

flow = fl.Flow("judged_mixture")
actor = flow.worker(fl.Actor, small(), lr=1e-3, max_tokens=4)
judge = flow.worker(fl.Actor, small("yn"), lr=None, max_tokens=2)
verdict = flow.worker(fl.FunctionReward, arithmetic.says_one, tokenizer=judge)
rule = flow.worker(fl.FunctionReward, arithmetic.says_one)


@flow.program
def judged_mixture(steps: int = 4) -> None:
    for step, prompts in flow.steps(mixed, steps):
        batch = actor.generate(prompts, n=4)
        said = verdict.score(judge.generate(judge.ask(batch, arithmetic.QUESTION), n=3, temperature=2.0))
        batch = rl.collect(batch, said, into={"rewards": "grade"}, rewards="mean")
        batch = rule.score(batch, into={"rewards": "ones"})
        batch = batch.with_columns({"rewards": 0.5 * batch.grade + batch.ones})
        metrics = actor.update(rl.pass_at_k(batch, k=2), loss=rl.ppo_clip())
        flow.log(step, metrics, reward=batch.rewards.mean())
        if step % 2 == 1:
            held = rule.score(actor.generate(flow.take(heldout), greedy=True))
            flow.log(step, greedy=held.rewards.mean())


if __name__ == "__main__":
    flow.main()
