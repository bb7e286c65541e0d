"""``check --plan`` says what is proved: no deadlock, a place for every rank, and the memory of each phase."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flowrl.cli import main

GRPO = str(Path(__file__).parents[2] / "algorithms" / "grpo.py")
PLAN = """cluster: {{device: h100-80, nodes: 2, devices_per_node: 8{cores}}}
pools:
  train:   {{devices: "0-7"}}
  rollout: {{devices: "8-15"}}
  cpu:     {{processes: {processes}}}
place:
  actor:
    train:    {{pool: train, mesh: {{fsdp: 8}}, backend: fsdp2}}
    generate: {{pool: rollout}}
  ref:    {{pool: train, mesh: {{fsdp: 8}}, backend: fsdp2}}
  reward: {{pool: cpu}}
pipeline: {pipeline}
"""


def checked(tmp_path, capsys, *, cores="", processes=16, pipeline="{staleness: 1}") -> tuple[int, str]:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN.format(cores=cores, processes=processes, pipeline=pipeline))
    status = main(["check", GRPO, "--plan", str(plan), "--program", "grpo"])
    return status, capsys.readouterr().out


def test_places_and_memory_are_said_beside_the_waits(tmp_path, capsys):
    status, said = checked(tmp_path, capsys, cores=", cores_per_node: 16")
    assert status == 0
    lines = [line.strip() for line in said.splitlines()]
    assert [line for line in lines if re.match(r"no deadlock: the \d+ waits of 24 calls and 8 moves of weights", line)]
    assert (
        "every rank has a place: 8 of 'train', 8 of 'rollout', 16 of 'cpu'; they take 16 of 16 devices and 32 of 32 cores"
        in lines
    )
    memory = [line for line in lines if line.startswith("memory of pool ")]
    assert [line.partition(" (")[0] for line in memory] == ["memory of pool 'train'", "memory of pool 'rollout'"]
    assert re.search(r"of 80\.0 GB on each device: ref\.logprobs \d+\.\d, actor\.update \d+\.\d$", memory[0])


def test_without_cores_it_says_what_it_rests_on(tmp_path, capsys):
    _, said = checked(tmp_path, capsys)
    assert "every rank has a place if 32 cores are there: " in said and "cores_per_node" in said


@pytest.mark.parametrize(
    ("cores", "processes", "what", "fix"),
    [
        (
            16,
            17,
            "the 33 ranks of this plan take a core each, 17 of them for pool 'cpu', and the 2 nodes have 32.",
            "16",
        ),
        (8, 4, "the 20 ranks of this plan take a core each, 4 of them for pool 'cpu', and the 2 nodes have 16.", "Add"),
        (7, 1, "node 0 has 7 cores for its 8 ranks with a device, and each takes one.", "cores_per_node: 8"),
    ],
)
def test_ranks_for_which_there_are_no_cores(cores, processes, what, fix, tmp_path, capsys):
    status, said = checked(tmp_path, capsys, cores=f", cores_per_node: {cores}", processes=processes)
    assert status == 1 and what in said and fix in said
    assert "every rank has a place" not in said and "plan.yaml:" in said


def test_groups_of_a_window_are_in_the_proof(tmp_path, capsys):
    _, fifo = checked(tmp_path, capsys, pipeline="{staleness: 1, publish: interrupt}")
    _, window = checked(tmp_path, capsys, pipeline="{staleness: 1, publish: interrupt, order: window}")
    counts = [int(re.search(r"the (\d+) waits", said)[1]) for said in (fifo, window)]
    assert counts[1] > counts[0]


@pytest.mark.parametrize("cores", ["none", "0", "-1"])
def test_cores_that_are_no_number(cores, tmp_path, capsys):
    status = main(["check", GRPO, "--plan", _written(tmp_path, cores), "--program", "grpo"])
    assert status != 0 and "cores_per_node" in capsys.readouterr().err


def _written(tmp_path, cores: str) -> str:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN.format(cores=f", cores_per_node: {cores}", processes=1, pipeline="{}"))
    return str(plan)
