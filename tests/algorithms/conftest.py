"""What tests of drivers share: the tasks beside them, one thread, and a small model that knows some sums."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import flowrl as fl
from flowrl import rl
from flowrl.cli import load_script

ALGORITHMS = Path(__file__).parents[2] / "algorithms"


@pytest.fixture(scope="session")
def drivers_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ALGORITHMS), *sys.path])
        yield ALGORITHMS


@pytest.fixture(scope="session")
def small_model(drivers_path, tmp_path_factory):
    """A folder with a small model that knows some of the first sums of a run, so that its rewards differ."""
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return taught(sizes, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def model_for_vllm(drivers_path, tmp_path_factory):
    """One like it, with heads of 32: vLLM has no kernel for those of 12."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    return taught(sizes, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def mixture_for_vllm(drivers_path, tmp_path_factory):
    """The same with a mixture of experts in each layer."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": False}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    return taught({"model_type": "qwen3_moe", "head_dim": 32, **sizes, **experts}, tmp_path_factory.mktemp("model"))


def taught(sizes, folder):
    from tasks import arithmetic

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    config = {**arithmetic.MODEL.config, **sizes}
    actor = fl.open(fl.Actor(fl.Model(config=config, tokenizer=arithmetic.build_tokenizer), lr=5e-3))
    source = arithmetic.examples(96, seed=0)  # the order of the prompts
    rows = source.to_batch(source.cursor().draw(), 0, actor.tokenizer)
    for _ in range(45):
        actor.update(rows, loss=rl.sft())
    actor.save(str(folder))
    torch.set_num_threads(before)
    return str(folder)


@pytest.fixture
def load_driver(small_model):
    """A driver's flow, fresh, on the small model; games and a judge have models of their own, teachers other weights."""

    def load(name: str):
        flow = load_script(str(ALGORITHMS / f"{name}.py"))
        own = {"judge"} if name == "judge" else set()
        plays = name in ("gigpo", "tool_use", "tictactoe")
        for handle in flow.handles:
            said = handle.arguments.get("model")
            teaches = name == "distillation" and handle.name in ("short", "long")
            if said is not None and not plays and not teaches and handle.name not in own:
                flow.use_model(handle.name, small_model)
        return flow

    return load
