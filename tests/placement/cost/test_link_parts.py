"""The parts of links that calls and publishes keep busy, in closed form, and what a simulation makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl.analysis.call_seconds import Pace
from flowrl.analysis.row_lengths import Tokens
from flowrl.cli.arguments.script import load_script
from flowrl.placement.cluster.cluster import Cluster
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost import communication as traffic
from flowrl.placement.cost.efficiency import Efficiency
from flowrl.placement.cost.link_parts import link_parts
from flowrl.placement.cost.roofline import Roofline
from flowrl.placement.cost.work import Role, Work, Workload
from flowrl.placement.model.model_shape import shape_named
from flowrl.placement.plan.plan_file import read

COSTS = Roofline(Cluster.of("h100-80:4x8"), Efficiency.ideal())
ACTOR = Role("actor", shape_named("qwen3-8b"), trains=True, generates=True)
LOAD = Workload(64, 512, 512)
GRPO = Path(__file__).parents[3] / "algorithms" / "grpo.py"


def call(kind: str, mesh: str, **more) -> Work:
    lie = Mesh.of(mesh)
    return Work("c", "c", kind, ACTOR, LOAD, lie, tuple(range(lie.size)), pool="train", backend="fsdp2", **more)


def test_gathering_weights_keeps_the_network_busy_where_ranks_are_in_several_nodes():
    across, inside = call("forward", "fsdp=16"), call("forward", "fsdp=8")
    for work, name in ((across, "network"), (inside, "link")):
        tokens = LOAD.rows / work.mesh.size * 1024
        gathered = traffic.sharded_weights(work, COSTS.hardware(work), tokens, 1)
        assert link_parts(COSTS, work) == pytest.approx({("train", name): min(1.0, gathered / COSTS.seconds(work))})


def test_an_update_sends_gradients_too_and_what_tp_exchanges_stays_inside_a_node():
    work = call("train", "dp=2,tp=8", minibatches=2)
    parts, hardware = link_parts(COSTS, work), COSTS.hardware(work)
    assert set(parts) == {("train", "link"), ("train", "network")}
    assert parts["train", "network"] == pytest.approx(2 * traffic.gradients(work, hardware) / COSTS.seconds(work))
    assert parts["train", "link"] == pytest.approx(COSTS.terms(work)["exchange"] / COSTS.seconds(work))


def test_a_publish_takes_all_of_what_its_busiest_end_has_and_a_part_of_the_other():
    """Eight ranks that train send each replica of three nodes its weights once: three times as much as one receives."""
    source = (Mesh.of("fsdp=8"), tuple(range(8)))
    where = {"source": source, "source_pool": "train", "pool": "rollout", "backend": "vllm"}
    to = tuple(range(8, 32))
    work = Work("p", "p", "publish", ACTOR, Workload(0, 0, 0), Mesh.of("dp=3,tp=8"), to, **where)
    parts = link_parts(COSTS, work)
    assert parts["train", "network"] == pytest.approx(1.0, rel=0.05)
    assert parts["rollout", "network"] == pytest.approx(1 / 3, rel=0.1)
    assert ("train", "link") not in parts and parts["rollout", "link"] < 1e-3, "norms alone are passed on"


def test_engines_user_code_and_moves_to_the_host_have_no_part():
    assert link_parts(COSTS, call("generate", "dp=2,tp=8")) == {}
    assert link_parts(COSTS, call("offload", "dp=8", moved=1e9)) == {}
    code = Work("r", "r", "external", Role("reward"), LOAD, processes=4, pool="cpu")
    assert link_parts(COSTS, code) == {}


PLAN = """
cluster: {device: h100-80, nodes: 4, devices_per_node: 8, network: 200}
pools: {train: {devices: "0-15"}, rollout: {devices: "16-31"}, cpu: {processes: 64}}
place:
  actor:
    train:    {pool: train, mesh: {fsdp: 16}, backend: fsdp2}
    generate: {pool: rollout, mesh: {dp: 8, tp: 2}, engine: vllm}
  ref: {pool: train, mesh: {fsdp: 16}, backend: fsdp2}
  reward: {pool: cpu}
pipeline: {staleness: 1}
"""


def test_a_simulated_publish_beside_all_gathers_takes_longer_than_alone(monkeypatch):
    flow = load_script(str(GRPO))
    flow.use_model("actor", "Qwen/Qwen3-8B")
    lengths = Tokens(512.0, "fixed", (512.0,))

    def publishes() -> list[float]:
        study = flow.study(read(PLAN), "grpo", tokens=lengths, steps=8, prompts_per_step=64, group_size=8)
        return [bar.end - bar.start for bar in study.simulate().bars if bar.node == "actor.publish"]

    shared = publishes()
    monkeypatch.setattr(Pace, "_parts", lambda self, key, work: {})
    alone = publishes()
    assert alone == pytest.approx([alone[0]] * len(alone)) and len(shared) == len(alone)
    assert max(shared) > 1.05 * alone[0] and min(shared) >= alone[0] * (1 - 1e-9)
