"""The megatron engine on CUDA: fused layers, sequence, context and expert parallel, bfloat16 with a distributed optimizer.

Needs one device per rank (one to four) and NCCL. Without Transformer Engine the plain layers are tested, and what needs
it is skipped. ``python -m pytest tests/backends/test_megatron_gpu.py -s`` prints the largest differences to the hf engine.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny import CONFIGS, rollouts

from flowrl import rl
from flowrl.backends import open_engine
from flowrl.workers.model_options import Build, Model, Optim

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA devices"),
    pytest.mark.skipif(
        find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
    ),
]

WIDE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
}
OPTIM = Optim(lr=1e-3, weight_decay=0.1, grad_clip=0.4)
STEPS = 3


def config(kind):
    inner = {"moe_intermediate_size": 64} if kind == "qwen3-moe" else {}
    return {**CONFIGS[kind], **WIDE, **inner}


def fused():
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError:
        return False
    return True


def compare(rank, count, store, kind, axes, dtype, folder):
    """One rank: the engine against the hf engine on the same device; writes the largest differences."""
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=count
    )
    model = Model(config=config(kind))
    opened = open_engine("megatron", Build(model, axes=axes, dtype=dtype, optim=OPTIM, device=f"cuda:{rank}"))
    reference = open_engine("hf", Build(model, dtype=dtype, optim=OPTIM, device=f"cuda:{rank}"))
    assert opened.net.settings.sequence_parallel == (fused() and axes.get("tp", 1) > 1)
    assert opened.trainer.optimizer.distributed or dtype == "fp32"
    batch = rollouts(reference)
    index = [i for g, rows in enumerate(batch.groups()) for i in rows if g % opened.team.data == opened.team.place]
    here = batch.take(torch.tensor(index, dtype=torch.int64))
    found = [("logprobs", float((opened.logprobs(here).values - reference.logprobs(here).values).abs().max()))]
    for loss in (rl.ppo_clip(clip=0.2, entropy=0.01), rl.sft()):
        for _ in range(STEPS):
            a = opened.update(here, loss, minibatch=8, micro_tokens=64)
            b = reference.update(batch, loss, minibatch=8, micro_tokens=64)
            found.append(("loss", abs(a["loss"] - b["loss"])))
            found.append(("norm", abs(a["grad_norm"] / b["grad_norm"] - 1)))
    found.append(("after", float((opened.logprobs(here).values - reference.logprobs(here).values).abs().max())))
    before = opened.digest()
    shards, meta = opened.state_shards()
    kept = {(s.name, s.offset): s.tensor.clone() for s in shards}
    opened.update(here, rl.sft())
    assert opened.digest() != before

    def read(shard):
        if (shard.name, shard.offset) in kept:
            shard.tensor.copy_(kept[shard.name, shard.offset])
        return (shard.name, shard.offset) in kept

    opened.load_state_shards(read, meta)
    assert opened.digest() == before
    worst = {name: max(v for n, v in found if n == name) for name, _ in found}
    Path(folder, f"{rank}").write_text("\n".join(f"{n} {v}" for n, v in worst.items()))
    torch.distributed.barrier()


LAYOUTS = [
    ("llama", {}, False),
    ("qwen3-moe", {}, False),
    ("llama", {"tp": 2}, False),
    ("qwen2", {"pp": 2}, False),
    ("llama", {"dp": 2}, False),
    ("llama", {"cp": 2}, True),
    ("qwen3-moe", {"ep": 2}, False),
    ("qwen3", {"pp": 2, "tp": 2}, False),
    ("llama", {"cp": 2, "tp": 2}, True),
    ("qwen3-moe", {"ep": 2, "tp": 2}, True),
    ("mixtral", {"pp": 2, "ep": 2}, False),
]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "axes", "needs_fused"), LAYOUTS, ids=str)
def test_layout(kind, axes, needs_fused, dtype, tmp_path):
    count = 1
    for size in axes.values():
        count *= size
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} devices")
    if needs_fused and not fused():
        pytest.skip("needs Transformer Engine")
    if dtype == "fp32" and axes.get("cp", 1) > 1:
        pytest.skip("Transformer Engine splits attention along cp in half precision alone")
    arguments = (count, str(tmp_path / "store"), kind, axes, dtype, str(tmp_path))
    torch.multiprocessing.spawn(compare, arguments, count)
    found = [dict(line.split() for line in (tmp_path / f"{r}").read_text().splitlines()) for r in range(count)]
    worst = {name: max(float(f[name]) for f in found) for name in found[0]}
    print(kind, axes, dtype, worst, file=sys.stderr)
    loose = 0.1 if dtype == "bf16" else 2e-3  # products of float32 may be in TF32
    assert worst["logprobs"] < loose and worst["loss"] < loose and worst["norm"] < loose, worst
