"""vLLM on a CUDA device: what differs there from a CPU. All else is in test_vllm.py, which runs on either.

They need vLLM's build for CUDA: ``python -m pytest -m 'vllm and gpu'``.
"""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from vllm_tiny import CONFIGS, DEVICE, MANY, PROMPTS, published, whole

from flowrl.backends import open_engine
from flowrl.backends.probe import TOLERANCE
from flowrl.batch import Column
from flowrl.errors import ModelError
from flowrl.workers.model_options import Build, Model, Sampling

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
]
#: A model of 0.15 GB, whose memory can be told from what else a process has.
SIZES = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}


@pytest.fixture
def larger():
    """It, with 2 GiB of keys and values, and the engine that trains."""
    build = Build(Model(config={**CONFIGS["qwen2-untied"], **SIZES}), dtype="fp32", device="cpu")
    ours = open_engine("vllm", replace(build, device="cuda", options={"kv_cache": 2.0}))
    yield ours, open_engine("hf", build)
    ours.close()


def write(engine, seed):
    """Other weights of the size that weights of a model this large have."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in engine.net.model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise * 0.04 if weight.dim() > 1 else 1 + 0.1 * noise)


def free():
    return torch.cuda.mem_get_info()[0]


def greedy(engine):
    return engine.generate(Column.of(MANY, "prompt", "i32"), 1, torch.arange(64), Sampling(16, greedy=True))


def test_asleep_the_device_has_the_memory_and_rows_are_the_same_after(larger):
    ours, theirs = larger
    for seed in range(3):
        write(theirs, seed)
        ours.take_weights(theirs.plain_weights())
        made, awake = greedy(ours).ids.to_list(), free()
        freed = ours.sleep()
        weights = sum(shard.tensor.nbytes for shard in ours.shards())
        assert freed >= weights + (2 << 30) and free() - awake >= 0.95 * (weights + (2 << 30))
        assert ours.wake() > 0 and greedy(ours).ids.to_list() == made  # it publishes again by itself
        assert abs(free() - awake) < 64 << 20


def test_after_five_publishes_no_memory_of_the_device_has_grown(larger):
    ours, theirs = larger
    held = []
    for seed in range(5):
        write(theirs, seed)
        ours.take_weights(theirs.plain_weights())
        greedy(ours)
        held.append(free())
    assert held[0] - held[-1] < 32 << 20, held


def test_in_bf16_it_is_as_near_to_the_trainer_as_rounding_allows(opened):
    ours, _ = published(opened, "qwen2", dtype="bf16")
    prompts, seeds = Column.of(PROMPTS, "prompt", "i32"), torch.arange(2 * len(PROMPTS))
    made = ours.generate(prompts, 2, seeds, Sampling(20))
    assert ours.published.gap < TOLERANCE["bfloat16"] and made.rollout_logprobs.values.isfinite().all()
    again = ours.generate(prompts, 2, seeds, Sampling(20))
    assert again.ids.to_list() == made.ids.to_list()


def test_without_a_dtype_it_computes_in_bf16(fault):
    fault("")
    ours = open_engine("vllm", Build(Model(config=CONFIGS["llama"]), device="cuda", options={"kv_cache": 0.25}))
    assert {shard.tensor.dtype for shard in ours.shards()} == {torch.bfloat16}
    ours.close()


def test_what_it_does_not_do_on_a_device_is_refused():
    build = Build(Model(config=CONFIGS["llama"]), dtype="fp32", device="cuda")
    with pytest.raises(ModelError, match="tp=2 on CPUs alone"):
        open_engine("vllm", replace(build, axes={"tp": 2}))
    with pytest.raises(ModelError, match="mixtures of experts on CPUs alone"):
        open_engine("vllm", replace(build, model=Model(config=CONFIGS["qwen3_moe"])))
    with pytest.raises(ModelError, match="the build for CUDA, and this place has the CPU"):
        open_engine("vllm", replace(build, device="cpu"))


@pytest.mark.nightly
def test_compiled_rows_are_those_of_transformers_after_each_publish(opened):
    for seed in range(3):
        ours, theirs = published(opened, "qwen2", seed=seed, compiled=True)
        assert greedy(ours).ids.to_list() == [whole(theirs, prompt, 16) for prompt in MANY]
