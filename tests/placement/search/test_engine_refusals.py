"""What backends refuse on a mesh is what check tells of them: the rules are those of the engines themselves."""

from __future__ import annotations

import pytest

from flowrl.placement.backends import names_of
from flowrl.placement.cluster.mesh import Mesh
from flowrl.placement.cost.work import Role
from flowrl.placement.model.model_shape import shape_named
from flowrl.placement.plan.plan import Place
from flowrl.placement.search.engine_refusals import refusals

DENSE, SPARSE = shape_named("qwen3-8b"), shape_named("qwen3-30b-a3b")
PLAIN = Role("actor", DENSE, trains=True)
ADAPTED, FROZEN = Role("actor", DENSE, trains=True, lora=10), Role("actor", DENSE, trains=True, frozen=0.5)


def said(backend: str, mesh: str, role: Role = PLAIN, device: str = "h100-80") -> list[str]:
    use = "train" if backend in names_of("train") else "generate"
    return [r.what for r in refusals(Place("train", Mesh.of(mesh), backend), role, device, use=use)]


@pytest.mark.parametrize(
    ("backend", "mesh", "role", "device", "what"),
    [
        ("fsdp2", "cp=2", PLAIN, "h100-80", "fsdp2 does not split a model along cp."),
        (
            "megatron",
            "cp=2,ep=2",
            Role("a", SPARSE),
            "h100-80",
            "megatron orders ranks differently along cp=2 and ep=2",
        ),
        ("megatron", "dp=2", ADAPTED, "h100-80", "megatron has no adapters (lora=)."),
        ("megatron", "dp=2", FROZEN, "h100-80", "megatron trains all weights (freeze=)."),
        ("megatron", "cp=2", PLAIN, "cpu", "megatron has cp=2 on CUDA alone."),
        ("megatron", "ep=2,tp=2", Role("a", SPARSE), "cpu", "megatron splits a mixture of experts by tp=2 on CUDA"),
        ("fsdp2", "tp=2", ADAPTED, "h100-80", "fsdp2 does not split adapters (lora=) by tp=2."),
        ("fsdp2", "pp=2", FROZEN, "h100-80", "fsdp2 does not have frozen weights (freeze=) in stages (pp=2)."),
    ],
)
def test_what_an_engine_refuses_is_told(backend, mesh, role, device, what):
    (found,) = said(backend, mesh, role, device)
    assert found.startswith(what)


@pytest.mark.parametrize(
    ("backend", "mesh", "role", "device"),
    [
        ("megatron", "dp=2,cp=2", PLAIN, "h100-80"),
        ("megatron", "ep=2,tp=2", Role("a", SPARSE, trains=True), "h100-80"),
        ("megatron", "pp=2,tp=2", PLAIN, "cpu"),
        ("fsdp2", "fsdp=2", ADAPTED, "cpu"),
        ("fsdp2", "tp=2", FROZEN, "h100-80"),
        ("vllm", "dp=2,tp=2", ADAPTED, "h100-80"),
    ],
)
def test_what_an_engine_does_is_not_refused(backend, mesh, role, device):
    assert said(backend, mesh, role, device) == []


@pytest.mark.parametrize("mesh", ["fsdp=2", "cp=2,ep=2", "dp=2,cp=2", "ep=4", "tp=2,pp=2"])
def test_megatron_refuses_the_same_meshes_itself(mesh):
    """Held against the engine's own check, which knows ranks and no worker."""
    from flowrl.backends.megatron import parallel
    from flowrl.errors import PlanError

    refused = True
    try:
        parallel._check(Mesh.of(mesh))
        refused = False
    except PlanError:
        pass
    assert bool(said("megatron", mesh, Role("a", SPARSE, trains=True))) == refused
