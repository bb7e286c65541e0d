"""Clusters of devices: how they are written and numbered, and what is none."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.errors import PlanError
from flowrl.placement.cluster.cluster import MOST, Cluster, Nodes
from flowrl.placement.cluster.device_specs import KINDS


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
        ("", f"'' is no cluster.\n  have a100-80, b200, cpu, gb200, h100-80, h20, h200, h800, l40s, mi300x\n{HOW}"),
        (
            "h100-80",
            f"'h100-80' is no cluster.\n  have a100-80, b200, cpu, gb200, h100-80, h20, h200, h800, l40s, mi300x\n{HOW}",
        ),
        (
            "h100-80:2x8+",
            f"'' is no cluster.\n  have a100-80, b200, cpu, gb200, h100-80, h20, h200, h800, l40s, mi300x\n{HOW}",
        ),
        (
            "h100-80:-1x8",
            f"'h100-80:-1x8' is no cluster.\n  have a100-80, b200, cpu, gb200, h100-80, h20, h200, h800, l40s, mi300x\n{HOW}",
        ),
        ("h100-80:0x8", f"a cluster of 0 nodes with 8 devices has no device.\n{HOW}"),
        ("cpu:1x0", f"a cluster of 1 nodes with 0 devices has no device.\n{HOW}"),
        (
            "a100:2x8",
            "there is no device 'a100'.\n  have a100-80, b200, cpu, gb200, h100-80, h20, h200, h800, l40s, mi300x\n  fix  Did you mean 'a100-80'?",
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
