"""The gap doctor on runs whose trainer is split over ranks, or whose engine is vLLM: what it names in one process.

Those with vLLM need `make vllm`, and are run by `make vllm-nightly`.
"""

from __future__ import annotations

from importlib.util import find_spec

import gap_flow
import pytest

pytest.importorskip("ray", reason="the extra [ray] is not installed")

from flowrl.analysis.gap import diagnose
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.plan.plan import Place, Plan, Pool

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
VLLM = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm")]
MEGATRON = pytest.mark.skipif(find_spec("megatron") is None, reason="the extra [megatron] is not installed")
MESH = {"hf": "1", "fsdp2": "fsdp=2", "megatron": "dp=2"}
NAMED = {
    "stale": ("weights", "all of the weights of one optimizer step before"),
    "hot": ("temperature", "in place of 1"),
    "begin": ("template", "begin of sequence"),
    "processed": ("kind", "top_k=4"),
}


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """One Ray for all tests of this file."""
    import ray

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


def plan(backend: str, engine: str) -> Plan:
    """One or two ranks train, and one samples."""
    mesh = Mesh.of(MESH[backend])
    pools = {
        "train": Pool("train", devices=tuple(range(mesh.size))),
        "rollout": Pool("rollout", devices=(mesh.size,)),
        "cpu": Pool("cpu", processes=1),
    }
    options = {"kv_cache": 0.0625, "rows": 32} if engine == "vllm" else {}
    actor = {"train": Place("train", mesh, backend), "generate": Place("rollout", Mesh(), engine, options=options)}
    return Plan(pools, {"actor": actor, "reward": Place("cpu")}, cluster=Cluster.of(f"cpu:1x{mesh.size + 1}"))


@pytest.mark.parametrize(("backend", "engine", "fault", "dtype"), [
    ("fsdp2", "hf", "", "fp32"),
    ("fsdp2", "hf", "stale", "fp32"),
    ("fsdp2", "hf", "hot", "bf16"),
    ("hf", "hf", "stale", "bf16"),
    pytest.param("megatron", "hf", "stale", "fp32", marks=MEGATRON),
    pytest.param("megatron", "hf", "begin", "fp32", marks=MEGATRON),
    pytest.param("fsdp2", "vllm", "", "fp32", marks=VLLM),
    pytest.param("fsdp2", "vllm", "hot", "fp32", marks=VLLM),
    pytest.param("hf", "vllm", "begin", "fp32", marks=VLLM),
    pytest.param("hf", "vllm", "processed", "fp32", marks=VLLM),
])  # fmt: skip
def test_a_fault_of_the_engine_is_named(tmp_path, monkeypatch, backend, engine, fault, dtype):
    monkeypatch.setattr(gap_flow, "FAULT", fault)
    flow = gap_flow.make_flow(dtype=dtype, **({"top_k": 4} if fault == "processed" else {}))
    how = {"checkpoint_every": 3, "trajectories": 3, "trajectories_every": 1, "save_models": False, "quiet": True}
    flow.run(out=tmp_path / "run", runtime="ray", plan=plan(backend, engine), **how)
    found = diagnose(tmp_path / "run", flow.handles, traces=[flow.trace("ranks")])
    assert (found.step, found.version, found.rows) == (3, 3, 12)
    if not fault:
        assert found.gap < 1e-5 and found.found is None
        return
    best, (cause, what) = found.found, NAMED[fault]
    assert found.gap > found.bound and best is not None, found.tried[:5]
    assert best.cause == cause and what in best.what, found.tried[:5]
