"""Adapters: saved as peft saves them, and one base for the actor and its reference."""

import json
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch

import flowrl as fl
from flowrl import rl
from flowrl.backends import open_engine
from flowrl.runtime.distributed.protocol import Blueprint, Named, unopened
from flowrl.runtime.distributed.rank_process.peers import Elsewhere
from flowrl.workers.base import Opening

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


# -- one base for several actors ----------------------------------------------------------------------------------------

SECOND = {"lr": 2e-2, "lora": fl.Lora(r=2, alpha=6), "seed": 5, "max_tokens": 6}


def beside(actor, **how):
    return fl.open(fl.Actor(of=actor, **{**SECOND, **how}), name="second")


def base_of(worker):
    return {n: p for n, p in worker.engine.net.model.named_parameters() if ".lora_" not in n}


def lived(worker, folder):
    """What a life of an actor comes to: samples, numbers, weights, state and files."""
    batch, found = examples(), []
    prompts = batch.select("prompt_ids")
    for _ in range(2):
        rows = worker.generate(prompts, n=2)
        found += [rows.response_ids, rows.rollout_logprobs, worker.logprobs(batch).old_logprobs]
        worker.update(batch, loss=rl.sft())
    worker.save(str(folder))
    files = {p.name: p.read_bytes() for p in folder.rglob("*.safetensors")}
    return found, worker.state(), worker.digest(), files


def assert_same(one, other):
    assert all(a.equal(b) for a, b in zip(one[0], other[0], strict=True))
    assert one[1][0].keys() == other[1][0].keys() and one[1][1] == other[1][1]
    assert all(torch.equal(w, other[1][0][n]) for n, w in one[1][0].items())
    assert one[2:] == other[2:] and len(one[3]) == 2


def test_two_actors_have_one_base_and_each_lives_as_with_its_own(tmp_path):
    """The second one is trained while the first is, before and after it, and neither sees the other."""
    actor = fresh(seed=3, max_tokens=6)
    actor.update(examples(), loss=rl.sft())  # the base is that under the adapters, whatever these are
    second = beside(actor)
    first, mine = base_of(actor), base_of(second)
    names = [n.replace(".base_layer.", ".") for n in first]
    assert names == [n.replace(".base_layer.", ".") for n in mine], "tied weights too"
    assert [w.data_ptr() for w in first.values()] == [w.data_ptr() for w in mine.values()]
    got = lived(second, tmp_path / "second")
    mixed = lived(actor, tmp_path / "actor")
    alone = fresh(seed=3, max_tokens=6)
    alone.update(examples(), loss=rl.sft())
    assert_same(mixed, lived(alone, tmp_path / "actor_alone"))
    assert_same(got, lived(fl.open(fl.Actor(MODEL, **SECOND)), tmp_path / "second_alone"))
    assert [w.data_ptr() for w in first.values()] == [w.data_ptr() for w in base_of(second).values()]


def test_peft_loads_the_adapters_of_both_over_one_model(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    fl.open(fl.Actor(MODEL)).save(str(tmp_path / "base"))
    actor = trained(model=str(tmp_path / "base"))
    second = beside(actor)
    second.update(examples(), loss=rl.sft())
    ids = examples().tokens[0][None].long()
    loaded = None
    for name, worker in (("actor", actor), ("second", second)):
        worker.save(str(tmp_path / name))
        folder = str(tmp_path / name / "adapter")
        if loaded is None:
            base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
            loaded = PeftModel.from_pretrained(base, folder, adapter_name=name).eval()
        else:
            loaded.load_adapter(folder, adapter_name=name)
        loaded.set_adapter(name)
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        with torch.no_grad():
            torch.testing.assert_close(loaded(ids).logits, whole(ids).logits, atol=1e-5, rtol=1e-5)


def test_references_of_both_and_a_third_read_the_one_base():
    actor = fresh()
    second = beside(actor)
    third, ref = beside(second, seed=1), fl.open(fl.Reference(of=second))
    assert {n: w.data_ptr() for n, w in base_of(third).items()} == {n: w.data_ptr() for n, w in base_of(second).items()}
    assert ref.engine.net is second.engine.net and ref.digest() == fl.open(fl.Reference(MODEL)).digest()
    before = actor.logprobs(examples()).old_logprobs
    third.update(examples(), loss=rl.sft())
    assert ref.logprobs(examples()).ref_logprobs.equal(fl.open(fl.Reference(MODEL)).logprobs(examples()).ref_logprobs)
    assert actor.logprobs(examples()).old_logprobs.equal(before)


def test_layers_are_recomputed_for_the_one_that_asks():
    actor = fresh(gradient_checkpointing=True)
    second, alone = beside(actor), fl.open(fl.Actor(MODEL, **SECOND))
    assert actor.engine.net.recomputed and not second.engine.net.recomputed
    assert dict(second.update(examples(), loss=rl.sft())) == dict(alone.update(examples(), loss=rl.sft()))


def test_a_frozen_one_takes_its_adapters_back_and_never_writes_the_base():
    actor = fresh()
    second = beside(actor, lr=None)
    tensors, record = fl.open(fl.Actor(MODEL, **{**SECOND, "lr": None})).state()
    tensors = {n: w + 1 if ".lora_B" in n else w.clone() for n, w in tensors.items()}
    second.load_state(tensors, record)
    assert all(torch.equal(w, tensors[n]) for n, w in second.state()[0].items())
    wrong = {n: w if ".lora_" in n else w + 1 for n, w in tensors.items()}
    before = actor.digest()
    with pytest.raises(fl.FlowError, match="The state holds other weights than the model that is shared."):
        second.load_state(wrong, record)
    assert actor.digest() == before


def test_of_another_dtype_it_has_a_copy_and_says_so():
    actor = fresh()
    with pytest.warns(UserWarning) as said:
        second = beside(actor, dtype="fp64")
    assert [str(w.message) for w in said if "copy" in str(w.message)] == [
        "'second' has a copy of the weights of 'actor': its weights are of another dtype."
    ]
    assert second.digest() == fl.open(fl.Actor(MODEL, **SECOND, dtype="fp64")).digest()


def test_on_a_rank_of_another_process_it_has_a_copy_and_says_so():
    blueprints = {
        "actor": Blueprint("actor", fl.Actor, (MODEL,), {"lora": fl.Lora()}, {}),
        "second": Blueprint("second", fl.Actor, (), {"of": Named("actor"), **SECOND}, {}),
    }
    second, said = unopened(blueprints, "second"), []
    assert second.build().model is MODEL, "known before anything is opened, for its tokenizer"
    elsewhere = Elsewhere(unopened(blueprints, "actor"), lambda: None)
    second.open(Opening(partial(open_engine, "hf"), lambda of: elsewhere, lambda said: None, said.append))
    assert said == ["'second' has a copy of the weights of 'actor': it is in another process."]
    assert second.digest() == fl.open(fl.Actor(MODEL, **SECOND)).digest()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"of": 0}, "This actor has the weights of 'actor' and no adapters of its own, so it would train those of 'actor'."),
        ({"of": 1, "lora": fl.Lora()}, "'plain' has no adapters (lora=), so its weights are no base for those of another actor."),
        ({"of": 0, "model": MODEL, "lora": fl.Lora()}, "An actor has a model of its own, or that of another actor with adapters."),
        ({}, "An actor has a model of its own, or that of another actor with adapters."),
    ],
)  # fmt: skip
def test_what_would_train_the_one_base_is_refused(arguments, said):
    flow = fl.Flow("x")
    actors = (
        flow.worker(fl.Actor, MODEL, lora=fl.Lora(), name="actor"),
        flow.worker(fl.Actor, MODEL, name="plain"),
    )
    if "of" in arguments:
        arguments = {**arguments, "of": actors[arguments["of"]]}
    with pytest.raises(fl.FlowError) as error:
        flow.worker(fl.Actor, **arguments, name="second")
    assert error.value.what == said and error.value.at is not None


def two_actors(shares):
    flow = fl.Flow("x")
    actor = flow.worker(fl.Actor, MODEL, lr=1e-2, lora=fl.Lora(r=3), max_tokens=4, name="actor")
    base = {"of": actor} if shares else {"model": MODEL}
    second = flow.worker(fl.Actor, **base, lr=1e-2, lora=fl.Lora(r=2), max_tokens=4, seed=5, name="second")
    reward = flow.worker(fl.FunctionReward, TASK["says_one"], name="reward")

    @flow.program
    def x(steps: int = 4):
        for step, batch in flow.steps(TASK["prompts"](4), steps):
            for name, worker in (("actor", actor), ("second", second)):
                rows = rl.group_advantages(reward.score(worker.generate(batch, n=4)))
                flow.log(step, **{name: worker.update(rows, loss=rl.ppo_clip())})

    return flow


def test_a_run_of_two_actors_is_that_of_two_copies_on_every_plan_and_after_a_resume(tmp_path):
    import shutil

    plan = tmp_path / "apart.yaml"
    plan.write_text("pools: {a: {device: cpu}, b: {device: cpu}}\nplace: {actor: {pool: a}, second: {pool: b}}\n")
    how = {"quiet": True, "save_models": False, "checkpoint_every": 2}
    ways = {
        "one": (True, {}),
        "copies": (False, {}),
        "eager": (True, {"runtime": "eager"}),
        "apart": (True, {"plan": plan}),
    }
    digests = {}
    for name, (shares, more) in ways.items():
        two_actors(shares).run(out=tmp_path / name, **how, **more)
        digests[name] = json.loads((tmp_path / name / "run.json").read_text())["weights_digests"]
    assert len(set(map(json.dumps, digests.values()))) == 1 and set(digests["one"]) >= {"actor", "second"}
    said = (tmp_path / "apart" / "events.jsonl").read_text()
    assert "'second' has a copy of the weights of 'actor': it is in another pool." in said
    shutil.rmtree(max((tmp_path / "one" / "checkpoints").iterdir()))  # as if the run had died before it
    two_actors(True).run(out=tmp_path / "one", **how, resume=True)
    assert json.loads((tmp_path / "one" / "run.json").read_text())["weights_digests"] == digests["copies"]


# -- adapters that were saved -------------------------------------------------------------------------------------------


def adapters_of(worker):
    return {n: w for n, w in worker.engine.weights().items() if ".lora_" in n or n == "score.weight"}


def saved(tmp_path, worker=None):
    worker = worker or trained()
    worker.engine.save(tmp_path / "model")
    return worker, tmp_path / "model" / "adapter"


def test_saved_adapters_begin_as_they_were_saved_bit_for_bit(tmp_path):
    actor, folder = saved(tmp_path)
    lora = fl.Lora(path=str(folder))
    assert (lora.r, lora.alpha) == (3, 12)
    other = fl.open(fl.Actor(MODEL, lr=1e-2, lora=lora))
    assert other.digest() == actor.digest()
    again = fl.open(fl.Actor(MODEL, lr=1e-2, lora=fl.Lora(path=folder, r=3, alpha=12)))
    beside_it = fl.open(fl.Actor(of=actor, lr=1e-2, lora=lora))
    merged = fl.open(fl.Actor(MODEL, lr=None, lora=lora))
    for one in (other, again, beside_it, merged):
        assert all(torch.equal(w, adapters_of(actor)[n]) for n, w in adapters_of(one).items())
        assert one.logprobs(examples()).old_logprobs.equal(actor.logprobs(examples()).old_logprobs)
    assert dict(other.update(examples(), loss=rl.sft())) == dict(beside_it.update(examples(), loss=rl.sft()))
    assert other.digest() == beside_it.digest() != actor.digest()
    other.engine.save(tmp_path / "again")
    once_more = fl.open(fl.Actor(MODEL, lora=fl.Lora(path=tmp_path / "again" / "adapter")))
    assert once_more.digest() == other.digest()


def test_the_head_of_a_reward_model_comes_back_with_its_adapters(tmp_path):
    judge, folder = saved(tmp_path, fl.open(fl.RewardModel(MODEL, lr=1e-2, lora=fl.Lora(r=2), seed=7)))
    other = fl.open(fl.RewardModel(MODEL, lr=1e-2, lora=fl.Lora(path=folder), seed=8))
    assert other.digest() == judge.digest()


def test_a_frozen_reward_model_scores_with_the_head_beside_its_adapters(tmp_path):
    fl.open(fl.Actor(MODEL)).save(str(tmp_path / "language"))
    language, rows = str(tmp_path / "language"), examples()
    judge, folder = saved(tmp_path, fl.open(fl.RewardModel(language, lr=1e-2, lora=fl.Lora(r=2), seed=7)))
    other = fl.open(fl.RewardModel(language, lora=fl.Lora(path=folder), seed=8))
    assert other.score(rows).rewards.equal(judge.score(rows).rewards)


def test_adapters_that_peft_made_are_read(tmp_path):
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    fl.open(fl.Actor(MODEL)).save(str(tmp_path / "base"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    settings = LoraConfig(r=2, lora_alpha=5, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    theirs = get_peft_model(base, settings).eval()
    theirs.save_pretrained(str(tmp_path / "theirs"))
    lora = fl.Lora(path=tmp_path / "theirs")
    assert (lora.r, lora.alpha, lora.targets) == (2, 5, ("down_proj", "q_proj"))
    mine = fl.open(fl.Actor(str(tmp_path / "base"), lora=lora))
    ids = examples().tokens[0][None].long()
    with torch.no_grad():
        assert torch.equal(mine.engine.net.model(ids).logits, theirs(ids).logits)


def edited(folder, **changes):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("make", "what", "fix"),
    [
        (lambda f: {"path": f.parent}, "Lora: path='{model}' has no adapters: there is no adapter_config.json.", "Did you mean '{model}/adapter'?"),
        (lambda f: {"path": f / "no"}, "Lora: path='{model}/adapter/no' has no adapters: there is no adapter_config.json.", "Name the folder with adapter_config.json and adapter_model.safetensors, such as runs/first/model/actor/adapter."),
        (lambda f: {"path": f, "r": 8}, "Lora: r=8, but the adapters in '{model}/adapter' have r=3.", "Leave r= out."),
        (lambda f: {"path": edited(f, use_dora=True)}, "Lora: the adapters in '{model}/adapter' are of a kind that is not known here: use_dora=True.", "Merge them into their model with peft (merge_and_unload), and give that model as model=."),
        (lambda f: {"path": edited(f, r=None)}, "Lora: the adapters in '{model}/adapter' are of a kind that is not known here: r=None.", "Merge them into their model with peft (merge_and_unload), and give that model as model=."),
        (lambda f: {"path": edited(f, peft_type="IA3")}, "Lora: the adapters in '{model}/adapter' are of a kind that is not known here: peft_type='IA3'.", "Merge them into their model with peft (merge_and_unload), and give that model as model=."),
    ],
)  # fmt: skip
def test_a_folder_of_other_adapters_is_refused_where_it_is_named(tmp_path, make, what, fix):
    _, folder = saved(tmp_path, fresh())
    with pytest.raises(fl.FlowError) as error:
        fl.Lora(**make(folder))
    model = str(tmp_path / "model")
    assert (error.value.what, error.value.fix) == (what.replace("{model}", model), fix.replace("{model}", model))
    assert Path(error.value.at.file).name == Path(__file__).name


def test_adapters_of_another_model_are_refused(tmp_path):
    _, folder = saved(tmp_path, fresh())
    for change, said in (
        ({"num_hidden_layers": 1}, "it has no 'base_model.model.model.layers.1"),
        ({"intermediate_size": 64}, r"gate_proj.lora_B.weight' is \[96, 3\], and the model has place for \[64, 3\]."),
    ):
        model = fl.Model(config={**MODEL.config, **change}, tokenizer=MODEL.tokenizer)
        with pytest.raises(fl.FlowError, match=said):
            fl.open(fl.Actor(model, lora=fl.Lora(path=folder)))
