"""Changes to a plan file: ``--set PATH=VALUE`` stands for the same words in the file."""

from __future__ import annotations

import pytest

from flowrl.errors import PlanError, UsageError
from flowrl.placement.plan.plan import Plan
from flowrl.placement.plan.plan_file import read

PLAN = """
cluster: {device: h100-80, nodes: 1, devices_per_node: 8}
pools:
  gpu: {devices: "0-7"}
place:
  actor:
    train: {pool: gpu, mesh: {fsdp: 8}, backend: fsdp2}
    generate: {pool: gpu, mesh: {dp: 8}}
pipeline: {staleness: 1}
"""


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ("staleness: 1", "staleness: 4", "pipeline.staleness=4"),
        ("staleness: 1", "staleness: 1, chunks: 2", "pipeline.chunks=2"),
        ("mesh: {fsdp: 8}", "mesh: {dp: 2, fsdp: 4}", "place.actor.train.mesh={dp: 2, fsdp: 4}"),
        ("mesh: {dp: 8}", "mesh: {dp: 4, tp: 2}", "place.actor.generate.mesh={dp: 4, tp: 2}"),
        ("nodes: 1", "nodes: 2", "cluster.nodes=2"),
        ('"0-7"', "all", "pools.gpu.devices=all"),
        ('"0-7"}', '"0-7"}\n  cpu: {processes: 2}', "pools.cpu.processes=2"),
        ("pipeline: {staleness: 1}", "pipeline:", "pipeline="),
        ("staleness: 1", "staleness: 1, deadline: 90.5", "pipeline.deadline=90.5"),
        ("staleness: 1", "staleness: 2", " pipeline.staleness = 2"),
    ],
)
def test_a_change_is_what_the_file_would_say(old, new, change):
    assert old in PLAN
    assert read(PLAN, changes=[change]).to_json() == read(PLAN.replace(old, new, 1)).to_json()


def test_the_last_change_wins_and_changes_add_up():
    plan = read(PLAN, changes=["pipeline.staleness=4", "pipeline.chunks=2", "pipeline.staleness=0"])
    assert (plan.pipeline.staleness, plan.pipeline.chunks) == (0, 2)


def test_a_plan_without_a_word_can_be_changed():
    assert read("", changes=["pipeline.staleness=1"]).pipeline.staleness == 1
    assert read("pipeline:", changes=["pipeline.staleness=1"]).pipeline.staleness == 1


@pytest.mark.parametrize(
    ("change", "what", "fix"),
    [
        ("pipeline.stalenes=1", "pipeline has no 'stalenes'.", "Did you mean 'staleness'?"),
        ("pipelin.staleness=1", "a plan has no 'pipelin'.", "Did you mean 'pipeline'?"),
        ("actor.lr=2e-6", "a plan has no 'actor'.", "For an argument of a worker write --arg actor.lr=2e-6."),
        ("actor=3", "a plan has no 'actor'.", None),
        ("pipeline.staleness=-1", "staleness", None),
        ("pipeline.staleness.x=1", "pipeline.staleness has no x: it is 1.", "Give it whole: --set pipeline.staleness="),
        ("place.actor.pool=gpu", "the place of 'actor' has both train and pool.", None),
        ("place.actor.train.pool=gpus", "gpus", "gpu"),
        ("place.actor.train.mesh={fsdp: [", "is no YAML", "Write a value"),
        ("pools.gpu.devices=0-8", "there is no device 8", None),
        ("pools.gpu.processes=8", "both devices and processes", None),
    ],
)
def test_what_is_wrong_with_a_change_names_it(change, what, fix):
    with pytest.raises(PlanError) as raised:
        read(PLAN, "plan.yaml", [change])
    assert what in raised.value.what and str(raised.value.at) == f"--set {change}"
    assert fix is None or fix in str(raised.value.fix)


def test_what_is_wrong_in_the_file_keeps_its_line():
    with pytest.raises(PlanError) as raised:
        read(PLAN.replace("chunks", "chunk").replace("staleness: 1", "stalenes: 1"), "plan.yaml", ["pipeline.chunks=2"])
    assert (raised.value.at.file, raised.value.at.line) == ("plan.yaml", 9)


@pytest.mark.parametrize("change", ["", "pipeline", "=1", "pipeline..staleness=1", ".=", "pipeline.=2"])
def test_a_change_has_a_path_and_a_value(change):
    with pytest.raises(UsageError, match="is no PATH=VALUE"):
        read(PLAN, changes=[change])


def test_a_file_is_loaded_with_changes(tmp_path):
    (tmp_path / "plan.yaml").write_text(PLAN)
    assert Plan.load(tmp_path / "plan.yaml", ["pipeline.staleness=3"]).pipeline.staleness == 3
    assert Plan.load(tmp_path / "plan.yaml").pipeline.staleness == 1
