"""The same numbers on a CUDA device as on the CPU, and its own defaults."""

import pytest
import tiny as T
import torch

from flowrl import rl
from flowrl.backends.stream import stream_of
from flowrl.workers.model_options import Sampling
from flowrl.workers.streaming import SampleRequest

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


@pytest.mark.parametrize("kind", ["qwen2", "mistral-window"])
def test_rows_one_by_one_are_those_of_the_cpu(kind):
    here, there = T.engine(kind, device="cpu"), T.engine(kind, device="cuda", dtype="fp32")
    column, rows = T.prompts(n=4)
    sampling = Sampling(max_tokens=12, temperature=0.8, repetition_penalty=1.1)
    wanted = here.generate(column, 4, rows.row_seeds(), sampling)
    found = stream_of(there).submit(SampleRequest(column, 4, rows.row_seeds(), sampling)).sampled()
    same = [a == b for a, b in zip(wanted.ids.to_list(), found.ids.to_list(), strict=True)]
    assert sum(same) >= 15  # save ties within rounding
    for i, equal in enumerate(same):
        if equal:
            assert torch.allclose(found.rollout_logprobs[i], wanted.rollout_logprobs[i], atol=1e-3)
