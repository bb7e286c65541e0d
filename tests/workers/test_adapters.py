"""Adapters: saved as peft saves them, and one base for the actor and its reference."""

import json
import runpy
from pathlib import Path

import pytest
import torch

import flowrl as fl
from flowrl import rl

pytest.importorskip("peft", reason="adapters need peft (extra 'lora')")

TASK = runpy.run_path(str(Path(__file__).parents[2] / "algorithms" / "tasks" / "arithmetic.py"))
SMALL = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
MODEL = fl.Model(config={**TASK["MODEL"].config, **SMALL}, tokenizer=TASK["build_tokenizer"])


def examples(rows=4):
    source = TASK["examples"](rows)
    return source.to_batch(source.cursor().draw(), 0, TASK["build_tokenizer"]())


def trained(cls=fl.Actor, model=MODEL, **how):
    worker = fl.open(cls(model, lr=1e-2, lora=fl.Lora(r=3, alpha=12), **how))
    for _ in range(2):
        worker.update(examples(), loss=rl.sft())
    return worker


def test_a_saved_adapter_is_loaded_by_peft(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    fl.open(fl.Actor(MODEL)).save(str(tmp_path / "base"))
    actor = trained(model=str(tmp_path / "base"))
    actor.save(str(tmp_path / "tuned"))
    folder = tmp_path / "tuned" / "adapter"
    assert {p.name for p in folder.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    said = json.loads((folder / "adapter_config.json").read_text())
    assert (said["peft_type"], said["task_type"], said["r"], said["lora_alpha"]) == ("LORA", "CAUSAL_LM", 3, 12)
    assert said["base_model_name_or_path"] == str(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(base, str(folder)).eval()
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").eval()
    ids = examples().tokens[0][None].long()
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")(ids).logits
        torch.testing.assert_close(loaded(ids).logits, whole(ids).logits, atol=1e-5, rtol=1e-5)
        assert (loaded(ids).logits - plain).abs().max() > 1e-3
    saved = {n: w for n, w in loaded.named_parameters() if ".lora_" in n}
    mine = {n: w for n, w in actor.engine.weights().items() if ".lora_" in n}
    assert {n.removeprefix("base_model.model."): True for n in saved} == dict.fromkeys(mine, True)
    assert all(torch.equal(saved[f"base_model.model.{n}"], w) for n, w in mine.items())


def test_the_head_of_a_reward_model_is_saved_with_its_adapters(tmp_path):
    from safetensors.torch import load_file

    judge = fl.open(fl.RewardModel(MODEL, lr=1e-2, lora=fl.Lora(r=2)))
    judge.engine.save(tmp_path / "judge")
    found = load_file(tmp_path / "judge" / "adapter" / "adapter_model.safetensors")
    said = json.loads((tmp_path / "judge" / "adapter" / "adapter_config.json").read_text())
    assert torch.equal(found["base_model.model.score.weight"], judge.engine.weights()["score.weight"])
    assert (said["task_type"], said["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert all(".lora_" in n or n.endswith("score.weight") for n in found)


def test_a_model_without_adapters_has_no_such_folder(tmp_path):
    fl.open(fl.Actor(MODEL)).save(str(tmp_path / "model"))
    assert not (tmp_path / "model" / "adapter").exists()


# -- one base for the actor and its reference ----------------------------------------------------------------------------


def fresh(**how):
    return fl.open(fl.Actor(MODEL, **{"lr": 1e-2, "lora": fl.Lora(r=3), **how}))


def test_a_reference_of_an_actor_with_adapters_reads_its_base():
    actor, batch = fresh(), examples()
    ref, copy = fl.open(fl.Reference(of=actor)), fl.open(fl.Reference(MODEL))
    assert ref.engine.net is actor.engine.net, "one model in memory"
    assert ref.digest() == copy.digest() == fl.open(fl.Actor(MODEL)).digest()
    for _ in range(2):
        assert ref.logprobs(batch).ref_logprobs.equal(copy.logprobs(batch).ref_logprobs)
        assert ref.distribution(batch).ref_distribution.equal(copy.distribution(batch).ref_distribution)
        before = actor.logprobs(batch).old_logprobs
        actor.update(batch, loss=rl.sft())
        assert not actor.logprobs(batch).old_logprobs.equal(before), "its adapters are on again"
    assert ref.digest() == copy.digest()


def test_adapters_are_on_again_after_a_failure():
    actor, batch = fresh(), examples()
    ref, before = fl.open(fl.Reference(of=actor)), actor.logprobs(batch).old_logprobs
    actor.update(batch, loss=rl.sft())
    after = actor.logprobs(batch).old_logprobs
    with pytest.raises(Exception, match="tokens"):
        ref.engine.logprobs(batch.drop("tokens"))
    assert actor.logprobs(batch).old_logprobs.equal(after) and not after.equal(before)


@pytest.mark.parametrize(
    ("how", "of", "why"),
    [
        ({}, {"dtype": "bf16"}, "its weights are of another dtype"),
        ({"updates": 1}, {}, "its adapters have been trained already"),
    ],
)
def test_where_the_base_cannot_be_read_there_is_a_copy_and_a_word(how, of, why):
    actor = fresh()
    for _ in range(how.get("updates", 0)):
        actor.update(examples(), loss=rl.sft())
    with pytest.warns(UserWarning, match=f"'ref' has a copy of the weights of 'actor': {why}"):
        ref = fl.open(fl.Reference(of=actor, **of), name="ref")
    assert ref.engine.net is not actor.engine.net


def test_the_next_program_has_the_actor_as_it_is_by_then():
    actor, batch = fresh(), examples()
    ref = fl.open(fl.Reference(of=actor), name="ref")
    actor.update(batch, loss=rl.sft())
    with pytest.warns(UserWarning, match="its adapters have been trained already"):
        ref.program_starts()
    assert ref.engine.net is not actor.engine.net
    torch.testing.assert_close(
        ref.logprobs(batch).ref_logprobs.values, actor.logprobs(batch).old_logprobs.values, atol=1e-5, rtol=0
    )


def test_a_reference_that_follows_has_weights_of_its_own():
    actor, other, batch = fresh(), fl.open(fl.Actor(MODEL, lr=1e-2)), examples()
    other.update(batch, loss=rl.sft())
    ref, before = fl.open(fl.Reference(of=actor)), actor.digest()
    assert ref.follow(other, decay=0.5).distance > 0
    assert actor.digest() == before and ref.engine.net is not actor.engine.net


def test_a_state_of_the_same_base_keeps_it_shared_and_another_makes_a_copy():
    actor, other = fresh(), fl.open(fl.Actor(MODEL, lr=1e-2))
    ref, copy = fl.open(fl.Reference(of=actor)), fl.open(fl.Reference(of=other))
    for source, shared in ((copy, True), (None, False)):
        if source is None:
            other.update(examples(), loss=rl.sft())
            copy.program_starts()
        tensors, record = copy.state()
        assert set(tensors) == set(ref.state()[0]), "a checkpoint is the same for both"
        ref.load_state({n: w.clone() for n, w in tensors.items()}, record)
        assert (ref.engine.net is actor.engine.net) == shared and ref.digest() == copy.digest()


def driver(lora):
    flow = fl.Flow("x")
    actor = flow.worker(fl.Actor, MODEL, lr=1e-2, lora=lora, max_tokens=4, name="actor")
    ref = flow.worker(fl.Reference, of=actor, name="ref")
    reward = flow.worker(fl.FunctionReward, TASK["says_one"], name="reward")

    @flow.program
    def x(steps: int = 4):
        for step, batch in flow.steps(TASK["prompts"](4), steps):
            batch = ref.logprobs(reward.score(actor.generate(batch, n=4)))
            batch = rl.group_advantages(batch)
            flow.log(step, actor.update(batch, loss=rl.ppo_clip(kl=0.1)), reward=batch.rewards.mean())

    return flow


def test_a_run_is_the_same_on_every_plan_and_after_a_resume(tmp_path):
    import shutil

    plan = tmp_path / "apart.yaml"
    plan.write_text("pools: {a: {device: cpu}, b: {device: cpu}}\nplace: {actor: {pool: a}, ref: {pool: b}}\n")
    flow, digests = driver(fl.Lora(r=3)), {}
    for name, how in (("one", {}), ("eager", {"runtime": "eager"}), ("apart", {"plan": plan})):
        out = tmp_path / name
        flow.run(out=out, quiet=True, save_models=False, checkpoint_every=2, **how)
        digests[name] = json.loads((out / "run.json").read_text())["weights_digests"]
    assert digests["one"] == digests["eager"] == digests["apart"]
    said = (tmp_path / "apart" / "events.jsonl").read_text()
    assert "'ref' has a copy of the weights of 'actor': it is in another pool." in said
    assert (
        not (tmp_path / "one" / "events.jsonl").exists()
        or "has a copy" not in (tmp_path / "one" / "events.jsonl").read_text()
    )
    shutil.rmtree(max((tmp_path / "one" / "checkpoints").iterdir()))  # as if the run had died before it
    flow.run(out=tmp_path / "one", quiet=True, save_models=False, checkpoint_every=2, resume=True)
    assert json.loads((tmp_path / "one" / "run.json").read_text())["weights_digests"] == digests["apart"]
