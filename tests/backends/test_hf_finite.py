"""Weights and fields that are not finite are named, with where that began; the run stops, and trains on nothing."""

from __future__ import annotations

import json

import pytest
import tiny as T
import torch

import flowrl as fl
from flowrl import rl
from flowrl.backends import open_engine
from flowrl.errors import NotFinite
from flowrl.runtime.distributed.protocol import Failed
from flowrl.workers.model_options import Build, Model, Optim, Sampling

SPOILED = "model.layers.1.mlp.up_proj.weight"
TOLD = f"1 of 26 weights are not finite, {SPOILED} (1 of 2048 numbers)"


def opened(head="lm"):
    return open_engine("hf", Build(Model(config=T.CONFIGS["qwen2"]), head=head, optim=Optim(lr=1e-3)))


def spoil(engine, value=float("nan")):
    next(s for s in engine.shards() if s.name == SPOILED).tensor[3, 5] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_every_op_names_the_weights(value):
    engine = opened()
    batch = T.rollouts(engine)
    spoil(engine, value)
    greedy = Sampling(4, greedy=True)
    ids, seeds = batch["prompt_ids"], torch.arange(len(batch))
    for ask in (
        lambda: engine.generate(ids, 1, seeds, Sampling(4)),
        lambda: engine.generate(ids, 1, seeds, Sampling(4, top_k=3, top_p=0.9, repetition_penalty=1.1)),
        lambda: engine.generate(ids, 1, seeds, greedy),
        lambda: engine.logprobs(batch),
        lambda: engine.distribution(batch),
        lambda: engine.update(batch, rl.ppo_clip()),
    ):
        with pytest.raises(NotFinite) as error:
            ask()
        assert error.value.names == (SPOILED,) and error.value.fix.startswith("Remove the newest folder")
        assert error.value.what.endswith(f": {TOLD}, since the model was opened.")


def test_values_and_scores_too():
    critic = opened("scalar")
    batch = T.rollouts(opened())
    spoil(critic)
    for ask, what in ((critic.values, "values"), (critic.scores, "scores")):
        with pytest.raises(NotFinite, match=f"of [0-9]+ {what} are not finite: 1 of 27 weights") as error:
            ask(batch)
        assert error.value.names == (SPOILED,)


def test_it_says_since_when():
    engine = opened()
    batch = T.rollouts(engine)
    tensors, meta = engine.state()
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    engine.update(batch.with_call(fl.batch.CallInfo(op="actor.update", step=4)), rl.ppo_clip(), epochs=2)
    spoil(engine)
    with pytest.raises(NotFinite, match="since optimizer step 1 in actor.update of step 4"):
        engine.logprobs(batch)
    engine.load_state(kept, meta)
    spoil(engine)
    with pytest.raises(NotFinite, match="since the checkpoint that they were read from"):
        engine.logprobs(batch)
    engine.take_weights({name.removeprefix("weights."): w for name, w in kept.items() if name.startswith("weights.")})
    spoil(engine)
    with pytest.raises(NotFinite, match="since the weights of another copy were taken over"):
        engine.logprobs(batch)


def test_a_field_is_named_with_its_row():
    engine = opened()
    batch = T.rollouts(engine)
    values = batch.advantages.values.clone()
    values[int(batch.advantages.offsets[2])] = float("inf")
    bad = batch.drop("advantages").with_columns({"advantages": batch.advantages.with_values(values)})
    with pytest.raises(NotFinite, match="the field 'advantages' is not finite in row") as error:
        engine.update(bad, rl.ppo_clip())
    assert error.value.names == ("advantages",)
    assert "; the weights were left alone." in error.value.what


def test_of_several_ranks_the_one_that_knows_is_told():
    knows = Failed(NotFinite("a", names=["w"]), "", "")
    says_little, elsewhere = Failed(NotFinite("a"), "", ""), Failed(None, "", "", elsewhere=True)
    failed = {0: elsewhere, 1: says_little, 2: knows}
    assert min(failed.items(), key=lambda f: f[1].knows_less)[0] == 2
    del failed[2]
    assert min(failed.items(), key=lambda f: f[1].knows_less)[0] == 1


class Spoiled(fl.Actor):
    """Its weights take a nan as the update of step 1 ends."""

    @fl.op(reads="tokens, response_mask", updates="weights", cost="train")
    def learn(self, batch) -> fl.Metrics:
        metrics = self.update(batch, loss=rl.sft())
        if batch.call.step == 1:
            spoil(self.engine)
        return metrics


flow = fl.Flow("spoiled")
actor = flow.worker(Spoiled, Model(config=T.CONFIGS["qwen2"], tokenizer=T.build_tokenizer), lr=1e-3, max_tokens=4)


@flow.program
def spoiled(steps: int = 5):
    for step, batch in flow.steps(fl.data.rows([{"prompt": "1 2"}], batch=2), steps):
        flow.log(step, actor.learn(actor.generate(batch)))


@pytest.mark.parametrize("runtime", ["eager", "local"])
def test_the_run_stops_and_names_worker_step_and_weights(tmp_path, runtime):
    with pytest.raises(NotFinite) as error:
        flow.run(out=tmp_path / "run", runtime=runtime, quiet=True)
    assert error.value.what.startswith("actor.generate of step 2: ")
    assert TOLD in error.value.what and error.value.at.text == "flow.log(step, actor.learn(actor.generate(batch)))"
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    assert not (tmp_path / "run" / "model").exists()
