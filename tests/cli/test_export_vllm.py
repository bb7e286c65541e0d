"""What flowrl export has written, vLLM loads by itself, and gives the tokens that transformers gives.

It needs vLLM: `make vllm-nightly`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from flowrl.cli import main

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm"),
]
PROMPTS = [[2, 3, 4], [7], [5, 6, 2, 3], [4, 4, 4, 5, 6, 7]]
TOKENS = 12

DRIVER = """
import flowrl as fl
from flowrl import rl
from letters import model_of

SIZES = {{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}}
MODEL = model_of(**SIZES, num_hidden_layers=2, initializer_range=0.3, **{more})

flow = fl.Flow("train")
actor = flow.worker(fl.Actor, MODEL, lr=1e-2, max_tokens=4)
reward = flow.worker(fl.FunctionReward, lambda response: float(len(response)))


@flow.program
def train(steps: int = 2):
    for step, batch in flow.steps(fl.data.rows([{{"prompt": "ab"}}, {{"prompt": "c"}}], batch=2), steps):
        batch = rl.advantages(reward.score(actor.generate(batch, n=4)))
        flow.log(step, actor.update(batch, loss=rl.ppo_clip()), reward=batch.rewards.mean())
"""

#: A user's own script: nothing of flowrl is in it.
SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams

engine = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=64)
how = SamplingParams(temperature=0.0, max_tokens=int(sys.argv[3]), ignore_eos=True)
asked = [{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])]
found = engine.generate(asked, how, use_tqdm=False)
print(json.dumps([list(one.outputs[0].token_ids) for one in found]))
"""


@pytest.mark.parametrize(
    "more", [{"model_type": "llama"}, {"model_type": "qwen2", "tie_word_embeddings": True}], ids=["llama", "qwen2-tied"]
)
def test_vllm_gives_the_greedy_tokens_of_transformers(more, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    (tmp_path / "train.py").write_text(DRIVER.format(more=more))
    run, folder = str(tmp_path / "run"), tmp_path / "model"
    assert main(["run", str(tmp_path / "train.py"), "--quiet", "--out", run]) == 0
    assert main(["export", run, str(folder)]) == 0
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    wanted: list[list[int]] = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        for _ in range(TOKENS):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        wanted.append(ids[0, len(prompt) :].tolist())
    (tmp_path / "greedy.py").write_text(SCRIPT)
    how = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    words = [sys.executable, "greedy.py", str(Path(folder)), json.dumps(PROMPTS), str(TOKENS)]
    environment = {**os.environ, **how, "VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == wanted
