"""Given and sampled preferences in one step, against a reference that follows every second step."""

import flowrl as fl
from flowrl import rl
from tasks import arithmetic

MODEL = fl.Model(
    config={**(arithmetic.MODEL.config or {}), "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2},
    tokenizer=arithmetic.build_tokenizer,
)

flow = fl.Flow("moving_reference")
actor = flow.worker(fl.Actor, MODEL, lr=1e-3, max_tokens=4, freeze="layers[0]")
ref = flow.worker(fl.Reference, of=actor)
rule = flow.worker(fl.FunctionReward, arithmetic.says_one)
sampled = arithmetic.prompts(6, seed=8)


@flow.program
def moving_reference(steps: int = 4, smoothing: float = 0.1) -> None:
    for step, batch in flow.steps(arithmetic.preferences(4), steps):
        given = actor.update(ref.logprobs(batch), loss=rl.preference_loss("robust", label_smoothing=smoothing, nll=0.1))
        pairs = rl.pairs(rule.score(actor.generate(flow.take(sampled), n=4)))
        own = actor.update(ref.logprobs(pairs), loss=rl.dpo(label_smoothing=smoothing), lr=5e-4)
        if step % 2 == 1:
            ref.follow(actor, decay=0.5)
        flow.log(step, given=given, own=own)


if __name__ == "__main__":
    flow.main()
