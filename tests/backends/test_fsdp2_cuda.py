"""The engine on ranks with CUDA devices: the numbers of one device, over NCCL, also with weights kept on the CPU."""

import math

import pytest
import torch
from ranks import run
from sharded import apart, build, opened, rollouts

from flowrl import rl
from flowrl.backends import open_engine

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not DEVICES, reason="needs a CUDA device")]

MESHES = [{}, {"fsdp": 2}, {"tp": 2}, {"fsdp": 2, "tp": 2}, {"dp": 2, "fsdp": 2}]


def trains(axes, offload):
    one, engine = opened(axes, dtype="fp32", device="cuda", offload=offload)
    batch = rollouts()
    count, place = engine.team.data, engine.team.place
    mine = batch.take(range(16 * place // count, 16 * (place + 1) // count))
    for _ in range(3):
        wanted = one.update(batch, rl.ppo_clip(entropy=0.01), micro_tokens=40)
        assert apart(wanted, engine.update(mine, rl.ppo_clip(entropy=0.01), micro_tokens=40)) < 1e-3
    assert {s.tensor.device.type for s in engine.shards()} == {"cpu" if offload else "cuda"}
    low = open_engine("fsdp2", build(axes, dtype="auto", device="cuda", offload=offload))
    assert low.net.compute == torch.bfloat16
    assert low.update(mine, rl.ppo_clip())["grad_norm"] > 0


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_training_is_that_of_one_device(axes, offload):
    count = math.prod(axes.values())
    if count > DEVICES:
        pytest.skip(f"needs {count} CUDA devices")
    run(trains, count, axes, offload, backend="cpu:gloo,cuda:nccl")
