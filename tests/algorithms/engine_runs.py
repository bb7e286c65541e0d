"""Runs of algorithms/grpo.py whose plan names an engine that samples, and when two of them are the same."""

from __future__ import annotations

import json

import pytest

from flowrl.placement.plan.plan import Plan

LOCAL = """
pools: {train: {device: cpu}, rollout: {device: cpu}}
place:
  actor:
    train:    {pool: train}
    generate: {pool: rollout, engine: ENGINE}
  ref:    {pool: train}
  reward: {pool: train}
"""
RANKS = """
cluster: {device: cpu, devices_per_node: 6}
pools: {train: {devices: "0-1"}, rollout: {devices: "REPLICAS"}}
place:
  actor:
    train:    {pool: train, TRAIN}
    generate: {pool: rollout, engine: ENGINE}
  ref:    {pool: train, TRAIN}
  reward: {pool: train}
"""
FSDP2, MEGATRON = "mesh: {fsdp: 2}, backend: fsdp2", "mesh: {tp: 2}, backend: megatron"
#: The devices that sample, and what stands beside their pool.
WHOLE, COPIES, SPLIT = ("2", ""), ("2-3", "mesh: {dp: 2}, "), ("2-3", "mesh: {tp: 2}, ")
BOTH = ("2-5", "mesh: {dp: 2, tp: 2}, ")
SAID = {"steps": 3, "prompts_per_step": 6, "group_size": 4}


def local(engine):
    return LOCAL.replace("ENGINE", engine)


def ranks(train, engine, layout):
    devices, mesh = layout
    text = RANKS.replace("REPLICAS", devices).replace("TRAIN", train)
    return text.replace("engine: ENGINE", f"{mesh}engine: {engine}")


def ran(flow, folder, text, runtime, **said):
    """The rows of a run under this plan, and its metrics."""
    folder.with_suffix(".yaml").write_text(text)
    plan = Plan.load(folder.with_suffix(".yaml"))
    how = {"quiet": True, "save_models": False, "parameters": {"grpo": SAID | said}}
    flow.run("grpo", plan=plan, out=folder, runtime=runtime, **how)
    return read(folder)


def read(folder):
    """The rows of a run, and its metrics."""
    rows, lines = (
        [json.loads(x) for x in (folder / f).read_text().splitlines()] for f in ("trajectories.jsonl", "metrics.jsonl")
    )
    return [(row["step"], row["key"], row["response"]) for row in rows], lines


def hold_equal(mine, reference):
    """Two runs (of :func:`ran`) have the same rows and rewards, and losses within rounding."""
    (rows, lines), (theirs, wanted) = mine, reference
    assert len(lines) == len(wanted) == SAID["steps"] and rows
    assert rows == theirs
    for line, other in zip(lines, wanted, strict=True):
        assert line["reward"] == other["reward"]
        assert line["loss"] == pytest.approx(other["loss"], abs=1e-3)
