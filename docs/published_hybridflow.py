"""Transitions and generations that HybridFlow published, on A100, predicted."""

from __future__ import annotations

from dataclasses import replace

import flowrl as fl
from flowrl.placement.cluster.cluster import Cluster, Nodes
from flowrl.placement.cost.efficiency import Efficiency
from flowrl.placement.cost.roofline import Roofline
from flowrl.placement.cost.work import Role, Work, Workload
from flowrl.placement.model.model_shape import shape_named

#: Nodes of 8 with 200 Gb/s between them; 1024 prompts of 1024 tokens, as many response tokens (arXiv:2409.19256, 8.1).
_A100 = "a100-80"


def transition() -> float:
    """Return the seconds in which weights of 70B go from training to generation on 128 devices (figure 14)."""
    cluster = Cluster((Nodes(_A100, 16, 8, network=200.0),))
    devices, actor = tuple(range(128)), _llama("llama-70b")
    source, to = fl.Mesh.of("pp=8,dp=2,tp=8"), fl.Mesh.of("dp=16,tp=8")
    work = Work("actor.publish", "actor.publish", "publish", actor, Workload(0, 0, 0), to, devices, backend="vllm")
    work = replace(work, source=(source, devices), pool="gpu", source_pool="gpu")
    return Roofline(cluster, Efficiency.published()).seconds(work)


def generation(model: str, tp: int) -> float:
    """Return the seconds of a generate on 16 devices with this tensor parallelism (figure 15)."""
    cluster = Cluster((Nodes(_A100, 2, 8, network=200.0),))
    mesh, load = fl.Mesh({"dp": 16 // tp, "tp": tp}), Workload(1024, 1024, 1024)
    title = "actor.generate"
    work = Work(title, title, "generate", _llama(model), load, mesh, tuple(range(16)), backend="vllm")
    return Roofline(cluster, Efficiency.published()).seconds(work)


def _llama(model: str) -> Role:
    return Role("actor", shape_named(model), trains=True, generates=True)


def table(within: float) -> str:
    """The table of the page."""
    rows = [("14, 70B on 128, transition, s", 78.2 / 0.891 - 78.2, transition())]
    for model, tp, saved in (("llama-7b", 2, 0.603), ("llama-13b", 4, 0.364)):
        predicted = generation(model, tp) / generation(model, 8)
        rows.append((f"15, {model} on 16, generation with tp={tp} to that with tp=8", 1 - saved, predicted))
    lines = ["| figure | published | predicted | ratio |", "|---|---|---|---|"]
    for what, published, predicted in rows:
        ratio = predicted / published
        mark = "" if abs(ratio - 1) <= within else " **\\***"
        lines.append(f"| {what} | {published:.2f} | {predicted:.2f} | {ratio:.2f}{mark} |")
    return "\n".join(lines)
