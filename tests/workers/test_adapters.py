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
