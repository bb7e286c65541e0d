"""The machine at hand as a cluster: its GPUs, or else its cores."""

import os

import pytest

from flowrl.errors import PlanError
from flowrl.placement.cluster.cluster import Cluster


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
