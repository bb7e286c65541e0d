"""Devices with figures that have sources, clusters of them, and the machine at hand."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import PlanError
from flowrl.placement.cluster.cluster import MOST, Cluster, Nodes
from flowrl.placement.cluster.device_specs import KINDS, kind_named, kind_of_card

FIGURES = ("flops", "memory", "bandwidth", "link", "link_latency", "network", "network_latency", "host")

# devices


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_each_figure_has_a_source(kind):
    assert set(kind.sources) == set(FIGURES) and all(kind.sources.values())
    assert {"bf16", "fp32"} <= set(kind.flops)
    assert all(v > 0 for v in kind.flops.values())
    assert all(getattr(kind, f) > 0 for f in FIGURES[1:])


def test_figures_are_those_of_the_data_sheets():
    """Dense, and one direction: half of what the sheets print with sparsity, and for both directions together."""
    h100 = KINDS["h100-80"]
    assert h100.flops["bf16"] == pytest.approx(1979e12 / 2, rel=1e-3)
    assert h100.flops["fp8"] == pytest.approx(3958e12 / 2, rel=1e-3)
    assert (h100.link, h100.memory, h100.bandwidth) == (900e9 / 2, 80e9, 3.35e12)
    assert "fp8" not in KINDS["a100-80"].flops and KINDS["a100-80"].flops["bf16"] == 312e12
    assert KINDS["h200"].flops == h100.flops and KINDS["h200"].memory == 141e9
    assert KINDS["b200"].memory * 8 == 1440e9 and KINDS["b200"].bandwidth * 8 == 64e12
    assert KINDS["l40s"].link == KINDS["l40s"].host, "without NVLink, other GPUs are behind PCIe"
    assert all(s.startswith("assumed") for s in KINDS["cpu"].sources.values())


def test_a_kind_that_is_not_there():
    with pytest.raises(PlanError) as found:
        kind_named("h100")
    assert str(found.value) == (
        "there is no device 'h100'.\n  have a100-80, b200, cpu, h100-80, h200, l40s\n  fix  Did you mean 'h100-80'?"
    )
    with pytest.raises(PlanError) as found:
        kind_named("tpu-v5p-large")
    assert found.value.fix == "Name the nearest of these."


@pytest.mark.parametrize(
    ("card", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H100 80GB HBM3", "h100-80"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_cards_are_known_by_the_name_of_their_driver(card, kind):
    assert kind_of_card(card) == kind


@pytest.mark.parametrize(
    "card", ["NVIDIA A100-SXM4-40GB", "NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA GB200", "NVIDIA L40", "Tesla T4"]
)
def test_cards_with_other_figures_are_not_taken_for_them(card):
    with pytest.raises(PlanError) as found:
        kind_of_card(card)
    assert str(found.value) == (
        f"this machine has '{card}', a GPU whose figures are not known here.\n"
        "  have a100-80, b200, cpu, h100-80, h200, l40s\n"
        "  fix  Write the nearest kind instead of auto, with the number of GPUs: cluster: h100-80:1x8."
    )


# clusters


def test_devices_are_numbered_through_the_nodes():
    cluster = Cluster.of("a100-80:2x8+l40s:1x4")
    assert (cluster.size, cluster.nodes, str(cluster)) == (20, 3, "a100-80:2x8+l40s:1x4")
    assert [cluster.node(d) for d in (0, 7, 8, 15, 16, 19)] == [0, 0, 1, 1, 2, 2]
    assert [cluster.kind(d).name for d in (15, 16)] == ["a100-80", "l40s"]
    assert [cluster.devices_of(n) for n in range(3)] == [range(0, 8), range(8, 16), range(16, 20)]
    assert cluster.to_json()[1] == {"device": "l40s", "nodes": 1, "devices_per_node": 4}
    for device in (-1, 20):
        with pytest.raises(IndexError):
            cluster.node(device)


groups = st.builds(Nodes, st.sampled_from(list(KINDS)), st.integers(1, 5), st.integers(1, 9))


@given(st.lists(groups, min_size=1, max_size=4))
def test_nodes_share_out_all_devices(parts):
    cluster = Cluster(tuple(parts))
    assert Cluster.of(str(cluster)) == cluster
    assert [d for n in range(cluster.nodes) for d in cluster.devices_of(n)] == list(range(cluster.size))
    assert all(d in cluster.devices_of(cluster.node(d)) for d in range(cluster.size))


def test_the_network_of_nodes_may_be_known_better():
    cluster = Cluster((Nodes("a100-80", 16, 8, network=200),))
    assert cluster.kind(5).network == 200e9 / 8 / 8
    assert cluster.kind(5).sources["network"] == "the plan" and KINDS["a100-80"].network == 25e9
    assert cluster.to_json() == [{"device": "a100-80", "nodes": 16, "devices_per_node": 8, "network": 200}]


HOW = "  fix  Write kind:NODESxDEVICES, such as h100-80:4x8; several with +; or auto."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"'' is no cluster.\n  have a100-80, b200, cpu, h100-80, h200, l40s\n{HOW}"),
        ("h100-80", f"'h100-80' is no cluster.\n  have a100-80, b200, cpu, h100-80, h200, l40s\n{HOW}"),
        ("h100-80:2x8+", f"'' is no cluster.\n  have a100-80, b200, cpu, h100-80, h200, l40s\n{HOW}"),
        ("h100-80:-1x8", f"'h100-80:-1x8' is no cluster.\n  have a100-80, b200, cpu, h100-80, h200, l40s\n{HOW}"),
        ("h100-80:0x8", f"a cluster of 0 nodes with 8 devices has no device.\n{HOW}"),
        ("cpu:1x0", f"a cluster of 1 nodes with 0 devices has no device.\n{HOW}"),
        (
            "a100:2x8",
            "there is no device 'a100'.\n  have a100-80, b200, cpu, h100-80, h200, l40s\n  fix  Did you mean 'a100-80'?",
        ),
        ("cpu:9999999x9", f"9999999 nodes with 9 devices are more than {MOST} devices."),
    ],
)
def test_what_is_no_cluster(text, message):
    with pytest.raises(PlanError) as found:
        Cluster.of(text)
    assert str(found.value) == message


def test_a_cluster_has_nodes():
    with pytest.raises(PlanError, match="a cluster has nodes."):
        Cluster(())
    with pytest.raises(PlanError, match="a network of 0 Gb/s moves nothing."):
        Nodes("cpu", 1, 1, network=0)


# the machine at hand


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose nvidia-smi prints these names; without any there is no such tool."""

    def has(*cards, status=0):
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        tool = tmp_path / "nvidia-smi"
        tool.write_text("#!/bin/sh\n" + "".join(f"echo '{c}'\n" for c in cards) + f"exit {status}\n")
        tool.chmod(0o755)

    return has


def test_its_gpus_are_a_node(machine):
    machine(*["NVIDIA H100 80GB HBM3"] * 8)
    assert str(Cluster.auto()) == str(Cluster.of(" auto ")) == "h100-80:1x8"


def test_its_gpus_may_be_of_two_kinds(machine):
    machine("NVIDIA L40S", "NVIDIA H200", "NVIDIA H200")
    cluster = Cluster.auto()
    assert (str(cluster), cluster.kind(0).name, cluster.kind(2).name) == ("l40s:1x1+h200:1x2", "l40s", "h200")


def test_a_gpu_of_no_known_kind_is_named(machine):
    machine("NVIDIA GeForce RTX 4090")
    with pytest.raises(PlanError, match="this machine has 'NVIDIA GeForce RTX 4090'"):
        Cluster.auto()


def test_without_gpus_its_cores_are_the_devices(machine, monkeypatch):
    machine("No devices were found", status=6)
    cores = f"cpu:1x{os.cpu_count()}"
    assert str(Cluster.auto()) == cores
    monkeypatch.setenv("PATH", "/nowhere")
    assert str(Cluster.auto()) == cores
