"""The same numbers on a CUDA device as on the CPU, and its own defaults."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flowrl import rl

T = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("tiny.py"))))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "mixtral", "mistral-window"])
def test_float32_on_cuda_gives_what_the_cpu_gives(kind):
    here = T.engine(kind, optim=T.OPTIM, device="cpu")
    there = T.engine(kind, optim=T.OPTIM, device="cuda", dtype="fp32")
    batch, other = T.rollouts(here), T.rollouts(there)
    same = sum(a == b for a, b in zip(batch.tokens.to_list(), other.tokens.to_list(), strict=True))
    assert same >= len(batch) - 1  # save ties within rounding
    assert float(abs(there.logprobs(batch) - here.logprobs(batch)).max()) < 1e-3
    a, b = here.update(batch, rl.ppo_clip()), there.update(batch, rl.ppo_clip())
    assert a == pytest.approx(b, rel=1e-2, abs=1e-3)


def test_by_default_bfloat16_trains_float32_weights():
    opened = T.engine("qwen2", optim=T.OPTIM, device="cuda")
    batch = T.rollouts(opened)
    assert float(abs(opened.logprobs(batch) - batch.rollout_logprobs).mean()) < 0.05
    assert opened.update(batch, rl.ppo_clip(entropy=0.01))["grad_norm"] > 0
    assert {w.dtype for w in opened.weights().values()} == {torch.float32}
