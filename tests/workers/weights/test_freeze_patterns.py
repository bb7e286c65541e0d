"""Frozen actors and frozen weights: who is trained, what is kept of the optimizer, and names that are none."""

import json
import runpy
from pathlib import Path

import pytest
import torch

import flowrl as fl
from flowrl import rl
from flowrl.errors import ModelError, ProgramError
from flowrl.lowering.roles import roles_of
from flowrl.placement.model.model_shape import shape_named
from flowrl.workers.weights.freeze_patterns import frozen_names

TASK = runpy.run_path(str(Path(__file__).parents[3] / "algorithms" / "tasks" / "arithmetic.py"))
LLAMA = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 12,
    "pad_token_id": 0,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 16, "n_embd": 32, "n_layer": 3, "n_head": 4, "eos_token_id": 12}


def opened(cls=fl.Actor, config=LLAMA, **how):
    model = fl.Model(config=config, tokenizer=TASK["build_tokenizer"])
    return fl.open(cls(model, **{"lr": 1e-2, **how}))


def examples(rows=4):
    source = TASK["examples"](rows)
    return source.to_batch(source.cursor().draw(), 0, TASK["build_tokenizer"]())


def weights(worker):
    return {n: w.clone() for n, w in worker.engine.weights().items()}


def moved(worker, batch):
    """The names of the weights that two updates change."""
    before = weights(worker)
    worker.update(batch, loss=rl.sft(), minibatch=2)
    return {n for n, w in weights(worker).items() if not torch.equal(w, before[n])}


# -- an actor without a learning rate ----------------------------------------------------------------------------------


def test_a_frozen_actor_generates_and_reads_as_a_trained_one_does():
    frozen, trained = opened(lr=None, max_tokens=6), opened(max_tokens=6)
    assert frozen.engine.trainer is None and trained.engine.trainer is not None
    assert frozen.digest() == trained.digest()
    prompts = TASK["prompts"](3)
    batch = prompts.to_batch(prompts.cursor().draw(), 0, frozen.tokenizer)
    first, second = frozen.generate(batch, n=2), trained.generate(batch, n=2)
    assert first.tokens.equal(second.tokens) and first.rollout_logprobs.equal(second.rollout_logprobs)
    assert frozen.logprobs(first).old_logprobs.equal(trained.logprobs(second).old_logprobs)


def test_a_frozen_actor_is_not_updated_where_no_check_was():
    frozen = opened(lr=None)
    frozen.name = "judge"
    with pytest.raises(ProgramError, match="was opened without an optimizer, so it cannot be trained"):
        frozen.update(examples(), loss=rl.sft())


def test_a_frozen_actor_may_follow_another_one():
    actor, average = opened(), opened(lr=None)
    actor.update(examples(), loss=rl.sft())
    assert average.follow(actor, decay=0.5).distance > 0
    assert average.follow(actor).distance > 0 and average.digest() == actor.digest()


# -- weights that stay as they are -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "patterns", "trained"),
    [
        (LLAMA, "layers[:-1]", ("model.embed_tokens", "model.layers.2.", "model.norm", "lm_head")),
        (LLAMA, ("embeddings", "layers[:2]", "lm_head"), ("model.layers.2.", "model.norm")),
        (LLAMA, ("*layernorm*", "model.norm", "layers[0]"), ("model.embed", "self_attn", "mlp", "lm_head")),
        (LLAMA, "model", ("lm_head",)),
        ({**LLAMA, "tie_word_embeddings": True}, "lm_head", ("model.layers.", "model.norm")),
        ({**LLAMA, "tie_word_embeddings": True}, "embeddings", ("model.layers.", "model.norm")),
        (GPT2, ("embeddings", "layers[-2:]"), ("transformer.wpe", "transformer.h.0.", "transformer.ln_f")),
    ],
)
@pytest.mark.parametrize("again", [False, True], ids=["", "activations computed again"])
def test_frozen_weights_stay_and_all_others_move(config, patterns, trained, again):
    worker = opened(config=config, freeze=patterns, gradient_checkpointing=again)
    wanted = {n for n in weights(worker) if any(part in n for part in trained)}
    wanted -= {
        n for n in wanted if patterns == ("*layernorm*", "model.norm", "layers[0]") and ("norm" in n or ".0." in n)
    }
    assert moved(worker, examples()) == wanted
    state = worker.engine.state()[0]
    assert {n.partition(".")[2] for n in state if n.startswith("exp_avg.")} == wanted, "an optimizer for these alone"
    assert {n.partition(".")[2] for n in state if n.startswith("weights.")} == wanted


def test_the_gradient_of_what_is_trained_is_that_of_the_whole_model():
    whole, part = opened(grad_clip=None), opened(grad_clip=None, freeze=("embeddings", "layers[:-1]"))
    for worker in (whole, part):
        worker.update(examples(), loss=rl.sft())
    first, second = weights(whole), weights(part)
    trained = part.engine.trainer.named
    assert all(torch.equal(first[n], second[n]) for n in trained)
    assert not torch.equal(first["model.embed_tokens.weight"], second["model.embed_tokens.weight"])


def test_a_checkpoint_brings_back_the_same_model():
    worker = opened(freeze="layers[:-1]")
    worker.update(examples(), loss=rl.sft())
    tensors, record = worker.state()
    again = opened(freeze="layers[:-1]")
    again.load_state({n: t.clone() for n, t in tensors.items()}, record)
    assert again.digest() == worker.digest()
    for one in (worker, again):
        one.update(examples(), loss=rl.sft())
    assert again.digest() == worker.digest()


@pytest.mark.parametrize(("cls", "loss"), [(fl.Critic, None), (fl.RewardModel, rl.bradley_terry())])
def test_models_with_a_scalar_head_have_frozen_weights_too(cls, loss):
    worker = opened(cls, freeze="model")
    assert set(worker.engine.trainer.named) == {"score.weight"}


@pytest.mark.parametrize(
    ("patterns", "what", "fix"),
    [
        (
            "model.layer.0",
            "freeze='model.layer.0' names no weight of LlamaForCausalLM.",
            "Did you mean 'model.layers.0'?",
        ),
        ("embedding", "freeze='embedding' names no weight of LlamaForCausalLM.", "Did you mean 'embeddings'?"),
        ("layers[7]", "freeze='layers[7]' names no layer of LlamaForCausalLM, which has 3.", "Count from 0 to 2."),
        ("layers[3:]", "freeze='layers[3:]' names no layer of LlamaForCausalLM, which has 3.", "Count from 0 to 2."),
        (
            ("model", "lm_head"),
            "freeze=['model', 'lm_head'] leaves no weight of LlamaForCausalLM to train.",
            "Freeze less, or write lr=None.",
        ),
    ],
)
def test_names_that_are_none_are_refused_when_the_model_opens(patterns, what, fix):
    with pytest.raises(ModelError) as caught:
        opened(freeze=patterns)
    assert (caught.value.what, caught.value.fix) == (what, fix)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ({"freeze": 3}, "freeze=3 names no weights."),
        ({"freeze": ("", "model")}, "freeze=('', 'model') names no weights."),
        ({"freeze": "layers[]x"}, "freeze='layers[]x' is no range of layers."),
        ({"freeze": "model", "lr": None}, "lr=None trains nothing, so freeze= has nothing to leave as it is."),
    ],
)
def test_what_no_model_could_mean_is_refused_at_the_declaration(how, what):
    flow = fl.Flow("x")
    with pytest.raises(ModelError) as caught:
        flow.worker(fl.Actor, fl.Model("a/model"), **how)
    assert caught.value.what == what and caught.value.at.file == __file__


def test_a_worker_with_frozen_weights_does_not_follow():
    with pytest.raises(ModelError, match="has frozen weights here, which following another worker would change"):
        opened(freeze="embeddings").follow(opened())


def test_layers_count_as_python_counts():
    names = [f"model.layers.{i}.{part}" for i in range(12) for part in ("mlp.experts.3.w", "norm")]
    for said, wanted in (("[:]", range(12)), ("[-1]", [11]), ("[2:-2]", range(2, 10)), ("[10:]", [10, 11])):
        found = frozen_names([f"layers{said}"], [*names, "lm_head"], [], "a model")
        assert found == {n for n in names if int(n.split(".")[2]) in wanted}


# -- what is said of them ----------------------------------------------------------------------------------------------


def forecast(**how):
    flow = fl.Flow("x")
    actor = flow.worker(fl.Actor, "llama-7b", name="actor", **how)
    policy = flow.worker(fl.Actor, "llama-7b", name="policy")

    @flow.program
    def x(steps: int = 2):
        for step, batch in flow.steps(TASK["examples"](2), steps):
            flow.log(step, actor.follow(policy) if how.get("lr", 1) is None else actor.update(batch, loss=rl.sft()))
            flow.log(step, policy.update(batch, loss=rl.sft()))

    from flowrl.placement.cost.work import Workload
    from flowrl.placement.cost.worker_memory import resident
    from flowrl.placement.plan.plan import Plan

    plan = Plan.one_process()
    role = roles_of(flow.handles, flow.trace(), plan)["actor"]
    return role, resident(role, "train", plan.place_of("actor", "train"), plan, Workload(8, 64.0, 64.0))


def test_memory_is_forecast_for_what_is_trained():
    llama = shape_named("llama-7b")
    whole, part, none = (forecast(**how)[1] for how in ({}, {"freeze": ("embeddings", "layers[:-2]")}, {"lr": None}))
    layer = sum(w.elements for w in llama.weights() if w.layer == 0)
    trained = 2 * layer + llama.vocab * llama.hidden + llama.hidden
    assert whole.idle["optimizer"] == pytest.approx(12 * llama.parameters)
    assert part.idle["optimizer"] == pytest.approx(12 * trained, rel=1e-6)
    assert part.working["gradients"] == pytest.approx(2 * trained, rel=1e-6)
    assert none.idle["weights"] == whole.idle["weights"] == 2 * llama.parameters
    assert part.idle["weights"] == pytest.approx(2 * llama.parameters + 2 * (llama.parameters - trained))
    assert "optimizer" not in none.idle and "gradients" not in none.working


def test_a_frozen_worker_is_not_saved_at_the_end_of_a_run(tmp_path):
    flow = fl.Flow("x")
    model = fl.Model(config=LLAMA, tokenizer=TASK["build_tokenizer"])
    judge = flow.worker(fl.Actor, model, lr=None, name="judge", max_tokens=4)
    actor = flow.worker(fl.Actor, model, freeze="layers[:-1]", name="actor", max_tokens=4)

    @flow.program
    def x(steps: int = 2):
        for step, batch in flow.steps(TASK["examples"](2), steps):
            made = judge.generate(batch.select("prompt", "prompt_ids"))
            flow.log(step, actor.update(batch, loss=rl.sft()), length=made.response_ids.lengths_column().mean())

    out = flow.run(out=tmp_path / "run", quiet=True).out
    assert [p.name for p in (out / "model").iterdir()] == ["actor"]
    assert set(json.loads((out / "run.json").read_text())["weights_digests"]) == {"judge", "actor"}
