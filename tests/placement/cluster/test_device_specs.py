"""Kinds of devices: figures that have sources, and the cards whose drivers name them."""

import pytest

from flowrl.errors import PlanError
from flowrl.placement.cluster.device_specs import KINDS, kind_named, kind_of_card

FIGURES = ("flops", "memory", "bandwidth", "link", "link_latency", "network", "network_latency", "host")


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_each_figure_has_a_source(kind):
    known = {*FIGURES, *(["host_memory"] if kind.host_memory is not None else [])}
    assert set(kind.sources) == known and all(kind.sources.values())
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


def test_systems_of_many_devices_have_the_figures_of_their_sheets():
    rack = KINDS["gb200"]
    assert rack.memory * 72 == pytest.approx(13.4e12, rel=0.01) and rack.bandwidth * 72 == 576e12
    assert rack.flops["fp8"] * 72 * 2 == 720e15 and rack.flops["bf16"] * 72 * 2 == 360e15
    assert rack.link * 72 * 2 == pytest.approx(130e12, rel=0.01)
    assert KINDS["h800"].flops == KINDS["h100-80"].flops and KINDS["h800"].link * 2 == 400e9
    assert KINDS["h20"].bandwidth == 4e12 and KINDS["h20"].flops["bf16"] == 148e12
    assert KINDS["mi300x"].link * 2 == 7 * 128e9


def test_a_kind_that_is_not_there():
    with pytest.raises(PlanError) as found:
        kind_named("h100")
    assert str(found.value) == (
        "there is no device 'h100'.\n  have a100-80, b200, cpu, gb200, h100-80, h20, h200, h800, l40s, mi300x\n  fix  Did you mean 'h100-80'?"
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
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_cards_are_known_by_the_name_of_their_driver(card, kind):
    assert kind_of_card(card) == kind


@pytest.mark.parametrize(
    "card",
    [
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA H100 PCIe",
        "NVIDIA H200 NVL",
        "NVIDIA GH200 480GB",
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA H800 PCIe",
        "NVIDIA H20-3e",
        "NVIDIA L40",
        "Tesla T4",
    ],
)
def test_cards_with_other_figures_are_not_taken_for_them(card):
    with pytest.raises(PlanError) as found:
        kind_of_card(card)
    assert str(found.value) == (
        f"this machine has '{card}', a GPU whose figures are not known here.\n"
        "  have a100-80, b200, cpu, gb200, h100-80, h20, h200, h800, l40s, mi300x\n"
        "  fix  Write the nearest kind instead of auto, with the number of GPUs: cluster: h100-80:1x8."
    )
